//! Which tiles are split, and that splits cover everything once.

use super::*;
use crate::attention::flash::variant::Variant;

#[test]
fn few_tiles_are_split_and_many_are_not() {
    let of = |is_causal| ForwardConfig::of(Variant { d: 64, element: Element::BFloat16, is_causal });
    // 128 tiles of 128 queries have 264 resident CTAs; 64 have more than twice as many.
    assert_eq!(of(false).split(16_384, 16_384, 2, 132), Split { count: 1, blocks: 256 });
    // 8 tiles of 16 blocks, 128 in all: no split below 128 keys.
    assert_eq!(of(false).split(1024, 1024, 1, 132), Split { count: 8, blocks: 2 });
    // 8 tiles of 64 queries and up to 16 blocks of 32 keys: of float32 none below 64.
    let float = ForwardConfig::of(Variant { d: 128, element: Element::Float, is_causal: true });
    assert_eq!(float.split(512, 512, 1, 132), Split { count: 8, blocks: 2 });
    assert_eq!(float.split(128, 128, 1, 132), Split { count: 2, blocks: 2 });
    // 64 tiles of up to 128 blocks, 4096 of them seen, for 264 resident CTAs.
    assert_eq!(of(true).split(8192, 8192, 1, 132), Split { count: 8, blocks: 16 });
    // One query that sees one key, however many there are.
    assert_eq!(of(true).split(1, 100_000, 1, 132), Split { count: 1, blocks: 2 });
    assert_eq!(of(false).split(1, 1, 1, 132), Split { count: 1, blocks: 1 });
}

#[test]
fn the_backward_pass_is_split_so_that_its_last_cta_ends_first() {
    let of = |d, is_causal| BackwardConfig::of(Variant { d, element: Element::Float, is_causal });
    let one = |blocks| Split { count: 1, blocks };
    let counts = |d, is_causal, n, heads| of(d, is_causal).splits(n, n, heads, 132).map(|split| split.count);
    for (n, causal, narrow, full) in [
        (1024, [32, 22], [16, 16], [16, 13]),
        (4096, [19, 14], [13, 10], [14, 11]),
        (8192, [14, 11], [14, 11], [8, 6]),
        // Without a mask 256 tiles of each pass make two full turns.
        (16_384, [8, 6], [5, 4], [1, 1]),
        (32_768, [1, 1], [1, 1], [1, 1]),
    ] {
        let all = (counts(128, true, n, 1), counts(64, true, n, 1), counts(128, false, n, 1));
        assert_eq!(all, (causal, narrow, full), "{n} queries and keys");
    }
    // No split below two blocks, of 16 and of 32 columns.
    let parts = |count| Split { count, blocks: 2 };
    assert_eq!(of(128, true).splits(128, 128, 1, 132), [parts(4); 2]);
    assert_eq!(of(64, true).splits(128, 128, 1, 132), [parts(2); 2]);
    assert_eq!(of(64, true).splits(64, 64, 1, 132), [one(2); 2]);
    // With many heads or many rows, tiles stay whole.
    assert_eq!(of(64, true).splits(4096, 4096, 16, 132), [one(128); 2]);
    assert_eq!(of(128, true).splits(65_536, 65_536, 1, 132), [one(4096); 2]);
    assert_eq!(of(128, true).splits(1 << 30, 1 << 30, 1, 132), [one(1 << 26); 2]);
    // With many tiles of keys and few of queries, each as long as the share of fourteen CTAs, only the few are split.
    let [keys, queries] = of(64, false).splits(64, 65_536, 16, 132);
    assert!(keys.count == 1 && queries.count > 14, "{keys:?} {queries:?}");
    // No tile is made for keys that no query sees.
    assert_eq!(of(64, true).splits(1, 100_000, 1, 132), [one(1); 2]);
    assert_eq!(of(64, false).splits(1, 1, 1, 132), [one(1); 2]);
}

#[test]
fn no_other_split_of_the_backward_pass_would_end_earlier() {
    for variant in Variant::all(crate::attention::flash::DIMENSIONS, Element::ALL) {
        let shape = BackwardConfig::of(variant);
        for (n_queries, n_keys, heads) in [(300, 640, 1), (4096, 1000, 3), (64, 20_000, 16), (9000, 9000, 1)] {
            let size = Size { n_queries, n_keys, heads };
            let resident_ctas = 132 * shape.blocks;
            let taken = shape.makespan(&shape.splits(n_queries, n_keys, heads, 132), size, resident_ctas);
            let share = shape.products(size) / u128::from(resident_ctas);
            for most in [u128::MAX, share, share / 2, share / 3, share / 4, share / 6] {
                let other = shape.makespan(&shape.splits_of(size, most), size, resident_ctas);
                assert!(taken <= other || most == share, "{variant:?} {size:?}: {taken}, in parts of {most} {other}");
            }
        }
    }
}

#[test]
fn splits_of_the_backward_pass_cover_all_columns_and_none_of_the_longest_is_empty() {
    for variant in Variant::all(crate::attention::flash::DIMENSIONS, Element::ALL) {
        let shape = BackwardConfig::of(variant);
        for (n_queries, n_keys) in [(1, 1), (1, 70_000), (70_000, 1), (300, 640), (4096, 4096), (1 << 30, 1 << 30)] {
            let splits = shape.splits(n_queries, n_keys, 1, 132);
            let seen = if variant.is_causal { n_keys.min(n_queries) } else { n_keys };
            let blocks = [n_queries.div_ceil(shape.keys.stream), seen.div_ceil(shape.queries.stream)];
            for (split, blocks) in splits.into_iter().zip(blocks) {
                let covered = split.count * split.blocks;
                assert!(covered >= blocks && covered - split.blocks < blocks, "{variant:?} {split:?}");
            }
        }
    }
}

#[test]
fn every_split_covers_all_keys_and_none_is_empty() {
    for variant in Variant::all(crate::attention::flash::DIMENSIONS, Element::ALL) {
        for (n_queries, n_keys) in [(1, 1), (1, 70_000), (300, 640), (4096, 4096), (65_536, 65_536)] {
            let split = ForwardConfig::of(variant).split(n_queries, n_keys, 1, 132);
            let longest = ForwardConfig::of(variant).split(n_queries, n_keys, 10_000, 132).blocks;
            assert!(split.count * split.blocks >= longest && (split.count - 1) * split.blocks < longest);
        }
    }
}
