//! Watches rank processes from outside: the first failure or the deadline ends them all, and none outlives the call.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// One rank's command and the file that takes what it prints.
pub struct Rank {
    pub command: Command,
    pub log: PathBuf,
}

const POLL: Duration = Duration::from_millis(2);

/// A dying rank's connections close before its process can be waited for, so the first to be seen failing may be a
/// victim. Whoever else fails on its own within this time is named as well.
const GRACE: Duration = Duration::from_millis(300);

/// How much of a rank's output an error repeats.
const LAST_WORDS_LINES: usize = 12;
const LAST_WORDS_BYTES: usize = 16 << 10;

/// Starts every rank and waits until all have exited with success.
///
/// # Errors
/// Names each rank that failed on its own (or still ran at the deadline), with its exit status and last words. Every
/// process has been killed and reaped by then.
pub fn supervise(ranks: Vec<Rank>, deadline: Duration) -> Result<()> {
    let started = Instant::now();
    let mut running = Running::start(ranks)?;
    loop {
        let mut failed = running.poll()?;
        if !failed.is_empty() {
            let seen = Instant::now();
            while seen.elapsed() < GRACE && !running.all_done() {
                std::thread::sleep(POLL);
                failed.extend(running.poll()?);
            }
            running.end();
            bail!(running.describe(&failed));
        }
        if running.all_done() {
            return Ok(());
        }
        if started.elapsed() >= deadline {
            let late = running.unfinished();
            running.end();
            bail!(
                "the deadline of {} passed; {}",
                crate::units::human_seconds(deadline.as_secs_f64()),
                running.describe(&late)
            );
        }
        std::thread::sleep(POLL);
    }
}

/// The started ranks; dropping it kills and reaps what still runs, so that no way out leaves a process behind.
struct Running {
    ranks: Vec<(Child, PathBuf, Option<ExitStatus>)>,
}

impl Running {
    fn start(ranks: Vec<Rank>) -> Result<Self> {
        let mut running = Self { ranks: Vec::new() };
        for (rank, Rank { mut command, log }) in ranks.into_iter().enumerate() {
            let out = File::create(&log).with_context(|| format!("making rank {rank}'s log {}", log.display()))?;
            let err = out.try_clone().with_context(|| format!("sharing rank {rank}'s log"))?;
            let program = command.get_program().to_string_lossy().into_owned();
            let child = command
                .stdin(Stdio::null())
                .stdout(out)
                .stderr(err)
                .spawn()
                .with_context(|| format!("starting rank {rank} as {program}"))?;
            running.ranks.push((child, log, None));
        }
        Ok(running)
    }

    /// Notes who has exited; gives back the ranks that have newly failed.
    fn poll(&mut self) -> Result<Vec<usize>> {
        let mut failed = Vec::new();
        for (rank, (child, _, status)) in self.ranks.iter_mut().enumerate() {
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
        self.ranks.iter().all(|(_, _, status)| status.is_some())
    }

    fn unfinished(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].2.is_none()).collect()
    }

    /// Kills and reaps every rank that still runs.
    fn end(&mut self) {
        let mut running: Vec<&mut Child> =
            self.ranks.iter_mut().filter(|(_, _, status)| status.is_none()).map(|(child, _, _)| child).collect();
        // Both calls fail only for a process that is gone already, which is what is wanted.
        running.iter_mut().for_each(|child| drop(child.kill()));
        running.iter_mut().for_each(|child| drop(child.wait()));
    }

    fn describe(&self, ranks: &[usize]) -> String {
        let of = self.ranks.len();
        let one = |&rank: &usize| {
            let (_, log, status) = &self.ranks[rank];
            let how = match status {
                Some(status) => describe_status(*status),
                None => "was still running and has been killed".to_string(),
            };
            match last_words(log) {
                words if words.is_empty() => format!("rank {rank} of {of} {how}, without a word"),
                words => format!("rank {rank} of {of} {how}; its last words:\n{words}"),
            }
        };
        ranks.iter().map(one).collect::<Vec<_>>().join("\n")
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
mod tests {
    use super::*;

    /// Runs one shell script a rank; gives back the error's words and the processes that the scripts left behind.
    fn drill(scripts: &[&str], deadline: Duration) -> (Result<()>, Vec<i32>) {
        let folder = tempfile::tempdir().unwrap();
        let ranks = scripts.iter().enumerate().map(|(rank, script)| {
            let mut command = Command::new("/bin/sh");
            let pid_file = folder.path().join(format!("{rank}.pid"));
            command.arg("-c").arg(format!("echo $$ > {}\n{script}", pid_file.display()));
            Rank { command, log: folder.path().join(format!("{rank}.log")) }
        });
        let outcome = supervise(ranks.collect(), deadline);
        let pid =
            |rank: usize| std::fs::read_to_string(folder.path().join(format!("{rank}.pid"))).ok()?.trim().parse().ok();
        let alive = |pid: &i32| std::path::Path::new(&format!("/proc/{pid}")).exists();
        (outcome, (0..scripts.len()).filter_map(pid).filter(alive).collect())
    }

    #[test]
    fn ranks_that_all_succeed_are_a_success() {
        let (outcome, left) = drill(&["exit 0", "sleep 0.05"], Duration::from_secs(10));
        assert!(outcome.is_ok() && left.is_empty(), "{outcome:?} {left:?}");
    }

    #[test]
    fn the_first_failing_rank_is_named_with_its_status_and_last_words_and_the_rest_are_ended() {
        let started = Instant::now();
        let (outcome, left) = drill(&["exec sleep 60", "echo the disk is full >&2; exit 3"], Duration::from_secs(30));
        let words = outcome.unwrap_err().to_string();
        assert!(words.starts_with("rank 1 of 2 exited with status 3; its last words:\nthe disk is full"), "{words}");
        assert!(!words.contains("rank 0"), "only the rank that failed on its own is named: {words}");
        assert!(left.is_empty() && started.elapsed() < Duration::from_secs(10), "{left:?}");
    }

    #[test]
    fn last_words_are_the_last_lines_or_those_of_the_panic() {
        let words = |script| drill(&[script], Duration::from_secs(30)).0.unwrap_err().to_string();
        let chatty = words("seq 1 100; exit 1");
        assert!(chatty.ends_with("\n99\n100") && !chatty.contains("\n88\n"), "{chatty}");
        let panic = words("echo before; echo \"thread 'main' panicked at x.rs:1\"; echo why; seq 1 100; exit 101");
        assert!(panic.contains("words:\nthread 'main' panicked at x.rs:1\nwhy\n1\n2"), "{panic}");
        assert!(words("exit 1").ends_with("exited with status 1, without a word"));
    }

    #[test]
    fn a_signal_is_named() {
        let (outcome, left) = drill(&["kill -SEGV $$", "exec sleep 60"], Duration::from_secs(30));
        let words = outcome.unwrap_err().to_string();
        assert!(words.starts_with("rank 0 of 2 was ended by signal 11"), "{words}");
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn ranks_that_run_past_the_deadline_are_named_and_ended() {
        let (outcome, left) = drill(&["exit 0", "echo waiting; exec sleep 60"], Duration::from_millis(500));
        let words = outcome.unwrap_err().to_string();
        assert!(words.contains("deadline of 500") && words.contains("rank 1 of 2 was still running"), "{words}");
        assert!(words.contains("waiting") && !words.contains("rank 0"), "{words}");
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn a_rank_that_cannot_start_ends_those_that_did() {
        let folder = tempfile::tempdir().unwrap();
        let mut sleeper = Command::new("/bin/sleep");
        sleeper.arg("60.0123");
        let ranks = vec![
            Rank { command: sleeper, log: folder.path().join("0.log") },
            Rank { command: Command::new("/nowhere/cs336"), log: folder.path().join("1.log") },
        ];
        let started = Instant::now();
        let words = format!("{:#}", supervise(ranks, Duration::from_secs(30)).unwrap_err());
        assert!(words.contains("starting rank 1 as /nowhere/cs336"), "{words}");
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}
