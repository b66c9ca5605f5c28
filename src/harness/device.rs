//! Checks that need a GPU: what one is, how its result is recorded, and which recorded results still count.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use super::problem::Verdict;
use super::record::{CaseRecord, Outcome, Profile, RecordFile, Run};
use super::store::Layout;

/// The record's name: `report/records/gpu/device.json` on the machine, `snapshots/gpu/device.json` once accepted.
pub const DEVICE: &str = "device";

/// Bumped when checks prove something else under their old names; earlier results are stale then.
const REVISION: u32 = 1;

/// What only a GPU can show.
#[derive(Serialize)]
pub struct DeviceCheck {
    /// Unique among all device checks; a result belongs to its name.
    pub name: &'static str,
    /// The same as a sentence.
    pub proves: &'static str,
    /// How many it needs.
    pub gpus: usize,
    /// File names under `kernels/` that it runs. A result counts while their code stays the same.
    pub kernels: &'static [&'static str],
    /// Runs in a process of its own. An error that holds [`crate::error::Fault::NotAvailable`] is a skip.
    #[serde(skip)]
    pub run: fn() -> Result<Verdict>,
}

impl DeviceCheck {
    /// A check that needs one GPU and runs none of our kernels.
    pub const fn new(name: &'static str, proves: &'static str, run: fn() -> Result<Verdict>) -> Self {
        Self { name, proves, gpus: 1, kernels: &[], run }
    }

    pub const fn on_two_gpus(self) -> Self {
        Self { gpus: 2, ..self }
    }

    pub const fn with_kernels(self, kernels: &'static [&'static str]) -> Self {
        Self { kernels, ..self }
    }

    /// Why a machine with so many GPUs cannot run it; `None` where it can.
    pub fn lacks(&self, gpus: usize) -> Option<String> {
        let needs = if self.gpus == 1 { "a GPU".to_string() } else { format!("{} GPUs", self.gpus) };
        let has = if gpus == 0 { "none".to_string() } else { gpus.to_string() };
        (gpus < self.gpus).then(|| format!("needs {needs}, this machine has {has}"))
    }

    fn params(&self) -> Value {
        json!({ "check": self.name })
    }
}

/// All device checks, with what their results depend on as it is here.
pub struct DeviceGroup {
    pub checks: Vec<&'static DeviceCheck>,
    /// The hash of each kernel's code, by its file name.
    kernels: BTreeMap<&'static str, String>,
    /// Versions of libraries by name; one that is not here is not compared.
    versions: BTreeMap<&'static str, String>,
}

impl DeviceGroup {
    /// Errors: a kernel's file that cannot be read.
    pub fn new(
        layout: &Layout,
        checks: Vec<&'static DeviceCheck>,
        versions: BTreeMap<&'static str, String>,
    ) -> Result<Self> {
        let files = checks.iter().flat_map(|check| check.kernels);
        let kernels = files.map(|file| Ok((*file, layout.kernel_hash(file)?))).collect::<Result<_>>()?;
        Ok(Self { checks, kernels, versions })
    }

    /// The record's entry of one result. `Err` is a failure with its reason.
    pub fn entry(&self, check: &DeviceCheck, run: &Run, elapsed_s: f64, ended: Result<&str, &str>) -> CaseRecord {
        let kernels = check.kernels.iter().map(|file| (file.to_string(), self.kernels[file].clone())).collect();
        let outcome = match ended {
            Ok(note) => Outcome::Measured { row: json!({ "note": note }) },
            Err(error) => Outcome::Failed { error: error.into() },
        };
        CaseRecord {
            grid: DEVICE.into(),
            params: check.params(),
            run: run.id.clone(),
            revision: REVISION,
            kernels,
            elapsed_s,
            conditions: None,
            outcome,
        }
    }

    /// Brings entries into the order of the checks.
    pub fn sort(&self, file: &mut RecordFile) {
        let params: Vec<Value> = self.checks.iter().map(|check| check.params()).collect();
        file.sort_like(params.iter());
    }

    /// The results that still count: the accepted ones, and over them this machine's own. A check that cannot run here
    /// keeps its accepted result this way.
    pub fn recorded(&self, layout: &Layout) -> Result<RecordFile> {
        let mut recorded = RecordFile::new(DEVICE, Profile::Gpu);
        let files = [layout.accepted(Profile::Gpu, DEVICE), layout.local(Profile::Gpu, DEVICE)];
        for path in files {
            let Some(file) = layout.read_file(&path, DEVICE, Profile::Gpu)? else { continue };
            for case in file.cases.iter().filter(|case| self.why_stale(&file, case).is_none()) {
                file.run(&case.run).into_iter().for_each(|run| recorded.put(case.clone(), run));
            }
        }
        self.sort(&mut recorded);
        Ok(recorded)
    }

    /// Why a result says nothing of the present kernels and libraries; `None` where it still counts.
    fn why_stale(&self, file: &RecordFile, case: &CaseRecord) -> Option<String> {
        let Some(check) = self.checks.iter().find(|check| check.params() == case.params) else {
            return Some("there is no such check any more".into());
        };
        if case.revision != REVISION {
            return Some(format!("it is of revision {}, the checks are at {REVISION}", case.revision));
        }
        if let Some(name) = check.kernels.iter().find(|name| case.kernels.get(**name) != self.kernels.get(*name)) {
            return Some(format!("kernels/{name} has changed since"));
        }
        let software = file.run(&case.run).map(|run| &run.software);
        let ran_with = |name: &str| software.and_then(|software| software.get(name));
        let (name, here) = self.versions.iter().find(|(name, here)| ran_with(name) != Some(*here))?;
        let then = ran_with(name).map_or("another", String::as_str);
        Some(format!("it ran with {name} {then}, here is {here}"))
    }

    /// What the accepted results leave open, in words; `None` when every check has passed with what is here.
    pub fn unproven(&self, layout: &Layout) -> Result<Option<String>> {
        let path = layout.accepted(Profile::Gpu, DEVICE);
        let (shown, total) = (layout.display(&path), self.checks.len());
        let Some(file) = layout.read_file(&path, DEVICE, Profile::Gpu)? else {
            return Ok(Some(format!(
                "unattested: {shown} does not exist, so no GPU has shown any of {total} checks; on one, run `cs336 grade --device`"
            )));
        };
        let mut open: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for check in &self.checks {
            let reason = match file.case(&check.params()) {
                None => Some("not run".into()),
                Some(case) => self.why_stale(&file, case).or(match &case.outcome {
                    Outcome::Measured { .. } => None,
                    _ => Some("failed".into()),
                }),
            };
            if let Some(reason) = reason {
                open.entry(reason).or_default().push(check.name);
            }
        }
        let count: usize = open.values().map(Vec::len).sum();
        let reasons = open.iter().map(|(reason, names)| format!("{} ({reason})", names.join(", ")));
        let words =
            || format!("unattested: {count} of {total} checks by {shown}: {}", reasons.collect::<Vec<_>>().join("; "));
        Ok((count > 0).then(words))
    }

    /// Whether this machine's results may be promoted; the error says why not and what to do.
    pub fn acceptable(&self, local: &RecordFile) -> Result<()> {
        if let Some(run) = local.runs.iter().find(|run| run.dirty) {
            bail!("run {} is of a tree with uncommitted changes; commit, then `cs336 grade --device`", run.id);
        }
        for case in &local.cases {
            let name = case.params["check"].as_str().unwrap_or_default();
            if let Outcome::Failed { error } = &case.outcome {
                bail!("{name} failed ({error}); fix it, then `cs336 grade --device`");
            }
            let stale = self.why_stale(local, case);
            ensure!(stale.is_none(), "{name} is stale: {}; `cs336 grade --device`", stale.unwrap_or_default());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
