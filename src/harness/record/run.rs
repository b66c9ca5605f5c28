//! What a run must say of itself, to be read and to be accepted.

use std::time::{Duration, SystemTime};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::values::require_counts;
use super::{MAX_PROCESSORS, Machine, Profile, RecordFile, Run};

/// When the course began whose handout is answered.
const EARLIEST: &str = "2025-04-01T00:00:00Z";
/// How a run's id begins.
pub const ID_TIME: &str = "%Y%m%dT%H%M%SZ";

impl Run {
    /// Id, time and commit are printed and compared, so they must be what a run writes.
    pub(super) fn validate(&self) -> Result<()> {
        let is_word = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        ensure!(is_word(&self.id), "the id is {:?}: use letters, digits and hyphens", self.id);
        ensure!(is_word(&self.commit), "the commit is {:?}: expected a hash or \"unknown\"", self.commit);
        let started: Result<jiff::Timestamp, _> = self.started.parse();
        let Machine { cores, memory_bytes, gpus, .. } = &self.machine;
        ensure!(
            (*cores as f64) < MAX_PROCESSORS,
            "its machine has {cores} cores: expected fewer than {MAX_PROCESSORS:e}"
        );
        let memories = gpus.iter().map(|gpu| gpu.memory_bytes).chain([*memory_bytes]);
        memories.map(Value::from).try_for_each(|bytes| require_counts(&bytes))?;
        ensure!(started.is_ok(), "it started at {:?}: expected a time as in 2026-11-21T07:32:00Z", self.started);
        Ok(())
    }

    /// Errors: it cannot be repeated, since the tree had changes; it names no machine; it started before [`EARLIEST`], at another
    /// time than its id says, or later than now, by more than clocks of two machines differ.
    pub(super) fn acceptable(&self) -> Result<()> {
        const A_DAY: Duration = Duration::from_secs(24 * 60 * 60);
        let Self { id, started, .. } = self;
        ensure!(
            self.commit != "unknown",
            "run {id} is of no known commit: git failed or is missing, or the tree is no checkout; mend that, then measure again"
        );
        if let Some(changes) = self.changes() {
            bail!("run {id} was measured from a tree with {changes}; commit, undo or remove them, then measure again");
        }
        let Machine { cpu, cores, memory_bytes, .. } = &self.machine;
        let is_whole = !cpu.is_empty() && *cores > 0 && *memory_bytes > 0;
        ensure!(is_whole, "run {id} does not say on which processor, cores and memory it ran; measure again");
        let at: jiff::Timestamp = started.parse()?;
        ensure!(
            at >= EARLIEST.parse()?,
            "run {id} is of {started}, when there was no handout; correct the clock, then measure again"
        );
        let (of_id, expected) = (id.split('-').next().unwrap_or_default(), at.strftime(ID_TIME).to_string());
        let is_time = jiff::civil::DateTime::strptime(ID_TIME, of_id).is_ok();
        ensure!(
            !is_time || of_id == expected,
            "run {id} started at {started}, which its id contradicts; measure again"
        );
        let is_past = SystemTime::from(at) < SystemTime::now() + A_DAY;
        ensure!(is_past, "run {id} is of {started}, which is still to come; correct the clock, then measure again");
        Ok(())
    }

    /// "uncommitted changes (modified: suites/p.toml)"; `None` if the tree was the commit's.
    pub fn changes(&self) -> Option<String> {
        const SHOWN: usize = 5;
        let more = if self.modified.len() > SHOWN { ", .." } else { "" };
        let names = self.modified[..self.modified.len().min(SHOWN)].join(", ");
        let files = if names.is_empty() { String::new() } else { format!(" (modified: {names}{more})") };
        self.dirty.then(|| format!("uncommitted changes{files}"))
    }
}

impl RecordFile {
    /// Errors: as those of [`Run::acceptable`]; a run of the GPU's profile that names no GPU.
    pub fn require_acceptable_runs(&self) -> Result<()> {
        for run in &self.runs {
            run.acceptable()?;
            let has_device = self.profile == Profile::Cpu || !run.machine.gpus.is_empty();
            ensure!(has_device, "run {} had no GPU; measure on a machine that has one", run.id);
        }
        Ok(())
    }
}
