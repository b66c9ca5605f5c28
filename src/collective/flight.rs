//! What each rank is doing, noted in a file of the supervisor's, where it survives the rank's death.
//!
//! A note is one `pwrite` of a line, 2 us on a busy two-core machine: one a call, and two more where the host waits. A
//! reader may meet a write half done: a line ends with a check of its text, and one that fails it is not believed.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result};

use super::Operation;

/// The variable that names a rank's file.
pub(super) const FLIGHT: &str = "CS336_FLIGHT";

/// Bytes of a line's text: the longest call ("1234567 reduce_scatter of 12345678901 BFloat16, average") fits.
const TEXT: usize = 80;
/// And of a line: its text, the check in hexadecimal digits, the line's end.
const LINE: usize = TEXT + 8 + 1;

/// Calls that the file remembers. A rank that launches ahead of the others (the 435 gradients of the XL model, one by
/// one) must still hold the call that the slowest of them made last.
const CALLS: u64 = 1024;

/// How often a file with a broken line is read before that line is given up.
const READINGS: usize = 20;

/// A rank's own side: numbers its collectives and notes them.
#[derive(Default)]
pub struct Flight {
    calls: AtomicU64,
    /// `None` without a supervisor, as under torchrun.
    file: Option<File>,
}

impl Flight {
    /// Opens the file that the environment names, if it names one.
    pub fn open() -> Result<Self> {
        let Some(path) = std::env::var_os(FLIGHT) else { return Ok(Self::default()) };
        Self::at(Path::new(&path))
    }

    fn at(path: &Path) -> Result<Self> {
        let options = OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = options.with_context(|| format!("opening this rank's notes {}", path.display()))?;
        Ok(Self { calls: AtomicU64::new(0), file: Some(file) })
    }

    /// Numbers a call, from 1, and notes it; `detail` is all that must agree between ranks beside the operation.
    pub fn call(&self, operation: Operation, detail: &str) -> u64 {
        let sequence = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        self.write(1 + sequence % CALLS, &format!("{sequence} {operation} {detail}"));
        sequence
    }

    /// Runs `wait`, noting that the rank can do nothing before collective `sequence` is done.
    pub fn waiting<T>(&self, sequence: u64, wait: impl FnOnce() -> Result<T>) -> Result<T> {
        self.waits(sequence);
        let value = wait()?;
        // Left as it is after an error: that collective is the last thing to be known of this rank.
        self.goes_on();
        Ok(value)
    }

    /// Notes that the rank can do nothing before collective `sequence` is done.
    pub fn waits(&self, sequence: u64) {
        self.write(0, &format!("waits {sequence}"));
    }

    pub fn goes_on(&self) {
        self.write(0, "runs");
    }

    /// A note that cannot be written is no reason to fail: it only tells less.
    fn write(&self, line: u64, text: &str) {
        let Some(file) = &self.file else { return };
        let mut bytes = [b' '; LINE];
        let length = text.len().min(TEXT);
        bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
        let check = format!("{:08x}\n", check(&bytes[..TEXT]));
        bytes[TEXT..].copy_from_slice(check.as_bytes());
        let _ = file.write_all_at(&bytes, line * LINE as u64);
    }
}

/// FNV-1a, 32 bits.
fn check(text: &[u8]) -> u32 {
    text.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Whether nothing was ever written here: the calls' lines begin at the second, and a file's hole reads as zeros.
fn is_blank(line: &[u8]) -> bool {
    line.iter().all(|&byte| byte == 0)
}

/// The text of a line; `None` of one that is being written.
fn text_of(line: &[u8]) -> Option<&str> {
    let (text, end) = line.split_at_checked(TEXT)?;
    let end = std::str::from_utf8(end).ok()?.trim_end();
    (end.len() == 8 && u32::from_str_radix(end, 16).ok()? == check(text)).then_some(())?;
    Some(std::str::from_utf8(text).ok()?.trim_end())
}

/// What a rank's file tells.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Notes {
    /// The collective that the rank cannot go on without.
    pub waits_in: Option<u64>,
    /// The latest calls by their numbers, each as operation and details.
    pub calls: BTreeMap<u64, (String, String)>,
}

impl Notes {
    /// Empty where there is no file yet: the rank has not met the others.
    ///
    /// A line that is just being written is read again; one that stays broken (the rank died in the write) is left out.
    pub fn read(path: &Path) -> Self {
        let mut bytes = std::fs::read(path).unwrap_or_default();
        let is_whole = |bytes: &[u8]| bytes.chunks(LINE).all(|line| is_blank(line) || text_of(line).is_some());
        for _ in 0..READINGS {
            if is_whole(&bytes) {
                break;
            }
            bytes = std::fs::read(path).unwrap_or_default();
        }
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Self {
        let mut lines = bytes.chunks(LINE).map(text_of);
        let state = lines.next().flatten().unwrap_or_default();
        let calls = lines.flatten().filter_map(|line| {
            let (sequence, call) = line.split_once(' ')?;
            let (operation, detail) = call.split_once(' ').unwrap_or((call, ""));
            Some((sequence.parse().ok()?, (operation.to_string(), detail.to_string())))
        });
        let waits_in = state.strip_prefix("waits ").and_then(|sequence| sequence.parse().ok());
        Self { waits_in, calls: calls.collect() }
    }

    /// The number of the last call; 0 before the first.
    pub fn last(&self) -> u64 {
        self.calls.last_key_value().map_or(0, |(sequence, _)| *sequence)
    }

    /// A call as errors name it: "all_reduce 3 of 4 Float, average".
    pub fn name(&self, sequence: u64) -> String {
        match self.calls.get(&sequence) {
            Some((operation, detail)) => format!("{operation} {sequence} {detail}").trim_end().to_string(),
            None => format!("collective {sequence}"),
        }
    }

    /// What the rank was doing, as the rest of a sentence about it.
    pub fn state(&self) -> String {
        match (self.waits_in, self.last()) {
            (Some(sequence), _) => format!("it waited in {}", self.name(sequence)),
            (None, 0) => "it had called no collective".to_string(),
            (None, last) => format!("it was in no collective; its last was {}", self.name(last)),
        }
    }
}

/// The first collective that the ranks do not call alike, with what each rank calls.
pub fn disagreement(ranks: &[Notes]) -> Option<String> {
    let first = ranks.iter().flat_map(|notes| notes.calls.keys()).copied().collect::<std::collections::BTreeSet<_>>();
    let differs = |sequence: &u64| {
        let mut calls = ranks.iter().filter_map(|notes| notes.calls.get(sequence));
        let one = calls.next();
        calls.any(|call| Some(call) != one)
    };
    let sequence = first.into_iter().find(differs)?;
    let of = |(rank, notes): (usize, &Notes)| {
        let (operation, detail) = notes.calls.get(&sequence)?;
        Some(format!("rank {rank} calls {operation} {detail}").trim_end().to_string())
    };
    let calls: Vec<_> = ranks.iter().enumerate().filter_map(of).collect();
    Some(format!("the ranks disagree on collective {sequence}: {}", calls.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(calls: &[(Operation, &str)]) -> (tempfile::NamedTempFile, Flight) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let flight = Flight::at(file.path()).unwrap();
        calls.iter().for_each(|(operation, detail)| drop(flight.call(*operation, detail).to_string()));
        (file, flight)
    }

    #[test]
    fn notes_tell_the_calls_and_what_is_waited_for() {
        assert_eq!(Notes::read(Path::new("/nowhere")).state(), "it had called no collective");
        let (file, flight) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum")]);
        let notes = Notes::read(file.path());
        assert_eq!(notes.state(), "it was in no collective; its last was all_reduce 2 of 4 Float, sum");
        assert_eq!(flight.waiting(2, || Ok(Notes::read(file.path()).waits_in)).unwrap(), Some(2));
        assert_eq!(Notes::read(file.path()).waits_in, None);
        flight.waiting(1, || -> Result<()> { anyhow::bail!("lost") }).unwrap_err();
        assert_eq!(Notes::read(file.path()).state(), "it waited in barrier 1");
    }

    #[test]
    fn a_note_half_written_is_not_believed() {
        let (file, flight) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 144 Float, average")]);
        flight.waits(1);
        let whole = std::fs::read(file.path()).unwrap();
        let notes = Notes::parse(&whole);
        assert_eq!((notes.last(), notes.waits_in), (2, Some(1)));
        // The line of call 2 is the fourth; so much of it is the new text, and the rest as it was before.
        for length in 1..LINE - 1 {
            let mut torn = whole.clone();
            torn[3 * LINE + length..4 * LINE].fill(0);
            let torn = Notes::parse(&torn);
            assert_eq!((torn.last(), torn.waits_in), (1, Some(1)), "after {length} bytes");
            assert_eq!(disagreement(&[notes.clone(), torn]), None);
        }
        let mut torn = whole.clone();
        torn[6] = b'2';
        assert_eq!(Notes::parse(&torn).waits_in, None);
        std::fs::write(file.path(), &torn).unwrap();
        assert_eq!(Notes::read(file.path()).last(), 2);
    }

    #[test]
    fn a_reader_beside_a_writer_never_sees_a_call_that_was_not_made() {
        let (file, flight) = rank(&[]);
        let writer = std::thread::spawn(move || {
            for _ in 0..20_000 {
                flight.call(Operation::AllReduce, "of 144 Float, average");
            }
        });
        while !writer.is_finished() {
            let notes = Notes::read(file.path());
            let made = ("all_reduce".to_string(), "of 144 Float, average".to_string());
            assert!(notes.calls.values().all(|call| *call == made), "{:?}", notes.calls);
        }
        writer.join().unwrap();
        assert_eq!(Notes::read(file.path()).last(), 20_000);
    }

    #[test]
    fn only_the_latest_calls_are_kept() {
        let (file, flight) = rank(&[]);
        (0..CALLS + 3).for_each(|_| drop(flight.call(Operation::Broadcast, "of 1 Half from rank 0").to_string()));
        let notes = Notes::read(file.path());
        assert_eq!((notes.calls.len() as u64, notes.last()), (CALLS, CALLS + 3));
        assert_eq!(*notes.calls.first_key_value().unwrap().0, 4);
    }

    #[test]
    fn the_first_disagreement_is_told_with_both_sides_of_it() {
        let (barrier, reduce) = ((Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum"));
        let notes = |calls: &[(Operation, &str)]| Notes::read(rank(calls).0.path());
        assert_eq!(disagreement(&[notes(&[barrier, reduce]), notes(&[barrier])]), None);
        let found = disagreement(&[notes(&[barrier, reduce, barrier]), notes(&[barrier, barrier])]).unwrap();
        assert_eq!(
            found,
            "the ranks disagree on collective 2: rank 0 calls all_reduce of 4 Float, sum, rank 1 calls barrier"
        );
        let longer = notes(&[barrier, (Operation::AllReduce, "of 5 Float, sum")]);
        assert!(disagreement(&[notes(&[barrier, reduce]), longer]).unwrap().contains("of 5 Float"));
    }
}
