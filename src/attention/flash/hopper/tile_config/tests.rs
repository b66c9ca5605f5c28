//! The tile configuration of each shape.

use super::*;

#[test]
fn every_variant_fits_a_multiprocessor() {
    /// What a CTA may have on Hopper.
    const SHARED_LIMIT: u32 = 227 * 1024;
    assert_eq!(Variant::all(DIMENSIONS, ELEMENTS).count(), 24);
    for variant in Variant::all(DIMENSIONS, ELEMENTS) {
        for forward in TileSize::ALL.map(|size| ForwardConfig::of(variant, size)) {
            // Each block takes a kibibyte more than it asks for.
            let all = forward.resident() * (forward.shared_bytes() + 1024);
            assert!(all <= SHARED_LIMIT + 1024, "{forward:?} takes {} bytes", forward.shared_bytes());
        }
        let backward = BackwardConfig::of(variant);
        assert!(backward.shared_bytes() <= SHARED_LIMIT, "{backward:?} takes {} bytes", backward.shared_bytes());
    }
}

#[test]
fn shapes_are_as_the_kernels_lay_them_out() {
    let variant = |d| Variant { d, element: Element::BFloat16, is_causal: true };
    let wide = ForwardConfig::of(variant(128), TileSize::Large);
    assert_eq!((wide.rows(), wide.threads(), columns(wide.variant)), (128, 384, 64));
    // 64 KiB of Q and O, two buffers of 64 KiB, ten barriers and a number, and what alignment may take.
    assert_eq!(wide.shared_bytes(), 65_536 + 2 * 65_536 + 88 + 1024);
    let small = ForwardConfig::of(variant(64), TileSize::Small);
    assert_eq!((small.rows(), small.threads(), small.resident()), (64, 256, 2));
    // 16 KiB of Q and O, two buffers of 32 KiB.
    assert_eq!(small.shared_bytes(), 16_384 + 2 * 32_768 + 88 + 1024);
    let panels = |d| [columns(variant(d)), BackwardConfig::of(variant(d)).key_columns()];
    assert_eq!([16, 64, 80, 96, 128].map(panels), [[16, 16], [64, 64], [16, 16], [32, 16], [64, 64]]);
    let middle = BackwardConfig::of(variant(64));
    assert_eq!((middle.queries, columns(middle.variant)), (128, 64));
    // 32 KiB of K and V, two buffers of 32 KiB and two rows of 512 bytes each, 64 KiB of dS, 32 KiB of dQ, six barriers.
    assert_eq!(middle.shared_bytes(), 32_768 + 2 * (32_768 + 1024) + 65_536 + 32_768 + 48 + 1024);
}

#[test]
fn rows_are_taken_by_the_kernels_of_the_next_dimension() {
    for (head_dim, expected) in [
        (8, 16),
        (16, 16),
        (24, 32),
        (32, 32),
        (40, 64),
        (48, 64),
        (64, 64),
        (72, 80),
        (80, 80),
        (88, 96),
        (96, 96),
        (104, 128),
        (120, 128),
        (128, 128),
    ] {
        assert_eq!(kernel_dimension(head_dim), Ok(expected), "rows of {head_dim}");
    }
    for head_dim in [-8, 0, 4, 12, 100, 136, 256] {
        let message = kernel_dimension(head_dim).unwrap_err();
        assert!(message.contains(&format!("multiples of 8 up to 128, not {head_dim}")), "{message}");
    }
}

#[test]
fn tiles_are_small_where_there_are_few_scores() {
    for (d, n, heads, expected) in [
        (64, 128, 1, TileSize::Small),
        (64, 8192, 1, TileSize::Small),
        (64, 8192, 3, TileSize::Large),
        (64, 16_384, 1, TileSize::Large),
        (16, 2048, 16, TileSize::Small),
        (16, 8192, 16, TileSize::Large),
        (32, 16_384, 16, TileSize::Large),
        (128, 1024, 1, TileSize::Small),
        (128, 512, 64, TileSize::Small),
        (128, 1024, 17, TileSize::Large),
        (128, 2048, 1, TileSize::Large),
    ] {
        assert_eq!(TileSize::fastest(d, n, n, heads), expected, "d {d}, {heads} heads of {n}");
    }
    // A single query of long context is split, whatever the tile size.
    assert_eq!(TileSize::fastest(128, 1, 65_536, 1), TileSize::Large);
}

#[test]
fn the_last_section_of_heads_is_as_full_as_possible() {
    let mebibytes = 1 << 20;
    for (heads, head_bytes, expected) in [
        (16, 8 * mebibytes, 4),
        (16, 4 * mebibytes, 8),
        // With ten at a time, six would be left.
        (16, 3 * mebibytes, 8),
        // With three at a time, one would be left.
        (16, 10 * mebibytes, 2),
        (13, 10 * mebibytes, 2),
        (15, 10 * mebibytes, 3),
        (7, 8 * mebibytes, 4),
        (16, 12 * mebibytes, 2),
        (7, 40 * mebibytes, 1),
        (5, 1, 5),
        (1, 1, 1),
    ] {
        assert_eq!(heads_at_a_time(heads, head_bytes), expected, "{heads} heads of {head_bytes} bytes");
    }
}
