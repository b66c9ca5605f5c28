//! The tile configuration of Hopper's kernels for each variant; pure, so that every machine can test it.

use crate::attention::flash::variant::{Element, Variant};
use crate::cuda::Program;

/// The types that the kernels take.
pub const ELEMENTS: [Element; 2] = [Element::BFloat16, Element::Half];

/// Head dimensions that the kernels are compiled for.
pub const DIMENSIONS: [i64; 6] = [16, 32, 64, 80, 96, 128];

/// Dynamic shared memory begins at any multiple of 16 bytes, the kernels' tiles at multiples of this.
const ALIGNMENT: u32 = 1024;

/// The `d` of the kernels that take rows of `head_dim` elements: the next one for which they are compiled. TMA takes rows
/// in multiples of 16 bytes, eight elements.
///
/// Errors: which `head_dim` they take.
pub fn kernel_dimension(head_dim: i64) -> Result<i64, String> {
    let is_taken = head_dim > 0 && head_dim % 8 == 0;
    let next = DIMENSIONS.into_iter().find(|&d| is_taken && head_dim <= d);
    next.ok_or_else(|| format!("its kernels take d in multiples of 8 up to 128, not {head_dim}"))
}

fn program<const N: usize>(file: &'static str, variant: Variant, shape: [(&'static str, u32); N]) -> Program {
    let Variant { d, element, is_causal } = variant;
    let is_half = element == Element::Half;
    let variant = [("FLASH_D", d), ("FLASH_HALF", is_half.into()), ("FLASH_CAUSAL", is_causal.into())];
    Program::new(file, variant.into_iter().chain(shape))
}

/// K and V of a section of heads, which with Q and O are to stay in an L2 cache of 50 MB.
const SECTION_BYTES: u64 = 32 << 20;

/// How many of `heads`, whose K and V take `head_bytes` each, are worked on together: as many as fit `SECTION_BYTES`,
/// or down to half as many if the last section is fuller then. A small last section has too few tiles for all CTAs.
pub fn heads_at_a_time(heads: u32, head_bytes: u64) -> u32 {
    let most = (SECTION_BYTES / head_bytes).clamp(1, u64::from(heads)) as u32;
    let missing = |section: &u32| heads.next_multiple_of(*section) - heads;
    (most.div_ceil(2)..=most).rev().min_by_key(missing).unwrap_or(1)
}

/// Columns of a panel in shared memory, whose rows are 128, 64 or 32 bytes: the most that fill a row.
pub fn columns(variant: Variant) -> u32 {
    [64, 32].into_iter().find(|columns| variant.d.is_multiple_of(*columns)).unwrap_or(16)
}

/// The size of the forward kernel's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TileSize {
    /// One warpgroup computes, and a multiprocessor has two CTAs: short steps, and enough tiles from few heads.
    Small,
    /// Two or three warpgroups take turns at the tensor cores: the most operations a second.
    Large,
}

impl TileSize {
    pub const ALL: [Self; 2] = [Self::Small, Self::Large];

    /// The faster size for this number of scores, masked ones included. Measured on an H200: entry 7 of the notebook in
    /// `kernels/flash_forward.cu`. At d = 96, whose tiles are those of d = 128, and at d = 80 it is not measured.
    pub fn fastest(d: u32, n_queries: u32, n_keys: u32, heads: u32) -> Self {
        let scores = (u64::from(n_queries) * u64::from(n_keys)).saturating_mul(heads.into());
        let is_small = if d > 80 { n_keys <= 1024 && scores <= 1 << 24 } else { scores <= 1 << 27 };
        if is_small { Self::Small } else { Self::Large }
    }
}

/// The forward kernel's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ForwardConfig {
    pub variant: Variant,
    /// Warpgroups that compute, 64 queries each.
    pub groups: u32,
    /// Keys of a block.
    pub keys: u32,
    /// Buffers for blocks of K and V.
    pub stages: u32,
    /// Whether tiles are split.
    pub is_split: bool,
    /// Query heads that share a head of k and v.
    pub group_size: u32,
}

impl ForwardConfig {
    pub fn of(variant: Variant, size: TileSize) -> Self {
        let (groups, keys, stages) = match (size, variant.d) {
            (TileSize::Small, 96 | 128) => (1, 64, 2),
            (TileSize::Small, _) => (1, 128, 2),
            (TileSize::Large, 96 | 128) => (2, 128, 2),
            // Three warpgroups have too few registers.
            (TileSize::Large, 80) => (2, 128, 4),
            (TileSize::Large, _) => (3, 128, 4),
        };
        Self { variant, groups, keys, stages, is_split: false, group_size: 1 }
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
            ("FLASH_SPLIT", self.is_split.into()),
            ("FLASH_GROUPED", (self.group_size > 1).into()),
        ];
        program("flash_forward.cu", self.variant, shape)
    }

    pub fn rows(&self) -> u32 {
        64 * self.groups
    }

    pub fn threads(&self) -> u32 {
        128 * (self.groups + 1)
    }

    /// CTAs that a multiprocessor holds at a time.
    pub fn resident(&self) -> u32 {
        if self.groups == 1 { 2 } else { 1 }
    }

    /// Q and O, K and V of each buffer, the barriers, and the tile's number.
    pub fn shared_bytes(&self) -> u32 {
        let row = 2 * self.variant.d;
        2 * self.rows() * row + 2 * self.stages * self.keys * row + 8 * (3 + 4 * self.stages) + ALIGNMENT
    }
}

/// The backward kernels' tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackwardConfig {
    pub variant: Variant,
    /// Queries of a block.
    pub queries: u32,
    /// Whether tiles of keys are split.
    pub is_split: bool,
    /// Query heads that share a head of k and v.
    pub group_size: u32,
}

impl BackwardConfig {
    pub const KEYS: u32 = 128;
    pub const THREADS: u32 = 384;
    /// Buffers for blocks of Q and dO.
    pub const STAGES: u32 = 2;

    pub fn of(variant: Variant) -> Self {
        Self { variant, queries: if variant.d > 64 { 64 } else { 128 }, is_split: false, group_size: 1 }
    }

    /// Columns of a panel of K, of which a warpgroup's part of dQ takes whole ones.
    pub fn key_columns(&self) -> u32 {
        if self.queries == 128 || self.variant.d.is_multiple_of(64) { columns(self.variant) } else { 16 }
    }

    /// Blocks of queries, of all heads of a group, that see any key of each block of keys.
    pub fn steps(&self, n_queries: u32, n_keys: u32) -> Vec<u32> {
        let all = n_queries.div_ceil(self.queries);
        let unseen = |tile: u32| if self.variant.is_causal { tile * Self::KEYS / self.queries } else { 0 };
        (0..n_keys.div_ceil(Self::KEYS)).map(|tile| self.group_size * all.saturating_sub(unseen(tile))).collect()
    }

    pub fn program(&self) -> Program {
        let is_grouped = self.group_size > 1;
        let shape = [
            ("FLASH_QUERIES", self.queries),
            ("FLASH_SPLIT", self.is_split.into()),
            ("FLASH_GROUPED", is_grouped.into()),
        ];
        program("flash_backward.cu", self.variant, shape)
    }

    /// K and V, Q and dO of each buffer with their rows' statistics, two of dS, each warpgroup's dQ, and the barriers.
    pub fn shared_bytes(&self) -> u32 {
        let row = 2 * self.variant.d;
        let stage = 2 * self.queries * row + 2 * 4 * self.queries;
        2 * Self::KEYS * row
            + Self::STAGES * stage
            + 2 * 2 * self.queries * Self::KEYS
            + 4 * self.queries * self.variant.d
            + 8 * (2 + 2 * Self::STAGES)
            + ALIGNMENT
    }
}

#[cfg(test)]
mod tests;
