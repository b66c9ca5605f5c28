//! Split tiles: where a pass has too few tiles to fill the GPU, several CTAs share the inner loop of one tile. In the
//! forward pass this is split-KV, as in Flash-Decoding.

use std::cmp::Reverse;
use std::iter;

use crate::attention::flash::params::MOST_ITEMS;
use crate::attention::flash::schedule;

/// How the tiles of every head are split; the `Parts` of the kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileSplits {
    /// Steps of the inner loop in a split; a tile's last split may have fewer.
    pub steps: u32,
    /// Each split's tile times 65,536, plus its number in the tile; the longest first.
    pub items: Vec<u32>,
    /// Splits of the tile that has most.
    pub most: u32,
}

/// The cost of a tile or a split in addition to its steps of the loop, in steps.
const STEPS_A_TILE: u64 = 1;
/// The cost of the launch that adds splits up, in steps of a forward pass of few rows.
const STEPS_TO_COMBINE: u64 = 2;
/// Splits whose results all CTAs together write and read again in the time of a step.
const SPLITS_A_STEP: u64 = 48;

impl TileSplits {
    /// The best splits of tiles with these `steps`, the same for each of `heads`, on a device that holds
    /// `resident_ctas` at a time; `None` if whole tiles are better. Of the ways to split the longest tile evenly, it is
    /// the one whose last CTA ends first, including the addition of the splits.
    pub fn of(steps: &[u32], heads: u32, resident_ctas: u32) -> Option<Self> {
        let longest = steps.iter().copied().max()?;
        let tiles = steps.len() as u64 * u64::from(heads);
        let combining = |splits: u64| SPLITS_A_STEP * STEPS_TO_COMBINE + splits;
        // Whole tiles take at most their longest more than each CTA's share takes.
        if SPLITS_A_STEP * (u64::from(longest) + STEPS_A_TILE) <= combining(tiles) || steps.len() >= 1 << 16 {
            return None;
        }
        let mut sorted = steps.to_vec();
        sorted.sort_unstable_by_key(|&length| Reverse(length));
        // In steps divided by `SPLITS_A_STEP`.
        let mut least = SPLITS_A_STEP * makespan(&sorted, heads, resident_ctas);
        let mut best = None;
        let total = u64::from(heads) * steps.iter().map(|&steps| u64::from(steps)).sum::<u64>();
        let mut candidates: Vec<u32> = (2..=longest.min(MOST_ITEMS as u32)).map(|n| longest.div_ceil(n)).collect();
        candidates.dedup();
        for in_split in candidates {
            let count = steps.iter().map(|steps| steps.div_ceil(in_split) as usize).sum::<usize>();
            let splits = count as u64 * u64::from(heads);
            let share = (total + STEPS_A_TILE * splits).div_ceil(u64::from(resident_ctas));
            let at_least = share.max(u64::from(in_split) + STEPS_A_TILE);
            if count > MOST_ITEMS || SPLITS_A_STEP * at_least + combining(splits) >= least {
                continue;
            }
            let lengths: Vec<u32> = Self::split(steps, in_split).into_iter().map(|(length, _)| length).collect();
            let cost = SPLITS_A_STEP * makespan(&lengths, heads, resident_ctas) + combining(splits);
            if cost < least {
                (least, best) = (cost, Some(in_split));
            }
        }
        let items = Self::split(steps, best?).into_iter().map(|(_, item)| item).collect();
        Some(Self { steps: best?, items, most: longest.div_ceil(best?) })
    }

    /// Length and item of every split of at most `in_split` steps, the longest first.
    fn split(steps: &[u32], in_split: u32) -> Vec<(u32, u32)> {
        let splits = |(tile, &steps): (usize, &u32)| {
            let length = move |split: u32| in_split.min(steps - split * in_split);
            (0..steps.div_ceil(in_split)).map(move |split| (length(split), (tile as u32) << 16 | split))
        };
        let mut items: Vec<(u32, u32)> = steps.iter().enumerate().flat_map(splits).collect();
        items.sort_by_key(|&(length, item)| (Reverse(length), item));
        items
    }

    /// Entries of [`Self::table`]; at most [`MOST_ITEMS`].
    pub fn count(&self) -> i32 {
        self.items.len() as i32
    }

    /// The items as the kernels take them, followed by zeros.
    pub fn table(&self) -> [u32; MOST_ITEMS] {
        let mut table = [0; MOST_ITEMS];
        table[..self.items.len()].copy_from_slice(&self.items);
        table
    }
}

/// When the last CTA ends, in steps. Each of `heads` has items of these `lengths`, the longest first.
fn makespan(lengths: &[u32], heads: u32, resident_ctas: u32) -> u64 {
    let of_head = |&length: &u32| iter::repeat_n(u64::from(length) + STEPS_A_TILE, heads as usize);
    schedule::makespan(lengths.iter().flat_map(of_head), resident_ctas)
}

#[cfg(test)]
mod tests;
