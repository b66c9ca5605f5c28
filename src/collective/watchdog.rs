//! Finds ranks that hang, from their flight records and from the processor time that they use.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::flight_recorder::{FlightRecord, disagreement};
use crate::units::human_seconds;

/// The state of all running ranks, as of the last poll.
pub struct Watchdog {
    ranks: Vec<WatchedRank>,
    patience: Duration,
}

struct WatchedRank {
    pid: u32,
    flight_record: PathBuf,
    record: FlightRecord,
    has_ended: bool,
    /// Since when the rank has used almost no processor time, and its total at that moment.
    idle_since: Instant,
    cpu_time: Duration,
}

/// A rank that uses less than this share of one processor is idle: its polling threads still wake up now and then.
const IDLE_SHARE: f64 = 0.05;

/// The unit of /proc/<pid>/stat is a hundredth of a second on every Linux that libtorch is built for.
const TICK: Duration = Duration::from_millis(10);

/// How long the others may wait for a rank that has exited: it cannot call any more.
const PATIENCE_AFTER_EXIT: Duration = Duration::from_secs(1);

impl Watchdog {
    /// `patience` is how long the others may wait for an idle rank.
    pub fn new(patience: Duration) -> Self {
        Self { ranks: Vec::new(), patience }
    }

    /// Watches the next rank, by its process id and the file of its flight record.
    pub fn add(&mut self, pid: u32, flight_record: PathBuf) {
        let (record, idle_since) = (FlightRecord::default(), Instant::now());
        self.ranks.push(WatchedRank {
            pid,
            flight_record,
            record,
            has_ended: false,
            idle_since,
            cpu_time: Duration::ZERO,
        });
    }

    /// Reads every rank's flight record and processor time.
    pub fn update(&mut self, has_ended: impl Fn(usize) -> bool) {
        for (rank, watched) in self.ranks.iter_mut().enumerate() {
            watched.update(has_ended(rank));
        }
    }

    /// Why the run cannot end; `None` while it can.
    pub fn fault(&self) -> Option<String> {
        self.disagreement().or_else(|| self.stalled())
    }

    /// Whether the rank waits for a collective (or did when it failed).
    pub fn is_waiting(&self, rank: usize) -> bool {
        self.ranks[rank].record.waits_in.is_some()
    }

    /// The first collective whose operation or details differ between ranks.
    pub fn disagreement(&self) -> Option<String> {
        disagreement(&self.ranks.iter().map(|rank| &rank.record).collect::<Vec<_>>())
    }

    /// Which rank the others wait for, and in which collective.
    pub fn delay(&self) -> Option<String> {
        let (waiting, sequence, late) = self.first_wait()?;
        let call = self.ranks[waiting].record.name(sequence);
        let late: Vec<_> = late.iter().map(|&rank| format!("rank {rank} {}", self.ranks[rank].activity())).collect();
        Some(format!("rank {waiting} waits in {call}, which {}", late.join(", ")))
    }

    /// What a rank was doing; `None` where it has no flight record.
    pub fn state(&self, rank: usize) -> Option<String> {
        let watched = &self.ranks[rank];
        watched.flight_record.exists().then(|| watched.record.state())
    }

    fn stalled(&self) -> Option<String> {
        let (_, _, late) = self.first_wait()?;
        let stalls = |&rank: &usize| {
            let WatchedRank { has_ended, idle_since, .. } = &self.ranks[rank];
            let patience = if *has_ended { PATIENCE_AFTER_EXIT.min(self.patience) } else { self.patience };
            idle_since.elapsed() >= patience
        };
        late.iter().any(stalls).then(|| self.delay()).flatten()
    }

    /// The earliest collective that one rank waits in and others have not called: the waiting rank, the collective's
    /// number, and the others. A rank that waits in a later collective may only be delayed by this one.
    fn first_wait(&self) -> Option<(usize, u64, Vec<usize>)> {
        let records = || self.ranks.iter().map(|rank| &rank.record).enumerate();
        let late = |sequence| records().filter(|(_, record)| record.last() < sequence).map(|(rank, _)| rank).collect();
        let waits = records().filter_map(|(rank, record)| Some((rank, record.waits_in?, late(record.waits_in?))));
        waits
            .filter(|(.., late): &(_, _, Vec<_>)| !late.is_empty())
            .min_by_key(|(rank, sequence, _)| (*sequence, *rank))
    }
}

impl WatchedRank {
    fn update(&mut self, has_ended: bool) {
        let record = FlightRecord::read(&self.flight_record);
        // An exited process uses no processor time; it is idle from the poll that first saw it gone.
        let cpu_time = if has_ended { self.cpu_time } else { processor_time(self.pid).unwrap_or(self.cpu_time) };
        let share = self.idle_since.elapsed().mul_f64(IDLE_SHARE) + 2 * TICK;
        if record.last() != self.record.last() || has_ended != self.has_ended || cpu_time > self.cpu_time + share {
            (self.idle_since, self.cpu_time) = (Instant::now(), cpu_time);
        }
        (self.record, self.has_ended) = (record, has_ended);
    }

    fn activity(&self) -> String {
        let since = human_seconds(self.idle_since.elapsed().as_secs_f64());
        match (self.has_ended, self.idle_since.elapsed() > Duration::from_secs(1)) {
            (true, _) => format!("has ended without calling ({})", self.record.state()),
            (false, true) => format!("has not called: it stalls, idle for {since} ({})", self.record.state()),
            (false, false) => format!("has not called: it works ({})", self.record.state()),
        }
    }
}

/// The processor time of all threads of a process so far.
fn processor_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // "1234 (a name (with anything)) S ...": utime and stime are the 12th and 13th after the name (proc(5)).
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks: Vec<u32> = fields.split(' ').skip(11).take(2).map_while(|field| field.parse().ok()).collect();
    (ticks.len() == 2).then(|| TICK * ticks.iter().sum::<u32>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::wait_until;

    fn watched(waits_in: Option<u64>, last: u64) -> WatchedRank {
        let call = (last, "all_reduce of 4 Float, sum".to_string());
        WatchedRank {
            pid: u32::MAX,
            flight_record: PathBuf::new(),
            record: FlightRecord { waits_in, calls: [call].into() },
            has_ended: false,
            idle_since: Instant::now(),
            cpu_time: Duration::ZERO,
        }
    }

    #[test]
    fn only_the_rank_that_all_others_wait_for_is_named() {
        // Rank 1 cannot call 6 before 5 is done, and only rank 2 has not called that.
        let ranks = vec![watched(Some(6), 6), watched(Some(5), 5), watched(None, 4)];
        let watch = Watchdog { ranks, patience: Duration::from_secs(60) };
        let message = watch.delay().unwrap();
        assert!(
            message.starts_with("rank 1 waits in all_reduce 5 of 4 Float, sum, which rank 2 has not called"),
            "{message}"
        );
        assert!(!message.contains("rank 1 has"), "{message}");
        assert_eq!(watch.stalled(), None, "the patience has not passed");
        let watch = Watchdog { patience: Duration::ZERO, ..watch };
        assert_eq!(watch.stalled().as_deref(), watch.delay().as_deref());
        let all_called = Watchdog { ranks: vec![watched(Some(5), 5), watched(None, 5)], patience: Duration::ZERO };
        assert_eq!((all_called.delay(), all_called.stalled()), (None, None));
    }

    #[test]
    fn processor_time_grows_with_work_and_not_with_sleep() {
        let pid = std::process::id();
        let before = processor_time(pid).unwrap();
        let has_grown = || {
            std::hint::black_box((0..10_000_000u64).map(std::hint::black_box).sum::<u64>());
            processor_time(pid).unwrap() >= before + 5 * TICK
        };
        assert!(wait_until(Duration::from_secs(60), has_grown), "the clock stands still");
        assert_eq!(processor_time(u32::MAX), None);
    }
}
