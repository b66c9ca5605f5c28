//! Where a number comes from: the commit, the machine and the conditions of a run.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;

use super::manifest::{Manifest, peers_hash};
use super::record::{Gpu, ID_TIME, Machine, Run};
use crate::printable::{one_line, shown_path};
use crate::process::{output_within, program};
use crate::root::require_own_repository;

/// Facts about the device and its libraries. The caller fills them in, because the harness names no device library.
#[derive(Debug, Clone)]
pub struct Facts {
    pub gpus: Vec<Gpu>,
    pub software: std::collections::BTreeMap<String, String>,
    pub settings: std::collections::BTreeMap<String, String>,
    pub peaks: super::record::Peaks,
}

/// The commit of a tree, and how its files differ from it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Commit {
    pub commit: String,
    pub dirty: bool,
    /// Files that differ, where they are known.
    pub modified: Vec<String>,
}

impl Commit {
    /// The commit of the checkout or unpacked bundle at `root`; "unknown" and dirty for other folders.
    ///
    /// Errors: a manifest that cannot be read; git does not end, or `interrupted` holds.
    pub fn of(root: &Path, interrupted: &dyn Fn() -> bool) -> Result<Self> {
        let Some(manifest) = Manifest::read(root)? else {
            let unknown = || Self { commit: "unknown".into(), dirty: true, modified: Vec::new() };
            return Ok(from_git(root, interrupted)?.unwrap_or_else(|_| unknown()));
        };
        let modified = manifest.modified(root, Path::new("/proc/self/exe"))?;
        Ok(Self { dirty: manifest.dirty || !modified.is_empty(), commit: manifest.commit, modified })
    }

    /// Why git does not say the commit of the checkout at `root`; `None` where it does, and where there is no checkout.
    ///
    /// Errors: those of [`Self::of`].
    pub fn why_unknown(root: &Path, interrupted: &dyn Fn() -> bool) -> Result<Option<String>> {
        let is_checkout = Manifest::read(root)?.is_none() && require_own_repository(root)?;
        Ok(if is_checkout { from_git(root, interrupted)?.err() } else { None })
    }
}

/// Options of git for a test that commits: they replace the user's settings.
#[rustfmt::skip]
pub const AS_ANYBODY: &[&str] = &[
    "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null",
    "-c", "core.excludesFile=/dev/null", "-c", "init.defaultObjectFormat=sha1",
];

/// What git prints for these arguments in `root`, or why it does not: there is no git, or no checkout.
///
/// Errors: it does not end, or `interrupted` holds; those of [`require_own_repository`].
pub fn git(root: &Path, arguments: &[&str], interrupted: &dyn Fn() -> bool) -> Result<Result<Vec<u8>, String>> {
    if !require_own_repository(root)? {
        return Ok(Err("neither the folder nor one above it is a checkout".into()));
    }
    run_git(root, arguments, interrupted)
}

/// [`git`], also where there is no repository yet.
pub fn run_git(root: &Path, arguments: &[&str], interrupted: &dyn Fn() -> bool) -> Result<Result<Vec<u8>, String>> {
    /// A repository on a file server takes seconds.
    const LIMIT: Duration = Duration::from_secs(60);
    let mut command = program("git");
    // A hook of git has the first of them, of its own repository.
    const FOREIGN: [&str; 9] = [
        "GIT_DIR",
        "GIT_COMMON_DIR",
        "GIT_OBJECT_DIRECTORY",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_LITERAL_PATHSPECS",
        "GIT_GLOB_PATHSPECS",
        "GIT_NOGLOB_PATHSPECS",
        "GIT_ICASE_PATHSPECS",
    ];
    for name in FOREIGN {
        command.env_remove(name);
    }
    // Others can put a repository without a folder of its own into one such as /tmp.
    command.args([
        "-c",
        "safe.bareRepository=explicit",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "core.checkStat=default",
        "-c",
        "core.ignoreCase=false",
        "-c",
        "core.trustctime=true",
        "-c",
        "core.hooksPath=/dev/null",
    ]);
    // A replaced commit has the id of another one.
    command.env("GIT_NO_REPLACE_OBJECTS", "1");
    match output_within(command.arg("-C").arg(root).args(arguments), LIMIT, interrupted) {
        Ok(output) if output.status.success() => Ok(Ok(output.stdout)),
        Ok(output) => Ok(Err(String::from_utf8_lossy(&output.stderr).trim().to_string())),
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Interrupted) => {
            let remedy = match error.kind() {
                ErrorKind::TimedOut => " (is a pipe among the files of the tree, such as .gitattributes?)",
                _ => "",
            };
            Err(error).with_context(|| format!("git {} in {}{remedy}", arguments.join(" "), shown_path(root)))
        }
        Err(error) => Ok(Err(error.to_string())),
    }
}

/// The commit of a checkout, or why git does not say it.
fn from_git(root: &Path, interrupted: &dyn Fn() -> bool) -> Result<Result<Commit, String>> {
    // Records, rendered text and templates do not affect measurements: accepting one problem must not dirty the next.
    let measured = [".", ":!snapshots", ":!templates", ":!report"];
    let questions = [
        vec!["rev-parse", "HEAD", "--show-toplevel"],
        vec!["ls-files", "--", "suites"],
        [&["diff", "--name-only", "--relative", "--ignore-submodules=none", "HEAD", "--"], &measured[..]].concat(),
        [&["ls-files", "-v", "--"], &measured[..]].concat(),
        // Python and a compiler find a file there that nobody has added; of ignored ones, Python runs those of `__pycache__`.
        vec!["ls-files", "--others", "--", "kernels", "suites", ":!suites/subjects"],
    ];
    let mut answers = Vec::new();
    for question in questions {
        match git(root, &question, interrupted)? {
            Ok(bytes) => answers.push(String::from_utf8_lossy(&bytes).lines().map(String::from).collect::<Vec<_>>()),
            Err(why) => return Ok(Err(why)),
        }
    }
    let [place, tracked, changed, marked, added] = answers.try_into().expect("an answer to each question");
    // A name of a folder may have several lines.
    let (commit, top) = place.split_first().map(|(commit, top)| (commit.clone(), top.join("\n"))).unwrap_or_default();
    // A copy of a submodule still looks at the original.
    if !Path::new(&*root.canonicalize()?.to_string_lossy()).starts_with(&top) {
        return Ok(Err(format!("git looks at the files in {}, which `core.worktree` names", one_line(&top))));
    }
    // A bundle that lost its manifest may lie in a checkout that knows nothing of it.
    if tracked.is_empty() {
        return Ok(Err("the checkout around it tracks none of its suites".into()));
    }
    // Of files that are "assume unchanged" (a small letter) or "skip worktree" (S), git does not see a change.
    let unseen = |line: &String| line.starts_with(|mark: char| mark.is_ascii_lowercase() || mark == 'S');
    let unseen = marked.iter().filter(|line| unseen(line)).filter_map(|line| Some(line.split_once(' ')?.1.to_string()));
    let modified: BTreeSet<String> = changed.into_iter().chain(unseen).chain(added).collect();
    let dirty = !modified.is_empty();
    Ok(Ok(Commit { commit, dirty, modified: modified.into_iter().collect() }))
}

/// Opens a run: a fresh id, the time, the commit and the machine. Errors: also those of [`Commit::of`].
pub fn open_run(root: &Path, suite_hash: &str, facts: &Facts, interrupted: &dyn Fn() -> bool) -> Result<Run> {
    let (now, started) = time(SystemTime::now())?;
    let Commit { commit, dirty, modified } = Commit::of(root, interrupted)?;
    Ok(Run {
        id: run_id(now)?,
        started,
        commit,
        dirty,
        modified: modified.iter().map(|name| one_line(name)).collect(),
        suite_hash: suite_hash.into(),
        peers_hash: peers_hash(root)?,
        machine: machine(&facts.gpus)?,
        software: facts.software.clone(),
        settings: facts.settings.clone(),
        peaks: facts.peaks.clone(),
    })
}

/// The time that `clock` shows, also as a record has it.
///
/// Errors: a year that a record cannot have. Its cases would be measured, and then be lost with the record.
fn time(clock: SystemTime) -> Result<(Timestamp, String)> {
    let since = clock.duration_since(SystemTime::UNIX_EPOCH);
    let (seconds, side) =
        since.map_or_else(|early| (early.duration().as_secs(), "before"), |late| (late.as_secs(), "after"));
    let shown = || format!("this machine's clock is {seconds} s {side} 1970-01-01: set it to the present time");
    let now = Timestamp::try_from(clock).with_context(shown)?;
    let started = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    ensure!(started.parse::<Timestamp>().is_ok(), shown());
    Ok((now, started))
}

fn run_id(now: Timestamp) -> Result<String> {
    let mut tail = [0u8; 2];
    let mut random = std::fs::File::open("/dev/urandom").context("failed to open /dev/urandom")?;
    std::io::Read::read_exact(&mut random, &mut tail).context("failed to read /dev/urandom")?;
    Ok(format!("{}-{:02x}{:02x}", now.strftime(ID_TIME), tail[0], tail[1]))
}

/// This machine's processor, cores and memory from `/proc`, with its GPUs.
pub fn machine(gpus: &[Gpu]) -> Result<Machine> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("failed to read {path}"));
    let cpu_info = read("/proc/cpuinfo")?;
    let cpu = field(&cpu_info, "model name").unwrap_or("unnamed CPU");
    let release = read("/etc/os-release").unwrap_or_default();
    let os = release.lines().find_map(|l| l.strip_prefix("PRETTY_NAME=")).unwrap_or("Linux").trim_matches('"');
    Ok(Machine {
        cpu: one_line(cpu),
        cores: std::thread::available_parallelism().context("failed to count the cores")?.get(),
        memory_bytes: memory_field("MemTotal")?,
        os: one_line(os),
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
mod tests;
