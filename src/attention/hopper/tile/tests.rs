//! How each shape is cut.

use super::*;

#[test]
fn every_variant_fits_a_multiprocessor() {
    assert_eq!(Variant::all().count(), 16);
    for variant in Variant::all() {
        for forward in Size::ALL.map(|size| Forward::of(variant, size)) {
            // Each block takes a kibibyte more than it asks for.
            let all = forward.resident() * (forward.shared_bytes() + 1024);
            assert!(all <= SHARED_LIMIT + 1024, "{forward:?} takes {} bytes", forward.shared_bytes());
        }
        let backward = Backward::of(variant);
        assert!(backward.shared_bytes() <= SHARED_LIMIT, "{backward:?} takes {} bytes", backward.shared_bytes());
    }
}

#[test]
fn shapes_are_as_the_kernels_lay_them_out() {
    let variant = |d| Variant { d, is_half: false, is_causal: true };
    let wide = Forward::of(variant(128), Size::Large);
    assert_eq!((wide.rows(), wide.threads(), wide.columns()), (128, 384, 64));
    // 64 KiB of Q and O, two buffers of 64 KiB, ten barriers and a number, and what alignment may take.
    assert_eq!(wide.shared_bytes(), 65_536 + 2 * 65_536 + 88 + 1024);
    let small = Forward::of(variant(64), Size::Small);
    assert_eq!((small.rows(), small.threads(), small.resident()), (64, 256, 2));
    // 16 KiB of Q and O, two buffers of 32 KiB.
    assert_eq!(small.shared_bytes(), 16_384 + 2 * 32_768 + 88 + 1024);
    let middle = Backward::of(variant(64));
    assert_eq!((middle.queries, middle.columns()), (128, 64));
    // 32 KiB of K and V, two buffers of 32 KiB and two rows of 512 bytes each, 64 KiB of dS, six barriers.
    assert_eq!(middle.shared_bytes(), 32_768 + 2 * (32_768 + 1024) + 65_536 + 48 + 1024);
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
        (72, 128),
        (80, 128),
        (96, 128),
        (120, 128),
        (128, 128),
    ] {
        assert_eq!(kernel_dimension(head_dim), Ok(expected), "rows of {head_dim}");
    }
    for head_dim in [-8, 0, 4, 12, 100, 136, 256] {
        let words = kernel_dimension(head_dim).unwrap_err();
        assert!(words.contains(&format!("multiples of 8 up to 128, not {head_dim}")), "{words}");
    }
}

#[test]
fn one_head_is_cut_until_it_fills_the_device_and_many_heads_are_left_whole() {
    let variant = Variant { d: 64, is_half: false, is_causal: true };
    let shape = Forward::of(variant, Size::Large);
    assert_eq!(shape.steps(500, 400), [2, 3, 4]);
    assert_eq!(Backward::of(variant).steps(500, 700), [4, 3, 2, 1, 0, 0]);
    let steps = shape.steps(8192, 8192);
    assert_eq!((steps.len(), steps[42]), (43, 64));
    let parts = Parts::of(&steps, 1, 132).unwrap();
    // 1430 steps in all are 11 for each multiprocessor.
    assert_eq!((parts.steps, parts.most), (11, 6));
    assert_eq!(Parts::of(&steps, 16, 132), None);
    // Every step of every tile is in one part, and no part is longer than one before it.
    let length = |item: u32| parts.steps.min(steps[(item >> 16) as usize] - (item & 0xFFFF) * parts.steps);
    assert_eq!(parts.items.iter().map(|&item| length(item)).sum::<u32>(), steps.iter().sum::<u32>());
    assert!(parts.items.is_sorted_by_key(|&item| std::cmp::Reverse(length(item))));
    let words = parts.words([7, 8]);
    assert_eq!((words.len(), words[0], words[1], words[2]), (513, word_of(parts.items.len() as u32, 11), 7, 8));
    assert_eq!(words[3], word_of(parts.items[0], parts.items[1]));
}

#[test]
fn the_cut_is_the_one_whose_last_block_is_done_first() {
    let steps_in_part = |size, d, n, heads| {
        let shape = Forward::of(Variant { d, is_half: false, is_causal: true }, size);
        Parts::of(&shape.steps(n, n), heads, 132 * shape.resident()).map(|parts| parts.steps)
    };
    for (size, d, n, heads, expected) in [
        (Size::Large, 64, 256, 1, None),
        // The launch that adds up costs what the parts save.
        (Size::Large, 64, 384, 1, None),
        (Size::Large, 64, 512, 1, Some(1)),
        (Size::Large, 64, 1024, 1, Some(1)),
        // Parts of one step would be done a step earlier, and are more to add up.
        (Size::Large, 64, 2048, 1, Some(2)),
        (Size::Large, 64, 4096, 1, Some(3)),
        // Four would do for the share; with five, no block has two parts.
        (Size::Large, 128, 4096, 1, Some(5)),
        (Size::Large, 64, 8192, 1, Some(11)),
        (Size::Large, 128, 8192, 1, Some(16)),
        // 342 tiles on 132 blocks: 2.6 turns, of which whole tiles would make three.
        (Size::Large, 64, 65_536, 1, Some(171)),
        (Size::Large, 128, 65_536, 1, None),
        (Size::Large, 64, 16_384, 16, None),
        (Size::Large, 128, 16_384, 16, None),
        (Size::Small, 64, 256, 1, None),
        (Size::Small, 64, 1024, 1, Some(1)),
        (Size::Small, 64, 2048, 1, Some(2)),
        // In parts of four they would be 288 for 264 places, of five they are 238.
        (Size::Small, 64, 4096, 1, Some(5)),
        (Size::Small, 64, 8192, 1, Some(16)),
        (Size::Small, 64, 2048, 16, None),
    ] {
        assert_eq!(steps_in_part(size, d, n, heads), expected, "{size:?}, d {d}, {heads} heads of {n}");
    }
}

#[test]
fn tiles_are_small_where_there_are_few_scores() {
    for (d, n, heads, expected) in [
        (64, 128, 1, Size::Small),
        (64, 8192, 1, Size::Small),
        (64, 8192, 3, Size::Large),
        (64, 16_384, 1, Size::Large),
        (16, 2048, 16, Size::Small),
        (16, 8192, 16, Size::Large),
        (32, 16_384, 16, Size::Large),
        (128, 1024, 1, Size::Small),
        (128, 512, 64, Size::Small),
        (128, 1024, 17, Size::Large),
        (128, 2048, 1, Size::Large),
    ] {
        assert_eq!(Size::fastest(d, n, n, heads), expected, "d {d}, {heads} heads of {n}");
    }
    // A single query of long context is cut into parts of whatever size.
    assert_eq!(Size::fastest(128, 1, 65_536, 1), Size::Large);
}

#[test]
fn a_free_block_takes_the_next_item() {
    for (lengths, heads, blocks, expected) in
        [(&[5, 4, 3, 3, 3][..], 1, 2, 13), (&[5, 4, 3, 3, 3], 1, 5, 6), (&[5, 1], 3, 4, 6), (&[], 1, 2, 0)]
    {
        assert_eq!(makespan(lengths, heads, blocks), expected, "{lengths:?} of {heads} heads on {blocks} blocks");
    }
}

#[test]
fn sections_have_as_many_heads_as_leave_the_last_one_full() {
    let mebibytes = 1 << 20;
    for (heads, head_bytes, expected) in [
        (16, 8 * mebibytes, 4),
        (16, 4 * mebibytes, 8),
        // Of ten a time, six would be left.
        (16, 3 * mebibytes, 8),
        // Of three a time, one would be left.
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

#[test]
fn a_list_of_parts_never_outgrows_its_table() {
    for (tiles, steps) in [(1, 100_000), (300, 500), (1020, 40), (5000, 4)] {
        if let Some(parts) = Parts::of(&vec![steps; tiles], 1, 10_000) {
            assert!(parts.items.len() <= MOST_ITEMS && parts.steps < steps, "{tiles} of {steps}");
        } else {
            assert!(tiles > MOST_ITEMS / 2, "{tiles} of {steps} could be cut");
        }
    }
}
