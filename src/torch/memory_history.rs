//! An allocator's history: when each block of memory was alive, what allocated it, and the file that viewers read.

mod recorder;
pub mod viewer;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};

pub use recorder::ffi::{Action, Event, Segment, SegmentBlock, Source};
pub use recorder::record;

impl Source {
    /// The outermost range, by which a program names its phases.
    pub fn phase(&self) -> &str {
        self.range.split('/').next().unwrap_or_default()
    }

    /// The outermost operator, which is the one that the program called, or the node that autograd ran.
    pub fn call(&self) -> &str {
        const ENGINE: &str = "autograd::engine::evaluate_function: ";
        let first = self.operators.split('/').next().unwrap_or_default();
        first.strip_prefix(ENGINE).unwrap_or(first)
    }
}

/// A recording; the segments are those at its end, and none for a CPU, whose allocator has none.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    pub before_bytes: u64,
    pub events: Vec<Event>,
    pub segments: Vec<Segment>,
}

/// Memory of one tensor from its allocation to its end; both are places in [`History::events`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub bytes: u64,
    /// `None` for what is older than the recording; such a block is known only if it ends within it.
    pub born: Option<usize>,
    pub died: Option<usize>,
}

/// Allocations of one size and source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub bytes_each: u64,
    pub count: u64,
    pub source: Source,
}

impl History {
    /// The blocks in order of their first step here. Fails for a history that contradicts itself.
    pub fn blocks(&self) -> Result<Vec<Block>> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut alive: HashMap<u64, usize> = HashMap::new();
        let mut older_bytes: u64 = 0;
        for (i, event) in self.events.iter().enumerate() {
            let Event { address, bytes, .. } = *event;
            match event.action {
                Action::Alloc => {
                    let before = alive.insert(address, blocks.len());
                    ensure!(before.is_none(), "step {i} of the history allocates {address:#x}, which is in use");
                    blocks.push(Block { bytes, born: Some(i), died: None });
                }
                Action::FreeCompleted => match alive.remove(&address) {
                    Some(block) => {
                        let block = &mut blocks[block];
                        ensure!(block.bytes == bytes, "step {i} frees {bytes} bytes of a block of {}", block.bytes);
                        block.died = Some(i);
                    }
                    None => {
                        older_bytes = older_bytes.saturating_add(bytes);
                        ensure!(
                            older_bytes <= self.before_bytes,
                            "by step {i}, {older_bytes} bytes that are older than the history were freed, of {}",
                            self.before_bytes
                        );
                        blocks.push(Block { bytes, born: None, died: Some(i) });
                    }
                },
                _ => {}
            }
        }
        Ok(blocks)
    }

    /// The bytes alive after each step, in `N` classes. `before` says how [`Self::before_bytes`] fall into them.
    ///
    /// Fails where more of a class is freed than it has.
    pub fn curve<const N: usize>(
        &self,
        blocks: &[Block],
        before: [u64; N],
        class: impl Fn(&Block) -> usize,
    ) -> Result<Curve<N>> {
        let total: u64 = before.iter().sum();
        ensure!(total == self.before_bytes, "{total} bytes are classed as older than the history, not {}", {
            self.before_bytes
        });
        let mut changes: Vec<(usize, bool, &Block)> = Vec::new();
        for block in blocks {
            changes.extend(block.born.map(|step| (step, true, block)));
            changes.extend(block.died.map(|step| (step, false, block)));
        }
        changes.sort_by_key(|change| change.0);
        let mut now = before;
        let mut points = Vec::with_capacity(changes.len());
        for (step, grows, block) in changes {
            let class = &mut now[class(block)];
            let after = if grows { class.checked_add(block.bytes) } else { class.checked_sub(block.bytes) };
            *class = after.ok_or_else(|| anyhow::anyhow!("step {step} frees more of a class than it has"))?;
            points.push(Point { step, time_us: self.events[step].time_us, bytes: now });
        }
        Ok(Curve { before, points })
    }

    /// `blocks` by size and source, the largest first.
    pub fn groups<'a>(&self, blocks: impl IntoIterator<Item = &'a Block>) -> Vec<Group> {
        let mut groups: BTreeMap<(Reverse<u64>, &Source), u64> = BTreeMap::new();
        static OLDER: Source = Source { range: String::new(), operators: String::new() };
        for block in blocks {
            let source = block.born.map_or(&OLDER, |step| &self.events[step].source);
            *groups.entry((Reverse(block.bytes), source)).or_default() += 1;
        }
        let groups = groups.into_iter();
        groups.map(|((bytes, source), count)| Group { bytes_each: bytes.0, count, source: source.clone() }).collect()
    }
}

/// Bytes in use over time, in `N` classes.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve<const N: usize> {
    pub before: [u64; N],
    pub points: Vec<Point<N>>,
}

/// The bytes in use after one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point<const N: usize> {
    pub step: usize,
    pub time_us: i64,
    pub bytes: [u64; N],
}

impl<const N: usize> Point<N> {
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl<const N: usize> Curve<N> {
    /// The first point of the largest total; `None` without steps, or where nothing rises above the beginning.
    pub fn peak(&self) -> Option<&Point<N>> {
        let beginning: u64 = self.before.iter().sum();
        let peak = self.points.iter().rev().max_by_key(|point| point.total())?;
        (peak.total() > beginning).then_some(peak)
    }

    /// At most `most` of the points (two at least): of each of equal stretches of time the lowest and the highest, so
    /// that every peak that a drawing can show stays exact.
    pub fn thinned(&self, most: usize) -> Vec<Point<N>> {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else { return Vec::new() };
        if self.points.len() <= most {
            return self.points.clone();
        }
        let stretches = (most / 2).max(1);
        let width = (last.time_us - first.time_us).max(1) as f64 / stretches as f64;
        let stretch = |point: &Point<N>| (((point.time_us - first.time_us) as f64 / width) as usize).min(stretches - 1);
        let mut kept = Vec::with_capacity(most);
        for points in self.points.chunk_by(|a, b| stretch(a) == stretch(b)) {
            let lowest = points.iter().enumerate().min_by_key(|(_, point)| point.total());
            let highest = points.iter().enumerate().rev().max_by_key(|(_, point)| point.total());
            if let (Some((low, _)), Some((high, _))) = (lowest, highest) {
                kept.push(points[low.min(high)]);
                kept.extend((low != high).then(|| points[low.max(high)]));
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests;
