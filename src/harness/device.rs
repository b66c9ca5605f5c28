//! Checks that need a GPU: what a check is, how its result is recorded, and which recorded results still count.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use super::problem::Verdict;
use super::record::{CaseRecord, Outcome, Profile, RecordFile, Run};
use super::store::Layout;

/// The record's name: `report/records/gpu/device.json` on the machine, `snapshots/gpu/device.json` once accepted.
pub const DEVICE: &str = "device";

/// Bump it when a check changes what it proves but keeps its name. Earlier results are then stale.
const REVISION: u32 = 1;

/// A check that needs a GPU.
#[derive(Serialize)]
pub struct DeviceCheck {
    /// Unique among all device checks; a result belongs to its name.
    pub name: &'static str,
    /// What the check proves, as a sentence.
    pub proves: &'static str,
    /// The GPUs that the whole proof needs. With fewer the check still runs, on ranks that share a GPU, and its result leaves
    /// the rest open.
    pub gpus: usize,
    /// File names under `kernels/` that the check runs. A change of their code makes its result stale.
    pub kernels: &'static [&'static str],
    /// Runs in its own process. An error that holds [`crate::error::Fault::NotAvailable`] is a skip.
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

    /// Why a machine with `gpus` GPUs cannot run the check; `None` if it can.
    pub fn lacks(&self, gpus: usize) -> Option<String> {
        (gpus == 0).then(|| "needs a GPU, this machine has none".to_string())
    }

    /// Why a result that passed on `run`'s machine is not the whole proof; `None` if it is.
    fn leaves_open(&self, run: Option<&Run>) -> Option<String> {
        let gpus = run.map_or(0, |run| run.machine.gpus.len());
        (self.gpus > gpus.max(1)).then(|| format!("passed on ranks that share a GPU, not yet on {} GPUs", self.gpus))
    }

    fn params(&self) -> Value {
        json!({ "check": self.name })
    }
}

/// All device checks, with the present kernel hashes and library versions.
pub struct DeviceGroup {
    pub checks: Vec<&'static DeviceCheck>,
    /// The hash of each kernel's code, by its file name.
    kernels: BTreeMap<&'static str, String>,
    /// Versions of libraries by name. A library that is missing here is not compared.
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

    /// Errors: a kernel of the check has changed since the hashes were taken, so that nobody knows which code the check ran.
    pub fn require_same_kernels(&self, layout: &Layout, check: &DeviceCheck) -> Result<()> {
        for file in check.kernels {
            ensure!(
                layout.kernel_hash(file)? == self.kernels[file],
                "{file} changed during the checks, so the result of {} is not recorded: run it again",
                check.name
            );
        }
        Ok(())
    }

    /// Adds one result to a record, which keeps the order of the checks.
    pub fn put(&self, file: &mut RecordFile, run: &Run, check: &DeviceCheck, outcome: Outcome, elapsed_s: f64) {
        let kernels = check.kernels.iter().map(|file| (file.to_string(), self.kernels[file].clone())).collect();
        let case = CaseRecord {
            grid: DEVICE.into(),
            params: check.params(),
            run: run.id.clone(),
            revision: REVISION,
            kernels,
            elapsed_s,
            conditions: None,
            busy_processors: None,
            outcome,
        };
        file.put(case, run);
        self.sort(file);
    }

    fn sort(&self, file: &mut RecordFile) {
        let params: Vec<Value> = self.checks.iter().map(|check| check.params()).collect();
        file.sort_like(params.iter());
    }

    /// The results that still count. This machine's results replace accepted ones; a check that cannot run here keeps its
    /// accepted result.
    pub fn recorded(&self, layout: &Layout) -> Result<RecordFile> {
        let mut recorded = RecordFile::new(DEVICE, Profile::Gpu);
        let local = layout.read_file(&layout.local(Profile::Gpu, DEVICE), DEVICE, Profile::Gpu);
        for file in [layout.read_accepted_file(DEVICE, Profile::Gpu), local] {
            let Some(file) = file? else { continue };
            for case in file.cases.iter().filter(|case| self.why_stale(&file, case).is_none()) {
                if self.is_weaker(&file, case, &recorded) {
                    continue;
                }
                file.run(&case.run).into_iter().for_each(|run| recorded.put(case.clone(), run));
            }
        }
        self.sort(&mut recorded);
        Ok(recorded)
    }

    /// Whether a result passed with fewer GPUs than the check needs, and `known` has the whole proof.
    fn is_weaker(&self, file: &RecordFile, case: &CaseRecord, known: &RecordFile) -> bool {
        let whole = |file: &RecordFile, case: &CaseRecord| {
            let check = self.checks.iter().find(|check| check.params() == case.params);
            let passed = matches!(case.outcome, Outcome::Measured { .. });
            passed.then(|| check.is_some_and(|check| check.leaves_open(file.run(&case.run)).is_none()))
        };
        whole(file, case) == Some(false) && known.case(&case.params).is_some_and(|old| whole(known, old) == Some(true))
    }

    /// Why a result does not count for the present kernels and libraries; `None` if it counts.
    fn why_stale(&self, file: &RecordFile, case: &CaseRecord) -> Option<String> {
        let Some(check) = self.checks.iter().find(|check| check.params() == case.params) else {
            return Some("this check no longer exists".into());
        };
        if case.revision != REVISION {
            return Some(format!("it has revision {}, the checks have revision {REVISION}", case.revision));
        }
        if let Some(name) = check.kernels.iter().find(|name| case.kernels.get(**name) != self.kernels.get(*name)) {
            return Some(format!("kernels/{name} has changed since"));
        }
        let software = file.run(&case.run).map(|run| &run.software);
        let ran_with = |name: &str| software.and_then(|software| software.get(name));
        let (name, here) = self.versions.iter().find(|(name, here)| ran_with(name) != Some(*here))?;
        let then = ran_with(name).map_or("another", String::as_str);
        Some(format!("it ran with {name} {then}, this machine has {here}"))
    }

    /// Which checks have no valid accepted result, and why; `None` if every check has one.
    pub fn unproven(&self, layout: &Layout) -> Result<Option<String>> {
        let path = layout.accepted(Profile::Gpu, DEVICE);
        let (shown, total) = (layout.display(&path), self.checks.len());
        let Some(file) = layout.read_accepted_file(DEVICE, Profile::Gpu)? else {
            return Ok(Some(format!(
                "unattested: {shown} does not exist, so none of {total} checks has passed; on a GPU, run `cs336 grade --device`"
            )));
        };
        let mut open: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for check in &self.checks {
            let reason = match file.case(&check.params()) {
                None => Some("not run".into()),
                Some(case) => self.why_stale(&file, case).or(match &case.outcome {
                    Outcome::Measured { .. } => check.leaves_open(file.run(&case.run)),
                    _ => Some("failed".into()),
                }),
            };
            if let Some(reason) = reason {
                open.entry(reason).or_default().push(check.name);
            }
        }
        let count: usize = open.values().map(Vec::len).sum();
        let reasons = open.iter().map(|(reason, names)| format!("{} ({reason})", names.join(", ")));
        let message =
            || format!("unattested: {count} of {total} checks by {shown}: {}", reasons.collect::<Vec<_>>().join("; "));
        Ok((count > 0).then(message))
    }

    /// Whether this machine's results may be promoted; the error says why not and what to do.
    pub fn acceptable(&self, local: &RecordFile) -> Result<()> {
        local.require_acceptable_runs()?;
        for case in &local.cases {
            let name = case.params["check"].as_str().unwrap_or_default();
            match &case.outcome {
                Outcome::Measured { .. } => {}
                Outcome::Failed { error } => bail!("{name} failed ({error}); fix it, then `cs336 grade --device`"),
                Outcome::NotRun { .. } | Outcome::OutOfMemory { .. } => {
                    bail!("{name} was not run, so the record proves nothing of it; `cs336 grade --device`")
                }
            }
            let stale = self.why_stale(local, case);
            ensure!(stale.is_none(), "{name} is stale: {}; `cs336 grade --device`", stale.unwrap_or_default());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
