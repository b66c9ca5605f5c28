//! Runs jobs in a separate process, so that a crash, a panic, an out-of-memory kill or a hang ends only one job.
//!
//! The parent re-executes this program as `cs336 worker`, sends one job a line, and receives one reply a line
//! ([`crate::process`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::device::DeviceCheck;
use super::problem::{Problem, Verdict};
use super::record::{Outcome, Profile};
use crate::error::{Fault, fault_in_words, fault_of};
use crate::process::{Answer, ChildProcess, Parent};

/// A job for a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Job {
    Check {
        problem: String,
        check: String,
    },
    DeviceCheck {
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
    /// Free what the last job left behind, so that the next one starts like the first.
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
    /// The result of a case file, as its runner serialised it.
    Compared {
        result: Value,
    },
    Failed {
        error: String,
    },
}

impl From<Verdict> for Reply {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Passed { note } => Self::Passed { note },
            Verdict::Skipped { reason } => Self::Skipped { reason },
        }
    }
}

/// How a job ended, seen from the parent.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    Reply(Reply),
    /// The worker died or sent an invalid reply. `how` has its last output; `out_of_memory` means that the operating
    /// system killed it because memory ran out.
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
    process: ChildProcess,
}

impl Worker {
    /// Starts `program worker` in the folder `root`.
    pub fn start(program: &Path, root: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg("worker").env("CS336_ROOT", root);
        Ok(Self { process: ChildProcess::start(command).context("starting a worker")? })
    }

    /// Whether the worker is waiting for a job: it is alive and has sent nothing since its last reply.
    pub fn is_idle(&mut self) -> bool {
        self.process.is_idle()
    }

    /// Sends a job and waits for its end, at most `limit`. Polls `interrupted` meanwhile.
    ///
    /// After any ending but a [`Reply`] the worker is dead or unusable and must be replaced.
    pub fn run(&mut self, job: &Job, limit: Duration, interrupted: &dyn Fn() -> bool) -> Result<Ending> {
        self.process.send(job)?;
        Ok(match self.process.receive(limit, interrupted) {
            Answer::Line(text) => match serde_json::from_str(&text) {
                Ok(reply) => Ending::Reply(reply),
                Err(error) => {
                    let start: String = text.chars().take(200).collect();
                    Ending::Died {
                        how: format!("the worker sent {start:?}, not a reply: {error}"),
                        out_of_memory: false,
                    }
                }
            },
            Answer::Died(death) => {
                Ending::Died { how: format!("the worker {death}"), out_of_memory: death.is_out_of_memory() }
            }
            Answer::TimedOut { .. } => Ending::TimedOut { limit },
            Answer::Interrupted => Ending::Interrupted,
        })
    }
}

/// The problems, device checks and case runner that a worker serves.
#[derive(Clone, Copy)]
pub struct Abilities {
    pub registry: &'static [Problem],
    pub device_checks: &'static [&'static [DeviceCheck]],
    pub run_case: fn(&Path) -> Result<Value>,
    /// Runs between two cases of one process. What it does not free would affect the second measurement.
    pub clean_up: fn() -> Result<()>,
}

/// The worker's side: serves jobs until its parent sends no more.
pub fn serve(abilities: Abilities) -> Result<()> {
    let mut parent = Parent::connect()?;
    // The operating system must kill this process first when memory runs out.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    while let Some(line) = parent.receive()? {
        let job: Job = serde_json::from_str(&line).with_context(|| format!("this line is not a job: {line:?}"))?;
        parent.send(&perform(abilities, &job))?;
    }
    Ok(())
}

fn perform(abilities: Abilities, job: &Job) -> Reply {
    let registry = abilities.registry;
    let attempt = catch_unwind(AssertUnwindSafe(|| match job {
        Job::Check { problem, check } => perform_check(registry, problem, check),
        Job::DeviceCheck { check } => perform_device_check(abilities.device_checks, check),
        Job::Measure { problem, profile, params } => perform_measure(registry, problem, *profile, params),
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
    Ok((found.run)()?.into())
}

fn perform_device_check(checks: &[&[DeviceCheck]], name: &str) -> Result<Reply> {
    let found = checks.iter().copied().flatten().find(|check| check.name == name);
    let found = found.with_context(|| format!("no device check is called {name:?}"))?;
    (found.run)().map(Reply::from).or_else(|error| match fault_of(&error) {
        Some(Fault::NotAvailable { needs, has }) => Ok(Reply::Skipped { reason: format!("needs {needs}, has {has}") }),
        _ => Err(error),
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
