//! A flight recorder: each rank writes its collective calls to a file, which the supervisor reads even after the rank died.
//!
//! Each call is one `pwrite` of a line (2 us on a busy two-core machine), and each wait of the host is two more. A reader
//! may see a line half written. So each line ends with a checksum of its text, and a line that fails it is ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use flate2::Crc;

use super::Operation;

use crate::printable::shown_path;

/// The variable that names a rank's file.
pub(crate) const FLIGHT_RECORD: &str = "CS336_FLIGHT";

/// Bytes of a line's text. The longest call ("1234567 reduce_scatter of 12345678901 BFloat16, average") fits.
const TEXT: usize = 80;
/// Bytes of a line: its text, the checksum in hexadecimal digits, the end of the line.
const LINE: usize = TEXT + 8 + 1;

/// Calls that the file keeps. A rank may launch far ahead of the others (the 435 gradients of the XL model, one by one);
/// its file must still hold the last call of the slowest rank.
const CALLS: u64 = 1024;

/// How often a half-written line is read before it is ignored, and the pause in which its writer may complete it.
const READINGS: usize = 20;
const BETWEEN_READINGS: Duration = Duration::from_micros(100);

/// The rank's side: numbers its collectives and records them.
#[derive(Default)]
pub struct FlightRecorder {
    calls: AtomicU64,
    /// The collective that the rank waits for, by name, and since when.
    awaited: Mutex<Option<(String, Instant)>>,
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
        let file = options.with_context(|| format!("failed to open this rank's flight record {}", shown_path(path)))?;
        Ok(Self { file: Some(file), ..Self::default() })
    }

    /// Numbers a call, from 1, and records it. `detail` must agree between ranks, like the operation.
    pub fn call(&self, operation: Operation, detail: &str) -> u64 {
        let sequence = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        self.write(1 + sequence % CALLS, &format!("{sequence} {operation} {detail}"));
        sequence
    }

    /// Runs `wait`, and records meanwhile that the rank waits for collective `sequence`, whose [`call_name`] is `name`.
    pub fn waiting<T>(&self, sequence: u64, name: &str, wait: impl FnOnce() -> Result<T>) -> Result<T> {
        self.start_wait(sequence, name);
        let value = wait()?;
        // Not cleared after an error: the supervisor reports the collective in which the rank failed.
        self.end_wait();
        Ok(value)
    }

    /// Records that the rank waits for collective `sequence`, whose [`call_name`] is `name`.
    pub fn start_wait(&self, sequence: u64, name: &str) {
        *self.lock() = Some((name.to_string(), Instant::now()));
        self.write(0, &format!("waits {sequence}"));
    }

    /// Records that the rank no longer waits.
    pub fn end_wait(&self) {
        *self.lock() = None;
        self.write(0, "runs");
    }

    /// The name of the collective that the rank waits for, and for how long it has.
    pub fn awaited(&self) -> Option<(String, Duration)> {
        self.lock().as_ref().map(|(name, since)| (name.clone(), since.elapsed()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<(String, Instant)>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A failed write is ignored: the supervisor's report then has less detail.
    fn write(&self, line: u64, text: &str) {
        let Some(file) = &self.file else { return };
        let mut bytes = [b' '; LINE];
        let length = text.len().min(TEXT);
        bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
        let checksum = format!("{:08x}\n", checksum(&bytes[..TEXT]));
        bytes[TEXT..].copy_from_slice(checksum.as_bytes());
        let _ = file.write_all_at(&bytes, line * LINE as u64);
    }
}

fn checksum(text: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(text);
    crc.sum()
}

/// The text of a line; `None` if it is half written, because the writer is still at work or died.
fn text_of(line: &[u8]) -> Option<&str> {
    let (text, end) = line.split_at_checked(TEXT)?;
    let digits = std::str::from_utf8(end.strip_suffix(b"\n")?).ok()?;
    (u32::from_str_radix(digits, 16).ok()? == checksum(text)).then_some(())?;
    Some(std::str::from_utf8(text).ok()?.trim_end())
}

/// The contents of a rank's file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct FlightRecord {
    /// The number of the collective that the rank waits for.
    pub waits_in: Option<u64>,
    /// The latest calls by their numbers: "all_reduce of 4 Float, average".
    pub calls: BTreeMap<u64, String>,
}

impl FlightRecord {
    /// Empty where there is no file yet: the rank has not reached the rendezvous.
    ///
    /// A half-written line is read again; if it stays so (the rank died during the write), it is left out. The state is
    /// the first line of the file but is written after its call, so a reader that sees the state also sees the call.
    pub fn read(path: &Path) -> Self {
        for _ in 1..READINGS {
            match Self::parse(&std::fs::read(path).unwrap_or_default()) {
                (record, 0) => return record,
                _ => std::thread::sleep(BETWEEN_READINGS),
            }
        }
        Self::parse(&std::fs::read(path).unwrap_or_default()).0
    }

    /// The record of the intact lines, and the number of broken lines.
    fn parse(bytes: &[u8]) -> (Self, usize) {
        let (mut record, mut broken) = (Self::default(), 0);
        // A line that was never written is a hole in the file, which reads as zeros.
        let written = bytes.chunks(LINE).enumerate().filter(|(_, line)| line.iter().any(|&byte| byte != 0));
        for (i, line) in written {
            match text_of(line) {
                None => broken += 1,
                Some(state) if i == 0 => record.waits_in = state.strip_prefix("waits ").and_then(|at| at.parse().ok()),
                Some(text) => record.calls.extend(call_of(text)),
            }
        }
        (record, broken)
    }

    /// The number of the last call; 0 before the first.
    pub fn last(&self) -> u64 {
        self.calls.last_key_value().map_or(0, |(sequence, _)| *sequence)
    }

    /// The call's [`call_name`].
    pub fn name(&self, sequence: u64) -> String {
        let Some(call) = self.calls.get(&sequence) else { return format!("collective {sequence}") };
        let (operation, detail) = call.split_once(' ').unwrap_or((call, ""));
        call_name(operation, sequence, detail)
    }

    /// What the rank was doing, as a clause for a message.
    pub fn state(&self) -> String {
        match (self.waits_in, self.last()) {
            (Some(sequence), _) => format!("it waited in {}", self.name(sequence)),
            (None, 0) => "it had called no collective".to_string(),
            (None, last) => format!("it was in no collective; its last was {}", self.name(last)),
        }
    }
}

/// The call of a line: its number, and its operation and details.
fn call_of(text: &str) -> Option<(u64, String)> {
    let (sequence, call) = text.split_once(' ')?;
    Some((sequence.parse().ok()?, call.to_string()))
}

/// A call as errors name it: "all_reduce 3 of 4 Float, average".
pub fn call_name(operation: &str, sequence: u64, detail: &str) -> String {
    format!("{operation} {sequence} {detail}").trim_end().to_string()
}

/// The first collective whose operation or details differ between ranks, with what each rank calls.
pub fn disagreement(ranks: &[&FlightRecord]) -> Option<String> {
    let sequences: BTreeSet<u64> = ranks.iter().flat_map(|record| record.calls.keys()).copied().collect();
    let differs = |sequence: &u64| {
        let mut calls = ranks.iter().filter_map(|record| record.calls.get(sequence));
        let one = calls.next();
        calls.any(|call| Some(call) != one)
    };
    let sequence = sequences.into_iter().find(differs)?;
    let call = |(rank, record): (usize, &&FlightRecord)| {
        record.calls.get(&sequence).map(|call| format!("rank {rank} calls {call}"))
    };
    let calls: Vec<_> = ranks.iter().enumerate().filter_map(call).collect();
    Some(format!("the ranks disagree on collective {sequence}: {}", calls.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(calls: &[(Operation, &str)]) -> (tempfile::NamedTempFile, FlightRecorder) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let recorder = FlightRecorder::at(file.path()).unwrap();
        for (operation, detail) in calls {
            recorder.call(*operation, detail);
        }
        (file, recorder)
    }

    #[test]
    fn a_record_holds_the_calls_and_the_collective_that_is_waited_for() {
        assert_eq!(FlightRecord::read(Path::new("/nowhere")).state(), "it had called no collective");
        let (file, recorder) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum")]);
        let record = FlightRecord::read(file.path());
        assert_eq!(record.state(), "it was in no collective; its last was all_reduce 2 of 4 Float, sum");
        let seen = || Ok((FlightRecord::read(file.path()).waits_in, recorder.awaited().map(|(name, _)| name)));
        let sum = "all_reduce 2 of 4 Float, sum".to_string();
        assert_eq!(recorder.waiting(2, &sum, seen).unwrap(), (Some(2), Some(sum.clone())));
        assert_eq!(seen().unwrap(), (None, None));
        recorder.waiting(1, "barrier 1", || -> Result<()> { anyhow::bail!("lost") }).unwrap_err();
        assert_eq!(FlightRecord::read(file.path()).state(), "it waited in barrier 1");
    }

    #[test]
    fn a_half_written_line_is_ignored() {
        let (file, recorder) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 144 Float, average")]);
        recorder.start_wait(1, "barrier 1");
        let whole = std::fs::read(file.path()).unwrap();
        let (record, broken) = FlightRecord::parse(&whole);
        assert_eq!((record.last(), record.waits_in, broken), (2, Some(1), 0));
        // Call 2 is on the fourth line: `length` bytes of it are written, and the rest is still zero.
        for length in 1..LINE - 1 {
            let mut torn = whole.clone();
            torn[3 * LINE + length..4 * LINE].fill(0);
            let (torn, broken) = FlightRecord::parse(&torn);
            assert_eq!((torn.last(), torn.waits_in, broken), (1, Some(1), 1), "after {length} bytes");
            assert_eq!(disagreement(&[&record, &torn]), None);
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
    fn a_mixture_of_two_lines_fails_the_checksum() {
        let line = |sequence: u64, detail: &str| {
            let (file, recorder) = rank(&[]);
            recorder.calls.store(sequence - 1, Ordering::Relaxed);
            recorder.call(Operation::AllReduce, detail);
            std::fs::read(file.path()).unwrap()[((1 + sequence % CALLS) as usize) * LINE..].to_vec()
        };
        let record =
            [line(7, "of 144 Float, average"), line(7 + CALLS, "of 145 Float, average"), line(7, "of 8 Half, sum")];
        for (old, new) in record.iter().flat_map(|old| record.iter().map(move |new| (old, new))) {
            for length in 0..=LINE {
                let mixed = [&new[..length], &old[length..]].concat();
                let known = mixed == *old || mixed == *new;
                assert_eq!(text_of(&mixed).is_some(), known, "{:?}", String::from_utf8_lossy(&mixed));
            }
        }
    }

    #[test]
    fn a_line_completed_between_two_readings_is_read() {
        let (file, _recorder) = rank(&[(Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum")]);
        let whole = std::fs::read(file.path()).unwrap();
        let at = (3 * LINE) as u64;
        let writer = file.reopen().unwrap();
        writer.write_all_at(b"2 broadcast", at).unwrap();
        assert_eq!(FlightRecord::read(file.path()).last(), 1, "a line that stays broken is left out");
        let (path, reader) = (file.path().to_owned(), std::sync::Barrier::new(2));
        let record = std::thread::scope(|scope| {
            let record = scope.spawn(|| {
                reader.wait();
                std::iter::repeat_with(|| FlightRecord::read(&path)).find(|record| record.last() == 2).unwrap()
            });
            reader.wait();
            writer.write_all_at(&whole[3 * LINE..], at).unwrap();
            record.join().unwrap()
        });
        assert_eq!(record.name(2), "all_reduce 2 of 4 Float, sum");
    }

    #[test]
    fn a_reader_concurrent_with_the_writer_sees_only_calls_that_were_made() {
        let (file, recorder) = rank(&[]);
        let writer = std::thread::spawn(move || {
            for _ in 0..20_000 {
                recorder.call(Operation::AllReduce, "of 144 Float, average");
            }
        });
        while !writer.is_finished() {
            let record = FlightRecord::read(file.path());
            let made = "all_reduce of 144 Float, average";
            assert!(record.calls.values().all(|call| call == made), "{:?}", record.calls);
        }
        writer.join().unwrap();
        assert_eq!(FlightRecord::read(file.path()).last(), 20_000);
    }

    #[test]
    fn only_the_latest_calls_are_kept() {
        let (file, recorder) = rank(&[]);
        for _ in 0..CALLS + 3 {
            recorder.call(Operation::Broadcast, "of 1 Half from rank 0");
        }
        let record = FlightRecord::read(file.path());
        assert_eq!((record.calls.len() as u64, record.last()), (CALLS, CALLS + 3));
        assert_eq!(*record.calls.first_key_value().unwrap().0, 4);
    }

    #[test]
    fn the_first_disagreement_names_the_calls_of_both_ranks() {
        let (barrier, reduce) = ((Operation::Barrier, ""), (Operation::AllReduce, "of 4 Float, sum"));
        let record = |calls: &[(Operation, &str)]| FlightRecord::read(rank(calls).0.path());
        assert_eq!(disagreement(&[&record(&[barrier, reduce]), &record(&[barrier])]), None);
        let found = disagreement(&[&record(&[barrier, reduce, barrier]), &record(&[barrier, barrier])]).unwrap();
        assert_eq!(
            found,
            "the ranks disagree on collective 2: rank 0 calls all_reduce of 4 Float, sum, rank 1 calls barrier"
        );
        let longer = record(&[barrier, (Operation::AllReduce, "of 5 Float, sum")]);
        assert!(disagreement(&[&record(&[barrier, reduce]), &longer]).unwrap().contains("of 5 Float"));
    }
}
