//! Made-up records for the tests of answers: cases that ended in every way, without a file or a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};

use super::records::{CaseId, RecordSet, Records};
use super::{Answer, mark};
use crate::harness::record::{CaseRecord, Gpu, Machine, Outcome, Peaks, Profile, RecordFile, Run};

/// What an answer quotes, its texts without marks.
pub fn printed(answer: &Answer) -> Value {
    serde_json::from_str(&mark::plain(&answer.quoted().to_string())).unwrap()
}

/// Records of one problem under one profile, built case by case.
pub struct MadeUp {
    file: RecordFile,
    run: Run,
}

impl MadeUp {
    /// A record of two cores.
    pub fn cpu(problem: &str) -> Self {
        Self { file: RecordFile::new(problem, Profile::Cpu), run: run("20260101T000000Z-cpu0", machine(None)) }
    }

    /// A record of one H200.
    pub fn gpu(problem: &str) -> Self {
        let machine = machine(Some("NVIDIA H200"));
        Self { file: RecordFile::new(problem, Profile::Gpu), run: run("20260101T000000Z-gpu0", machine) }
    }

    /// Starts another run for the cases that follow, on a machine with this GPU (`None`: two cores).
    pub fn run(mut self, id: &str, gpu: Option<&str>) -> Self {
        self.run = run(id, machine(gpu));
        self
    }

    pub fn measured(self, grid: &str, params: &impl Serialize, row: &impl Serialize) -> Self {
        let row = serde_json::to_value(row).unwrap();
        self.ended(grid, params, Outcome::Measured { row })
    }

    pub fn out_of_memory(self, grid: &str, params: &impl Serialize) -> Self {
        let message = "CUDA out of memory".into();
        self.ended(
            grid,
            params,
            Outcome::OutOfMemory { requested_bytes: Some(1 << 30), predicted_bytes: None, message },
        )
    }

    pub fn not_run(self, grid: &str, params: &impl Serialize) -> Self {
        let [reason, needs, has] = ["needs 6 GPUs, has 2", "6 GPUs", "2"].map(String::from);
        self.ended(grid, params, Outcome::NotRun { reason, needs, has })
    }

    pub fn failed(self, grid: &str, params: &impl Serialize) -> Self {
        self.ended(grid, params, Outcome::Failed { error: "the worker died".into() })
    }

    fn ended(mut self, grid: &str, params: &impl Serialize, outcome: Outcome) -> Self {
        let case = CaseRecord {
            grid: grid.into(),
            params: serde_json::to_value(params).unwrap(),
            run: self.run.id.clone(),
            revision: 1,
            kernels: BTreeMap::new(),
            elapsed_s: 1.0,
            conditions: None,
            busy_processors: None,
            outcome,
        };
        self.file.put(case, &self.run);
        self
    }

    pub fn set(self) -> RecordSet {
        RecordSet { file: self.file, stale: BTreeMap::new() }
    }

    /// The problem's records, with no others.
    pub fn records(self) -> Records {
        match self.file.profile {
            Profile::Cpu => Records { cpu: Some(self.set()), ..Records::default() },
            Profile::Gpu => Records { gpu: Some(self.set()), ..Records::default() },
        }
    }
}

/// Samples in seconds, as a row holds them.
pub fn seconds(samples: &[f64]) -> Value {
    json!({"unit": "s", "samples": samples})
}

/// A machine with two cores, and with one such GPU where it is named.
pub fn machine(gpu: Option<&str>) -> Machine {
    let gpu = gpu.map(|name| Gpu { name: name.into(), memory_bytes: 141 << 30, compute_capability: "9.0".into() });
    Machine {
        cpu: "made up".into(),
        cores: 2,
        memory_bytes: 24 << 30,
        os: "Linux".into(),
        gpus: gpu.into_iter().collect(),
    }
}

/// The first case of a made-up run.
pub fn source(run: &str, machine: Machine) -> CaseId {
    let profile = if machine.gpus.is_empty() { Profile::Cpu } else { Profile::Gpu };
    CaseId::new("made_up", profile, 0, run, Arc::new(machine))
}

fn run(id: &str, machine: Machine) -> Run {
    let peaks = Peaks { flops_per_s: BTreeMap::new(), bytes_per_s: 1e12, cache_bytes: 0.0, source: "made up".into() };
    Run {
        id: id.into(),
        started: "2026-01-01T00:00:00Z".into(),
        commit: "0123456789".into(),
        dirty: false,
        modified: Vec::new(),
        peers_hash: None,
        suite_hash: String::new(),
        machine,
        software: BTreeMap::new(),
        settings: BTreeMap::new(),
        peaks,
    }
}
