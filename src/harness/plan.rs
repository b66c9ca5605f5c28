//! What is still to be measured of a problem: what is missing, stale, failed or not run, and what it took last time.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::Value;

use super::problem::{Measured, Problem};
use super::record::{CaseRecord, Outcome, Profile, RecordFile};
use super::store::Layout;
use super::suite::{Suite, load};

/// Which cases of a grid to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Every case anew.
    All,
    /// What is missing, stale, failed or not run: `measure --resume`. What this machine lacks as well ends as before,
    /// at once; what it has by now, such as a second GPU, is measured.
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

/// One case to measure, and what it took last time (here, or else where the accepted record was made), if that is known.
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
        // The sum of no numbers is minus zero.
        (known.sum::<f64>() + 0.0, self.pending.iter().filter(|p| p.last_elapsed_s.is_none()).count())
    }
}

/// Works out what `scope` asks for; `None` for a problem that measures nothing under this profile.
pub fn plan<'a>(layout: &Layout, problem: &'a Problem, profile: Profile, scope: Scope) -> Result<Option<Plan<'a>>> {
    let (Some(measured), Some(suite)) = (&problem.measured, load(&layout.root, problem)?) else { return Ok(None) };
    if suite.cases(profile).next().is_none() {
        return Ok(None);
    }
    let kernels = kernel_hashes(layout, measured, profile)?;
    let old = layout.read_local(profile, problem.name)?;
    let mut record = old.unwrap_or_else(|| RecordFile::new(problem.name, profile));
    // Only an estimate: an unreadable accepted record is for whoever needs its figures to complain about.
    let accepted = layout.read_accepted(profile, problem.name).ok().flatten();
    let took = |file: Option<&RecordFile>, params: &Value| file?.case(params).map(|case| case.elapsed_s);
    let mut pending = Vec::new();
    for (grid, params) in suite.cases(profile) {
        let known = record.case(params);
        let wanted = match (known, scope) {
            (None, _) | (_, Scope::All) => true,
            (Some(case), _) if staleness_of_case(case, measured, &kernels).is_some() => true,
            (Some(case), Scope::Unfinished) => {
                matches!(case.outcome, Outcome::Failed { .. } | Outcome::NotRun { .. })
            }
            (Some(_), Scope::Outdated) => false,
        };
        if wanted {
            let last_elapsed_s = took(Some(&record), params).or_else(|| took(accepted.as_ref(), params));
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
    Ok(staleness_of_case(case, measured, &kernel_hashes(layout, measured, file.profile)?))
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

/// The kernels that a problem's figures depend on, and the hash of each as it stands now; a CPU runs none of them.
pub fn kernel_hashes(layout: &Layout, measured: &Measured, profile: Profile) -> Result<BTreeMap<String, String>> {
    if profile == Profile::Cpu {
        return Ok(BTreeMap::new());
    }
    measured.kernels.iter().map(|name| Ok((name.to_string(), layout.kernel_hash(name)?))).collect()
}
