//! How the kernels are cut for each variant: pure, so that every machine can test it.

use crate::attention::host::DIMENSIONS;
use crate::cuda::{Program, word_of};

/// What the kernels are compiled anew for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    pub d: u32,
    /// Float16; bfloat16 otherwise.
    pub is_half: bool,
    pub is_causal: bool,
}

/// What a block may have of shared memory on Hopper, in bytes.
pub const SHARED_LIMIT: u32 = 227 * 1024;
/// Dynamic shared memory begins at any multiple of 16; the kernels' tiles at multiples of this.
const ALIGNMENT: u32 = 1024;

impl Variant {
    pub fn all() -> impl Iterator<Item = Self> {
        let types = |d| [false, true].map(|is_half| [false, true].map(|is_causal| Self { d, is_half, is_causal }));
        DIMENSIONS.into_iter().flat_map(move |d| types(d as u32).into_iter().flatten())
    }

    fn defines(self) -> Vec<(&'static str, String)> {
        let flag = |on: bool| u32::from(on).to_string();
        vec![
            ("FLASH_D", self.d.to_string()),
            ("FLASH_HALF", flag(self.is_half)),
            ("FLASH_CAUSAL", flag(self.is_causal)),
        ]
    }
}

/// Tiles cut into parts that are worked on as tiles of their own; the kernels' `Parts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// Steps of the loop in a part; a tile's last part may have fewer.
    pub steps: u32,
    /// Each part's tile times 65,536, plus its own number; the longest first.
    pub items: Vec<u32>,
    /// Of the tile that has most.
    pub most: u32,
}

/// What a table in a kernel's parameters holds.
const MOST_ITEMS: usize = 1020;
/// What writing the parts and adding them up is taken to cost, in steps of the loop. To be measured.
const STEPS_TO_COMBINE: u32 = 3;

impl Parts {
    /// How tiles of so many `steps` each, the same for each of `heads`, are best cut for a device, or `None` where they
    /// are better left whole: where the longest takes hardly longer than every multiprocessor's share of all.
    pub fn of(steps: &[u32], heads: u32, multiprocessors: u32) -> Option<Self> {
        let total: u64 = u64::from(heads) * steps.iter().map(|&steps| u64::from(steps)).sum::<u64>();
        let share = u32::try_from(total.div_ceil(u64::from(multiprocessors))).ok()?;
        let longest = steps.iter().copied().max()?;
        if longest <= share + STEPS_TO_COMBINE || steps.len() >= 1 << 16 {
            return None;
        }
        let count = |in_part: u32| steps.iter().map(|steps| steps.div_ceil(in_part) as usize).sum::<usize>();
        let in_part = (share.max(1)..longest).find(|&in_part| count(in_part) <= MOST_ITEMS)?;
        let parts = |(tile, &steps): (usize, &u32)| {
            let length = move |part: u32| in_part.min(steps - part * in_part);
            (0..steps.div_ceil(in_part)).map(move |part| (length(part), (tile as u32) << 16 | part))
        };
        let mut items: Vec<(u32, u32)> = steps.iter().enumerate().flat_map(parts).collect();
        items.sort_by_key(|&(length, item)| (std::cmp::Reverse(length), item));
        let items = items.into_iter().map(|(_, item)| item).collect();
        Some(Self { steps: in_part, items, most: longest.div_ceil(in_part) })
    }

    /// The kernels' `Parts`: what is found at two addresses beside the list.
    pub fn words(&self, addresses: [u64; 2]) -> Vec<u64> {
        let item = |i: usize| self.items.get(i).copied().unwrap_or_default();
        let items = (0..MOST_ITEMS).step_by(2).map(|i| word_of(item(i), item(i + 1)));
        [word_of(self.items.len() as u32, self.steps)].into_iter().chain(addresses).chain(items).collect()
    }
}

/// Columns of a panel in shared memory: its rows are at most 128 bytes.
fn columns(d: u32) -> u32 {
    d.min(64)
}

/// The forward kernel's cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Forward {
    pub variant: Variant,
    /// Warpgroups that compute, 64 queries each.
    pub groups: u32,
    /// Keys of a block.
    pub keys: u32,
    /// Buffers for blocks of K and V.
    pub stages: u32,
    /// Whether tiles come in parts.
    pub is_split: bool,
}

impl Forward {
    pub fn of(variant: Variant) -> Self {
        match variant.d {
            128 => Self { variant, groups: 2, keys: 128, stages: 2, is_split: false },
            _ => Self { variant, groups: 3, keys: 128, stages: 4, is_split: false },
        }
    }

    /// Blocks of keys that each tile of queries sees.
    pub fn steps(&self, n_queries: u32, n_keys: u32) -> Vec<u32> {
        let seen = |tile: u32| if self.variant.is_causal { n_keys.min((tile + 1) * self.rows()) } else { n_keys };
        (0..n_queries.div_ceil(self.rows())).map(|tile| seen(tile).div_ceil(self.keys)).collect()
    }

    pub fn program(&self) -> Program {
        let shape = [
            ("FLASH_GROUPS", self.groups),
            ("FLASH_KEYS", self.keys),
            ("FLASH_STAGES", self.stages),
            ("FLASH_SPLIT", u32::from(self.is_split)),
        ];
        let shape = shape.into_iter().map(|(name, value)| (name, value.to_string()));
        Program { file: "flash_forward.cu", defines: self.variant.defines().into_iter().chain(shape).collect() }
    }

    pub fn rows(&self) -> u32 {
        64 * self.groups
    }

    pub fn columns(&self) -> u32 {
        columns(self.variant.d)
    }

    pub fn threads(&self) -> u32 {
        128 * (self.groups + 1)
    }

    /// Q and O, K and V of each buffer, and the barriers.
    pub fn shared_bytes(&self) -> u32 {
        let row = 2 * self.variant.d;
        2 * self.rows() * row + 2 * self.stages * self.keys * row + 8 * (2 + 4 * self.stages) + ALIGNMENT
    }
}

/// The backward kernels' cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backward {
    pub variant: Variant,
    /// Queries of a block.
    pub queries: u32,
    /// Whether blocks of keys come in parts.
    pub is_split: bool,
}

impl Backward {
    pub const KEYS: u32 = 128;
    pub const THREADS: u32 = 384;
    const STAGES: u32 = 2;

    pub fn of(variant: Variant) -> Self {
        Self { variant, queries: if variant.d == 128 { 64 } else { 128 }, is_split: false }
    }

    /// Blocks of queries that see any key of each block of keys.
    pub fn steps(&self, n_queries: u32, n_keys: u32) -> Vec<u32> {
        let all = n_queries.div_ceil(self.queries);
        let unseen = |tile: u32| if self.variant.is_causal { tile * Self::KEYS / self.queries } else { 0 };
        (0..n_keys.div_ceil(Self::KEYS)).map(|tile| all.saturating_sub(unseen(tile))).collect()
    }

    pub fn program(&self) -> Program {
        let shape =
            [("FLASH_QUERIES", self.queries.to_string()), ("FLASH_SPLIT", u32::from(self.is_split).to_string())];
        Program { file: "flash_backward.cu", defines: self.variant.defines().into_iter().chain(shape).collect() }
    }

    pub fn columns(&self) -> u32 {
        columns(self.variant.d)
    }

    /// K and V, Q and dO of each buffer with their rows' statistics, two of dS, and the barriers.
    pub fn shared_bytes(&self) -> u32 {
        let row = 2 * self.variant.d;
        let stage = 2 * self.queries * row + 2 * 4 * self.queries;
        2 * Self::KEYS * row
            + Self::STAGES * stage
            + 2 * 2 * self.queries * Self::KEYS
            + 8 * (2 + 4 * Self::STAGES)
            + ALIGNMENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_fits_a_multiprocessor() {
        assert_eq!(Variant::all().count(), 16);
        for variant in Variant::all() {
            let (forward, backward) = (Forward::of(variant), Backward::of(variant));
            assert!(forward.shared_bytes() <= SHARED_LIMIT, "{forward:?} takes {} bytes", forward.shared_bytes());
            assert!(backward.shared_bytes() <= SHARED_LIMIT, "{backward:?} takes {} bytes", backward.shared_bytes());
        }
    }

    #[test]
    fn shapes_are_as_the_kernels_lay_them_out() {
        let variant = |d| Variant { d, is_half: false, is_causal: true };
        let wide = Forward::of(variant(128));
        assert_eq!((wide.rows(), wide.threads(), wide.columns()), (128, 384, 64));
        // 64 KiB of Q and O, two buffers of 64 KiB, ten barriers, and what alignment may take.
        assert_eq!(wide.shared_bytes(), 65_536 + 2 * 65_536 + 80 + 1024);
        let middle = Backward::of(variant(64));
        assert_eq!((middle.queries, middle.columns()), (128, 64));
        // 32 KiB of K and V, two buffers of 32 KiB and two rows of 512 bytes each, 64 KiB of dS, ten barriers.
        assert_eq!(middle.shared_bytes(), 32_768 + 2 * (32_768 + 1024) + 65_536 + 80 + 1024);
    }
    #[test]
    fn one_head_is_cut_until_it_fills_the_device_and_many_heads_are_left_whole() {
        let variant = Variant { d: 64, is_half: false, is_causal: true };
        let shape = Forward::of(variant);
        assert_eq!(shape.steps(500, 400), [2, 3, 4]);
        assert_eq!(Backward::of(variant).steps(500, 700), [4, 3, 2, 1, 0, 0]);
        let steps = shape.steps(8192, 8192);
        assert_eq!((steps.len(), steps[42]), (43, 64));
        let parts = Parts::of(&steps, 1, 132).unwrap();
        // 1430 steps in all are 11 for each multiprocessor.
        assert_eq!((parts.steps, parts.most), (11, 6));
        assert_eq!(Parts::of(&steps, 16, 132), None);
        assert_eq!(Parts::of(&shape.steps(512, 512), 1, 132), None, "four steps are not worth cutting");
        // Every step of every tile is in one part, and no part is longer than one before it.
        let length = |item: u32| parts.steps.min(steps[(item >> 16) as usize] - (item & 0xFFFF) * parts.steps);
        assert_eq!(parts.items.iter().map(|&item| length(item)).sum::<u32>(), steps.iter().sum::<u32>());
        assert!(parts.items.is_sorted_by_key(|&item| std::cmp::Reverse(length(item))));
        let words = parts.words([7, 8]);
        assert_eq!((words.len(), words[0], words[1], words[2]), (513, word_of(parts.items.len() as u32, 11), 7, 8));
        assert_eq!(words[3], word_of(parts.items[0], parts.items[1]));
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
}
