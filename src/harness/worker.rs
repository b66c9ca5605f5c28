//! Work in a process of its own, so that a crash, a panic, an out-of-memory kill or a hang is one job's ending and no more.
//!
//! The parent re-executes this program as `cs336 worker`, writes one JSON job a line to its standard input, and reads
//! one reply a line from its standard output. Lines without the mark are a library's chatter and are ignored.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::problem::{Problem, Verdict};
use super::provenance::oom_kills;
use super::record::{Outcome, Profile};
use crate::error::{Fault, fault_in_words, fault_of};

const MARK: &str = "@cs336 ";
/// How many of a worker's last lines of standard error an error message carries.
const LAST_WORDS: usize = 12;
/// How often a waiting parent looks for an interrupt.
const POLL: Duration = Duration::from_millis(50);

/// What a worker can be asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Job {
    Check {
        problem: String,
        check: String,
    },
    Measure {
        problem: String,
        profile: Profile,
        params: Value,
    },
    /// Run one case file from outside.
    Case {
        path: PathBuf,
    },
    /// Give back what the last job left behind, so that the next one starts like the first.
    CleanUp,
}

/// How a job ended inside the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    Passed {
        note: String,
    },
    Skipped {
        reason: String,
    },
    Ended {
        outcome: Outcome,
    },
    /// What running a case file gave, as its runner wrote it.
    Compared {
        result: Value,
    },
    Failed {
        error: String,
    },
}

/// How a job ended as the parent sees it.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    Reply(Reply),
    /// The worker died, with its last words; `out_of_memory` when the kernel's count of such kills went up.
    Died {
        how: String,
        out_of_memory: bool,
    },
    TimedOut {
        limit: Duration,
    },
    Interrupted,
}

/// A running worker process; it is killed, with its process group, when this is dropped.
pub struct Worker {
    child: Child,
    stdin: ChildStdin,
    replies: Receiver<String>,
    last_words: Arc<Mutex<VecDeque<String>>>,
    log: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    /// Starts `program worker` in the folder `root`.
    pub fn start(program: &Path, root: &Path) -> Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let mut child = Command::new(program)
            .arg("worker")
            .env("CS336_ROOT", root)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("failed to start a worker from {}", program.display()))?;
        let stdin = child.stdin.take().context("a worker has no standard input")?;
        let stdout = child.stdout.take().context("a worker has no standard output")?;
        let stderr = child.stderr.take().context("a worker has no standard error")?;
        let (sender, replies) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let Some(reply) = line.strip_prefix(MARK) else { continue };
                if sender.send(reply.to_string()).is_err() {
                    break;
                }
            }
        });
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        let words = Arc::clone(&last_words);
        let log = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut words = words.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                words.push_back(line);
                if words.len() > LAST_WORDS {
                    words.pop_front();
                }
            }
        });
        Ok(Self { child, stdin, replies, last_words, log: Some(log) })
    }

    /// Gives the worker a job and waits for its end, at most `limit`; `interrupted` is polled meanwhile.
    ///
    /// After anything but a [`Reply`] the worker is dead and must be replaced.
    pub fn run(&mut self, job: &Job, limit: Duration, interrupted: &dyn Fn() -> bool) -> Result<Ending> {
        let kills_before = oom_kills();
        let started = Instant::now();
        let line = serde_json::to_string(job)? + "\n";
        if self.stdin.write_all(line.as_bytes()).and_then(|()| self.stdin.flush()).is_err() {
            return self.died(kills_before, interrupted);
        }
        loop {
            match self.replies.recv_timeout(POLL) {
                Ok(text) => {
                    let reply = serde_json::from_str(&text).with_context(|| format!("a worker answered {text:?}"))?;
                    return Ok(Ending::Reply(reply));
                }
                Err(RecvTimeoutError::Disconnected) => return self.died(kills_before, interrupted),
                Err(RecvTimeoutError::Timeout) if interrupted() => {
                    self.kill();
                    return Ok(Ending::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) if started.elapsed() > limit => {
                    self.kill();
                    return Ok(Ending::TimedOut { limit });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn died(&mut self, kills_before: Option<u64>, interrupted: &dyn Fn() -> bool) -> Result<Ending> {
        let status = self.child.wait().context("failed to wait for a worker")?;
        if interrupted() {
            return Ok(Ending::Interrupted);
        }
        if let Some(log) = self.log.take() {
            let _ = log.join();
        }
        let words = self.last_words.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let words = words.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
        let out_of_memory =
            matches!((kills_before, oom_kills()), (Some(a), Some(b)) if b > a) && signal(status) == Some(9);
        let how =
            if words.is_empty() { describe(status) } else { format!("{}; its last words: {words}", describe(status)) };
        Ok(Ending::Died { how, out_of_memory })
    }

    fn kill(&mut self) {
        // The group holds the ranks that the worker may have started.
        if let Some(group) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

fn signal(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

fn describe(status: ExitStatus) -> String {
    match signal(status) {
        Some(9) => "the worker was killed (signal 9)".into(),
        Some(number) => format!("the worker crashed (signal {number})"),
        None => format!("the worker ended early ({status})"),
    }
}

/// What a worker can do: the problems it knows, and how it runs a case file.
#[derive(Clone, Copy)]
pub struct Abilities {
    pub registry: &'static [Problem],
    pub run_case: fn(&Path) -> Result<Value>,
    /// Runs before every case that is measured, so that it draws the same numbers whichever cases ran before it.
    pub seed: fn() -> Result<()>,
    /// Runs between two cases of one process: what it leaves behind of the first, the second would measure.
    pub clean_up: fn() -> Result<()>,
}

/// The worker's side: serves jobs from standard input until it closes.
pub fn serve(abilities: Abilities) -> Result<()> {
    // Die with the parent, and be the first to go when memory runs out.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    for line in std::io::stdin().lines() {
        let line = line.context("failed to read a job")?;
        let job: Job = serde_json::from_str(&line).with_context(|| format!("not a job: {line:?}"))?;
        let reply = perform(abilities, &job);
        println!("{MARK}{}", serde_json::to_string(&reply)?);
        std::io::stdout().flush().context("failed to reply")?;
    }
    Ok(())
}

fn perform(abilities: Abilities, job: &Job) -> Reply {
    let registry = abilities.registry;
    let attempt = catch_unwind(AssertUnwindSafe(|| match job {
        Job::Check { problem, check } => perform_check(registry, problem, check),
        Job::Measure { problem, profile, params } => {
            (abilities.seed)()?;
            perform_measure(registry, problem, *profile, params)
        }
        Job::Case { path } => (abilities.run_case)(path).map(|result| Reply::Compared { result }),
        Job::CleanUp => (abilities.clean_up)().map(|()| Reply::Passed { note: String::new() }),
    }));
    match attempt {
        Ok(Ok(reply)) => reply,
        Ok(Err(error)) => Reply::Failed { error: format!("{error:#}") },
        Err(panic) => {
            let message = panic_message(panic.as_ref());
            let is_measure = matches!(job, Job::Measure { .. });
            match fault_in_words(&message).filter(|_| is_measure) {
                Some(fault) => Reply::Ended { outcome: outcome_of(fault) },
                None => Reply::Failed { error: format!("panicked: {message}") },
            }
        }
    }
}

fn find<'a>(registry: &'a [Problem], name: &str) -> Result<&'a Problem> {
    registry.iter().find(|p| p.name == name).with_context(|| format!("no problem is called {name:?}"))
}

fn perform_check(registry: &[Problem], problem: &str, check: &str) -> Result<Reply> {
    let problem = find(registry, problem)?;
    let found = problem.checks.iter().find(|c| c.name == check);
    let found = found.with_context(|| format!("{} has no check {check:?}", problem.name))?;
    Ok(match (found.run)()? {
        Verdict::Passed { note } => Reply::Passed { note },
        Verdict::Skipped { reason } => Reply::Skipped { reason },
    })
}

fn perform_measure(registry: &[Problem], problem: &str, profile: Profile, params: &Value) -> Result<Reply> {
    let problem = find(registry, problem)?;
    let Some(measured) = &problem.measured else { bail!("{} measures nothing", problem.name) };
    match (measured.measure)(params, profile) {
        Ok(row) => Ok(Reply::Ended { outcome: Outcome::Measured { row } }),
        Err(error) => match fault_of(&error) {
            Some(fault) => Ok(Reply::Ended { outcome: outcome_of(fault) }),
            None => Err(error),
        },
    }
}

fn outcome_of(fault: Fault) -> Outcome {
    match fault {
        Fault::OutOfMemory { requested_bytes, message } => {
            Outcome::OutOfMemory { requested_bytes, predicted_bytes: None, message }
        }
        Fault::NotAvailable { needs, has } => {
            Outcome::NotRun { reason: "this machine cannot run it".into(), needs, has }
        }
    }
}

/// The text of a panic's payload.
pub fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text =
        payload.downcast_ref::<String>().cloned().or_else(|| payload.downcast_ref::<&str>().map(|s| s.to_string()));
    text.unwrap_or_else(|| "no message".into())
}
