//! Compares this machine's records with the accepted ones: exact values must be equal, timings are compared by a rank test.

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;

use super::answer::machines::leave_out_others;
use super::plan::staleness;
use super::problem::Problem;
use super::record::{CaseRecord, Machine, Outcome, RecordFile};
use super::samples::{Samples, Unit, each_samples, is_time};
use super::stats::{Change, Comparison, compare};
use super::store::Layout;
use super::suite::Suite;

/// The differences between two record files of one problem and profile.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Drift {
    pub problem: String,
    /// Of how many cases the timings were not compared, since two machines ran them; `None` if all were.
    pub other_machine: Option<String>,
    pub cases: Vec<CaseDrift>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseDrift {
    pub params: Value,
    pub changes: Vec<Finding>,
}

/// One difference, or one compared timing, of one case.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Finding {
    OnlyLocal,
    OnlyAccepted,
    /// The outcomes differ, for example measured and out of memory.
    Outcome {
        accepted: String,
        local: String,
    },
    /// A value that must repeat exactly has changed.
    Value {
        path: String,
        accepted: Value,
        local: Value,
    },
    Timing {
        path: String,
        #[serde(flatten)]
        comparison: Comparison,
    },
}

impl Finding {
    /// Whether this is a difference. An indistinct or unchanged timing is none.
    pub fn is_difference(&self) -> bool {
        !matches!(self, Self::Timing { comparison, .. } if matches!(comparison.change, Change::Same | Change::Indistinct))
    }

    /// Whether this contradicts the accepted record; a different timing does not.
    pub fn is_contradiction(&self) -> bool {
        matches!(self, Self::Outcome { .. } | Self::Value { .. })
    }
}

/// Compares two record files case by case.
pub fn drift(local: &RecordFile, accepted: &RecordFile) -> Result<Drift> {
    ensure!(local.problem == accepted.problem && local.profile == accepted.profile, "records of different problems");
    // The machines of cases whose timings are not compared, with the number of cases.
    let (mut cases, mut others) = (Vec::new(), Vec::<([String; 2], usize)>::new());
    for case in &local.cases {
        let changes = match accepted.case(&case.params) {
            None => vec![Finding::OnlyLocal],
            Some(old) => {
                let machines = [(accepted, old), (local, case)].map(|(file, case)| machine_of(file, case));
                let is_other = machines[0] != machines[1];
                match others.iter_mut().find(|(pair, _)| *pair == machines) {
                    Some((_, count)) => *count += 1,
                    None => others.extend(is_other.then_some((machines, 1))),
                }
                compare_case(old, case, !is_other)?
            }
        };
        cases.push(CaseDrift { params: case.params.clone(), changes });
    }
    for case in accepted.cases.iter().filter(|c| local.case(&c.params).is_none()) {
        cases.push(CaseDrift { params: case.params.clone(), changes: vec![Finding::OnlyAccepted] });
    }
    let words = others.iter().map(|([there, here], count)| {
        format!("of {count} cases the accepted figures come from {there}, these from {here}")
    });
    let other_machine = (!others.is_empty()).then(|| words.collect::<Vec<_>>().join("; "));
    Ok(Drift { problem: local.problem.clone(), other_machine, cases })
}

/// The machine that ran the case, in words.
fn machine_of(file: &RecordFile, case: &CaseRecord) -> String {
    file.runs.iter().find(|run| run.id == case.run).map_or_else(String::new, |run| {
        let Machine { cpu, cores, gpus, .. } = &run.machine;
        format!("{cpu} ({cores} cores){}", gpus.iter().map(|gpu| format!(" + {}", gpu.name)).collect::<String>())
    })
}

fn compare_case(accepted: &CaseRecord, local: &CaseRecord, timings: bool) -> Result<Vec<Finding>> {
    let (Outcome::Measured { row: old }, Outcome::Measured { row: new }) = (&accepted.outcome, &local.outcome) else {
        let (accepted, local) = (outcome_words(&accepted.outcome), outcome_words(&local.outcome));
        return Ok(if accepted == local { Vec::new() } else { vec![Finding::Outcome { accepted, local }] });
    };
    let mut findings = Vec::new();
    compare_values("", &what_must_repeat(old), &what_must_repeat(new), &mut findings);
    if timings {
        let old_samples = samples_of(old)?;
        for (path, new) in samples_of(new)? {
            let Some((_, old)) = old_samples.iter().find(|(p, _)| *p == path) else { continue };
            let has_zero = old.samples.iter().chain(&new.samples).any(|x| *x == 0.0);
            if has_zero && old.samples != new.samples {
                // Bytes, energy and clocks may be zero, which has no ratio.
                let [accepted, local] = [&old.samples, &new.samples].map(|samples| samples.clone().into());
                findings.push(Finding::Value { path, accepted, local });
            } else if !has_zero && (old.samples != new.samples || new.unit == Unit::Seconds) {
                findings.push(Finding::Timing { comparison: compare(&old.samples, &new.samples)?, path });
            }
        }
    }
    Ok(findings)
}

fn outcome_words(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Measured { .. } => "measured".into(),
        Outcome::OutOfMemory { .. } => "out of memory".into(),
        Outcome::NotRun { needs, .. } => format!("not run (needs {needs})"),
        Outcome::Failed { .. } => "failed".into(),
    }
}

fn samples_of(row: &Value) -> Result<Vec<(String, Samples)>> {
    let mut found = Vec::new();
    each_samples(row, &mut |path, samples| {
        found.push((path.to_string(), samples.clone()));
        Ok(())
    })?;
    Ok(found)
}

/// The fields of rows that follow from timings: samples, shares of a time, the fit of a model, lists in the order of their times,
/// and what was seen at moments. Words hold ports, times and numbers of threads, and reasons change with the program.
const NOISY: [&str; 9] = ["samples", "overlap", "best", "kernels", "rest", "profiles", "timeline", "words", "reason"];

/// The row without what is noisy, which leaves what must repeat exactly; plain times and rates are left out too.
fn what_must_repeat(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let is_noisy = |key: &str, child: &Value| {
                NOISY.contains(&key)
                    || (is_time(key) || key.ends_with("_per_s")) && (child.is_number() || child.is_array())
            };
            let kept = fields.iter().filter(|(key, child)| !is_noisy(key, child));
            Value::Object(kept.map(|(key, child)| (key.clone(), what_must_repeat(child))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(what_must_repeat).collect()),
        other => other.clone(),
    }
}

fn compare_values(path: &str, accepted: &Value, local: &Value, findings: &mut Vec<Finding>) {
    match (accepted, local) {
        (Value::Object(old), Value::Object(new)) => {
            let keys = old.keys().chain(new.keys().filter(|k| !old.contains_key(*k)));
            for key in keys {
                let at = join(path, key);
                let side = |fields: &serde_json::Map<String, Value>| fields.get(key).cloned().unwrap_or(Value::Null);
                compare_values(&at, &side(old), &side(new), findings);
            }
        }
        _ if accepted == local => {}
        _ => findings.push(Finding::Value { path: path.into(), accepted: accepted.clone(), local: local.clone() }),
    }
}

/// Whether a local record may be promoted; the error says why not and what to do.
///
/// `accepted` is the record that it would replace. A measured case must not become one that could not run.
pub fn acceptable(
    layout: &Layout,
    problem: &Problem,
    suite: &Suite,
    local: &RecordFile,
    accepted: Option<&RecordFile>,
) -> Result<()> {
    let name = problem.name;
    local.require_acceptable_runs().context(name)?;
    let expected = suite.cases(local.profile).count();
    let missing = suite.cases(local.profile).filter(|(_, params)| local.case(params).is_none()).count();
    let measure = format!("`cs336 measure {name} --profile {} --resume`", local.profile);
    ensure!(missing == 0, "{name}: {missing} of {expected} cases are not measured; {measure}");
    if let Some(left_out) = leave_out_others(&mut local.clone()) {
        bail!("{left_out}; measure all on one: {measure}");
    }
    let why_stale = staleness(layout, problem, suite, local.profile)?;
    for case in &local.cases {
        let before = accepted.and_then(|file| file.case(&case.params));
        match (&case.outcome, before.map(|old| &old.outcome)) {
            (Outcome::NotRun { needs, has, .. }, Some(Outcome::Measured { .. })) => bail!(
                "{name}: the case {} was measured before and did not run here: it needs {needs}, has {has}",
                case.params
            ),
            (Outcome::OutOfMemory { .. }, Some(Outcome::Measured { .. })) => bail!(
                "{name}: the case {} was measured before and ran out of memory here; measure it where there is as much",
                case.params
            ),
            (Outcome::Measured { row: new }, Some(Outcome::Measured { row: old }))
                if let Some((path, kind)) =
                    lost_measurement("", old, Some(new), before.is_some_and(|old| of_same_code(case, old))) =>
            {
                bail!("{name}: the case {} was measured in {path} before and is {kind:?} there now", case.params)
            }
            _ => {}
        }
        if let Some(error) = case.outcome.failure() {
            bail!("{name}: the case {} failed ({error}); fix it, then {measure}", case.params);
        }
        require_same_bound(name, case, before)?;
        if let Some(reason) = why_stale(local, case) {
            bail!("{name}: the case {} is stale: {reason}; {measure}", case.params);
        }
    }
    Ok(())
}

/// Errors: a case whose time is bound by other work, or in another unit, than the accepted one's of the same code.
pub fn require_same_bounds(local: &RecordFile, accepted: &RecordFile) -> Result<()> {
    local.cases.iter().try_for_each(|case| require_same_bound(&local.problem, case, accepted.case(&case.params)))
}

fn require_same_bound(name: &str, case: &CaseRecord, accepted: Option<&CaseRecord>) -> Result<()> {
    let Some(accepted) = accepted.filter(|accepted| of_same_code(case, accepted)) else { return Ok(()) };
    let (Outcome::Measured { row: new }, Outcome::Measured { row: old }) = (&case.outcome, &accepted.outcome) else {
        return Ok(());
    };
    match changed_bound(old, new)? {
        None => Ok(()),
        Some(path) => bail!(
            "{name}: the case {} has another work or unit in {path}, which bound its time, than the accepted one; measure again",
            case.params
        ),
    }
}

/// Whether both cases were measured by the same code, so that their rows have the same parts.
fn of_same_code(case: &CaseRecord, accepted: &CaseRecord) -> bool {
    accepted.revision == case.revision
}

/// The first outcome within a row that is measured in `old` and something else in `new`, and what; with `all_parts` also the
/// first list of samples that `new` lacks, and the first list or object that is empty there alone.
fn lost_measurement(path: &str, old: &Value, new: Option<&Value>, all_parts: bool) -> Option<(String, String)> {
    let within = match (old, new) {
        (Value::Object(old), Some(Value::Object(new))) => {
            let [was, is] = [old, new].map(|fields| fields.get("kind").and_then(Value::as_str));
            if let Some(kind) = is.filter(|kind| was == Some("measured") && *kind != "measured") {
                return Some((path.into(), kind.into()));
            }
            let below =
                |(key, old): (&String, &Value)| lost_measurement(&join(path, key), old, new.get(key), all_parts);
            old.iter().find_map(below)
        }
        (Value::Array(old), Some(Value::Array(new))) => {
            let mut parts = old.iter().enumerate();
            parts.find_map(|(at, old)| lost_measurement(&join(path, &at.to_string()), old, new.get(at), all_parts))
        }
        _ => (all_parts && has_samples(old)).then(|| (path.into(), "missing".into())),
    };
    let is_emptied = all_parts && new.is_some_and(is_empty) && !is_empty(old);
    within.or_else(|| is_emptied.then(|| (path.into(), "missing".into())))
}

/// Of a list or an object.
fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn has_samples(row: &Value) -> bool {
    match row {
        Value::Object(fields) => fields.contains_key("samples") || fields.values().any(has_samples),
        Value::Array(rows) => rows.iter().any(has_samples),
        _ => false,
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.into() } else { format!("{path}.{key}") }
}

/// The first list of samples whose unit, or whose work where `old` has it, is another in `new`: the floor of a time depends on
/// both.
fn changed_bound(old: &Value, new: &Value) -> Result<Option<String>> {
    let new = samples_of(new)?;
    let changed = |(path, old): &(String, Samples)| {
        let differs = |new: &Samples| new.unit != old.unit || old.work.is_some() && new.work != old.work;
        new.iter().any(|(other, new)| other == path && differs(new))
    };
    Ok(samples_of(old)?.into_iter().find(changed).map(|(path, _)| path))
}

#[cfg(test)]
mod tests;
