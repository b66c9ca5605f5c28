//! Records as answers read them: typed cases with their outcome, grouped by the profile that they were measured under.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::format::{markdown, plain_strings};
use super::machines::{machine_name, memory_bytes, named};
use super::quantity::{Quantity, Unit};
use super::table::Cell;
use crate::harness::conditions::Conditions;
use crate::harness::problem::Measure;
use crate::harness::record::{CaseRecord, Machine, Outcome, Profile, RecordFile, Run};
use crate::harness::samples::Samples;
use crate::harness::stats;
use crate::harness::suite::Suite;
use crate::json::from_value;

/// What one problem has measured, and what it plans to.
#[derive(Default)]
pub struct Records {
    /// The problem's suite; `None` if the problem measures nothing.
    pub suite: Option<Suite>,
    pub cpu: Option<RecordSet>,
    pub gpu: Option<RecordSet>,
    /// The records of other problems that this one's answer reads, by name.
    pub others: BTreeMap<String, Records>,
    /// What of this machine's records cannot be used, each with what to do. The accepted records stand in; a subject has none.
    pub unreadable: Vec<String>,
}

/// The records of one problem under one profile.
pub struct RecordSet {
    pub file: RecordFile,
    /// The stale cases: index in the file to the reason.
    pub stale: BTreeMap<usize, String>,
}

/// One case of a record, with the types of its problem.
#[derive(Debug, Clone)]
pub struct Case<P, R> {
    pub id: CaseId,
    pub grid: String,
    pub params: P,
    pub outcome: CaseOutcome<R>,
    /// Why the case is stale; `None` if it is fresh.
    pub stale: Option<String>,
    /// Readings of the device's sensor; `None` without a sensor.
    pub conditions: Option<Conditions>,
}

/// [`Outcome`] with a typed row; the texts are as recorded, not yet escaped.
#[derive(Debug, Clone)]
pub enum CaseOutcome<R> {
    Measured(R),
    OutOfMemory { requested_bytes: Option<u64>, predicted_bytes: Option<u64>, message: String },
    NotRun { reason: String, needs: String, has: String },
    Failed { error: String },
}

/// Where a number comes from: a case of a record, its run and its machine.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseId {
    pub problem: Arc<str>,
    pub profile: Profile,
    /// The index of the case in its record.
    pub case: usize,
    pub run: Arc<str>,
    machine: Arc<Machine>,
}

impl CaseId {
    pub fn new(problem: &str, profile: Profile, case: usize, run: &str, machine: Arc<Machine>) -> Self {
        Self { problem: problem.into(), profile, case, run: run.into(), machine }
    }

    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// For messages: "run 20261121T073200Z-4f2a on NVIDIA H200".
    pub fn place(&self) -> String {
        format!("run {} on {}", self.run, machine_name(&self.machine, self.profile))
    }
}

impl Records {
    /// The records that the report prints: the GPU's if there are any, else the CPU's.
    ///
    /// Errors: neither exists.
    pub fn main(&self) -> Result<&RecordSet> {
        self.gpu().or_else(|| self.cpu()).context("no case is recorded: run `cs336 measure`")
    }

    /// `None` if no case is recorded.
    pub fn cpu(&self) -> Option<&RecordSet> {
        self.of(Profile::Cpu)
    }

    /// `None` if no case is recorded.
    pub fn gpu(&self) -> Option<&RecordSet> {
        self.of(Profile::Gpu)
    }

    /// `None` if no case is recorded under the profile.
    pub fn of(&self, profile: Profile) -> Option<&RecordSet> {
        let set = match profile {
            Profile::Cpu => &self.cpu,
            Profile::Gpu => &self.gpu,
        };
        set.as_ref().filter(|set| !set.file.cases.is_empty())
    }

    /// All existing sets, the GPU's first because its figures answer the handout.
    pub fn sets(&self) -> impl Iterator<Item = &RecordSet> {
        [self.gpu(), self.cpu()].into_iter().flatten()
    }

    /// The grid's name and the parameters of every case that the suite plans under a profile.
    pub fn planned(&self, profile: Profile) -> impl Iterator<Item = (&str, &Value)> {
        self.suite.iter().flat_map(move |suite| suite.cases(profile))
    }

    /// What cannot be used of this problem's records and of those that its answer also reads, each with what to do.
    pub fn unreadable_files(&self) -> impl Iterator<Item = &String> {
        self.unreadable.iter().chain(self.others.values().flat_map(|other| &other.unreadable))
    }

    /// Whether a case was measured and every planned one has an outcome that is not a failure, in the records that the report
    /// prints.
    pub fn are_complete(&self) -> bool {
        match self.main() {
            Ok(set) => {
                let recorded = |(_, params): (&str, &Value)| set.file.case(params).is_some();
                let is_measured = |case: &CaseRecord| matches!(case.outcome, Outcome::Measured { .. });
                set.file.cases.iter().any(is_measured)
                    && set.failures().next().is_none()
                    && self.planned(set.profile()).all(recorded)
            }
            Err(_) => Profile::ALL.into_iter().all(|profile| self.planned(profile).next().is_none()),
        }
    }

    /// Another problem's records, which the registry entry lists in `reads`.
    pub fn other(&self, problem: &str) -> Result<&Records> {
        self.others.get(problem).with_context(|| {
            format!("this answer may not read the records of {problem:?}: add it to `reads` in the registry")
        })
    }
}

impl RecordSet {
    pub fn profile(&self) -> Profile {
        self.file.profile
    }

    pub fn is_gpu(&self) -> bool {
        self.profile() == Profile::Gpu
    }

    /// The cases that failed as a whole or in a column, each with its first error.
    pub fn failures(&self) -> impl Iterator<Item = (&CaseRecord, &str)> {
        self.file.cases.iter().filter_map(|case| Some((case, case.outcome.failure()?)))
    }

    /// Oldest first, ties by id: the order does not depend on the file.
    pub fn runs(&self) -> Vec<&Run> {
        runs_by_age(&self.file.runs)
    }

    /// Errors: the file names no run.
    pub fn newest_run(&self) -> Result<&Run> {
        self.runs().last().copied().with_context(|| format!("the records of {} name no run", self.file.problem))
    }

    /// The machines of the measured cases as captions name them, in Markdown; the newest run's where none is measured.
    pub fn machine(&self) -> Result<String> {
        let measured = self.file.cases.iter().filter(|case| matches!(case.outcome, Outcome::Measured { .. }));
        let run = |case: &CaseRecord| self.file.runs.iter().find(|run| run.id == case.run);
        let runs = match measured.filter_map(run).collect::<Vec<_>>() {
            none if none.is_empty() => vec![self.newest_run()?],
            runs => runs,
        };
        Ok(named(runs.into_iter().map(|run| (&run.machine, self.profile()))))
    }

    /// Memory of the device that the profile measures on, in bytes.
    pub fn memory_bytes(&self) -> Result<u64> {
        Ok(memory_bytes(&self.newest_run()?.machine, self.profile()))
    }

    /// Machines with their runs, for captions: "AMD EPYC 7B13, 2 cores, run 20261121T073200Z-4f2a".
    pub fn source(&self) -> String {
        source(&self.runs(), self.profile())
    }

    /// Every case, in the file's order, with the types of the problem that measured it.
    ///
    /// Errors: parameters or a row that these types cannot read.
    pub fn cases<M: Measure>(&self) -> Result<Vec<Case<M::Params, M::Row>>> {
        self.cases_as()
    }

    /// [`Self::cases`] with other types, for fields that the rows of several problems share.
    pub fn cases_as<P: DeserializeOwned, R: DeserializeOwned>(&self) -> Result<Vec<Case<P, R>>> {
        let machines: BTreeMap<&str, Arc<Machine>> =
            self.file.runs.iter().map(|run| (run.id.as_str(), Arc::new(run.machine.clone()))).collect();
        let cases = self.file.cases.iter().enumerate().map(|(at, record)| {
            let named = || format!("case {at} of {} ({})", self.file.problem, self.profile());
            let machine = machines.get(record.run.as_str()).with_context(|| format!("{} names no run", named()))?;
            Ok(Case {
                id: CaseId::new(&self.file.problem, self.profile(), at, &record.run, machine.clone()),
                grid: record.grid.clone(),
                params: from_value(&plain_strings(&record.params))
                    .with_context(|| format!("{}: its parameters have another shape", named()))?,
                outcome: CaseOutcome::of(&record.outcome).with_context(named)?,
                stale: self.stale.get(&at).cloned(),
                conditions: record.conditions.clone(),
            })
        });
        cases.collect()
    }
}

impl<R: DeserializeOwned> CaseOutcome<R> {
    fn of(outcome: &Outcome) -> Result<Self> {
        Ok(match outcome.clone() {
            Outcome::Measured { row } => {
                Self::Measured(from_value(&plain_strings(&row)).context("its row has another shape")?)
            }
            Outcome::OutOfMemory { requested_bytes, predicted_bytes, message } => {
                Self::OutOfMemory { requested_bytes, predicted_bytes, message }
            }
            Outcome::NotRun { reason, needs, has } => Self::NotRun { reason, needs, has },
            Outcome::Failed { error } => Self::Failed { error },
        })
    }
}

impl<R> CaseOutcome<R> {
    /// What a table shows of a case that was not measured: "OOM", "not run" or "failed".
    pub fn label(&self) -> &'static str {
        match self {
            Self::Measured(_) => "measured",
            Self::OutOfMemory { .. } => "OOM",
            Self::NotRun { .. } => "not run",
            Self::Failed { .. } => "failed",
        }
    }

    /// What a case that was not measured says of its end, as recorded; empty for a measured one.
    pub fn reason(&self) -> &str {
        match self {
            Self::Measured(_) => "",
            Self::OutOfMemory { message: why, .. } | Self::NotRun { reason: why, .. } | Self::Failed { error: why } => {
                why
            }
        }
    }
}

impl<P, R> Case<P, R> {
    /// The case with its row, if it was measured.
    pub fn measured(&self) -> Option<(&Self, &R)> {
        Some((self, self.row()?))
    }

    /// The row of a measured case.
    pub fn row(&self) -> Option<&R> {
        match &self.outcome {
            CaseOutcome::Measured(row) => Some(row),
            _ => None,
        }
    }

    /// What a table shows of the case: a cell of its row, or how it ended.
    pub fn cell<C: Into<Cell>>(&self, of: impl FnOnce(&R) -> C) -> Cell {
        self.row().map_or_else(|| self.outcome.label().into(), |row| of(row).into().of_case(&self.id))
    }

    /// A number of this case, in base units.
    pub fn quantity(&self, value: f64, unit: Unit) -> Quantity {
        Quantity::new(value, unit, vec![self.id.clone()])
    }

    /// The median of samples of this case.
    pub fn median(&self, samples: &Samples) -> Quantity {
        self.statistic(samples, stats::median)
    }

    /// A statistic of samples of this case, in their unit.
    pub fn statistic(&self, samples: &Samples, statistic: impl Fn(&[f64]) -> f64) -> Quantity {
        self.quantity(statistic(&samples.samples), samples.unit.into())
    }
}

/// Oldest first, ties by id: the order does not depend on the file.
pub fn runs_by_age(runs: &[Run]) -> Vec<&Run> {
    let mut runs: Vec<&Run> = runs.iter().collect();
    runs.sort_by(|a, b| (&a.started, &a.id).cmp(&(&b.started, &b.id)));
    runs
}

fn source(runs: &[&Run], profile: Profile) -> String {
    let mut by_machine: Vec<(String, Vec<&str>)> = Vec::new();
    for run in runs {
        let name = machine_name(&run.machine, profile);
        match by_machine.iter_mut().find(|(n, _)| *n == name) {
            Some((_, ids)) => ids.push(&run.id),
            None => by_machine.push((name, vec![&run.id])),
        }
    }
    let words = by_machine.iter().map(|(machine, ids)| {
        let runs = match &ids[..] {
            [one] => format!("run {one}"),
            [a, b] => format!("runs {a} and {b}"),
            [first, .., last] => format!("{} runs from {first} to {last}", ids.len()),
            [] => String::new(),
        };
        format!("{}, {runs}", markdown(machine))
    });
    words.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
