//! Where a number comes from: the commit, the machine and the conditions of a run.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::record::{Gpu, Machine, Run};

/// Facts about the device and its libraries. The caller fills them in, because the harness names no device library.
#[derive(Debug, Clone)]
pub struct Facts {
    pub gpus: Vec<Gpu>,
    pub software: std::collections::BTreeMap<String, String>,
    pub settings: std::collections::BTreeMap<String, String>,
    pub peaks: super::record::Peaks,
}

/// The commit of a tree, and whether tracked files have uncommitted changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commit {
    pub commit: String,
    pub dirty: bool,
}

/// The file in which a bundle stores its commit.
pub const BUNDLE_FILE: &str = "bundle.json";

impl Commit {
    /// The commit of the checkout or unpacked bundle at `root`; "unknown" and dirty for other folders.
    pub fn of(root: &Path) -> Self {
        let from_bundle = || serde_json::from_slice(&std::fs::read(root.join(BUNDLE_FILE)).ok()?).ok();
        from_bundle().or_else(|| from_git(root)).unwrap_or(Self { commit: "unknown".into(), dirty: true })
    }
}

fn from_git(root: &Path) -> Option<Commit> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let commit = git(&["rev-parse", "HEAD"])?;
    // Records, rendered text and templates do not affect measurements: accepting one problem must not dirty the next.
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":!snapshots", ":!templates", ":!report"])?;
    Some(Commit { commit, dirty: !changed.is_empty() })
}

/// Opens a run: a fresh id, the time, the commit and the machine.
pub fn open_run(root: &Path, suite_hash: &str, facts: &Facts) -> Result<Run> {
    let now = jiff::Timestamp::now();
    let Commit { commit, dirty } = Commit::of(root);
    Ok(Run {
        id: run_id(now)?,
        started: now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        commit,
        dirty,
        suite_hash: suite_hash.into(),
        machine: machine(&facts.gpus)?,
        software: facts.software.clone(),
        settings: facts.settings.clone(),
        peaks: facts.peaks.clone(),
    })
}

fn run_id(now: jiff::Timestamp) -> Result<String> {
    let mut tail = [0u8; 2];
    let mut random = std::fs::File::open("/dev/urandom").context("failed to open /dev/urandom")?;
    std::io::Read::read_exact(&mut random, &mut tail).context("failed to read /dev/urandom")?;
    Ok(format!("{}-{:02x}{:02x}", now.strftime("%Y%m%dT%H%M%SZ"), tail[0], tail[1]))
}

/// This machine's processor, cores and memory from `/proc`, with its GPUs.
pub fn machine(gpus: &[Gpu]) -> Result<Machine> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("failed to read {path}"));
    let cpu_info = read("/proc/cpuinfo")?;
    let cpu = field(&cpu_info, "model name").unwrap_or("unnamed CPU").to_string();
    let release = read("/etc/os-release").unwrap_or_default();
    let os = release.lines().find_map(|l| l.strip_prefix("PRETTY_NAME=")).unwrap_or("Linux").trim_matches('"');
    Ok(Machine {
        cpu,
        cores: std::thread::available_parallelism().context("failed to count the cores")?.get(),
        memory_bytes: memory_field("MemTotal")?,
        os: os.to_string(),
        gpus: gpus.to_vec(),
    })
}

/// Bytes that a new allocation can use without swapping (`MemAvailable`).
pub fn available_memory_bytes() -> Result<u64> {
    memory_field("MemAvailable")
}

fn memory_field(name: &str) -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("failed to read /proc/meminfo")?;
    let kib = field(&text, name).and_then(|v| v.split_whitespace().next()).and_then(|v| v.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("/proc/meminfo has no {name}"))? * 1024)
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().filter_map(|l| l.split_once(':')).find(|(k, _)| k.trim() == name).map(|(_, v)| v.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_name_cores_and_memory() {
        let machine = machine(&[]).unwrap();
        assert!(!machine.cpu.is_empty() && machine.cores >= 1 && machine.memory_bytes > 1 << 20, "{machine:?}");
        assert!(available_memory_bytes().unwrap() <= machine.memory_bytes);
    }

    #[test]
    fn outside_a_checkout_the_commit_is_unknown_and_counts_as_dirty() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Commit::of(folder.path()), Commit { commit: "unknown".into(), dirty: true });
    }

    #[test]
    fn a_bundle_has_its_commit() {
        let folder = tempfile::tempdir().unwrap();
        let commit = Commit { commit: "abc".into(), dirty: false };
        std::fs::write(folder.path().join(BUNDLE_FILE), serde_json::to_vec(&commit).unwrap()).unwrap();
        assert_eq!(Commit::of(folder.path()), commit);
    }

    #[test]
    fn run_ids_sort_by_time_and_differ() {
        let now = jiff::Timestamp::from_second(1_763_700_000).unwrap();
        let ids: std::collections::BTreeSet<_> = (0..8).map(|_| run_id(now).unwrap()).collect();
        assert!(ids.len() > 1 && ids.iter().all(|id| id.starts_with("20251121T044000Z-")), "{ids:?}");
    }
}
