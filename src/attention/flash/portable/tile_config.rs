//! The tile configuration of the portable kernels for each variant; pure, so that every machine can test it.

use crate::attention::flash::variant::{Element, Variant};
use crate::cuda::Program;

/// Rows of a matrix instruction.
const ROWS: u32 = 16;

fn program<const N: usize>(file: &'static str, variant: Variant, shape: [(&'static str, u32); N]) -> Program {
    let Variant { d, element, is_causal } = variant;
    let variant = [("PORTABLE_D", d), ("PORTABLE_TYPE", element as u32), ("PORTABLE_CAUSAL", is_causal.into())];
    Program::new(file, variant.into_iter().chain(shape))
}

/// The forward kernel's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardConfig {
    pub variant: Variant,
    pub warps: u32,
    /// Tiles of 16 queries of each warp.
    pub tiles: u32,
    /// Keys of a block.
    pub keys: u32,
    /// Buffers for blocks of K and V.
    pub stages: u32,
    /// CTAs that share a multiprocessor's registers.
    pub blocks: u32,
    /// Query heads that share a head of k and v.
    pub group_size: u32,
}

impl ForwardConfig {
    pub fn of(variant: Variant) -> Self {
        let (tiles, keys, stages, blocks) = match (variant.element, variant.d) {
            (Element::Float, 16) => (1, 64, 2, 3),
            (Element::Float, 32 | 64) => (1, 32, 2, 3),
            (Element::Float, _) => (1, 32, 2, 2),
            (_, 16) => (2, 64, 3, 3),
            (_, 32 | 64) => (2, 64, 3, 2),
            _ => (2, 32, 3, 2),
        };
        Self { variant, warps: 4, tiles, keys, stages, blocks, group_size: 1 }
    }

    pub fn program(&self) -> Program {
        let shape = [
            ("PORTABLE_WARPS", self.warps),
            ("PORTABLE_TILES", self.tiles),
            ("PORTABLE_KEYS", self.keys),
            ("PORTABLE_STAGES", self.stages),
            ("PORTABLE_BLOCKS", self.blocks),
            ("PORTABLE_GROUPED", (self.group_size > 1).into()),
        ];
        program("portable_forward.cu", self.variant, shape)
    }

    /// Queries of a tile.
    pub fn rows(&self) -> u32 {
        ROWS * self.tiles * self.warps
    }

    pub fn threads(&self) -> u32 {
        32 * self.warps
    }

    /// Q, and K and V of each buffer.
    pub fn shared_bytes(&self) -> u32 {
        (self.rows() + 2 * self.stages * self.keys) * self.variant.row_bytes()
    }
}

/// The backward kernels' tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardConfig {
    pub variant: Variant,
    pub warps: u32,
    /// For dk and dv; the rows are keys.
    pub keys: GradientTiles,
    /// For dq; the rows are queries.
    pub queries: GradientTiles,
    /// Buffers for streamed blocks.
    pub stages: u32,
    /// CTAs that share a multiprocessor.
    pub blocks: u32,
    /// Query heads that share a head of k and v.
    pub group_size: u32,
    /// Whether the tiles of keys make dq too; there are no tiles of queries then.
    pub is_fused: bool,
}

/// Tiles of keys, which make dk and dv, or tiles of queries, which make dq.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientTiles {
    /// Matrix products for each block.
    pub products: u32,
    /// Tiles of 16 rows of each warp.
    pub tiles: u32,
    /// Columns of a block that is streamed through shared memory.
    pub stream: u32,
}

impl BackwardConfig {
    /// Rows of lse and D are padded to a multiple of this; `portable_backward_prepare` has a CTA for each multiple.
    pub const PADDING: u32 = 128;

    /// The least scores, masked ones included, for which the tiles of keys make dq too.
    ///
    /// Measured on an H100, one head of 16,384, in us, seven products and five: d = 128 causal 5123 and 4095, full 9483 and 7358;
    /// d = 64 causal 2272 and 2311, full 4339 and 3669. With fewer scores, most of the time goes by until the first tiles have
    /// followed one another.
    const FUSED_LEAST_SCORES: u64 = 1 << 28;

    /// For as many scores of all heads, with `shared_limit` bytes of shared memory for a CTA.
    pub fn for_scores(variant: Variant, scores: u64, shared_limit: u32) -> Self {
        let fused = Self::fused(variant).filter(|fused| fused.most_shared_bytes() <= shared_limit);
        fused.filter(|_| scores >= Self::FUSED_LEAST_SCORES).unwrap_or_else(|| Self::of(variant))
    }

    /// With tiles of keys that make dq too: five products instead of seven. `None` for types and d that do not have it.
    pub fn fused(variant: Variant) -> Option<Self> {
        let two_passes = Self::of(variant);
        let has = variant.element == Element::Float && variant.d >= 64;
        has.then_some(Self {
            keys: GradientTiles { products: 5, ..two_passes.keys },
            queries: GradientTiles { products: 0, ..two_passes.queries },
            is_fused: true,
            ..two_passes
        })
    }

    pub fn of(variant: Variant) -> Self {
        // Tiles and stream for dk and dv, and for dq.
        let [(key_tiles, queries), (query_tiles, keys)] = match (variant.element, variant.d) {
            (Element::Float, 128) => [(1, 16), (1, 16)],
            (Element::Float, _) => [(1, 32), (1, 32)],
            (_, 16) => [(2, 64), (2, 64)],
            (_, 32) => [(2, 32), (2, 64)],
            (_, 64) => [(1, 64), (2, 32)],
            _ => [(1, 32), (1, 64)],
        };
        Self {
            variant,
            warps: 4,
            keys: GradientTiles { products: 4, tiles: key_tiles, stream: queries },
            queries: GradientTiles { products: 3, tiles: query_tiles, stream: keys },
            stages: 2,
            blocks: 2,
            group_size: 1,
            is_fused: false,
        }
    }

    pub fn program(&self) -> Program {
        let shape = [
            ("PORTABLE_WARPS", self.warps),
            ("PORTABLE_KEYS_TILES", self.keys.tiles),
            ("PORTABLE_QUERIES_TILES", self.queries.tiles),
            ("PORTABLE_KEYS_STREAM", self.keys.stream),
            ("PORTABLE_QUERIES_STREAM", self.queries.stream),
            ("PORTABLE_STAGES", self.stages),
            ("PORTABLE_BLOCKS", self.blocks),
            ("PORTABLE_GROUPED", (self.group_size > 1).into()),
            ("PORTABLE_FUSED", self.is_fused.into()),
        ];
        program("portable_backward.cu", self.variant, shape)
    }

    pub fn threads(&self) -> u32 {
        32 * self.warps
    }

    /// Rows of a tile.
    pub fn rows(&self, pass: GradientTiles) -> u32 {
        ROWS * pass.tiles * self.warps
    }

    /// Two inputs of the tile, two streamed inputs, and `statistics` floats for each streamed row.
    fn shared_bytes(&self, pass: GradientTiles, statistics: u32) -> u32 {
        let row = 2 * self.variant.row_bytes();
        self.rows(pass) * row + self.stages * pass.stream * (row + 4 * statistics)
    }

    /// Of a launch that has tiles of both, or of keys with two blocks of dS, a padded row for each query.
    pub fn most_shared_bytes(&self) -> u32 {
        if self.is_fused {
            return self.shared_bytes(self.keys, 2) + 2 * self.keys.stream * (4 * self.rows(self.keys) + 16);
        }
        self.shared_bytes(self.keys, 2).max(self.shared_bytes(self.queries, 0))
    }
}

#[cfg(test)]
mod tests;
