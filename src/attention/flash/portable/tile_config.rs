//! The tile configuration of the portable kernels for each variant; pure, so that every machine can test it.

use anyhow::{Context as _, Result};
use tch::Kind;

use crate::attention::flash::DIMENSIONS;
use crate::attention::flash::launch::Inputs;
use crate::attention::flash::tile_sizes;
use crate::cuda::Program;

/// Element types, by their number in `kernels/lib/fragment.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Element {
    BFloat16 = 0,
    Half = 1,
    Float = 2,
}

impl Element {
    pub const ALL: [Self; 3] = [Self::BFloat16, Self::Half, Self::Float];

    /// Of a tensor's kind, if there are kernels for it.
    pub fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::BFloat16 => Some(Self::BFloat16),
            Kind::Half => Some(Self::Half),
            Kind::Float => Some(Self::Float),
            _ => None,
        }
    }

    pub fn bytes(self) -> u32 {
        if self == Self::Float { 4 } else { 2 }
    }
}

/// What the kernels are compiled for, each variant on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    pub d: u32,
    pub element: Element,
    pub is_causal: bool,
}

/// The shared memory that a CTA may have from compute capability 8.0 on, in bytes (8.6 and 8.9 have the least).
pub const SHARED_LIMIT: u32 = 99 * 1024;
/// Rows of a matrix instruction.
const ROWS: u32 = 16;

impl Variant {
    /// The kernels for these inputs.
    pub fn of(inputs: &Inputs) -> Result<Self> {
        let element = Element::of(inputs.kind()).with_context(|| format!("no kernels take {:?}", inputs.kind()))?;
        Ok(Self { d: inputs.sizes.d, element, is_causal: inputs.is_causal })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let variants = |d, element| [false, true].map(|is_causal| Self { d, element, is_causal });
        let types = move |d| Element::ALL.into_iter().flat_map(move |element| variants(d, element));
        DIMENSIONS.into_iter().flat_map(move |d| types(d as u32))
    }

    fn row_bytes(self) -> u32 {
        self.d * self.element.bytes()
    }

    fn program(self, file: &'static str, shape: &[(&'static str, u32)]) -> Program {
        let variant = [
            ("PORTABLE_D", self.d),
            ("PORTABLE_TYPE", self.element as u32),
            ("PORTABLE_CAUSAL", u32::from(self.is_causal)),
        ];
        let defines = variant.iter().chain(shape).map(|&(name, value)| (name, value.to_string()));
        Program { file, defines: defines.collect() }
    }
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
}

impl ForwardConfig {
    pub fn of(variant: Variant) -> Self {
        let [warps, tiles, keys, stages, blocks] = tile_sizes::portable_forward(variant.element, variant.d);
        Self { variant, warps, tiles, keys, stages, blocks }
    }

    pub fn program(&self) -> Program {
        let shape = [
            ("PORTABLE_WARPS", self.warps),
            ("PORTABLE_TILES", self.tiles),
            ("PORTABLE_KEYS", self.keys),
            ("PORTABLE_STAGES", self.stages),
            ("PORTABLE_BLOCKS", self.blocks),
        ];
        self.variant.program("portable_forward.cu", &shape)
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
    pub stages: u32,
    pub blocks: u32,
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

    pub fn of(variant: Variant) -> Self {
        let [warps, stages, blocks] = tile_sizes::PORTABLE_BACKWARD;
        let [[key_tiles, queries], [query_tiles, keys]] = tile_sizes::portable_backward(variant.element, variant.d);
        Self {
            variant,
            warps,
            keys: GradientTiles { products: 4, tiles: key_tiles, stream: queries },
            queries: GradientTiles { products: 3, tiles: query_tiles, stream: keys },
            stages,
            blocks,
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
        ];
        self.variant.program("portable_backward.cu", &shape)
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

    pub fn keys_shared_bytes(&self) -> u32 {
        self.shared_bytes(self.keys, 2)
    }

    pub fn queries_shared_bytes(&self) -> u32 {
        self.shared_bytes(self.queries, 0)
    }

    /// Of a launch that has tiles of both.
    pub fn most_shared_bytes(&self) -> u32 {
        self.keys_shared_bytes().max(self.queries_shared_bytes())
    }
}

#[cfg(test)]
mod tests;
