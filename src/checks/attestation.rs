//! Trials of the attention kernels on a GPU: their outcomes, and whether they passed with the present kernels.
//! `problems/flash_backward/measure.rs` runs the trials.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::harness::answer::format::markdown;
use crate::harness::answer::{
    Case, CaseOutcome, Cell, Claim, Column, Quantity, RecordSet, Records, Style, Table, Unit,
};
use crate::harness::record::Profile;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub implementation: Implementation,
    pub trial: Trial,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Implementation {
    Hopper,
    Portable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trial {
    /// Lengths around tile sizes, for every d of the implementation, type and mask.
    Ragged,
    /// Large scores, equal rows, heads that lie inside rows, and a `do` of strides 0, for every d and type.
    Adversarial,
    /// Repeats of one case, for every d: deterministic results must be bitwise equal.
    Repeats,
    /// The adversarial trial under compute-sanitizer's checker of memory accesses.
    Memcheck,
    /// The adversarial trial under its checker of races in shared memory.
    Racecheck,
    /// Shapes whose blocks fill every shared-memory buffer several times, with errors by FlashAttention's rule.
    Refills,
    /// Repeats of such a shape.
    RefillsRepeat,
    RefillsMemcheck,
    RefillsRacecheck,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The head dimensions that were tried.
    pub dimensions: Vec<i64>,
    /// Number of cases checked by the rule for each tile size, or of runs of one case for each tile size and d.
    pub cases: u32,
    /// The largest error of any result, relative to the rule's bound.
    pub worst_share: Option<f64>,
    /// The report of a checker.
    pub findings: Option<Findings>,
}

/// What compute-sanitizer reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Findings {
    pub errors: u64,
    /// The kinds of the first errors, each once.
    pub kinds: Vec<String>,
}

impl Implementation {
    pub fn name(self) -> &'static str {
        match self {
            Self::Hopper => "hopper",
            Self::Portable => "portable",
        }
    }
}

impl Trial {
    /// The name in tables and sentences.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ragged => "ragged lengths",
            Self::Adversarial => "adversarial inputs",
            Self::Repeats => "repeats",
            Self::Memcheck => "memory checker",
            Self::Racecheck => "race checker",
            Self::Refills => "refills",
            Self::RefillsRepeat => "repeats with refills",
            Self::RefillsMemcheck => "memory checker with refills",
            Self::RefillsRacecheck => "race checker with refills",
        }
    }
}

/// A summary of the suite's GPU trials. A trial counts if it passed with the present kernels.
#[derive(Debug, Default, Serialize)]
pub struct Attested {
    pub trials: usize,
    /// The trials that count: "none", "5", "hopper: ragged lengths, repeats; portable: memory checker".
    pub passed: String,
    pub passed_trials: String,
    /// The verb form: "attests" or "attest".
    pub verb: &'static str,
    /// Whether a memory or race checker passed.
    pub checkers: bool,
    /// "Failed: ..", "Stale: ..", "Not measured: ..".
    pub rest: Vec<String>,
    #[serde(skip)]
    count: usize,
}

impl Attested {
    /// From the records of flash_backward.
    pub fn of(records: &Records) -> Result<Self> {
        let planned = records.planned(Profile::Gpu).map(|(_, params)| Ok(serde_json::from_value(params.clone())?));
        let planned: Vec<Params> = planned.collect::<Result<_>>()?;
        let cases: Vec<Case<Params, Row>> = records.gpu().map(RecordSet::cases_as).transpose()?.unwrap_or_default();
        let [mut passed, mut failed, mut stale, mut missing] = [const { Vec::new() }; 4];
        let mut checkers = false;
        for params in &planned {
            let words = params.trial.label();
            let with = |why: &str| (params.implementation, format!("{words} ({why})"));
            let Some(case) = cases.iter().find(|case| case.params == *params) else {
                missing.push((params.implementation, words.to_string()));
                continue;
            };
            match (&case.stale, &case.outcome) {
                (Some(why), _) => stale.push(with(&markdown(why))),
                (None, CaseOutcome::NotRun { needs, .. }) => missing.push(with(&format!("needs {}", markdown(needs)))),
                (None, CaseOutcome::OutOfMemory { message: why, .. } | CaseOutcome::Failed { error: why }) => {
                    failed.push(with(&markdown(why)));
                }
                (None, CaseOutcome::Measured(row)) => match &row.findings {
                    Some(found) if found.errors > 0 => {
                        failed.push(with(&format!("errors reported: {}", found.errors)));
                    }
                    findings => {
                        checkers |= findings.is_some();
                        passed.push((params.implementation, words.to_string()));
                    }
                },
            }
        }
        let rest = [("Failed", failed), ("Stale", stale), ("Not measured", missing)];
        let rest = rest.iter().filter(|(_, of)| !of.is_empty()).map(|(ended, of)| format!("{ended}: {}.", listed(of)));
        Ok(Self {
            trials: planned.len(),
            passed: if passed.is_empty() { "none".into() } else { passed.len().to_string() },
            passed_trials: listed(&passed),
            verb: if passed.len() <= 1 { "attests" } else { "attest" },
            checkers,
            rest: rest.collect(),
            count: passed.len(),
        })
    }

    pub fn claim(&self) -> Claim {
        Claim::all("kernels-are-attested", "trials that pass", self.count, self.trials)
    }
}

/// "hopper: ragged lengths, repeats; portable: memory checker".
fn listed(trials: &[(Implementation, String)]) -> String {
    let mut by_implementation: BTreeMap<Implementation, Vec<&str>> = BTreeMap::new();
    for (implementation, words) in trials {
        by_implementation.entry(*implementation).or_default().push(words);
    }
    let words = by_implementation.iter().map(|(of, trials)| format!("{}: {}", of.name(), trials.join(", ")));
    words.collect::<Vec<_>>().join("; ")
}

/// A table with one line for each trial of a machine. Hopper's kernels run each case with both sizes of tiles.
pub fn table(set: &RecordSet) -> Result<Table> {
    let mut table = Table::new(vec![
        Column::text("kernels"),
        Column::text("trial"),
        Column::text("$d$"),
        Column::number("cases", Style::Grouped, 0),
        Column::number("largest error (share of the bound)", Style::Percent, 0),
        Column::text("checker reports"),
    ]);
    for case in set.cases_as::<Params, Row>()? {
        let stale = if case.stale.is_some() { " (stale)" } else { "" };
        let name: Cell = case.params.implementation.name().into();
        let trial = format!("{}{stale}", case.params.trial.label()).into();
        let Some(row) = case.row() else {
            let dashes = [const { Cell::Missing }; 3];
            table.row([vec![name, trial], dashes.to_vec(), vec![ending(&case.outcome).into()]].concat());
            continue;
        };
        let dimensions = row.dimensions.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
        let share = row.worst_share.map(|share| case.quantity(share, Unit::One));
        let cases = Quantity::new(f64::from(row.cases), Unit::One, vec![case.id.clone()]);
        let reported = match &row.findings {
            None => Cell::Missing,
            Some(Findings { errors: 0, .. }) => "nothing".into(),
            Some(Findings { errors, kinds }) => format!("{errors} errors: {}", kinds.join("; ")).into(),
        };
        table.row(vec![name, trial, dimensions.into(), cases.into(), share.into(), reported]);
    }
    let place = if set.is_gpu() { "on" } else { "in the emulator on" };
    Ok(table.captioned(format!(
        "Trials of the attention kernels, forward and backward, {place} {}. The error may be twice that of plain attention in \
         the same type, plus a rounding. For repeats, \"cases\" is the number of runs; all must be bitwise equal except \
         Hopper's $dQ$.",
        set.machine()?
    )))
}

fn ending(outcome: &CaseOutcome<Row>) -> String {
    match outcome {
        CaseOutcome::NotRun { needs, .. } => format!("{}: it needs {}", outcome.label(), markdown(needs)),
        CaseOutcome::OutOfMemory { message: why, .. } | CaseOutcome::Failed { error: why } => {
            format!("{}: {}", outcome.label(), markdown(why))
        }
        CaseOutcome::Measured(_) => outcome.label().into(),
    }
}
