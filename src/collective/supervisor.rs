//! Watches rank processes from outside: the first failure or the deadline ends them all, and none outlives the call.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use super::watch::Watch;
use crate::units::human_seconds;

/// One rank's command, the file that takes what it prints, and the one that takes its notes.
pub struct Rank {
    pub command: Command,
    pub log: PathBuf,
    pub flight: PathBuf,
}

/// When a run is ended though no rank has failed.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// From start to the last rank's exit.
    pub deadline: Duration,
    /// How long ranks may wait in a collective for one that does nothing.
    pub patience: Duration,
    /// Whether somebody wants the run ended, by Ctrl-C for instance.
    pub interrupted: fn() -> bool,
}

const POLL: Duration = Duration::from_millis(2);

/// How often the ranks' notes are read: seldom enough to take nothing from a benchmark.
const LOOK: Duration = Duration::from_millis(100);

/// A dying rank's connections close before its process can be waited for, so the first to be seen failing may be a
/// victim. Whoever else fails on its own within this time is named as well.
const GRACE: Duration = Duration::from_millis(300);

/// How much of a rank's output an error repeats.
const LAST_WORDS_LINES: usize = 12;
const LAST_WORDS_BYTES: usize = 16 << 10;

/// Starts every rank and waits until all have exited with success.
///
/// # Errors
/// Names each rank that failed on its own (or still ran at the deadline), with its exit status, its last words and the
/// collective that it was in; or the rank that stalls, or the collective that the ranks call each in its own way. Every
/// process has been killed and reaped by then.
pub fn supervise(ranks: Vec<Rank>, terms: Terms) -> Result<()> {
    let started = Instant::now();
    let mut running = Running::start(ranks)?;
    let mut watch = Watch::new(running.ranks.iter().map(|rank| (rank.child.id(), rank.flight.clone())), terms.patience);
    let mut looked = Instant::now();
    loop {
        let mut failed = running.poll()?;
        if !failed.is_empty() {
            let seen = Instant::now();
            while seen.elapsed() < GRACE && !running.all_done() {
                std::thread::sleep(POLL);
                failed.extend(running.poll()?);
            }
            running.look(&mut watch);
            // A rank that failed while it waited for another is likely to be that one's victim.
            failed.sort_by_key(|&rank| watch.is_waiting(rank));
            return Err(running.fault(&watch, vec![watch.disagreement().or(watch.holds_up())], &failed));
        }
        if running.all_done() {
            running.look(&mut watch);
            // NCCL may let ranks end well that called different things, with values that are nobody's.
            return watch.disagreement().map_or(Ok(()), |fault| Err(running.fault(&watch, vec![Some(fault)], &[])));
        }
        let deadline = (started.elapsed() >= terms.deadline)
            .then(|| format!("the deadline of {} passed", human_seconds(terms.deadline.as_secs_f64())));
        if let Some(end) = deadline.or_else(|| (terms.interrupted)().then(|| "interrupted".to_string())) {
            running.look(&mut watch);
            let late = running.unfinished();
            return Err(running.fault(&watch, vec![Some(end), watch.disagreement().or(watch.holds_up())], &late));
        }
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            running.look(&mut watch);
            if let Some(fault) = watch.fault() {
                return Err(running.fault(&watch, vec![Some(fault)], &[]));
            }
        }
        std::thread::sleep(POLL);
    }
}

struct Started {
    child: Child,
    log: PathBuf,
    flight: PathBuf,
    status: Option<ExitStatus>,
}

/// The started ranks; dropping it kills and reaps what still runs, so that no way out leaves a process behind.
struct Running {
    ranks: Vec<Started>,
}

impl Running {
    fn start(ranks: Vec<Rank>) -> Result<Self> {
        let mut running = Self { ranks: Vec::new() };
        for (rank, Rank { mut command, log, flight }) in ranks.into_iter().enumerate() {
            let out = File::create(&log).with_context(|| format!("making rank {rank}'s log {}", log.display()))?;
            let err = out.try_clone().with_context(|| format!("sharing rank {rank}'s log"))?;
            let program = command.get_program().to_string_lossy().into_owned();
            let child = command
                .stdin(Stdio::null())
                .stdout(out)
                .stderr(err)
                // Ctrl-C at a terminal goes to the supervisor's group alone, which ends its ranks in its own way.
                .process_group(0)
                .spawn()
                .with_context(|| format!("starting rank {rank} as {program}"))?;
            running.ranks.push(Started { child, log, flight, status: None });
        }
        Ok(running)
    }

    /// Notes who has exited; gives back the ranks that have newly failed.
    fn poll(&mut self) -> Result<Vec<usize>> {
        let mut failed = Vec::new();
        for (rank, Started { child, status, .. }) in self.ranks.iter_mut().enumerate() {
            if status.is_none() {
                *status = child.try_wait().with_context(|| format!("waiting for rank {rank}"))?;
                if status.is_some_and(|status| !status.success()) {
                    failed.push(rank);
                }
            }
        }
        Ok(failed)
    }

    fn all_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.status.is_some())
    }

    fn unfinished(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].status.is_none()).collect()
    }

    /// Kills and reaps every rank that still runs.
    fn end(&mut self) {
        let mut running: Vec<&mut Child> =
            self.ranks.iter_mut().filter(|rank| rank.status.is_none()).map(|rank| &mut rank.child).collect();
        // Both calls fail only for a process that is gone already, which is what is wanted.
        running.iter_mut().for_each(|child| drop(child.kill()));
        running.iter_mut().for_each(|child| drop(child.wait()));
    }

    fn look(&self, watch: &mut Watch) {
        watch.look(|rank| self.ranks[rank].status.is_some());
    }

    /// Ends the run and tells why: the reasons, then the ranks `to_blame`, then what the others were doing.
    fn fault(&mut self, watch: &Watch, why: Vec<Option<String>>, to_blame: &[usize]) -> anyhow::Error {
        self.end();
        let others = (0..self.ranks.len()).filter(|rank| !to_blame.contains(rank));
        let others = others.filter_map(|rank| Some(format!("rank {rank}: {}", watch.state(rank)?)));
        let blamed = to_blame.iter().map(|&rank| self.describe(rank, watch.state(rank)));
        let lines: Vec<_> = why.into_iter().flatten().chain(blamed).chain(others).collect();
        anyhow!(lines.join("\n"))
    }

    fn describe(&self, rank: usize, state: Option<String>) -> String {
        let (of, Started { log, status, .. }) = (self.ranks.len(), &self.ranks[rank]);
        let how = match status {
            Some(status) => describe_status(*status),
            None => "was still running and has been killed".to_string(),
        };
        let state = state.map(|state| format!("; {state}")).unwrap_or_default();
        match last_words(log) {
            words if words.is_empty() => format!("rank {rank} of {of} {how}{state}, without a word"),
            words => format!("rank {rank} of {of} {how}{state}; its last words:\n{words}"),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

fn describe_status(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => format!("ended with {status}"),
    }
}

fn last_words(log: &PathBuf) -> String {
    let Ok(bytes) = std::fs::read(log) else { return String::new() };
    let tail = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LAST_WORDS_BYTES)..]).into_owned();
    let lines: Vec<&str> = tail.lines().filter(|line| !line.trim().is_empty()).collect();
    // What a panic says comes before its backtrace, which may be long.
    let panic = lines.iter().rposition(|line| line.contains("panicked at"));
    let from = panic.unwrap_or(lines.len().saturating_sub(LAST_WORDS_LINES));
    lines[from..].iter().take(LAST_WORDS_LINES).copied().collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests;
