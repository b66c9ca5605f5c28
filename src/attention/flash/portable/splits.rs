//! Split tiles: where tiles are too few to fill the GPU, several CTAs share the inner loop of one tile.

use std::iter;

use super::tile_config::{BackwardConfig, ForwardConfig, GradientTiles};
use crate::attention::flash::schedule;
use crate::attention::flash::variant::Element;

/// How the keys of a tile of queries, or the queries of a tile of keys, are split among CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Splits of the longest tile.
    pub count: u32,
    /// Blocks of keys or queries of each split.
    pub blocks: u32,
}

impl Split {
    /// The least blocks of a split of the backward pass. With fewer, writing and reading its sums in float32 takes too much
    /// of the time.
    const LEAST_BLOCKS: u32 = 2;
    /// Tiles for each resident CTA, above which only tiles that are longer than a CTA's share are split.
    const MANY: u32 = 32;

    /// The least keys of a split of the forward pass; float32 takes longer for each.
    fn least_keys(element: Element) -> u32 {
        if element == Element::Float { 64 } else { 128 }
    }
}

impl ForwardConfig {
    /// How the keys of a tile are split; `heads` counts those of all batches.
    pub fn split(&self, n_queries: u32, n_keys: u32, heads: u32, multiprocessors: u32) -> Split {
        let tiles = n_queries.div_ceil(self.rows());
        let seen = if self.variant.is_causal { n_keys.min(tiles.saturating_mul(self.rows())) } else { n_keys };
        let longest = seen.div_ceil(self.keys);
        let (items, resident_ctas) = (u64::from(tiles) * u64::from(heads), u64::from(multiprocessors * self.blocks));
        if 2 * items > resident_ctas {
            return Split { count: 1, blocks: longest };
        }
        // Under the causal mask about half of all blocks are seen.
        let all = items * u64::from(longest) / if self.variant.is_causal && tiles > 1 { 2 } else { 1 };
        let least = Split::least_keys(self.variant.element) / self.keys;
        let blocks = u32::try_from(all.div_ceil(resident_ctas)).unwrap_or(u32::MAX).max(least).min(longest);
        Split { count: longest.div_ceil(blocks), blocks }
    }
}

impl BackwardConfig {
    /// How the tiles of keys and those of queries are split; `heads` counts those of all batches. Tiles stay whole, or
    /// have splits of a half, a third, a quarter or a sixth of a CTA's share of all products. Of these ways it is the
    /// one whose last CTA ends first.
    pub fn splits(&self, n_queries: u32, n_keys: u32, heads: u32, multiprocessors: u32) -> [Split; 2] {
        let size = Size { n_queries, n_keys, heads };
        let whole = self.splits_of(size, u128::MAX);
        let query_tiles = if self.is_fused { 0 } else { n_queries.div_ceil(self.rows(self.queries)) };
        let tiles = n_keys.div_ceil(self.rows(self.keys)) + query_tiles;
        let resident_ctas = multiprocessors * self.blocks;
        let share = self.products(size) / u128::from(resident_ctas);
        // With many tiles, the last ones take little of the time, unless one kind has few and long tiles.
        let is_many = u64::from(tiles) * u64::from(heads) > u64::from(Split::MANY * resident_ctas);
        if is_many && self.splits_of(size, share) == whole {
            return whole;
        }
        let of = |fraction| self.splits_of(size, share / fraction);
        let mut candidates: Vec<_> = iter::once(whole).chain([2, 3, 4, 6].map(of)).collect();
        candidates.dedup();
        // Of equals the first, which has fewer splits.
        candidates.into_iter().min_by_key(|splits| self.makespan(splits, size, resident_ctas)).unwrap_or(whole)
    }

    /// Of all tiles of both passes, in products of a row and a column.
    fn products(&self, size: Size) -> u128 {
        let (rows, columns) = (u128::from(size.n_queries), u128::from(size.n_keys));
        let square = rows.min(columns);
        let hidden =
            if self.variant.is_causal { square * square.saturating_sub(1) / 2 + (columns - square) * rows } else { 0 };
        u128::from(self.keys.products + self.queries.products) * u128::from(size.heads) * (rows * columns - hidden)
    }

    /// Splits of at most `most` products; a tile that has no more stays whole.
    fn splits_of(&self, size: Size, most: u128) -> [Split; 2] {
        let passes = [(self.keys, size.n_queries, self.group_size), (self.queries, self.longest_row(size), 1)];
        passes.map(|(pass, longest, heads)| {
            let column = u128::from(pass.products * self.rows(pass));
            let blocks = heads * longest.div_ceil(pass.stream);
            if column * u128::from(longest) * u128::from(heads) <= most {
                return Split { count: 1, blocks };
            }
            let columns = u32::try_from(most / column).unwrap_or(u32::MAX);
            let in_split = columns.div_ceil(pass.stream).max(Split::LEAST_BLOCKS).min(blocks);
            Split { count: blocks.div_ceil(in_split), blocks: in_split }
        })
    }

    /// The most keys that a query sees.
    fn longest_row(&self, size: Size) -> u32 {
        if self.variant.is_causal { size.n_keys.min(size.n_queries) } else { size.n_keys }
    }

    /// When the last CTA ends, in products of a row and a column. Tiles of keys come first, then tiles of queries, of each
    /// kind the longest first.
    fn makespan(&self, splits: &[Split; 2], size: Size, resident_ctas: u32) -> u64 {
        let Size { n_queries, n_keys, heads } = size;
        // Of a group, a tile of keys meets the blocks of every head of queries.
        let items = |pass: GradientTiles, split: Split, columns: Vec<u32>, group_size: u32| {
            let rows = u64::from(self.rows(pass));
            let unit = u64::from(pass.products * pass.stream) * rows;
            // The start and the end of a split take as long as three products of a block.
            let beside = 3 * u64::from(pass.stream) * rows;
            columns.into_iter().flat_map(move |columns| {
                let blocks = group_size * columns.div_ceil(pass.stream);
                let length = move |i: u32| blocks.saturating_sub(i * split.blocks).min(split.blocks);
                let cost = move |blocks: u32| u64::from(blocks) * unit + if blocks > 0 { beside } else { 0 };
                iter::repeat_n(0..split.count, (heads / group_size) as usize).flatten().map(move |i| cost(length(i)))
            })
        };
        let tiles =
            |n: u32, pass: GradientTiles| (0..n.div_ceil(self.rows(pass))).map(move |tile| tile * self.rows(pass));
        let seeing = |first: u32| if self.variant.is_causal { n_queries.saturating_sub(first) } else { n_queries };
        let seen = |first: u32| {
            let last = if self.variant.is_causal { first.saturating_add(self.rows(self.queries)) } else { n_keys };
            last.min(self.longest_row(size))
        };
        let keys = items(self.keys, splits[0], tiles(n_keys, self.keys).map(seeing).collect(), self.group_size);
        if self.is_fused {
            return schedule::makespan(keys, resident_ctas) + self.stagger(splits[0], size, resident_ctas);
        }
        let queries = tiles(n_queries, self.queries).map(seen).rev().collect();
        schedule::makespan(keys.chain(items(self.queries, splits[1], queries, 1)), resident_ctas)
    }

    /// How long the last of the first tiles waits for its turn to add to dq: a step for each tile of its head before it.
    fn stagger(&self, keys: Split, size: Size, resident_ctas: u32) -> u64 {
        let tiles = size.n_keys.div_ceil(self.rows(self.keys));
        let at_a_time = tiles.min(resident_ctas / (size.heads / self.group_size * keys.count).max(1));
        u64::from(at_a_time) * u64::from(self.keys.products * self.keys.stream * self.rows(self.keys))
    }
}

/// The sizes of a call.
#[derive(Debug, Clone, Copy)]
struct Size {
    n_queries: u32,
    n_keys: u32,
    /// Of all batches.
    heads: u32,
}

#[cfg(test)]
mod tests;
