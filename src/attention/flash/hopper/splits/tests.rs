//! Which tiles are split, and how.

use super::*;
use crate::attention::flash::hopper::tile_config::{BackwardConfig, ForwardConfig, TileSize};
use crate::attention::flash::variant::{Element, Variant};

#[test]
fn one_head_is_split_until_it_fills_the_device_and_many_heads_stay_whole() {
    let variant = Variant { d: 64, element: Element::BFloat16, is_causal: true };
    let shape = ForwardConfig::of(variant, TileSize::Large);
    assert_eq!(shape.steps(500, 400), [2, 3, 4]);
    assert_eq!(BackwardConfig::of(variant).steps(500, 700), [4, 3, 2, 1, 0, 0]);
    let steps = shape.steps(8192, 8192);
    assert_eq!((steps.len(), steps[42]), (43, 64));
    let splits = TileSplits::of(&steps, 1, 132).unwrap();
    // 1430 steps in all are 11 for each multiprocessor.
    assert_eq!((splits.steps, splits.most), (11, 6));
    assert_eq!(TileSplits::of(&steps, 16, 132), None);
    // Every step of every tile is in one part, and no part is longer than one before it.
    let length = |item: u32| splits.steps.min(steps[(item >> 16) as usize] - (item & 0xFFFF) * splits.steps);
    assert_eq!(splits.items.iter().map(|&item| length(item)).sum::<u32>(), steps.iter().sum::<u32>());
    assert!(splits.items.is_sorted_by_key(|&item| std::cmp::Reverse(length(item))));
    let table = splits.table();
    let (items, rest) = table.split_at(splits.items.len());
    assert!(items == splits.items && rest.iter().all(|&item| item == 0) && splits.count() as usize == items.len());
}

#[test]
fn the_split_is_the_one_whose_last_cta_ends_first() {
    let steps_in_part = |size, d, n, heads| {
        let shape = ForwardConfig::of(Variant { d, element: Element::BFloat16, is_causal: true }, size);
        TileSplits::of(&shape.steps(n, n), heads, 132 * shape.resident()).map(|splits| splits.steps)
    };
    for (size, d, n, heads, expected) in [
        (TileSize::Large, 64, 256, 1, None),
        // The launch that adds up costs what the splits save.
        (TileSize::Large, 64, 384, 1, None),
        (TileSize::Large, 64, 512, 1, Some(1)),
        (TileSize::Large, 64, 1024, 1, Some(1)),
        // Splits of one step would end a step earlier, but there are more to add up.
        (TileSize::Large, 64, 2048, 1, Some(2)),
        (TileSize::Large, 64, 4096, 1, Some(3)),
        // Four would do for the share; with five, no block has two splits.
        (TileSize::Large, 128, 4096, 1, Some(5)),
        (TileSize::Large, 64, 8192, 1, Some(11)),
        (TileSize::Large, 128, 8192, 1, Some(16)),
        // 342 tiles on 132 ctas: 2.6 turns, of which whole tiles would make three.
        (TileSize::Large, 64, 65_536, 1, Some(171)),
        (TileSize::Large, 128, 65_536, 1, None),
        (TileSize::Large, 64, 16_384, 16, None),
        (TileSize::Large, 128, 16_384, 16, None),
        (TileSize::Small, 64, 256, 1, None),
        (TileSize::Small, 64, 1024, 1, Some(1)),
        (TileSize::Small, 64, 2048, 1, Some(2)),
        // Splits of four would be 288 items for 264 resident CTAs; splits of five are 238.
        (TileSize::Small, 64, 4096, 1, Some(5)),
        (TileSize::Small, 64, 8192, 1, Some(16)),
        (TileSize::Small, 64, 2048, 16, None),
    ] {
        assert_eq!(steps_in_part(size, d, n, heads), expected, "{size:?}, d {d}, {heads} heads of {n}");
    }
}

#[test]
fn a_free_cta_takes_the_next_item() {
    for (lengths, heads, ctas, expected) in
        [(&[5, 4, 3, 3, 3][..], 1, 2, 13), (&[5, 4, 3, 3, 3], 1, 5, 6), (&[5, 1], 3, 4, 6), (&[], 1, 2, 0)]
    {
        assert_eq!(makespan(lengths, heads, ctas), expected, "{lengths:?} of {heads} heads on {ctas} ctas");
    }
}

#[test]
fn a_list_of_splits_never_outgrows_its_table() {
    for (tiles, steps) in [(1, 100_000), (300, 500), (1020, 40), (5000, 4)] {
        if let Some(splits) = TileSplits::of(&vec![steps; tiles], 1, 10_000) {
            assert!(splits.items.len() <= MOST_ITEMS && splits.steps < steps, "{tiles} of {steps}");
        } else {
            assert!(tiles > MOST_ITEMS / 2, "{tiles} of {steps} could be cut");
        }
    }
}
