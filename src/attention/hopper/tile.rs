//! How the kernels are cut for each variant: pure, so that every machine can test it.

use std::cmp::Reverse;
use std::iter;

use crate::attention::host::{self, DIMENSIONS};
use crate::cuda::{Program, word_of};

/// What the kernels are compiled anew for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    /// Elements of a tile's row, of which the last may be missing in the tensors.
    pub d: u32,
    /// Float16; bfloat16 otherwise.
    pub is_half: bool,
    pub is_causal: bool,
}

/// What a block may have of shared memory on Hopper, in bytes.
pub const SHARED_LIMIT: u32 = 227 * 1024;
/// Dynamic shared memory begins at any multiple of 16; the kernels' tiles at multiples of this.
const ALIGNMENT: u32 = 1024;

/// The `d` of the variants that take rows of `head_dim` elements: its own, or the next for which there are kernels. The
/// copy engine steps over rows in multiples of 16 bytes, eight elements.
///
/// Errors: which `head_dim` they take.
pub fn kernel_dimension(head_dim: i64) -> Result<u32, String> {
    let is_taken = head_dim > 0 && head_dim % 8 == 0;
    let next = DIMENSIONS.into_iter().find(|&d| is_taken && head_dim <= d);
    next.map(|d| d as u32).ok_or_else(|| format!("its kernels take d in multiples of 8 up to 128, not {head_dim}"))
}

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
/// What a tile or a part costs a block beside its steps of the loop, in steps.
const STEPS_A_TILE: u64 = 1;
/// What the launch that adds parts up costs, in steps of a forward pass of few rows.
const STEPS_TO_COMBINE: u64 = 2;
/// Parts that are written and read again, by all blocks together, in the time of a step.
const PARTS_A_STEP: u64 = 48;

/// When the last of `blocks` is done, in steps. Each of `heads` has items of these `lengths`, the longest first.
fn makespan(lengths: &[u32], heads: u32, blocks: u32) -> u64 {
    let of_head = |&length: &u32| iter::repeat_n(u64::from(length) + STEPS_A_TILE, heads as usize);
    host::makespan(lengths.iter().flat_map(of_head), blocks)
}

impl Parts {
    /// How tiles of so many `steps` each, the same for each of `heads`, are best cut for a device that holds `places`
    /// blocks at a time, or `None` where they are better left whole. Of the ways to cut the longest tile into equal parts, it
    /// is the one whose last block is done first, the adding up included.
    pub fn of(steps: &[u32], heads: u32, places: u32) -> Option<Self> {
        let longest = steps.iter().copied().max()?;
        let tiles = steps.len() as u64 * u64::from(heads);
        let combining = |parts: u64| PARTS_A_STEP * STEPS_TO_COMBINE + parts;
        // Left whole they take at most their longest more than what each place's share takes.
        if PARTS_A_STEP * (u64::from(longest) + STEPS_A_TILE) <= combining(tiles) || steps.len() >= 1 << 16 {
            return None;
        }
        let mut sorted = steps.to_vec();
        sorted.sort_unstable_by_key(|&length| Reverse(length));
        // In steps divided by `PARTS_A_STEP`.
        let mut least = PARTS_A_STEP * makespan(&sorted, heads, places);
        let mut best = None;
        let total = u64::from(heads) * steps.iter().map(|&steps| u64::from(steps)).sum::<u64>();
        let mut candidates: Vec<u32> = (2..=longest.min(MOST_ITEMS as u32)).map(|n| longest.div_ceil(n)).collect();
        candidates.dedup();
        for in_part in candidates {
            let count = steps.iter().map(|steps| steps.div_ceil(in_part) as usize).sum::<usize>();
            let parts = count as u64 * u64::from(heads);
            let share = (total + STEPS_A_TILE * parts).div_ceil(u64::from(places));
            let at_least = share.max(u64::from(in_part) + STEPS_A_TILE);
            if count > MOST_ITEMS || PARTS_A_STEP * at_least + combining(parts) >= least {
                continue;
            }
            let lengths: Vec<u32> = Self::cut(steps, in_part).into_iter().map(|(length, _)| length).collect();
            let cost = PARTS_A_STEP * makespan(&lengths, heads, places) + combining(parts);
            if cost < least {
                (least, best) = (cost, Some(in_part));
            }
        }
        let items = Self::cut(steps, best?).into_iter().map(|(_, item)| item).collect();
        Some(Self { steps: best?, items, most: longest.div_ceil(best?) })
    }

    /// Length and item of every part of at most `in_part` steps, the longest first.
    fn cut(steps: &[u32], in_part: u32) -> Vec<(u32, u32)> {
        let parts = |(tile, &steps): (usize, &u32)| {
            let length = move |part: u32| in_part.min(steps - part * in_part);
            (0..steps.div_ceil(in_part)).map(move |part| (length(part), (tile as u32) << 16 | part))
        };
        let mut items: Vec<(u32, u32)> = steps.iter().enumerate().flat_map(parts).collect();
        items.sort_by_key(|&(length, item)| (Reverse(length), item));
        items
    }

    /// The kernels' `Parts`: what is found at two addresses beside the list.
    pub fn words(&self, addresses: [u64; 2]) -> Vec<u64> {
        let item = |i: usize| self.items.get(i).copied().unwrap_or_default();
        let items = (0..MOST_ITEMS).step_by(2).map(|i| word_of(item(i), item(i + 1)));
        [word_of(self.items.len() as u32, self.steps)].into_iter().chain(addresses).chain(items).collect()
    }
}

/// K and V of so many heads are worked on at a time: with Q and O they are to stay in an L2 cache of 50 MB.
const SECTION_BYTES: u64 = 32 << 20;

/// In sections of how many heads, whose K and V are of `head_bytes` each, the tiles of `heads` are worked on: of as
/// many as `SECTION_BYTES` hold, or down to half as many if the last section is fuller then. A small one has too few
/// tiles for the blocks that are done with the others.
pub fn heads_at_a_time(heads: u32, head_bytes: u64) -> u32 {
    let most = (SECTION_BYTES / head_bytes).clamp(1, u64::from(heads)) as u32;
    let missing = |section: &u32| heads.next_multiple_of(*section) - heads;
    (most.div_ceil(2)..=most).rev().min_by_key(missing).unwrap_or(1)
}

/// Columns of a panel in shared memory: its rows are at most 128 bytes.
fn columns(d: u32) -> u32 {
    d.min(64)
}

/// Of the forward kernel's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// Of one warpgroup, two blocks a multiprocessor: short steps, and enough tiles for a device from few heads.
    Small,
    /// Of two or three warpgroups, which take turns at the tensor cores: the most operations a second.
    Large,
}

impl Size {
    pub const ALL: [Self; 2] = [Self::Small, Self::Large];

    /// The faster for so many scores, those counted that the mask hides: measured on an H200, by entry 7 of the notebook
    /// in `kernels/flash_forward.cu`.
    pub fn fastest(d: u32, n_queries: u32, n_keys: u32, heads: u32) -> Self {
        let scores = u64::from(n_queries) * u64::from(n_keys) * u64::from(heads);
        let is_small = if d == 128 { n_keys <= 1024 && scores <= 1 << 24 } else { scores <= 1 << 27 };
        if is_small { Self::Small } else { Self::Large }
    }
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
    pub fn of(variant: Variant, size: Size) -> Self {
        let (groups, keys, stages) = match (size, variant.d) {
            (Size::Small, 128) => (1, 64, 2),
            (Size::Small, _) => (1, 128, 2),
            (Size::Large, 128) => (2, 128, 2),
            (Size::Large, _) => (3, 128, 4),
        };
        Self { variant, groups, keys, stages, is_split: false }
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

    /// Blocks that a multiprocessor holds at a time.
    pub fn resident(&self) -> u32 {
        if self.groups == 1 { 2 } else { 1 }
    }

    /// Q and O, K and V of each buffer, the barriers, and the tile's number.
    pub fn shared_bytes(&self) -> u32 {
        let row = 2 * self.variant.d;
        2 * self.rows() * row + 2 * self.stages * self.keys * row + 8 * (3 + 4 * self.stages) + ALIGNMENT
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
    /// Buffers for blocks of Q and dO.
    pub const STAGES: u32 = 2;

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
            + 8 * (2 + 2 * Self::STAGES)
            + ALIGNMENT
    }
}

#[cfg(test)]
mod tests;
