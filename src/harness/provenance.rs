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
        vec!["rev-parse", "HEAD"],
        vec!["ls-files", "--", "suites"],
        [&["diff", "--name-only", "--relative", "HEAD", "--"], &measured[..]].concat(),
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
    let [commit, tracked, changed, marked, added] = answers.try_into().expect("an answer to each question");
    // A bundle that lost its manifest may lie in a checkout that knows nothing of it.
    if tracked.is_empty() {
        return Ok(Err("the checkout around it tracks none of its suites".into()));
    }
    // Of files that are "assume unchanged" (a small letter) or "skip worktree" (S), git does not see a change.
    let unseen = |line: &String| line.starts_with(|mark: char| mark.is_ascii_lowercase() || mark == 'S');
    let unseen = marked.iter().filter(|line| unseen(line)).filter_map(|line| Some(line.split_once(' ')?.1.to_string()));
    let modified: BTreeSet<String> = changed.into_iter().chain(unseen).chain(added).collect();
    let (commit, dirty) = (commit.concat(), !modified.is_empty());
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
mod tests {
    use super::super::manifest::{MANIFEST, PROGRAM};
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
        let commit = Commit::of(folder.path(), &|| false).unwrap();
        assert_eq!((commit.commit.as_str(), commit.dirty), ("unknown", true));
        assert_eq!(Commit::why_unknown(folder.path(), &|| false).unwrap(), None);
    }

    fn commit_by(root: &Path, arguments: &[&str]) {
        run_git(root, &[AS_ANYBODY, arguments].concat(), &|| false).unwrap().unwrap();
    }

    #[test]
    fn what_git_says_of_a_damaged_checkout_is_told() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("suites")).unwrap();
        std::fs::write(folder.path().join("suites/p.toml"), "a").unwrap();
        commit_by(folder.path(), &["init", "--quiet"]);
        commit_by(folder.path(), &["add", "."]);
        commit_by(folder.path(), &["commit", "--quiet", "--message", "a"]);
        std::fs::write(folder.path().join(".git/index"), "DIRC").unwrap();
        let why = Commit::why_unknown(folder.path(), &|| false).unwrap().unwrap();
        assert!(why.contains("index"), "{why}");
        assert_eq!(Commit::of(folder.path(), &|| false).unwrap().commit, "unknown");
    }

    #[test]
    fn a_checkout_names_its_changed_files_and_a_folder_that_git_does_not_track_has_no_commit() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("suites/p.toml", "a");
        write("templates/p.md", "a");
        commit_by(folder.path(), &["init", "--quiet"]);
        commit_by(folder.path(), &["add", "."]);
        commit_by(folder.path(), &["commit", "--quiet", "--message", "a"]);
        write("templates/p.md", "b");
        assert_eq!(Commit::why_unknown(folder.path(), &|| false).unwrap(), None);
        let clean = Commit::of(folder.path(), &|| false).unwrap();
        assert!(clean.commit.len() == 40 && !clean.dirty, "{clean:?}");
        write("suites/p.toml", "b");
        let changed = Commit::of(folder.path(), &|| false).unwrap();
        assert_eq!((changed.dirty, changed.modified), (true, vec!["suites/p.toml".to_string()]));
        write("suites/p.toml", "a");
        write("suites/subjects/right/.venv/a.py", "");
        write(".gitignore", "__pycache__");
        for added in ["suites/torch.py", "suites/peers/__pycache__/protocol.cpython-311.pyc"] {
            write(added, "");
            let found = Commit::of(folder.path(), &|| false).unwrap();
            assert_eq!((found.dirty, found.modified), (true, vec![added.to_string()]));
            std::fs::remove_file(folder.path().join(added)).unwrap();
        }
        for mark in ["assume-unchanged", "skip-worktree"] {
            commit_by(folder.path(), &["update-index", &format!("--{mark}"), "suites/p.toml"]);
            let hidden = Commit::of(folder.path(), &|| false).unwrap();
            assert_eq!((hidden.dirty, hidden.modified), (true, vec!["suites/p.toml".to_string()]), "{mark}");
            commit_by(folder.path(), &["update-index", &format!("--no-{mark}"), "suites/p.toml"]);
            assert!(!Commit::of(folder.path(), &|| false).unwrap().dirty);
        }
        // A replaced commit has the id of the one without the change.
        write("suites/p.toml", "b");
        commit_by(folder.path(), &["commit", "--quiet", "--all", "--message", "b"]);
        commit_by(folder.path(), &["reset", "--quiet", "HEAD~"]);
        commit_by(folder.path(), &["replace", "HEAD", "HEAD@{1}"]);
        assert_eq!(Commit::of(folder.path(), &|| false).unwrap().modified, ["suites/p.toml"]);
        write("dist/cs336/suites/p.toml", "a");
        assert_eq!(Commit::of(&folder.path().join("dist/cs336"), &|| false).unwrap().commit, "unknown");
    }

    #[test]
    fn a_bundle_that_another_program_runs_has_its_commit_and_is_modified() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        std::fs::write(folder.path().join(PROGRAM), "a program").unwrap();
        let packed = Commit { commit: "abc".into(), dirty: false, modified: Vec::new() };
        let manifest = Manifest::of(folder.path(), packed).unwrap();
        std::fs::write(folder.path().join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
        let found = Commit { commit: "abc".into(), dirty: true, modified: vec![PROGRAM.into()] };
        assert_eq!(Commit::of(folder.path(), &|| false).unwrap(), found);
    }

    #[test]
    fn a_clock_whose_year_no_record_can_have_is_refused_before_anything_is_measured() {
        let at = |seconds: i64| match seconds {
            0.. => SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.unsigned_abs()),
            _ => SystemTime::UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()),
        };
        // Records can have the years 1970, 2026 and 1920, but none beyond 9999 and none before our era.
        for (seconds, started) in [
            (0, "1970-01-01T00:00:00Z"),
            (1_795_500_000, "2026-11-24T06:00:00Z"),
            (-1_577_923_200, "1920-01-01T00:00:00Z"),
        ] {
            assert_eq!(time(at(seconds)).unwrap().1, started);
        }
        for seconds in [400_000_000_000, i64::MAX, -98_230_000_000] {
            let said = format!("{:#}", time(at(seconds)).unwrap_err());
            assert!(
                said.starts_with(&format!("this machine's clock is {} s ", seconds.unsigned_abs()))
                    && said.contains("set it to the present"),
                "{said}"
            );
        }
    }

    #[test]
    fn run_ids_sort_by_time_and_differ() {
        let now = Timestamp::from_second(1_763_700_000).unwrap();
        let ids: std::collections::BTreeSet<_> = (0..8).map(|_| run_id(now).unwrap()).collect();
        assert!(ids.len() > 1 && ids.iter().all(|id| id.starts_with("20251121T044000Z-")), "{ids:?}");
    }
}
