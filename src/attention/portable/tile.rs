//! How the portable kernels are cut for each variant: pure, so that every machine can test it.

use tch::Kind;

use crate::attention::host::DIMENSIONS;
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
        let least = Split::LEAST_KEYS / self.keys;
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
    /// Below this a part's own o, written and read again in float32, is no longer little beside what it is made of.
    const LEAST_KEYS: u32 = 256;
    /// The same of the backward pass, whose blocks take longer.
    const LEAST_BLOCKS: u32 = 2;
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

    /// How the columns of the tiles of keys and of queries are shared out, if `heads` (of all batches) have so many.
    pub fn splits(&self, n_queries: u32, n_keys: u32, heads: u32, multiprocessors: u32) -> [Split; 2] {
        let is_causal = self.variant.is_causal;
        let (rows, columns) = (u128::from(n_queries), u128::from(n_keys));
        // Scores of a head, and what a place has of the products of all: both passes are in one launch.
        let square = rows.min(columns);
        let hidden = if is_causal { square * square.saturating_sub(1) / 2 + (columns - square) * rows } else { 0 };
        let products = u128::from(self.keys.products + self.queries.products);
        let places = u128::from(multiprocessors * self.blocks);
        let share = products * u128::from(heads) * (rows * columns - hidden) / places;
        let seen = if is_causal { n_keys.min(n_queries) } else { n_keys };
        [(self.keys, n_queries), (self.queries, seen)].map(|(pass, longest)| {
            let column = u128::from(pass.products * self.rows(pass));
            let blocks = longest.div_ceil(pass.stream);
            if column * u128::from(longest) <= share {
                return Split { count: 1, blocks };
            }
            // Half of a place's share, so that what is left over at the end is little.
            let part = u32::try_from(share / 2 / column).unwrap_or(u32::MAX);
            let in_part = part.div_ceil(pass.stream).max(Split::LEAST_BLOCKS).min(blocks);
            Split { count: blocks.div_ceil(in_part), blocks: in_part }
        })
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
mod tests {
    use super::*;

    #[test]
    fn every_variant_fits_a_multiprocessor_of_every_gpu_that_it_is_for() {
        assert_eq!(Variant::all().count(), 24);
        for variant in Variant::all() {
            let (forward, backward) = (Forward::of(variant), Backward::of(variant));
            for bytes in [forward.shared_bytes(), backward.most_shared_bytes()] {
                assert!(bytes <= SHARED_LIMIT, "{variant:?} takes {bytes} bytes");
            }
            for pass in [backward.keys, backward.queries] {
                assert_eq!(Backward::PADDING % backward.rows(pass), 0, "{variant:?}");
                assert_eq!(Backward::PADDING % pass.stream, 0, "{variant:?}");
            }
        }
    }

    #[test]
    fn shapes_are_as_the_kernels_lay_them_out() {
        let variant = |d, element| Variant { d, element, is_causal: true };
        let float = Forward::of(variant(64, Element::Float));
        // 16 KiB of Q and two buffers of 16 KiB, so that three blocks take 144 KiB.
        assert_eq!((float.rows(), float.threads(), float.shared_bytes()), (64, 128, 3 * 16_384));
        let wide = Forward::of(variant(128, Element::Half));
        assert_eq!((wide.rows(), wide.shared_bytes()), (128, 32_768 + 3 * 16_384));
        let backward = Backward::of(variant(64, Element::BFloat16));
        // K and V of 64 keys; two buffers of Q, dO and two statistics of 64 queries.
        assert_eq!(backward.keys_shared_bytes(), 2 * 8192 + 2 * (2 * 8192 + 2 * 256));
        // Q and dO of 128 queries; two buffers of K and V of 32 keys.
        assert_eq!(backward.queries_shared_bytes(), 2 * 16_384 + 2 * (2 * 4096));
    }

    #[test]
    fn few_tiles_are_split_and_many_are_not() {
        let of = |is_causal| Forward::of(Variant { d: 64, element: Element::BFloat16, is_causal });
        // 128 tiles of 128 queries have 264 places; 64 have more than twice as many.
        assert_eq!(of(false).split(16_384, 16_384, 2, 132), Split { count: 1, blocks: 256 });
        // 8 tiles of 16 blocks, 128 in all: no part below 256 keys.
        assert_eq!(of(false).split(1024, 1024, 1, 132), Split { count: 4, blocks: 4 });
        // 64 tiles of up to 128 blocks, 4096 of them seen, for 264 places.
        assert_eq!(of(true).split(8192, 8192, 1, 132), Split { count: 8, blocks: 16 });
        // One query that sees one key, however many there are.
        assert_eq!(of(true).split(1, 100_000, 1, 132), Split { count: 1, blocks: 2 });
        assert_eq!(of(false).split(1, 1, 1, 132), Split { count: 1, blocks: 1 });
    }

    #[test]
    fn both_passes_are_split_by_what_a_place_has_of_their_products() {
        let of = |d, is_causal| Backward::of(Variant { d, element: Element::Float, is_causal });
        let one = |blocks| Split { count: 1, blocks };
        // 4 and 3 products of 4096 rows and columns in 264 places: half of a place's share is 870 columns of a tile of
        // keys, 1159 of one of queries.
        let whole = [Split { count: 5, blocks: 55 }, Split { count: 4, blocks: 73 }];
        assert_eq!(of(128, false).splits(4096, 4096, 1, 132), whole);
        let [keys, queries] = of(128, true).splits(4096, 4096, 1, 132);
        assert_eq!((keys, queries), (Split { count: 10, blocks: 28 }, Split { count: 7, blocks: 37 }));
        // No part below two blocks, of 16 and of 32 columns.
        let parts = |count| Split { count, blocks: 2 };
        assert_eq!(of(128, true).splits(128, 128, 1, 132), [parts(4); 2]);
        assert_eq!(of(64, true).splits(128, 128, 1, 132), [parts(2); 2]);
        assert_eq!(of(64, true).splits(64, 64, 1, 132), [one(2); 2]);
        // What many heads or many rows have is left whole.
        assert_eq!(of(64, true).splits(4096, 4096, 16, 132), [one(128); 2]);
        assert_eq!(of(128, true).splits(65_536, 65_536, 1, 132), [one(4096); 2]);
        // Keys that no query sees are nobody's work.
        assert_eq!(of(64, true).splits(1, 100_000, 1, 132), [one(1); 2]);
        assert_eq!(of(64, false).splits(1, 1, 1, 132), [one(1); 2]);
    }

    #[test]
    fn parts_of_the_backward_pass_cover_all_columns_and_none_of_the_longest_is_empty() {
        for variant in Variant::all() {
            let shape = Backward::of(variant);
            for (n_queries, n_keys) in [(1, 1), (1, 70_000), (70_000, 1), (300, 640), (4096, 4096), (1 << 30, 1 << 30)]
            {
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
        for variant in Variant::all() {
            for (n_queries, n_keys) in [(1, 1), (1, 70_000), (300, 640), (4096, 4096), (65_536, 65_536)] {
                let split = Forward::of(variant).split(n_queries, n_keys, 1, 132);
                let longest = Forward::of(variant).split(n_queries, n_keys, 10_000, 132).blocks;
                assert!(split.count * split.blocks >= longest && (split.count - 1) * split.blocks < longest);
            }
        }
    }
}
