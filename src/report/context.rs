//! Records as the templates see them: cases with their outcome flattened, samples with their statistics.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::escape;
use super::runs::Seen;
use crate::harness::answer::RecordSet;
use crate::harness::record::{CaseRecord, Outcome, Profile};
use crate::harness::stats::{Summary, quantile};
use crate::harness::suite::Suite;

/// What a template sees as `cpu` or `gpu`; `None` where no case is recorded.
///
/// `{profile, machine, memory_bytes, run, runs, date, commit, dirty, source, settings, peaks, seen, conditions, cases}`;
/// every text is Markdown. `memory_bytes` is the device's; `seen` is a [`Seen`] and `conditions` its words, both none
/// where no sensor looked.
pub fn record_set(records: Option<&RecordSet>) -> Result<Option<Value>> {
    let Some(records) = records.filter(|r| !r.file.cases.is_empty()) else { return Ok(None) };
    let profile = records.file.profile;
    let runs = records.runs();
    let Some(newest) = runs.last() else { return Ok(None) };
    let cases = records.file.cases.iter().enumerate().map(|(at, record)| case(record, records.stale.get(&at)));
    let cases: Vec<Value> = cases.collect::<Result<_>>()?;
    let seen = Seen::of(records.file.cases.iter());
    Ok(Some(json!({
        "profile": profile.name(),
        "machine": records.machine()?,
        "run": newest.id,
        "runs": runs.iter().map(|r| r.id.as_str()).collect::<Vec<_>>(),
        "date": newest.started.get(..10).unwrap_or(&newest.started),
        "commit": newest.commit.get(..10).unwrap_or(&newest.commit),
        "dirty": newest.dirty,
        "source": records.source(),
        "memory_bytes": records.memory_bytes()?,
        "settings": newest.settings,
        "peaks": newest.peaks,
        "conditions": seen.as_ref().map(|seen| escape::markdown(&seen.words())),
        "seen": seen,
        "cases": cases,
    })))
}

/// What a template sees as `planned`: `cpu` and `gpu`, each a list of `{grid, params}` in the suite's order.
pub fn planned(suite: Option<&Suite>) -> Value {
    let of = |profile| -> Vec<Value> {
        let cases = suite.into_iter().flat_map(|suite| suite.cases(profile));
        cases.map(|(grid, params)| json!({"grid": grid, "params": params})).collect()
    };
    json!({"cpu": of(Profile::Cpu), "gpu": of(Profile::Gpu)})
}

/// One case: `grid`, `params`, `run`, `kind`, `elapsed_s`, `stale` (why, or none), `conditions` where a sensor looked, and
/// what its kind of outcome has; nothing else is defined.
fn case(record: &CaseRecord, stale: Option<&String>) -> Result<Value> {
    let mut fields = Map::new();
    fields.insert("stale".into(), stale.map(|why| escape::markdown(why)).into());
    fields.insert("grid".into(), record.grid.clone().into());
    fields.insert("params".into(), record.params.clone());
    fields.insert("run".into(), record.run.clone().into());
    fields.insert("elapsed_s".into(), record.elapsed_s.into());
    if let Some(conditions) = &record.conditions {
        fields.insert("conditions".into(), serde_json::to_value(conditions)?);
    }
    let mut put = |key: &str, value: Value| fields.insert(key.into(), value);
    let text = |s: &String| Value::from(escape::markdown(s));
    match &record.outcome {
        Outcome::Measured { row } => {
            put("kind", "measured".into());
            put("row", with_statistics(row));
        }
        Outcome::OutOfMemory { requested_bytes, predicted_bytes, message } => {
            put("kind", "out_of_memory".into());
            put("message", text(message));
            for (key, bytes) in [("requested_bytes", requested_bytes), ("predicted_bytes", predicted_bytes)] {
                if let Some(bytes) = bytes {
                    put(key, (*bytes).into());
                }
            }
        }
        Outcome::NotRun { reason, needs, has } => {
            put("kind", "not_run".into());
            put("reason", text(reason));
            put("needs", text(needs));
            put("has", text(has));
        }
        Outcome::Failed { error } => {
            put("kind", "failed".into());
            put("message", text(error));
        }
    }
    Ok(Value::Object(fields))
}

/// Adds `n`, `mean`, `std`, `median`, `min`, `max`, `p99` to every object that holds samples.
pub fn with_statistics(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut out: Map<String, Value> =
                fields.iter().map(|(key, child)| (key.clone(), with_statistics(child))).collect();
            if let Some(samples) = fields.get("samples").and_then(Value::as_array) {
                out.extend(statistics(&samples.iter().filter_map(Value::as_f64).collect::<Vec<_>>()));
            }
            Value::Object(out)
        }
        Value::Array(items) => items.iter().map(with_statistics).collect(),
        plain => plain.clone(),
    }
}

/// The standard deviation is null where one sample has none.
fn statistics(samples: &[f64]) -> Map<String, Value> {
    let Some(Summary { n, mean, std, median, min, max }) = Summary::of(samples) else { return Map::new() };
    let p99 = quantile(samples, 0.99);
    let all = json!({"n": n, "mean": mean, "std": std, "median": median, "min": min, "max": max, "p99": p99});
    all.as_object().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_gain_their_statistics_wherever_they_stand() {
        let row = json!({"steps": [{"forward": {"unit": "s", "samples": [4.0, 1.0, 2.0, 3.0]}}], "note": "x"});
        let forward = &with_statistics(&row)["steps"][0]["forward"];
        assert_eq!(forward["n"], 4);
        assert_eq!(forward["median"], 2.5);
        assert_eq!(forward["min"], 1.0);
        assert_eq!(forward["max"], 4.0);
        assert!((forward["std"].as_f64().unwrap() - (5.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert!((forward["p99"].as_f64().unwrap() - 3.97).abs() < 1e-12);
    }

    #[test]
    fn one_sample_has_no_standard_deviation() {
        let row = with_statistics(&json!({"unit": "s", "samples": [2.0]}));
        assert_eq!(row["std"], Value::Null);
        assert_eq!(row["mean"], 2.0);
        assert_eq!(row["p99"], 2.0);
    }
}
