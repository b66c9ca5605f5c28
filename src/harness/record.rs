//! Records: each measured case with its parameters, its run and its outcome.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::conditions::Conditions;
use super::floor;
use super::samples::{check_times, each_samples, round_times, round_to_clock};
use crate::json;

/// The version of a record file's JSON structure. Files of another version are refused. A new parameter with a default
/// and a new optional field of a row do not change it.
pub const SCHEMA: u32 = 1;

/// Which of a suite's grids ran: `cpu` takes minutes on two cores, `gpu` is the handout's grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    Cpu,
    Gpu,
}

impl Profile {
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Gpu];

    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
        }
    }
}

impl std::fmt::Display for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One problem's records under one profile: `report/records/<profile>/<problem>.json` here,
/// `snapshots/<profile>/<problem>.json` once accepted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordFile {
    pub schema: u32,
    pub problem: String,
    pub profile: Profile,
    pub runs: Vec<Run>,
    pub cases: Vec<CaseRecord>,
}

/// One case of a grid and how it ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseRecord {
    /// The grid's name within its profile, such as "warmup".
    pub grid: String,
    pub params: Value,
    /// The id of the [`Run`] that measured this case.
    pub run: String,
    pub revision: u32,
    /// File name under `kernels/` to the hash of its content, for the kernels that the case used.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kernels: BTreeMap<String, String>,
    /// Wall time of the whole case, warm-up included.
    pub elapsed_s: f64,
    /// `None` if the device has no sensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Conditions>,
    /// Of the host, while the case ran, on average, those of other users among them. `None` where the kernel does not say, and
    /// in records that are older.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_processors: Option<f64>,
    pub outcome: Outcome,
}

/// How a case ended. An expected failure is a variant, never a sentinel value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    Measured { row: Value },
    OutOfMemory { requested_bytes: Option<u64>, predicted_bytes: Option<u64>, message: String },
    NotRun { reason: String, needs: String, has: String },
    Failed { error: String },
}

impl Outcome {
    pub fn is_not_run(&self) -> bool {
        matches!(self, Self::NotRun { .. })
    }

    /// The error, if the case failed as a whole or in a column; of several columns the first one's.
    pub fn failure(&self) -> Option<&str> {
        match self {
            Self::Failed { error } => Some(error),
            Self::Measured { row } => failure_within(row),
            _ => None,
        }
    }
}

fn failure_within(row: &Value) -> Option<&str> {
    match row {
        Value::Object(fields) if fields.get("kind").is_some_and(|kind| kind == "failed") => {
            fields.get("error")?.as_str()
        }
        Value::Object(fields) => fields.values().find_map(failure_within),
        Value::Array(rows) => rows.iter().find_map(failure_within),
        _ => None,
    }
}

/// One measurement session of one build on one machine. Every printed number belongs to a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The date and a random tail: `20261121T073200Z-4f2a`.
    pub id: String,
    /// RFC 3339, UTC.
    pub started: String,
    /// The commit of the tree that the program ran in (or was bundled from), or "unknown" outside a checkout.
    pub commit: String,
    /// Whether tracked files, or those of a bundle, differed from that commit.
    pub dirty: bool,
    /// Those files, where they are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modified: Vec<String>,
    /// SHA-256 of the suite file.
    pub suite_hash: String,
    /// SHA-256 of the Python peers; `None` where there are none, and in records older than this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers_hash: Option<String>,
    pub machine: Machine,
    pub software: BTreeMap<String, String>,
    /// Settings that affect timings and are constant during a run: threads, tf32, a GPU's power limit and maximum clocks.
    pub settings: BTreeMap<String, String>,
    /// The peaks that this run's timings were checked against.
    pub peaks: Peaks,
}

/// The machine that was measured. It has no host name because records are published.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_bytes: u64,
    pub os: String,
    /// Empty without a GPU.
    pub gpus: Vec<Gpu>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    pub name: String,
    pub memory_bytes: u64,
    pub compute_capability: String,
}

/// The machine's peak speeds, and their source: a data sheet or a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peaks {
    /// Floating-point operations per second, by precision.
    pub flops_per_s: BTreeMap<String, f64>,
    pub bytes_per_s: f64,
    /// Traffic below this size may come from a cache, so it is not compared with `bytes_per_s`.
    pub cache_bytes: f64,
    pub source: String,
}

impl RecordFile {
    pub fn new(problem: &str, profile: Profile) -> Self {
        Self { schema: SCHEMA, problem: problem.into(), profile, runs: Vec::new(), cases: Vec::new() }
    }

    /// Parses and validates; `origin` is what messages call the file.
    pub fn parse(text: &str, origin: &str) -> Result<Self> {
        let raw: Value = json::from_str(text).with_context(|| format!("{origin} is not valid JSON (truncated?)"))?;
        check_schema(&raw, origin)?;
        require_lines(&raw).with_context(|| format!("{origin} holds what no run can write"))?;
        let file: Self = json::from_value(&raw).with_context(|| format!("{origin} is not a record file of cs336"))?;
        file.validate().with_context(|| format!("{origin} holds what no run can write"))?;
        Ok(file)
    }

    /// Errors: a run without a proper id, time or commit, or with the id of another; a case without its run; two cases with
    /// the same parameters; a count above 2^53; more bytes than its run's machine has; an invalid sample, one that takes longer than
    /// its case, or one below the floor of that machine.
    pub fn validate(&self) -> Result<()> {
        let mut runs = HashMap::new();
        for (i, run) in self.runs.iter().enumerate() {
            run.validate().with_context(|| format!("run {i}"))?;
            ensure!(runs.insert(&run.id, run).is_none(), "two runs have the id {:?}", run.id);
        }
        for (i, case) in self.cases.iter().enumerate() {
            let unknown = || format!("case {i} names run {:?}, but the file has no such run", case.run);
            let run = runs.get(&case.run).with_context(unknown)?;
            case.validate(run).with_context(|| format!("case {i} ({})", case.params))?;
        }
        self.refuse_equal_cases()
    }

    /// Replaces each case's parameters by their canonical form, which fills in keys added since the case was measured.
    /// Parameters that `canonical` cannot read are kept; no suite can contain them.
    ///
    /// Errors: two cases then have the same parameters.
    pub fn with_canonical_params(mut self, canonical: impl Fn(&Value) -> Option<Value>) -> Result<Self> {
        for case in &mut self.cases {
            case.params = canonical(&case.params).unwrap_or_else(|| std::mem::take(&mut case.params));
        }
        self.refuse_equal_cases()?;
        Ok(self)
    }

    fn refuse_equal_cases(&self) -> Result<()> {
        let mut cases = HashMap::new();
        for (i, case) in self.cases.iter().enumerate() {
            if let Some(first) = cases.insert(&case.params, i) {
                bail!("cases {first} and {i} have the same parameters {}; delete one of them", case.params);
            }
        }
        Ok(())
    }

    pub fn run(&self, id: &str) -> Option<&Run> {
        self.runs.iter().find(|r| r.id == id)
    }

    pub fn case(&self, params: &Value) -> Option<&CaseRecord> {
        self.cases.iter().find(|c| &c.params == params)
    }

    /// Replaces the case with the same parameters, or appends `case`. Drops runs that have no cases.
    pub fn put(&mut self, case: CaseRecord, run: &Run) {
        if !self.runs.iter().any(|r| r.id == run.id) {
            self.runs.push(run.clone());
        }
        match self.cases.iter_mut().find(|c| c.params == case.params) {
            Some(old) => *old = case,
            None => self.cases.push(case),
        }
        self.drop_unused_runs();
    }

    /// Keeps the cases that `wanted` accepts, and their runs.
    pub fn retain(&mut self, wanted: impl Fn(&CaseRecord) -> bool) {
        self.cases.retain(wanted);
        self.drop_unused_runs();
    }

    /// Brings the cases into the order of `params`, so that a resumed file equals one measured without a pause.
    pub fn sort_like<'a>(&mut self, params: impl Iterator<Item = &'a Value>) {
        let order: Vec<&Value> = params.collect();
        self.cases.sort_by_key(|case| order.iter().position(|p| *p == &case.params).unwrap_or(usize::MAX));
    }

    fn drop_unused_runs(&mut self) {
        let cases = &self.cases;
        self.runs.retain(|r| cases.iter().any(|c| c.run == r.id));
    }

    /// The file's text: valid JSON with one run and one case a line, so that a diff shows which cases changed. Times of rows
    /// are rounded as [`round_times`] says.
    pub fn to_json(&self) -> Result<String> {
        let Self { schema, problem, profile, runs, cases } = self;
        let header =
            format!("  \"schema\": {schema},\n  \"problem\": {},\n  \"profile\": \"{profile}\"", json!(problem));
        let runs = lines(runs.iter().map(serde_json::to_string))?;
        let cases = lines(cases.iter().map(|case| serde_json::to_string(&case.rounded())))?;
        Ok(format!("{{\n{header},\n  \"runs\": {runs},\n  \"cases\": {cases}\n}}\n"))
    }
}

/// Longer than any case: a year.
const MAX_ELAPSED_S: f64 = 3.2e7;

/// More than any host has.
const MAX_PROCESSORS: f64 = 1e5;

impl CaseRecord {
    fn validate(&self, run: &Run) -> Result<()> {
        let elapsed_s = self.elapsed_s;
        ensure!(
            (0.0..MAX_ELAPSED_S).contains(&elapsed_s),
            "it took {elapsed_s:e} s: expected 0 to {MAX_ELAPSED_S:e} s"
        );
        let busy = self.busy_processors.unwrap_or_default();
        ensure!(
            (0.0..MAX_PROCESSORS).contains(&busy),
            "{busy:e} processors were busy: expected 0 to {MAX_PROCESSORS:e}"
        );
        self.conditions.as_ref().map_or(Ok(()), Conditions::validate)?;
        let Outcome::Measured { row } = &self.outcome else { return Ok(()) };
        require_counts(row)?;
        each_samples(row, &mut |at, samples| samples.validate().with_context(|| at.to_string()))?;
        check_times(row, elapsed_s)?;
        check_bytes(row, &run.machine)?;
        floor::check(row, &run.peaks)
    }

    fn rounded(&self) -> Self {
        let mut case = self.clone();
        case.elapsed_s = round_to_clock(case.elapsed_s);
        if let Outcome::Measured { row } = &mut case.outcome {
            round_times(row);
        }
        case
    }
}

/// A JSON array with one item a line.
fn lines(items: impl Iterator<Item = serde_json::Result<String>>) -> Result<String> {
    let items: Vec<String> = items.map(|item| Ok(format!("\n    {}", item?))).collect::<Result<_>>()?;
    Ok(if items.is_empty() { "[]".into() } else { format!("[{}\n  ]", items.join(",")) })
}

fn check_schema(raw: &Value, origin: &str) -> Result<()> {
    let schema = raw.get("schema").and_then(Value::as_u64);
    let schema = schema.with_context(|| format!("{origin} has no \"schema\" number, so cs336 did not write it"))?;
    match schema.cmp(&u64::from(SCHEMA)) {
        Ordering::Equal => Ok(()),
        Ordering::Less => bail!("{origin} has the old schema {schema}; this cs336 reads schema {SCHEMA}"),
        Ordering::Greater => {
            bail!("{origin} has schema {schema}, from a newer cs336; this one reads schema {SCHEMA}")
        }
    }
}

mod run;
#[cfg(test)]
mod tests;
mod values;

use values::{require_counts, require_lines};

pub use run::ID_TIME;
pub use values::{check_bytes, check_ranks};
