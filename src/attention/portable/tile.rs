//! How the portable kernels are cut for each variant: pure, so that every machine can test it.

use std::iter;

use tch::Kind;

use crate::attention::host::{DIMENSIONS, makespan};
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

/// What the kernels are compiled anew for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    pub d: u32,
    pub element: Element,
    pub is_causal: bool,
}

/// What a block may have of shared memory from compute capability 8.0 on, in bytes (8.6 and 8.9 have the least).
pub const SHARED_LIMIT: u32 = 99 * 1024;
/// Of tiles of 16 rows that one warp computes at a time.
const ROWS: u32 = 16;

impl Variant {
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

/// The forward kernel's cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    pub variant: Variant,
    pub warps: u32,
    /// Tiles of 16 queries of each warp.
    pub tiles: u32,
    /// Keys of a block.
    pub keys: u32,
    /// Buffers for blocks of K and V.
    pub stages: u32,
    /// Thread blocks that a multiprocessor's registers are shared by.
    pub blocks: u32,
}

impl Forward {
    pub fn of(variant: Variant) -> Self {
        let (tiles, keys, stages, blocks) = match (variant.element, variant.d) {
            (Element::Float, 16) => (1, 64, 2, 3),
            (Element::Float, 32 | 64) => (1, 32, 2, 3),
            (Element::Float, _) => (1, 32, 2, 2),
            (_, 16) => (2, 64, 3, 3),
            (_, 32 | 64) => (2, 64, 3, 2),
            _ => (2, 32, 3, 2),
        };
        Self { variant, warps: 4, tiles, keys, stages, blocks }
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

    /// How the keys of a tile are shared out, if `heads` (of all batches) have so many queries and keys.
    pub fn split(&self, n_queries: u32, n_keys: u32, heads: u32, multiprocessors: u32) -> Split {
        let tiles = n_queries.div_ceil(self.rows());
        let seen = if self.variant.is_causal { n_keys.min(tiles.saturating_mul(self.rows())) } else { n_keys };
        let longest = seen.div_ceil(self.keys);
        let (items, places) = (u64::from(tiles) * u64::from(heads), u64::from(multiprocessors * self.blocks));
        if 2 * items > places {
            return Split { count: 1, blocks: longest };
        }
        // Under the causal mask about half of all blocks are seen.
        let all = items * u64::from(longest) / if self.variant.is_causal && tiles > 1 { 2 } else { 1 };
        let least = Split::least_keys(self.variant.element) / self.keys;
        let blocks = u32::try_from(all.div_ceil(places)).unwrap_or(u32::MAX).max(least).min(longest);
        Split { count: longest.div_ceil(blocks), blocks }
    }
}

/// The parts in which thread blocks share what a tile of queries has of keys, or a tile of keys of queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Of the longest tile.
    pub count: u32,
    /// Blocks of keys or queries of each part.
    pub blocks: u32,
}

impl Split {
    /// Blocks of the backward pass in a part: with fewer a part's own sums, written and read again in float32, are no
    /// longer little beside what they are made of.
    const LEAST_BLOCKS: u32 = 2;
    /// Tiles for each place, above which none is split that has no more than its share.
    const MANY: u32 = 32;

    /// The least of a part of the forward pass, in keys, of which float32 takes longer.
    fn least_keys(element: Element) -> u32 {
        if element == Element::Float { 64 } else { 128 }
    }
}

/// The backward kernels' cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backward {
    pub variant: Variant,
    pub warps: u32,
    /// The kernel of dk and dv, whose rows are keys.
    pub keys: Pass,
    /// The kernel of dq, whose rows are queries.
    pub queries: Pass,
    pub stages: u32,
    pub blocks: u32,
}

/// How much there is to do.
#[derive(Debug, Clone, Copy)]
struct Size {
    n_queries: u32,
    n_keys: u32,
    /// Of all batches.
    heads: u32,
}

/// What differs between the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Matrix products for each block.
    pub products: u32,
    /// Tiles of 16 rows of each warp.
    pub tiles: u32,
    /// Rows of the other kind in a block.
    pub stream: u32,
}

impl Backward {
    /// Rows of statistics are counted in these, and `portable_backward_prepare` has a block for each.
    pub const PADDING: u32 = 128;

    pub fn of(variant: Variant) -> Self {
        let keys = |tiles, stream| Pass { products: 4, tiles, stream };
        let queries = |tiles, stream| Pass { products: 3, tiles, stream };
        let (keys, queries) = match (variant.element, variant.d) {
            (Element::Float, 128) => (keys(1, 16), queries(1, 16)),
            (Element::Float, _) => (keys(1, 32), queries(1, 32)),
            (_, 16) => (keys(2, 64), queries(2, 64)),
            (_, 32) => (keys(2, 32), queries(2, 64)),
            (_, 64) => (keys(1, 64), queries(2, 32)),
            _ => (keys(1, 32), queries(1, 64)),
        };
        Self { variant, warps: 4, keys, queries, stages: 2, blocks: 2 }
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
    pub fn rows(&self, pass: Pass) -> u32 {
        ROWS * pass.tiles * self.warps
    }

    /// How the columns of the tiles of keys and of queries are shared out, if `heads` (of all batches) have so many. Tiles
    /// may stay whole, or be cut into parts of a half, a third, a quarter or a sixth of what a place has of all products:
    /// the way is taken whose last block is done first.
    pub fn splits(&self, n_queries: u32, n_keys: u32, heads: u32, multiprocessors: u32) -> [Split; 2] {
        let size = Size { n_queries, n_keys, heads };
        let whole = self.splits_of(size, u128::MAX);
        let tiles = n_keys.div_ceil(self.rows(self.keys)) + n_queries.div_ceil(self.rows(self.queries));
        let places = multiprocessors * self.blocks;
        let share = self.products(size) / u128::from(places);
        // The last tiles of so many are little beside all, unless those of one pass are few and long.
        let is_many = u64::from(tiles) * u64::from(heads) > u64::from(Split::MANY * places);
        if is_many && self.splits_of(size, share) == whole {
            return whole;
        }
        let of = |fraction| self.splits_of(size, share / fraction);
        let mut candidates: Vec<_> = iter::once(whole).chain([2, 3, 4, 6].map(of)).collect();
        candidates.dedup();
        // Of equals the first, which has fewer parts.
        candidates.into_iter().min_by_key(|splits| self.makespan(splits, size, places)).unwrap_or(whole)
    }

    /// Of all tiles of both passes, in products of a row and a column.
    fn products(&self, size: Size) -> u128 {
        let (rows, columns) = (u128::from(size.n_queries), u128::from(size.n_keys));
        let square = rows.min(columns);
        let hidden =
            if self.variant.is_causal { square * square.saturating_sub(1) / 2 + (columns - square) * rows } else { 0 };
        u128::from(self.keys.products + self.queries.products) * u128::from(size.heads) * (rows * columns - hidden)
    }

    /// Tiles in parts of at most `most` products, where they are more than one part.
    fn splits_of(&self, size: Size, most: u128) -> [Split; 2] {
        [(self.keys, size.n_queries), (self.queries, self.longest_row(size))].map(|(pass, longest)| {
            let column = u128::from(pass.products * self.rows(pass));
            let blocks = longest.div_ceil(pass.stream);
            if column * u128::from(longest) <= most {
                return Split { count: 1, blocks };
            }
            let part = u32::try_from(most / column).unwrap_or(u32::MAX);
            let in_part = part.div_ceil(pass.stream).max(Split::LEAST_BLOCKS).min(blocks);
            Split { count: blocks.div_ceil(in_part), blocks: in_part }
        })
    }

    /// Keys that the query which sees most of them sees.
    fn longest_row(&self, size: Size) -> u32 {
        if self.variant.is_causal { size.n_keys.min(size.n_queries) } else { size.n_keys }
    }

    /// When the last block is done, in products of a row and a column: tiles of keys come first, then those of queries,
    /// each pass's longest first.
    fn makespan(&self, splits: &[Split; 2], size: Size, places: u32) -> u64 {
        let Size { n_queries, n_keys, heads } = size;
        let items = |pass: Pass, split: Split, columns: Vec<u32>| {
            let rows = u64::from(self.rows(pass));
            let unit = u64::from(pass.products * pass.stream) * rows;
            // A part's beginning and end cost as much as three of its products do.
            let beside = 3 * u64::from(pass.stream) * rows;
            columns.into_iter().flat_map(move |columns| {
                let blocks = columns.div_ceil(pass.stream);
                let part = move |i: u32| blocks.saturating_sub(i * split.blocks).min(split.blocks);
                let cost = move |blocks: u32| u64::from(blocks) * unit + if blocks > 0 { beside } else { 0 };
                iter::repeat_n(0..split.count, heads as usize).flatten().map(move |i| cost(part(i)))
            })
        };
        let tiles = |n: u32, pass: Pass| (0..n.div_ceil(self.rows(pass))).map(move |tile| tile * self.rows(pass));
        let seeing = |first: u32| if self.variant.is_causal { n_queries.saturating_sub(first) } else { n_queries };
        let seen = |first: u32| {
            let last = if self.variant.is_causal { first.saturating_add(self.rows(self.queries)) } else { n_keys };
            last.min(self.longest_row(size))
        };
        let keys = tiles(n_keys, self.keys).map(seeing).collect();
        let queries = tiles(n_queries, self.queries).map(seen).rev().collect();
        let all = items(self.keys, splits[0], keys).chain(items(self.queries, splits[1], queries));
        makespan(all, places)
    }

    /// Two inputs that are held, two that are streamed, and `statistics` floats a streamed row.
    fn shared_bytes(&self, pass: Pass, statistics: u32) -> u32 {
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
