//! The cases behind the page's numbers: a list that links reach, and their samples for the strip plots.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use super::escape::escape;
use crate::harness::answer::machines::machine_name;
use crate::harness::answer::mark::{self, CaseKey};
use crate::harness::answer::{RecordSet, Records};
use crate::harness::record::{CaseRecord, Outcome, Profile, Run};
use crate::harness::samples::each_samples;
use crate::report::Document;
use crate::report::warnings::in_line;

/// At most this many plain values of a row are shown.
const MOST_VALUES: usize = 60;

/// The record sets of a document by problem and profile.
#[derive(Default)]
pub struct Sets<'a>(BTreeMap<(&'a str, Profile), &'a RecordSet>);

/// "naive_ddp.gpu.3": what a case is called in the page's ids and data.
pub fn name((problem, profile, case): &CaseKey) -> String {
    format!("{problem}.{profile}.{case}")
}

impl<'a> Sets<'a> {
    pub fn of(document: &'a Document) -> Self {
        let mut sets = Self(BTreeMap::new());
        for problem in &document.problems {
            sets.add(&problem.records);
        }
        sets
    }

    fn add(&mut self, records: &'a Records) {
        for set in records.sets() {
            self.0.insert((&set.file.problem, set.profile()), set);
        }
        records.others.values().for_each(|other| self.add(other));
    }

    fn set(&self, key: &CaseKey) -> Result<&'a RecordSet> {
        let (problem, profile, _) = key;
        let set = self.0.get(&(problem.as_str(), *profile)).copied();
        set.with_context(|| format!("a number comes from {}, and the document has no such record", name(key)))
    }

    fn case(&self, key: &CaseKey) -> Result<(&'a CaseRecord, &'a Run, Option<&'a String>)> {
        let set = self.set(key)?;
        let missing = || format!("a number comes from {}, which its record lacks", name(key));
        let case = set.file.cases.get(key.2).with_context(missing)?;
        let run = set.file.runs.iter().find(|run| run.id == case.run).with_context(missing)?;
        Ok((case, run, set.stale.get(&key.2)))
    }

    /// Errors: a mark of the text names a case that the document lacks. Filters make none such, but a template can hold any
    /// character.
    pub fn require_cases(&self, text: &str) -> Result<()> {
        let known = |key: &CaseKey| self.case(key).map(drop);
        mark::keys(text).try_for_each(|key| mark::cases(key).iter().try_for_each(known)).with_context(|| {
            let marks = [mark::KEY, mark::TEXT, mark::END].map(|mark| format!("U+{:04X}", u32::from(mark)));
            format!("delete the characters {}, which only filters may print", marks.join(", "))
        })
    }

    /// The list of the cases, grouped by problem and profile; each entry is the target of its numbers' links.
    pub fn list(&self, keys: &BTreeSet<CaseKey>) -> Result<String> {
        let mut groups: BTreeMap<(&str, Profile), Vec<String>> = BTreeMap::new();
        for key in keys {
            let (case, ..) = self.case(key)?;
            let words = format!("{}: {}; {}; run {}", case.grid, in_line(&case.params), outcome(case), case.run);
            let entry = format!("<li id=\"case-{}\">{}</li>", name(key), escape(&mark::removed(&words)));
            groups.entry((&key.0, key.1)).or_default().push(entry);
        }
        let mut out = String::new();
        for ((problem, profile), entries) in groups {
            let count = entries.len();
            let _ = write!(out, "<details><summary><code>{problem}</code> ({profile}): {count} cases</summary>");
            let _ = writeln!(out, "<ul>{}</ul></details>", entries.concat());
        }
        Ok(out)
    }

    /// Runs and cases as one JSON object, samples to four digits.
    pub fn json(&self, keys: &BTreeSet<CaseKey>) -> Result<String> {
        let (mut runs, mut cases) = (Map::new(), Map::new());
        for key in keys {
            let (case, run, stale) = self.case(key)?;
            runs.entry(&run.id).or_insert_with(|| {
                json!({"machine": machine_name(&run.machine, key.1), "started": run.started, "commit": run.commit,
                    "dirty": run.dirty})
            });
            let (series, values) = contents(case)?;
            let entry = json!({"problem": key.0, "profile": key.1, "grid": case.grid, "params": in_line(&case.params),
                "run": run.id, "outcome": outcome(case), "stale": stale, "series": series, "values": values});
            cases.insert(name(key), entry);
        }
        // a text must not end the element that holds the data
        let data = serde_json::to_string(&json!({"runs": runs, "cases": cases}))?;
        Ok(mark::removed(&data).replace('<', "\\u003c"))
    }
}

fn outcome(case: &CaseRecord) -> &'static str {
    match &case.outcome {
        failed if failed.failure().is_some() => "failed",
        Outcome::Measured { .. } => "measured",
        Outcome::OutOfMemory { .. } => "out of memory",
        Outcome::NotRun { .. } => "not run",
        Outcome::Failed { .. } => "failed",
    }
}

/// Every series of samples of a case: name, unit and samples; and its plain numbers and words.
fn contents(case: &CaseRecord) -> Result<(Vec<Value>, Vec<Value>)> {
    let Outcome::Measured { row } = &case.outcome else { return Ok((Vec::new(), Vec::new())) };
    let (mut series, mut values) = (Vec::new(), Vec::new());
    each_samples(row, &mut |path, samples| {
        let rounded: Vec<f64> = samples.samples.iter().map(|x| four_digits(*x)).collect();
        series.push(json!([path, samples.unit, rounded]));
        Ok(())
    })?;
    plain_values(row, &mut String::new(), &mut values);
    Ok((series, values))
}

fn four_digits(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

/// Numbers and words of a row with their paths; lists are too long to show.
fn plain_values(row: &Value, path: &mut String, values: &mut Vec<Value>) {
    let Some(fields) = row.as_object().filter(|fields| !fields.contains_key("samples")) else { return };
    for (key, value) in fields {
        let length = path.len();
        *path += if length > 0 { "." } else { "" };
        *path += key;
        match value {
            Value::Object(_) => plain_values(value, path, values),
            Value::Array(_) | Value::Null => {}
            _ if values.len() < MOST_VALUES => values.push(json!([path.clone(), value])),
            _ => {}
        }
        path.truncate(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::made_up::MadeUp;
    use crate::report::ProblemInput;

    #[test]
    fn cases_are_listed_with_their_samples_and_an_unknown_one_is_an_error() {
        let row = json!({"step": {"unit": "s", "samples": [0.001_234_56, 2.0]}, "calls": 3, "spans": [1, 2]});
        let records = MadeUp::gpu("x").measured("a", &json!({"size": "</xl>"}), &row).records();
        let problems = vec![ProblemInput { records, ..ProblemInput::default() }];
        let document =
            Document { title: String::new(), assignment: String::new(), summary: None, subject: None, problems };
        let sets = Sets::of(&document);
        let problem = sets.0.keys().next().unwrap().0.to_string();
        let key = |case| BTreeSet::from([(problem.clone(), Profile::Gpu, case)]);
        let json = sets.json(&key(0)).unwrap();
        assert!(json.contains(r#""series":[["step","s",[0.001235,2.0]]],"values":[["calls",3]]"#), "{json}");
        assert!(!json.contains('<'), "{json}");
        let list = sets.list(&key(0)).unwrap();
        assert!(
            list.contains(&format!("<li id=\"case-{problem}.gpu.0\">a: size &lt;/xl&gt;; measured; run ")),
            "{list}"
        );
        assert!(sets.list(&key(1)).is_err());
    }
}
