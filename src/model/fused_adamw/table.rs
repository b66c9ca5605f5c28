//! The parameters of the kernels in `kernels/adamw.cu`, and the table of tensors among them.

use anyhow::{Context as _, Result, bail, ensure};

use crate::cuda::{Address, kernel_params};

/// Tensors of one launch; 52 bytes each must fit the 32,764 bytes that a kernel's parameters may have.
pub const TENSORS: usize = 600;

/// 8-byte words of [`Columns`].
pub const WORDS: usize = size_of::<Columns>() / 8;

kernel_params! {
    struct Columns as "Table" {
        p, g, m, v, progress: [Address<'static>; TENSORS],
        elements: [i64; TENSORS],
        first_chunk: [u32; TENSORS],
        count: u64,
    }

    struct Factors as "Factors" { decay, blend1, beta2, blend2, eps, unused: f32 }

    struct Advance as "adamw_advance" { table: Columns, lr, beta1, beta2: f64 }

    struct Update as "adamw_update" { table: Columns, factors: Factors }
}

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
#[derive(Debug, Clone)]
pub struct Table {
    /// What the kernels take by value.
    pub columns: Box<Columns>,
    pub tensors: u32,
    /// Blocks, one a chunk.
    pub chunks: u32,
}

/// Cuts `entries` into launches, and each launch into chunks of `chunk` elements, none of which spans two tensors.
pub fn tables(entries: &[Entry], chunk: u32) -> Result<Vec<Table>> {
    entries.chunks(TENSORS).map(|entries| table(entries, chunk)).collect()
}

fn table(entries: &[Entry], chunk: u32) -> Result<Table> {
    let (mut elements, mut first_chunk) = ([0; TENSORS], [0; TENSORS]);
    let mut chunks: u64 = 0;
    for (i, entry) in entries.iter().enumerate() {
        elements[i] = i64::try_from(entry.elements)?;
        first_chunk[i] = u32::try_from(chunks).context("counting chunks")?;
        chunks += entry.elements.div_ceil(u64::from(chunk));
        // The most blocks of a grid.
        ensure!(
            chunks <= i32::MAX as u64,
            "{} tensors have more than 2^31 chunks of {chunk} elements: step with fewer of them at a time",
            entries.len()
        );
    }
    let address = |of: fn(&Entry) -> u64| {
        std::array::from_fn(|i| entries.get(i).map_or(Address::NULL, |entry| Address::from_raw(of(entry))))
    };
    let columns = Box::new(Columns {
        p: address(|entry| entry.p),
        g: address(|entry| entry.g),
        m: address(|entry| entry.m),
        v: address(|entry| entry.v),
        progress: address(|entry| entry.progress),
        elements,
        first_chunk,
        count: entries.len() as u64,
    });
    Ok(Table { columns, tensors: entries.len() as u32, chunks: chunks as u32 })
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
    use crate::cuda::layout::{Expected, Layout, compare};

    /// Entry `i` with this number of elements, at addresses of its own.
    fn entry(i: u64, elements: u64) -> Entry {
        let base = 1 << 40 | i << 20;
        Entry { p: base, g: base + 1, m: base + 2, v: base + 3, progress: base + 4096, elements }
    }

    /// The kernel's `tensor_of`.
    fn tensor_of(table: &Columns, chunk: u32) -> usize {
        let (mut low, mut high) = (0, table.count as usize);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if table.first_chunk[middle] <= chunk { low = middle } else { high = middle }
        }
        low
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// Every element of every tensor is in exactly one chunk of exactly one launch.
        #[test]
        fn chunks_cover_every_element_once(lengths in prop::collection::vec(0u64..20_000, 1..1500)) {
            let entries: Vec<Entry> = (0..).zip(&lengths).map(|(i, &n)| entry(i, n)).collect();
            let mut covered = vec![0; entries.len()];
            for (launch, table) in tables(&entries, 4096).unwrap().iter().enumerate() {
                let columns = &table.columns;
                for chunk in 0..table.chunks {
                    let tensor = tensor_of(columns, chunk);
                    let start = u64::from(chunk - columns.first_chunk[tensor]) * 4096;
                    let elements = columns.elements[tensor] as u64;
                    prop_assert!(start < elements, "chunk {} starts at {} of {}", chunk, start, elements);
                    let entry = &entries[launch * TENSORS + tensor];
                    prop_assert_eq!(entry.elements, elements);
                    let Columns { p, g, m, v, progress, .. } = **columns;
                    let addresses = [p, g, m, v, progress].map(|column| column[tensor]);
                    let expected = [entry.p, entry.g, entry.m, entry.v, entry.progress].map(Address::from_raw);
                    prop_assert_eq!(addresses, expected);
                    covered[launch * TENSORS + tensor] += (elements - start).min(4096);
                }
            }
            prop_assert_eq!(covered, lengths);
        }
    }

    #[test]
    fn the_parameters_lie_as_the_kernels_declare_them() {
        let expected = Expected {
            structs: vec![Layout::of::<Columns>(), Layout::of::<Factors>()],
            kernels: vec![Layout::of::<Advance>(), Layout::of::<Update>()],
            conditions: Vec::new(),
        };
        compare(&super::super::program(super::super::SHAPE), &expected).unwrap();
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
        assert_eq!((large[0].chunks, large[0].columns.first_chunk[1]), ((1 << 21) + 2, (1 << 21) + 1));
        let error = tables(&[entry(0, 1 << 43)], 4096).unwrap_err().to_string();
        assert!(error.contains("2^31 chunks"), "{error}");
    }

    #[test]
    fn overlapping_memory_is_refused_with_both_names() {
        let names = ["a", "b", "c"];
        let message = |entries: &[Entry]| require_apart(entries, |i| names[i]).map_err(|error| error.to_string());
        let apart = [entry(0, 8), entry(1, 8), entry(2, 8)];
        message(&apart).unwrap();
        let overlapping = Entry { p: apart[0].p + 28, ..apart[2] };
        assert_eq!(
            message(&[apart[0], apart[1], overlapping]).unwrap_err(),
            "a and c share memory: give a shared parameter once"
        );
        let touching = Entry { p: apart[0].p + 32, ..apart[2] };
        message(&[apart[0], apart[1], touching]).unwrap();
        let same_name = Entry { progress: apart[1].progress, ..apart[2] };
        assert!(message(&[apart[0], apart[1], same_name]).unwrap_err().starts_with("b and c"));
        message(&[entry(0, 0), Entry { progress: 7, ..entry(0, 0) }]).unwrap();
    }
}
