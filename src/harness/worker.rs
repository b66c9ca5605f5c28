//! Runs jobs in a separate process, so that a crash, a panic, an out-of-memory kill or a hang ends only one job.
//!
//! The parent re-executes this program as `cs336 worker`, sends one numbered job a line, and receives one reply a line with
//! the same number ([`crate::process`]).

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::device::DeviceCheck;
use super::grade::CheckStatus;
use super::problem::{Problem, Verdict};
use super::record::{Outcome, Profile};
use super::store::{Layout, with_room};
use super::subject::Subject;
use crate::error::{Fault, NotGraded, fault_in_words, fault_of, without_frames};
use crate::json;
use crate::process::{Answer, ChildProcess, LockedFolder, Parent, TEMPORARY_FOLDER, is_open};

/// The file of the running program, also after a build has replaced it: a new worker must not be of another version.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// A clean-up takes milliseconds. A process that needs longer hangs.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(30);

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
        /// Whose functions are measured beside ours.
        subject: Option<Subject>,
    },
    /// Run one case file from outside.
    Case {
        /// Not a `PathBuf`, which JSON refuses if it is not UTF-8.
        path: OsString,
        /// Whose implementations are run; ours without one.
        subject: Option<Subject>,
    },
    SubjectCheck {
        subject: Subject,
        problem: String,
        check: String,
    },
    /// Free what the last job left behind, so that the next one starts like the first.
    CleanUp,
}

impl Job {
    fn is_of_subject(&self) -> bool {
        match self {
            Self::SubjectCheck { .. } => true,
            Self::Measure { subject, .. } | Self::Case { subject, .. } => subject.is_some(),
            Self::Check { .. } | Self::DeviceCheck { .. } | Self::CleanUp => false,
        }
    }
}

/// How a job ended inside the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    Checked(Verdict),
    Ended(Outcome),
    /// The result of a case file, as its runner serialised it.
    Compared(Value),
    /// How a subject's check ended. A failure of the subject is a result like others, and the process goes on.
    Graded(CheckStatus),
    /// Why a subject could not be graded, for which it is not to blame.
    NotGraded(String),
    CleanedUp,
    Failed(String),
}

/// How a job ended, seen from the parent.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    Reply(Reply),
    /// The process died or sent an invalid reply. `how` has its last output; `out_of_memory` means that the operating
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

/// One process kept alive over many jobs, and replaced after a job that failed. It is killed, with its process group, when
/// this is dropped.
pub struct Worker {
    root: PathBuf,
    running: Option<Running>,
    /// Jobs so far. A reply has its job's number, so that it is never taken for that of another job.
    jobs: u64,
}

struct Running {
    process: ChildProcess,
    /// Removed after the process and all its descendants have ended, however they end.
    _folder: Option<LockedFolder>,
}

impl Worker {
    /// The process starts with the first job.
    pub fn new(layout: &Layout) -> Self {
        Self { root: layout.root.clone(), running: None, jobs: 0 }
    }

    /// Ends the process, so that the next job is the first of its process.
    pub fn restart(&mut self) {
        self.running = None;
    }

    /// Runs one job, at most `limit`. Polls `interrupted` meanwhile. If the job fails, the next job gets a new process.
    pub fn run(&mut self, job: &Job, limit: Duration, interrupted: &dyn Fn() -> bool) -> Result<Ending> {
        // A process that died after its last reply must not fail this job.
        let mut running = match self.running.take().and_then(|mut running| running.process.is_idle().then_some(running))
        {
            Some(running) => running,
            None => self.start(job)?,
        };
        let process = &mut running.process;
        self.jobs += 1;
        process.send(&(self.jobs, job))?;
        let reply = match process.receive(limit, interrupted) {
            Answer::Line(text) => match reply_to(self.jobs, &text) {
                Ok(reply) => reply,
                Err(error) => return Ok(Ending::Died { how: format!("{error:#}"), out_of_memory: false }),
            },
            Answer::Died(death) => {
                let out_of_memory = death.is_out_of_memory();
                return Ok(Ending::Died { how: format!("the worker {death}"), out_of_memory });
            }
            Answer::TimedOut { .. } => return Ok(Ending::TimedOut { limit }),
            Answer::Interrupted => return Ok(Ending::Interrupted),
        };
        let failed = match &reply {
            Reply::Failed(_) | Reply::NotGraded(_) => true,
            Reply::Ended(outcome) => !matches!(outcome, Outcome::Measured { .. }),
            Reply::Checked(_) | Reply::Compared(_) | Reply::Graded(_) | Reply::CleanedUp => false,
        };
        if !failed {
            self.running = Some(running);
        }
        Ok(Ending::Reply(reply))
    }

    fn start(&self, job: &Job) -> Result<Running> {
        let mut command = Command::new(THIS_PROGRAM);
        command.arg("worker").env("CS336_ROOT", &self.root);
        let folder = LockedFolder::new("worker");
        // A job of ours that needs one says so itself.
        let folder = match job.is_of_subject() {
            true => Some(folder.context("making a folder for the subject's files")?),
            false => match folder {
                Err(error) if is_open(&error) => return Err(error.into()),
                folder => folder.ok(),
            },
        };
        if let Some(folder) = &folder {
            command.env(TEMPORARY_FOLDER, folder.path());
        }
        Ok(Running { process: ChildProcess::start(command).context("starting a worker")?, _folder: folder })
    }

    /// Asks the process to free what the last job left behind. If that fails, the next job gets a new process.
    pub fn clean_up(&mut self, interrupted: &dyn Fn() -> bool) {
        if self.running.is_some() {
            // `run` drops a process whose clean-up failed.
            let _ = self.run(&Job::CleanUp, CLEAN_UP_LIMIT, interrupted);
        }
    }
}

/// Reads the reply to job `number`.
fn reply_to(number: u64, text: &str) -> Result<Reply> {
    let start = || text.chars().take(200).collect::<String>();
    let (answered, reply): (u64, Reply) =
        json::from_str(text).with_context(|| format!("the worker sent {:?}, not a reply", start()))?;
    ensure!(answered == number, "the worker answered job {answered}, expected was job {number}");
    Ok(reply)
}

/// The problems, device checks and case runner that a worker serves.
#[derive(Clone, Copy)]
pub struct Abilities {
    pub registry: &'static [Problem],
    /// The problems that a subject is measured on, with the adapters.
    pub subject_problems: &'static [(Problem, &'static [&'static str])],
    pub device_checks: &'static [&'static [DeviceCheck]],
    pub run_case: fn(&Path, Option<&Subject>) -> Result<Value>,
    /// Runs the check of this problem and name.
    pub check_subject: fn(&Subject, &str, &str) -> Result<CheckStatus>,
    /// Runs between two cases of one process. What it does not free would affect the second measurement.
    pub clean_up: fn() -> Result<()>,
}

/// The worker's side: serves jobs until its parent sends no more.
pub fn serve(abilities: Abilities) -> Result<()> {
    let mut parent = Parent::connect()?;
    // The operating system must kill this process first when memory runs out.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    while let Some(line) = parent.receive()? {
        let (number, job): (u64, Job) =
            json::from_str(&line).with_context(|| format!("this line is not a job: {line:?}"))?;
        parent.send(&(number, perform(abilities, &job)))?;
    }
    Ok(())
}

fn perform(abilities: Abilities, job: &Job) -> Reply {
    let registry = abilities.registry;
    let attempt = catch_unwind(AssertUnwindSafe(|| match job {
        Job::Check { problem, check } => perform_check(registry, problem, check),
        Job::DeviceCheck { check } => perform_device_check(abilities.device_checks, check),
        Job::Measure { problem, profile, params, subject } => {
            let theirs = abilities.subject_problems.iter().map(|(entry, _)| entry).find(|entry| entry.name == *problem);
            let entry = match subject {
                Some(_) => theirs.with_context(|| format!("{problem} measures no subject"))?,
                None => find(registry, problem)?,
            };
            perform_measure(entry, *profile, params, subject.as_ref())
        }
        Job::Case { path, subject } => (abilities.run_case)(path.as_ref(), subject.as_ref()).map(Reply::Compared),
        Job::SubjectCheck { subject, problem, check } => {
            (abilities.check_subject)(subject, problem, check).map(Reply::Graded)
        }
        Job::CleanUp => (abilities.clean_up)().map(|()| Reply::CleanedUp),
    }));
    match attempt {
        Ok(Ok(reply)) => reply,
        Ok(Err(error)) if NotGraded::of(&error).is_some() && !matches!(job, Job::Measure { .. }) => {
            Reply::NotGraded(format!("{error:#}"))
        }
        Ok(Err(error)) => Reply::Failed(with_room(without_frames(&format!("{error:#}")))),
        Err(panic) => {
            let message = panic_message(panic.as_ref());
            let is_measure = matches!(job, Job::Measure { .. });
            match fault_in_words(&message).filter(|_| is_measure) {
                Some(fault) => Reply::Ended(outcome_of(fault)),
                None => Reply::Failed(without_frames(&format!("panicked: {message}"))),
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
    (found.run)().map(Reply::Checked)
}

fn perform_device_check(checks: &[&[DeviceCheck]], name: &str) -> Result<Reply> {
    let found = checks.iter().copied().flatten().find(|check| check.name == name);
    let found = found.with_context(|| format!("no device check is called {name:?}"))?;
    let verdict = (found.run)().or_else(|error| match fault_of(&error) {
        Some(Fault::NotAvailable { needs, has }) => Verdict::skipped(format!("needs {needs}, has {has}")),
        _ => Err(error),
    });
    verdict.map(Reply::Checked)
}

fn perform_measure(problem: &Problem, profile: Profile, params: &Value, subject: Option<&Subject>) -> Result<Reply> {
    let Some(measured) = &problem.measured else { bail!("{} measures nothing", problem.name) };
    match (measured.measure)(params, profile, subject) {
        Ok(row) => Ok(Reply::Ended(Outcome::Measured { row })),
        Err(error) => match fault_of(&error) {
            Some(fault) => Ok(Reply::Ended(outcome_of(fault))),
            None => Err(error),
        },
    }
}

pub(super) fn outcome_of(fault: Fault) -> Outcome {
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
