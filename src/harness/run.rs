//! Measuring a grid: what is still to do, the checks that come first, and one case after another into the record.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::floor;
use super::problem::{Check, Measured, Problem};
use super::provenance::{Facts, open_run};
use super::record::{CaseRecord, Outcome, Profile, RecordFile, Run};
use super::store::{Layout, write_atomically};
use super::suite::{Suite, load};
use super::worker::{Ending, Job, Pool, Reply};

/// Which cases of a grid to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Every case anew.
    All,
    /// What is missing, stale or failed: `measure --resume`.
    Unfinished,
    /// What is missing or stale: `writeup`.
    Outdated,
}

/// What is to be measured of one problem under one profile.
pub struct Plan<'a> {
    pub problem: &'a Problem,
    pub measured: &'a Measured,
    pub profile: Profile,
    pub suite: Suite,
    /// The record as it stands, without the cases that have left the suite.
    pub record: RecordFile,
    pub pending: Vec<Pending>,
}

/// One case to measure, and what it took last time, where that is known.
#[derive(Debug, Clone, PartialEq)]
pub struct Pending {
    pub grid: String,
    pub params: Value,
    pub last_elapsed_s: Option<f64>,
}

impl Plan<'_> {
    /// Seconds that the pending cases took last time, and how many of them have no such figure.
    pub fn estimate(&self) -> (f64, usize) {
        let known = self.pending.iter().filter_map(|p| p.last_elapsed_s);
        (known.sum(), self.pending.iter().filter(|p| p.last_elapsed_s.is_none()).count())
    }
}

/// Works out what `scope` asks for; `None` for a problem that measures nothing under this profile.
pub fn plan<'a>(layout: &Layout, problem: &'a Problem, profile: Profile, scope: Scope) -> Result<Option<Plan<'a>>> {
    let (Some(measured), Some(suite)) = (&problem.measured, load(&layout.root, problem)?) else { return Ok(None) };
    if suite.cases(profile).next().is_none() {
        return Ok(None);
    }
    let kernels = kernel_hashes(layout, measured)?;
    let old = layout.read_local(profile, problem.name)?;
    let mut record = old.unwrap_or_else(|| RecordFile::new(problem.name, profile));
    let mut pending = Vec::new();
    for (grid, params) in suite.cases(profile) {
        let known = record.case(params);
        let wanted = match (known, scope) {
            (None, _) | (_, Scope::All) => true,
            (Some(case), _) if staleness_of_case(case, measured, &kernels).is_some() => true,
            (Some(case), Scope::Unfinished) => matches!(case.outcome, Outcome::Failed { .. }),
            (Some(_), Scope::Outdated) => false,
        };
        if wanted {
            let last_elapsed_s = known.map(|c| c.elapsed_s);
            pending.push(Pending { grid: grid.into(), params: params.clone(), last_elapsed_s });
        }
    }
    record.keep(|case| suite.cases(profile).any(|(_, params)| params == &case.params));
    Ok(Some(Plan { problem, measured, profile, suite, record, pending }))
}

/// Why a case's record no longer says what its problem would measure today; `None` when it still does.
pub fn staleness(
    layout: &Layout,
    problem: &Problem,
    suite: &Suite,
    file: &RecordFile,
    case: &CaseRecord,
) -> Result<Option<String>> {
    let Some(measured) = &problem.measured else { return Ok(Some("the problem measures nothing any more".into())) };
    if !suite.cases(file.profile).any(|(_, params)| params == &case.params) {
        return Ok(Some("its parameters have left the suite".into()));
    }
    Ok(staleness_of_case(case, measured, &kernel_hashes(layout, measured)?))
}

fn staleness_of_case(case: &CaseRecord, measured: &Measured, kernels: &BTreeMap<String, String>) -> Option<String> {
    if case.revision != measured.revision {
        return Some(format!("it is of revision {}, the problem is at {}", case.revision, measured.revision));
    }
    let changed = case.kernels.iter().find(|(name, hash)| kernels.get(*name) != Some(*hash));
    if let Some((name, _)) = changed {
        return Some(format!("kernels/{name} has changed since"));
    }
    match &case.outcome {
        Outcome::Measured { row } => (measured.check_row)(row).err().map(|e| format!("{e:#}")),
        _ => None,
    }
}

fn kernel_hashes(layout: &Layout, measured: &Measured) -> Result<BTreeMap<String, String>> {
    measured.kernels.iter().map(|name| Ok((name.to_string(), layout.kernel_hash(name)?))).collect()
}

/// What happens while measuring, told to whoever shows it.
pub trait Progress {
    fn checks_started(&mut self, problem: &Problem);
    fn case_started(&mut self, case: &Pending);
    fn case_ended(&mut self, case: &Pending, outcome: &Outcome, elapsed: Duration);
}

/// How cases are run: by which program, how long each may take, and when to stop.
pub struct Runner<'a> {
    pub layout: &'a Layout,
    pub program: PathBuf,
    pub limit: Duration,
    pub interrupted: &'a dyn Fn() -> bool,
}

/// How many cases ended how.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    pub measured: usize,
    pub out_of_memory: usize,
    pub not_run: usize,
    pub failed: usize,
    pub interrupted: bool,
}

impl Runner<'_> {
    /// Measures the pending cases of `plan`, writing the record after each one.
    ///
    /// Checks come first, in the same kind of process: what fails its checks is not timed.
    pub fn measure(&self, mut plan: Plan, facts: &Facts, progress: &mut dyn Progress) -> Result<Tally> {
        let mut tally = Tally::default();
        if plan.pending.is_empty() {
            return Ok(tally);
        }
        let mut pool = Pool::new(self.program.clone(), self.layout.root.clone());
        progress.checks_started(plan.problem);
        for check in plan.problem.checks {
            match self.check(&mut pool, plan.problem, check)? {
                CheckEnding::Passed { .. } | CheckEnding::Skipped { .. } => {}
                CheckEnding::Interrupted => return Ok(Tally { interrupted: true, ..tally }),
                CheckEnding::Failed { error } => {
                    bail!("{}::{} fails, so {0} is not timed: {error}", plan.problem.name, check.name)
                }
            }
        }
        // What the checks warmed must not serve the cases.
        let mut pool = Pool::new(self.program.clone(), self.layout.root.clone());
        let run = open_run(&self.layout.root, &plan.suite.hash, facts)?;
        let kernels = kernel_hashes(self.layout, plan.measured)?;
        let path = self.layout.local(plan.profile, plan.problem.name);
        for pending in std::mem::take(&mut plan.pending) {
            progress.case_started(&pending);
            let started = Instant::now();
            let Some(outcome) =
                self.measure_case(&mut pool, plan.problem, plan.measured, plan.profile, &pending.params, &run)?
            else {
                return Ok(Tally { interrupted: true, ..tally });
            };
            let elapsed = started.elapsed();
            tally.count(&outcome);
            progress.case_ended(&pending, &outcome, elapsed);
            let case = CaseRecord {
                grid: pending.grid,
                params: pending.params,
                run: run.id.clone(),
                revision: plan.measured.revision,
                kernels: kernels.clone(),
                elapsed_s: elapsed.as_secs_f64(),
                outcome,
            };
            plan.record.put(case, &run);
            plan.record.sort_like(plan.suite.cases(plan.profile).map(|(_, params)| params));
            write_atomically(&path, plan.record.to_json()?.as_bytes())?;
        }
        Ok(tally)
    }

    /// Measures one case in a worker; `None` when interrupted. A timing below the physical floor is a failure.
    pub fn measure_case(
        &self,
        pool: &mut Pool,
        problem: &Problem,
        measured: &Measured,
        profile: Profile,
        params: &Value,
        run: &Run,
    ) -> Result<Option<Outcome>> {
        let job = Job::Measure { problem: problem.name.into(), profile, params: params.clone() };
        let failed = |error: String| Some(Outcome::Failed { error });
        let predicted_bytes = (measured.predicted_bytes)(params);
        if (measured.fresh_process)(params) {
            pool.restart();
        }
        Ok(match pool.run(&job, self.limit, self.interrupted)? {
            Ending::Interrupted => None,
            Ending::TimedOut { limit } => failed(format!("exceeded the limit of {} s for one case", limit.as_secs())),
            Ending::Died { how, out_of_memory: true } => {
                Some(Outcome::OutOfMemory { requested_bytes: None, predicted_bytes, message: how })
            }
            Ending::Died { how, out_of_memory: false } => failed(how),
            Ending::Reply(Reply::Failed { error }) => failed(error),
            Ending::Reply(Reply::Ended { outcome: Outcome::Measured { row } }) => {
                match floor::check(&row, &run.peaks) {
                    Ok(()) => Some(Outcome::Measured { row }),
                    Err(error) => failed(format!("{error:#}")),
                }
            }
            Ending::Reply(Reply::Ended { outcome: Outcome::OutOfMemory { requested_bytes, message, .. } }) => {
                Some(Outcome::OutOfMemory { requested_bytes, predicted_bytes, message })
            }
            Ending::Reply(Reply::Ended { outcome }) => Some(outcome),
            Ending::Reply(other) => bail!("a worker answered a measurement with {other:?}"),
        })
    }

    /// Runs one check in a worker.
    pub fn check(&self, pool: &mut Pool, problem: &Problem, check: &Check) -> Result<CheckEnding> {
        let job = Job::Check { problem: problem.name.into(), check: check.name.into() };
        Ok(
            match pool
                .run(&job, self.limit, self.interrupted)
                .with_context(|| format!("{}::{}", problem.name, check.name))?
            {
                Ending::Interrupted => CheckEnding::Interrupted,
                Ending::TimedOut { limit } => {
                    CheckEnding::Failed { error: format!("exceeded the limit of {} s", limit.as_secs()) }
                }
                Ending::Died { how, .. } => CheckEnding::Failed { error: how },
                Ending::Reply(Reply::Passed { note }) => CheckEnding::Passed { note },
                Ending::Reply(Reply::Skipped { reason }) => CheckEnding::Skipped { reason },
                Ending::Reply(Reply::Failed { error }) => CheckEnding::Failed { error },
                Ending::Reply(other) => bail!("a worker answered a check with {other:?}"),
            },
        )
    }
}

/// How one check ended.
#[derive(Debug, Clone, PartialEq)]
pub enum CheckEnding {
    Passed { note: String },
    Skipped { reason: String },
    Failed { error: String },
    Interrupted,
}

impl Tally {
    pub fn count(&mut self, outcome: &Outcome) {
        *match outcome {
            Outcome::Measured { .. } => &mut self.measured,
            Outcome::OutOfMemory { .. } => &mut self.out_of_memory,
            Outcome::NotRun { .. } => &mut self.not_run,
            Outcome::Failed { .. } => &mut self.failed,
        } += 1;
    }

    pub fn add(&mut self, other: Self) {
        self.measured += other.measured;
        self.out_of_memory += other.out_of_memory;
        self.not_run += other.not_run;
        self.failed += other.failed;
        self.interrupted |= other.interrupted;
    }
}
