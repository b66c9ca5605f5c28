//! What each rank is doing, noted in a file of the supervisor's, where it survives the rank's death.
//!
//! A note is one `pwrite` of a line, 2 us on a busy two-core machine: one a call, and two more where the host waits. A
//! reader may meet a write half done: a line ends with a check of its text, and one that fails it is not believed.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::Operation;

/// The variable that names a rank's file.
pub(crate) const FLIGHT_RECORD: &str = "CS336_FLIGHT";

/// Bytes of a line's text: the longest call ("1234567 reduce_scatter of 12345678901 BFloat16, average") fits.
const TEXT: usize = 80;
/// And of a line: its text, the check in hexadecimal digits, the line's end.
const LINE: usize = TEXT + 8 + 1;

/// Calls that the file remembers. A rank that launches ahead of the others (the 435 gradients of the XL model, one by
/// one) must still hold the call that the slowest of them made last.
const CALLS: u64 = 1024;

/// How often a file with a broken line is read before that line is given up, and what lies between two readings: a
/// writer that lost its processor in the middle of a line must get one to end it.
const READINGS: usize = 20;
const BETWEEN_READINGS: Duration = Duration::from_micros(100);

/// A rank's own side: numbers its collectives and notes them.
#[derive(Default)]
pub struct FlightRecorder {
    calls: AtomicU64,
    /// `None` without a supervisor, as under torchrun.
    file: Option<File>,
}

impl FlightRecorder {
    /// Opens the file that the environment names, if it names one.
    pub fn open() -> Result<Self> {
        let Some(path) = std::env::var_os(FLIGHT_RECORD) else { return Ok(Self::default()) };
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

    /// FlightRecord that the rank can do nothing before collective `sequence` is done.
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

/// FNV-1a with words of eight bytes in the place of bytes: a supervisor checks a thousand lines of every rank at a look.
fn check(text: &[u8]) -> u32 {
    let (words, rest) = text.as_chunks();
    debug_assert!(rest.is_empty(), "a line's text is a whole number of words");
    let hash = words.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &word| {
        let hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3);
        // A product's upper bits know all of the word, its lower ones only what is below them.
        hash ^ (hash >> 32)
    });
    hash as u32
}

/// A line as a reader may meet it.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    /// Nothing was ever written here: a file's hole reads as zeros.
    Blank,
    Whole(&'a str),
    /// It is being written, or its writer died before it was done.
    Broken,
}

impl<'a> Line<'a> {
    fn of(line: &'a [u8]) -> Self {
        if line.iter().all(|&byte| byte == 0) {
            return Self::Blank;
        }
        Self::text(line).map_or(Self::Broken, Self::Whole)
    }

    fn text(line: &'a [u8]) -> Option<&'a str> {
        let (text, end) = line.split_at_checked(TEXT)?;
        let digits = std::str::from_utf8(end.strip_suffix(b"\n")?).ok()?;
        (u32::from_str_radix(digits, 16).ok()? == check(text)).then_some(())?;
        Some(std::str::from_utf8(text).ok()?.trim_end())
    }
}

/// What a rank's file tells.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct FlightRecord {
    /// The collective that the rank cannot go on without.
    pub waits_in: Option<u64>,
    /// The latest calls by their numbers, each as operation and details.
    pub calls: BTreeMap<u64, (String, String)>,
}

impl FlightRecord {
    /// Empty where there is no file yet: the rank has not met the others.
    ///
    /// A line that is just being written is read again; one that stays broken (the rank died in the write) is left out.
    /// The state comes first in the file, so that the call it waits in, noted before it, is never read too early.
    pub fn read(path: &Path) -> Self {
        for _ in 1..READINGS {
            match Self::parse(&std::fs::read(path).unwrap_or_default()) {
                (notes, 0) => return notes,
                _ => std::thread::sleep(BETWEEN_READINGS),
            }
        }
        Self::parse(&std::fs::read(path).unwrap_or_default()).0
    }

    /// What the whole lines tell, and how many are broken.
    fn parse(bytes: &[u8]) -> (Self, usize) {
        let (mut notes, mut broken) = (Self::default(), 0);
        for (i, line) in bytes.chunks(LINE).enumerate() {
            match Line::of(line) {
                Line::Blank => {}
                Line::Broken => broken += 1,
                Line::Whole(state) if i == 0 => {
                    notes.waits_in = state.strip_prefix("waits ").and_then(|sequence| sequence.parse().ok());
                }
                Line::Whole(text) => notes.calls.extend(call_of(text)),
            }
        }
        (notes, broken)
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

/// A call's number, operation and details.
fn call_of(text: &str) -> Option<(u64, (String, String))> {
    let (sequence, call) = text.split_once(' ')?;
    let (operation, detail) = call.split_once(' ').unwrap_or((call, ""));
    Some((sequence.parse().ok()?, (operation.to_string(), detail.to_string())))
}

/// The first collective that the ranks do not call alike, with what each rank calls.
pub fn disagreement(ranks: &[&FlightRecord]) -> Option<String> {
    let first = ranks.iter().flat_map(|notes| notes.calls.keys()).copied().collect::<std::collections::BTreeSet<_>>();
    let differs = |sequence: &u64| {
        let mut calls = ranks.iter().filter_map(|notes| notes.calls.get(sequence));
        let one = calls.next();
        calls.any(|call| Some(call) != one)
    };
    let sequence = first.into_iter().find(differs)?;
    let of = |(rank, notes): (usize, &&FlightRecord)| {
        let (operation, detail) = notes.calls.get(&sequence)?;
        Some(format!("rank {rank} calls {operation} {detail}").trim_end().to_string())
    };
    let calls: Vec<_> = ranks.iter().enumerate().filter_map(of).collect();
    Some(format!("the ranks disagree on collective {sequence}: {}", calls.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(calls: &[(Operation, &str)]) -> (tempfile::NamedTempFile, FlightRecorder) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let flight = FlightRecorder::at(file.path()).unwrap();
        for (operation, detail) in calls {
            flight.call(*operation, detail);
        }
        (file, flight)
    }

    #[test]
    fn notes_tell_the_calls_and_what_is_waited_for() {
        assert_eq!(FlightRecord::read(Path::new("/nowhere")).state(), "it had called no collective");
        let (file, flight) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum")]);
        let notes = FlightRecord::read(file.path());
        assert_eq!(notes.state(), "it was in no collective; its last was all_reduce 2 of 4 Float, sum");
        assert_eq!(flight.waiting(2, || Ok(FlightRecord::read(file.path()).waits_in)).unwrap(), Some(2));
        assert_eq!(FlightRecord::read(file.path()).waits_in, None);
        flight.waiting(1, || -> Result<()> { anyhow::bail!("lost") }).unwrap_err();
        assert_eq!(FlightRecord::read(file.path()).state(), "it waited in barrier 1");
    }

    #[test]
    fn a_note_half_written_is_not_believed() {
        let (file, flight) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 144 Float, average")]);
        flight.waits(1);
        let whole = std::fs::read(file.path()).unwrap();
        let (notes, broken) = FlightRecord::parse(&whole);
        assert_eq!((notes.last(), notes.waits_in, broken), (2, Some(1), 0));
        // The line of call 2 is the fourth; so much of it is the new text, and the rest as it was before.
        for length in 1..LINE - 1 {
            let mut torn = whole.clone();
            torn[3 * LINE + length..4 * LINE].fill(0);
            let (torn, broken) = FlightRecord::parse(&torn);
            assert_eq!((torn.last(), torn.waits_in, broken), (1, Some(1), 1), "after {length} bytes");
            assert_eq!(disagreement(&[&notes, &torn]), None);
        }
        // A rank that dies there leaves a file that ends in the middle of the line.
        for length in 3 * LINE + 1..4 * LINE {
            let (torn, broken) = FlightRecord::parse(&whole[..length]);
            assert_eq!((torn.last(), broken), (1, 1), "{length} bytes");
        }
        let mut torn = whole.clone();
        torn[6] = b'2';
        assert_eq!(FlightRecord::parse(&torn).0.waits_in, None);
        std::fs::write(file.path(), &torn).unwrap();
        assert_eq!(FlightRecord::read(file.path()).last(), 2);
    }

    #[test]
    fn no_mixture_of_two_notes_on_one_line_passes_for_either() {
        let line = |sequence: u64, detail: &str| {
            let (file, flight) = rank(&[]);
            flight.calls.store(sequence - 1, Ordering::Relaxed);
            flight.call(Operation::AllReduce, detail);
            std::fs::read(file.path()).unwrap()[((1 + sequence % CALLS) as usize) * LINE..].to_vec()
        };
        let notes =
            [line(7, "of 144 Float, average"), line(7 + CALLS, "of 145 Float, average"), line(7, "of 8 Half, sum")];
        for (old, new) in notes.iter().flat_map(|old| notes.iter().map(move |new| (old, new))) {
            for length in 0..=LINE {
                let mixed = [&new[..length], &old[length..]].concat();
                let known = mixed == *old || mixed == *new;
                assert_eq!(Line::of(&mixed) != Line::Broken, known, "{:?}", String::from_utf8_lossy(&mixed));
            }
        }
    }

    #[test]
    fn a_note_that_is_ended_between_two_readings_is_believed() {
        let (file, _flight) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum")]);
        let whole = std::fs::read(file.path()).unwrap();
        let at = (3 * LINE) as u64;
        let writer = file.reopen().unwrap();
        writer.write_all_at(b"2 broadcast", at).unwrap();
        assert_eq!(FlightRecord::read(file.path()).last(), 1, "one that stays broken is left out");
        let (path, reader) = (file.path().to_owned(), std::sync::Barrier::new(2));
        let notes = std::thread::scope(|scope| {
            let notes = scope.spawn(|| {
                reader.wait();
                std::iter::repeat_with(|| FlightRecord::read(&path)).find(|notes| notes.last() == 2).unwrap()
            });
            reader.wait();
            writer.write_all_at(&whole[3 * LINE..], at).unwrap();
            notes.join().unwrap()
        });
        assert_eq!(notes.name(2), "all_reduce 2 of 4 Float, sum");
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
            let notes = FlightRecord::read(file.path());
            let made = ("all_reduce".to_string(), "of 144 Float, average".to_string());
            assert!(notes.calls.values().all(|call| *call == made), "{:?}", notes.calls);
        }
        writer.join().unwrap();
        assert_eq!(FlightRecord::read(file.path()).last(), 20_000);
    }

    #[test]
    fn only_the_latest_calls_are_kept() {
        let (file, flight) = rank(&[]);
        for _ in 0..CALLS + 3 {
            flight.call(Operation::Broadcast, "of 1 Half from rank 0");
        }
        let notes = FlightRecord::read(file.path());
        assert_eq!((notes.calls.len() as u64, notes.last()), (CALLS, CALLS + 3));
        assert_eq!(*notes.calls.first_key_value().unwrap().0, 4);
    }

    #[test]
    fn the_first_disagreement_is_told_with_both_sides_of_it() {
        let (barrier, reduce) = ((Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum"));
        let notes = |calls: &[(Operation, &str)]| FlightRecord::read(rank(calls).0.path());
        assert_eq!(disagreement(&[&notes(&[barrier, reduce]), &notes(&[barrier])]), None);
        let found = disagreement(&[&notes(&[barrier, reduce, barrier]), &notes(&[barrier, barrier])]).unwrap();
        assert_eq!(
            found,
            "the ranks disagree on collective 2: rank 0 calls all_reduce of 4 Float, sum, rank 1 calls barrier"
        );
        let longer = notes(&[barrier, (Operation::AllReduce, "of 5 Float, sum")]);
        assert!(disagreement(&[&notes(&[barrier, reduce]), &longer]).unwrap().contains("of 5 Float"));
    }
}
