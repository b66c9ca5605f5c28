//! Watches rank processes from outside: the first failure or the deadline ends them all, and none outlives the call.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::ranks::Launch;
use super::watchdog::Watchdog;
use crate::process::{ChildProcess, Death, Event, after, wait_for_any};
use crate::units::human_seconds;

/// One rank's command, and the file of its flight record.
pub struct Rank {
    pub command: Command,
    pub flight_record: PathBuf,
}

/// Why a launch has failed, a line for each rank.
#[derive(Debug, thiserror::Error)]
#[error("{words}")]
pub struct RanksFault {
    pub words: String,
    /// Whether the kernel ended one of them because memory ran out.
    pub out_of_memory: bool,
}

/// How often the supervisor looks at ranks that neither print nor reply.
const TICK: Duration = Duration::from_millis(10);

/// How often the flight records are read: rarely enough not to slow a benchmark down.
const READ_INTERVAL: Duration = Duration::from_millis(100);

/// A dying rank's connections close before its exit is seen, so the first failure seen may be caused by another rank.
/// Ranks that fail within this time are named as well.
const GRACE: Duration = Duration::from_millis(300);

/// Starts every rank of `launch`, sends it `input`, and waits until all have exited with success; gives back each rank's
/// reply, a line of JSON, where it gave one.
///
/// # Errors
/// Names each rank that failed on its own (or still ran at the deadline), with its exit status, its last output and its
/// collective; or the stalled rank, or the collective on which the ranks disagree. Every process has been killed and
/// reaped by then.
pub fn supervise(launch: &Launch, ranks: Vec<Rank>, input: &Value) -> Result<Vec<Option<String>>> {
    let started = Instant::now();
    let mut running = Running::start(ranks, input, launch.patience)?;
    let mut last_read = Instant::now();
    loop {
        let mut failed = running.poll();
        if !failed.is_empty() {
            let seen = Instant::now();
            while seen.elapsed() < GRACE && !running.all_done() {
                running.wait();
                failed.extend(running.poll());
            }
            running.read_flight_records();
            // A rank that failed while it waited for another probably failed because of it, so it is named last.
            failed.sort_by_key(|&rank| running.watchdog.is_waiting(rank));
            let why = running.watchdog.disagreement().or(running.watchdog.delay());
            return Err(running.fault(why, &failed));
        }
        if running.all_done() {
            running.read_flight_records();
            // With NCCL, ranks that called different collectives may all exit with success, but with wrong values.
            return match running.watchdog.disagreement() {
                Some(fault) => Err(running.fault([fault], &[])),
                None => Ok(running.ranks.iter_mut().map(|rank| rank.reply.take()).collect()),
            };
        }
        let deadline = (started.elapsed() >= launch.deadline)
            .then(|| format!("the deadline of {} passed", human_seconds(launch.deadline.as_secs_f64())));
        if let Some(end) = deadline.or_else(|| (launch.interrupted)().then(|| "interrupted".to_string())) {
            running.read_flight_records();
            let why = running.watchdog.disagreement().or(running.watchdog.delay());
            let late = running.unfinished();
            return Err(running.fault([end].into_iter().chain(why), &late));
        }
        if last_read.elapsed() >= READ_INTERVAL {
            last_read = Instant::now();
            running.read_flight_records();
            if let Some(fault) = running.watchdog.fault() {
                return Err(running.fault([fault], &[]));
            }
        }
        running.wait();
    }
}

struct Started {
    process: ChildProcess,
    reply: Option<String>,
    death: Option<Death>,
}

/// The started ranks; dropping it kills and reaps those that still run, so that no return path leaves a process behind.
struct Running {
    ranks: Vec<Started>,
    watchdog: Watchdog,
}

impl Running {
    fn start(ranks: Vec<Rank>, input: &Value, patience: Duration) -> Result<Self> {
        let mut running = Self { ranks: Vec::new(), watchdog: Watchdog::new(patience) };
        for (rank, Rank { command, flight_record }) in ranks.into_iter().enumerate() {
            let mut process = ChildProcess::start(command).with_context(|| format!("starting rank {rank}"))?;
            process.send(input)?;
            running.watchdog.add(process.id(), flight_record);
            running.ranks.push(Started { process, reply: None, death: None });
        }
        Ok(running)
    }

    /// Waits until a rank prints, replies or ends, at most [`TICK`].
    fn wait(&self) {
        wait_for_any(self.ranks.iter().map(|rank| &rank.process), TICK);
    }

    /// Records replies and exits; gives back the ranks that have newly failed.
    fn poll(&mut self) -> Vec<usize> {
        let mut failed = Vec::new();
        for (rank, started) in self.ranks.iter_mut().enumerate().filter(|(_, rank)| rank.death.is_none()) {
            match started.process.poll() {
                Some(Event::Line(reply)) => started.reply = Some(reply),
                Some(Event::Died(death)) => {
                    if !death.is_success() {
                        failed.push(rank);
                    }
                    started.death = Some(death);
                }
                None => {}
            }
        }
        failed
    }

    fn all_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.death.is_some())
    }

    fn unfinished(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].death.is_none()).collect()
    }

    /// Kills and reaps every rank that still runs, all at the same time.
    fn end(&mut self) {
        self.ranks.iter_mut().for_each(|rank| rank.process.start_kill());
        self.ranks.iter_mut().for_each(|rank| rank.process.kill());
    }

    fn read_flight_records(&mut self) {
        self.watchdog.update(|rank| self.ranks[rank].death.is_some());
    }

    /// Ends the run and gives the error: the reasons, then the ranks `to_blame`, then what the other ranks were doing.
    fn fault(&mut self, why: impl IntoIterator<Item = String>, to_blame: &[usize]) -> anyhow::Error {
        self.end();
        let mut lines: Vec<String> = why.into_iter().collect();
        lines.extend(to_blame.iter().map(|&rank| self.describe(rank)));
        let others = (0..self.ranks.len()).filter(|rank| !to_blame.contains(rank));
        lines.extend(others.filter_map(|rank| Some(format!("rank {rank}: {}", self.watchdog.state(rank)?))));
        let out_of_memory = |&rank: &usize| self.ranks[rank].death.as_ref().is_some_and(Death::is_out_of_memory);
        RanksFault { words: lines.join("\n"), out_of_memory: to_blame.iter().any(out_of_memory) }.into()
    }

    fn describe(&mut self, rank: usize) -> String {
        let (of, state) = (self.ranks.len(), self.watchdog.state(rank));
        let Started { process, death, .. } = &mut self.ranks[rank];
        let (how, last_output) = match death {
            Some(death) => (death.cause.to_string(), death.last_output.clone()),
            None => ("was still running and has been killed".to_string(), process.last_output()),
        };
        let state = state.map(|state| format!("; {state}")).unwrap_or_default();
        format!("rank {rank} of {of} {how}{state}{}", after(&last_output))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
