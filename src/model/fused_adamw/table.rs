//! The kernel's table of tensors, as words; pure, so that every machine can test it.

use anyhow::{Context as _, Result, bail, ensure};

use crate::cuda::word_of;

/// Tensors of one launch; 52 bytes each must fit the 32,764 bytes that a kernel's parameters may have.
pub const TENSORS: usize = 600;

/// Of `struct Table` of `kernels/adamw.cu`: six columns of 8 bytes, one of 4, and the count.
pub const WORDS: usize = 6 * TENSORS + TENSORS / 2 + 1;

/// One tensor's addresses and its number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub p: u64,
    pub g: u64,
    pub m: u64,
    pub v: u64,
    pub progress: u64,
    pub elements: u64,
}

/// One launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The [`WORDS`] that the kernel takes by value.
    pub words: Vec<u64>,
    pub tensors: u32,
    /// Blocks, one a chunk.
    pub chunks: u32,
}

/// Cuts `entries` into launches, and each launch into chunks of `chunk` elements, none of which spans two tensors.
pub fn tables(entries: &[Entry], chunk: u32) -> Result<Vec<Table>> {
    entries.chunks(TENSORS).map(|entries| table(entries, chunk)).collect()
}

fn table(entries: &[Entry], chunk: u32) -> Result<Table> {
    let mut first_chunks = Vec::with_capacity(TENSORS);
    let mut chunks: u64 = 0;
    for entry in entries {
        first_chunks.push(u32::try_from(chunks).context("counting chunks")?);
        chunks += entry.elements.div_ceil(u64::from(chunk));
        // The most blocks of a grid.
        ensure!(
            chunks <= i32::MAX as u64,
            "{} tensors have more than 2^31 chunks of {chunk} elements: step with fewer of them at a time",
            entries.len()
        );
    }
    first_chunks.resize(TENSORS, 0);
    let columns: [fn(&Entry) -> u64; 6] = [|e| e.p, |e| e.g, |e| e.m, |e| e.v, |e| e.progress, |e| e.elements];
    let mut words = Vec::with_capacity(WORDS);
    for column in columns {
        words.extend(entries.iter().map(column));
        words.resize(words.len() + TENSORS - entries.len(), 0);
    }
    words.extend(first_chunks.chunks(2).map(|two| word_of(two[0], two[1])));
    words.push(entries.len() as u64);
    Ok(Table { words, tensors: entries.len() as u32, chunks: chunks as u32 })
}

/// Refuses entries that share memory: the kernel updates all of them at the same time.
pub fn require_apart<'a>(entries: &[Entry], name: impl Fn(usize) -> &'a str) -> Result<()> {
    let parameters = entries.iter().map(|entry| (entry.p, 4 * entry.elements)).collect();
    let counters = entries.iter().map(|entry| (entry.progress, 16)).collect();
    match overlap(parameters).or_else(|| overlap(counters)) {
        Some((i, j)) => bail!("{} and {} share memory: give a shared parameter once", name(i), name(j)),
        None => Ok(()),
    }
}

/// Two of these ranges, each an address and its bytes, that overlap.
fn overlap(ranges: Vec<(u64, u64)>) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&i| ranges[i].1 > 0).collect();
    order.sort_by_key(|&i| ranges[i]);
    let two = order.windows(2).find(|two| ranges[two[0]].0 + ranges[two[0]].1 > ranges[two[1]].0)?;
    Some((two[0], two[1]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Entry `i` of so many elements; its addresses tell it from the others.
    fn entry(i: u64, elements: u64) -> Entry {
        let base = 1 << 40 | i << 20;
        Entry { p: base, g: base + 1, m: base + 2, v: base + 3, progress: base + 4096, elements }
    }

    /// The kernel's `tensor_of`, in the words of the table.
    fn tensor_of(words: &[u64], chunk: u32) -> usize {
        let (mut low, mut high) = (0, words[6 * TENSORS + TENSORS / 2] as usize);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if first_chunk(words, middle) <= chunk { low = middle } else { high = middle }
        }
        low
    }

    fn first_chunk(words: &[u64], i: usize) -> u32 {
        (words[6 * TENSORS + i / 2] >> (32 * (i % 2))) as u32
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// Every element of every tensor is in exactly one chunk of exactly one launch.
        #[test]
        fn chunks_cover_every_element_once(lengths in prop::collection::vec(0u64..20_000, 1..1500)) {
            let entries: Vec<Entry> = (0..).zip(&lengths).map(|(i, &n)| entry(i, n)).collect();
            let mut covered = vec![0; entries.len()];
            for (launch, table) in tables(&entries, 4096).unwrap().iter().enumerate() {
                prop_assert_eq!(table.words.len(), WORDS);
                for chunk in 0..table.chunks {
                    let tensor = tensor_of(&table.words, chunk);
                    let start = u64::from(chunk - first_chunk(&table.words, tensor)) * 4096;
                    let elements = table.words[5 * TENSORS + tensor];
                    prop_assert!(start < elements, "chunk {} starts at {} of {}", chunk, start, elements);
                    let entry = &entries[launch * TENSORS + tensor];
                    prop_assert_eq!(entry.elements, elements);
                    let columns: Vec<u64> = (0..5).map(|c| table.words[c * TENSORS + tensor]).collect();
                    prop_assert_eq!(columns, vec![entry.p, entry.g, entry.m, entry.v, entry.progress]);
                    covered[launch * TENSORS + tensor] += (elements - start).min(4096);
                }
            }
            prop_assert_eq!(covered, lengths);
        }
    }

    #[test]
    fn launches_are_minimal_and_no_tensors_need_none() {
        let entries: Vec<Entry> = (0..1201).map(|i| entry(i, 5)).collect();
        let sizes = |n: usize| -> Vec<u32> { tables(&entries[..n], 4096).unwrap().iter().map(|t| t.tensors).collect() };
        assert_eq!((sizes(0), sizes(600), sizes(1201)), (vec![], vec![600], vec![600, 600, 1]));
        assert_eq!(tables(&[entry(0, 0)], 4096).unwrap()[0].chunks, 0);
    }

    #[test]
    fn a_tensor_may_exceed_2_to_the_31_elements_and_a_grid_may_not() {
        let large = tables(&[entry(0, (1 << 33) + 1), entry(1, 1)], 4096).unwrap();
        assert_eq!((large[0].chunks, first_chunk(&large[0].words, 1)), ((1 << 21) + 2, (1 << 21) + 1));
        let error = tables(&[entry(0, 1 << 43)], 4096).unwrap_err().to_string();
        assert!(error.contains("2^31 chunks"), "{error}");
    }

    #[test]
    fn overlapping_memory_is_refused_with_both_names() {
        let names = ["a", "b", "c"];
        let words = |entries: &[Entry]| require_apart(entries, |i| names[i]).map_err(|error| error.to_string());
        let apart = [entry(0, 8), entry(1, 8), entry(2, 8)];
        words(&apart).unwrap();
        let overlapping = Entry { p: apart[0].p + 28, ..apart[2] };
        assert_eq!(
            words(&[apart[0], apart[1], overlapping]).unwrap_err(),
            "a and c share memory: give a shared parameter once"
        );
        let touching = Entry { p: apart[0].p + 32, ..apart[2] };
        words(&[apart[0], apart[1], touching]).unwrap();
        let same_name = Entry { progress: apart[1].progress, ..apart[2] };
        assert!(words(&[apart[0], apart[1], same_name]).unwrap_err().starts_with("b and c"));
        words(&[entry(0, 0), Entry { progress: 7, ..entry(0, 0) }]).unwrap();
    }
}
