//! A subject: somebody else's implementation of the assignment's adapters, in a folder, and the checks that it is put to.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::problem::Verdict;
use super::python;
use super::store::{Layout, sha256, sha256_of_file};
use crate::error::{Fault, NotGraded};
use crate::printable::{one_line, shell_word, shown_path};
use crate::process::Death;
use crate::root::{installing, open, way_to};

/// The folder that is graded, the Python that loads it, and its limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// Absolute, without links.
    pub folder: PathBuf,
    pub python: PathBuf,
    /// How long one call of an adapter may take, in seconds.
    pub limit_s: u64,
    /// The most memory that each of its processes may have.
    pub memory_bytes: u64,
    /// Inputs of checks are drawn from it. A subject can read it where the command line names it.
    pub seed: i64,
    /// The adapters that are not timed, each with the words of the check that it fails.
    #[serde(default)]
    pub refused: BTreeMap<String, String>,
    /// The problems that are not measured, each with what kept a check before them from being graded.
    #[serde(default)]
    pub not_graded: BTreeMap<String, String>,
}

/// One check of one part of a problem for any subject.
pub struct SubjectCheck {
    pub problem: &'static str,
    pub part: &'static str,
    pub name: &'static str,
    /// The adapter that a failure is charged to.
    pub adapter: &'static str,
    pub run: fn(&Subject) -> Result<Verdict>,
}

/// Where adapters may lie in a subject's folder: in a checkout of the starter code, or alone.
pub const ADAPTERS: [&str; 2] = ["tests/adapters.py", "adapters.py"];

/// The endings of files that a subject's results can depend on.
const SOURCES: [&str; 20] = [
    "py", "pyc", "pyx", "toml", "txt", "json", "yaml", "yml", "ini", "cfg", "cu", "cuh", "ptx", "cubin", "cpp", "cc",
    "c", "h", "hpp", "so",
];

/// A larger file is data. It counts by its size and the time of its last change, since reading it may take hours.
const MOST_SOURCE_BYTES: u64 = 1 << 26;

/// The variable that names the Python of a subject.
pub const PYTHON: &str = "PYTHON";

/// How long its Python may take to start: PyTorch may be imported from a cold disk, on every rank.
pub const STARTING: Duration = Duration::from_secs(300);

/// No check calls the adapters more often: three sizes of buckets in five steps of three calls are 45.
const MOST_CALLS: u32 = 64;

/// What to do where the kernel has ended a process because memory ran out, before the subject had all that it may have.
pub const MORE_MEMORY: &str = "grade it where there is more, or lower --memory";

impl Layout {
    /// Errors: [`Subject::require_graded`], where a subject is measured.
    pub fn require_graded(&self, problem: &str) -> Result<()> {
        self.subject.as_ref().map_or(Ok(()), |subject| subject.require_graded(problem))
    }
}

impl Subject {
    /// The subject in `folder`, with `$PYTHON`, else its own `.venv`, else the Python of this program.
    ///
    /// Errors: the folder does not exist or has no adapters; the Python is behind a `.venv` that leads out of the folder;
    /// `PYTHONPATH` lists a folder of it.
    pub fn find(folder: &Path, limit_s: u64, memory_bytes: u64, seed: i64) -> Result<Self> {
        let shown = shown_path(folder);
        let folder = folder.canonicalize().with_context(|| format!("the subject {shown} cannot be opened"))?;
        let found = ADAPTERS.map(|name| std::fs::metadata(folder.join(name)));
        if let Some(Err(error)) = found.iter().find(|found| is_denied(found)) {
            bail!("the subject {shown} cannot be read: {error}; give this user the right to (chmod -R u+rX)");
        }
        ensure!(
            found.iter().flatten().any(|found| found.is_file()),
            "the subject {shown} has neither {}; name a checkout of the assignment's starter code",
            ADAPTERS.join(" nor ")
        );
        ensure!(folder.to_str().is_some(), "the subject {shown} has a name that is not UTF-8; rename it");
        require_foreign_modules(&folder, std::env::var_os(python::FOLDERS))?;
        let mut python = python_of(&folder, std::env::var_os(PYTHON));
        require_within(&folder, &python)?;
        if !comes_from(&python, &folder) && own_files(&python).is_empty() {
            python = started_by(&python).unwrap_or(python);
        }
        Ok(Self { folder, python, limit_s, memory_bytes, seed, refused: BTreeMap::new(), not_graded: BTreeMap::new() })
    }

    /// Errors: a check before `problem` was not graded, which is no fault of its code and no measurement of it.
    fn require_graded(&self, problem: &str) -> Result<()> {
        let reason = self.not_graded.get(problem);
        reason.map_or(Ok(()), |reason| {
            bail!("{problem} is not measured, since a check before it is not graded: {reason}")
        })
    }

    /// Errors: [`NotGraded`] where its adapters cannot be read, as where its folder was moved meanwhile: what fails then is no
    /// fault of its code.
    pub fn require_readable(&self) -> Result<()> {
        let is_readable = ADAPTERS.iter().any(|name| open(&self.folder.join(name)).is_ok());
        let words =
            || format!("the adapters in {} cannot be read; grade it again when they can", shown_path(&self.folder));
        ensure!(is_readable, NotGraded(words()));
        Ok(())
    }

    /// The folder's name, which the title page of its report has.
    pub fn name(&self) -> String {
        one_line(&self.folder.file_name().unwrap_or_default().to_string_lossy())
    }

    /// What the folder of its records and report is called: its name, and eight digits of the hash of where it lies, since
    /// every checkout of the starter code may have one name.
    pub fn report_name(&self) -> String {
        let (name, hash) = (self.name(), sha256(self.folder.as_os_str().as_encoded_bytes()));
        // A name has at most 255 bytes.
        format!("{}-{}", name.chars().take(60).collect::<String>(), &hash[..8])
    }

    /// Whether its Python was found through its folder, so that it may be of its making, and runs confined only.
    pub fn has_own_python(&self) -> bool {
        comes_from(&self.python, &self.folder)
    }

    /// Checks that a Python that is not of the subject's making has `module`: the one of this program, or of [`PYTHON`].
    pub fn require_of_foreign_python(&self, module: &str) -> Result<()> {
        let missing = (!self.has_own_python()).then(|| python::require_of(&self.python, module).err()).flatten();
        let Some(Fault::NotAvailable { has, .. }) = missing else { return Ok(()) };
        bail!("it needs a Python with {module}, has {has}; {}, or name one that has it in {PYTHON}", installing())
    }

    /// How a Python of ours with torch fails to import our side of a subject's process, so that no other one can: a file of
    /// ours is damaged.
    pub fn fault_of_ours(&self) -> Option<Death> {
        let (python, suites) = (python::interpreter(), Layout::find().ok()?.root.join("suites"));
        if comes_from(&python, &self.folder) || python::require("torch").is_err() {
            return None;
        }
        let import = "import sys; sys.path.append(sys.argv[1]); import peers.subject";
        python::run(&python, &["-B", "-c", import, suites.to_str()?], STARTING, &|| false)
            .ok()
            .filter(|death| !death.is_success())
    }

    /// The arguments of a command that name it, after a space.
    pub fn argument(&self) -> String {
        format!(" --subject {}", shell_word(&self.folder))
    }

    /// SHA-256 of its code: the names, in its folder, and the bytes of its sources, and where links within it lead. Folders
    /// that begin with a dot are left out unless such a link leads there, and so are Python environments and links elsewhere.
    pub fn hash(&self) -> Result<String> {
        let (mut folders, mut seen, mut lines) = (vec![self.folder.clone()], BTreeSet::new(), BTreeMap::new());
        while let Some(folder) = folders.pop() {
            if !seen.insert(folder.clone()) {
                continue;
            }
            for entry in std::fs::read_dir(&folder).with_context(|| format!("listing {}", shown_path(&folder)))? {
                let path = entry?.path();
                // A link that leads nowhere is no code.
                let Some(real) = path.canonicalize().ok().filter(|real| self.is_own(real)) else { continue };
                let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
                let is_source = path.extension().is_some_and(|ending| SOURCES.iter().any(|source| ending == *source));
                if real.is_dir() && !is_hidden {
                    folders.push(real.clone());
                } else if real.is_file() && is_source {
                    let content = content(&real).with_context(|| format!("reading {}", shown_path(&path)))?;
                    lines.insert(self.within(&real), content);
                } else {
                    continue;
                }
                if real != path {
                    lines.insert(self.within(&path), format!("leads to {:?}", self.within(&real)));
                }
            }
        }
        let lines = lines.iter().map(|(path, what)| format!("{what} {path:?}\n"));
        Ok(sha256(lines.collect::<String>().as_bytes()))
    }

    /// The path of a file in its folder.
    fn within(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.folder).unwrap_or(path).to_path_buf()
    }

    /// Whether a path without links leads into its folder, and there into no Python environment.
    fn is_own(&self, real: &Path) -> bool {
        let mut inner = real.ancestors().take_while(|folder| *folder != self.folder);
        real.starts_with(&self.folder) && !inner.any(|folder| folder.join("pyvenv.cfg").is_file())
    }

    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_s)
    }

    /// How long a check or a case may take that has `least` without a subject: its calls end at their own limit, and the first
    /// that does not end ends the check.
    pub fn patience(&self, least: Duration) -> Duration {
        least.max(STARTING + MOST_CALLS * self.limit())
    }

    /// The longest limit of a call, in seconds, whose patience is at most `seconds`; `None` if there is none.
    pub fn longest_limit(seconds: u64) -> Option<u64> {
        let of_calls = seconds.checked_sub(STARTING.as_secs())?;
        Some(of_calls / u64::from(MOST_CALLS)).filter(|&limit| limit > 0)
    }

    /// A seed of its own for each use.
    pub fn seed_for(&self, number: i64) -> i64 {
        self.seed.wrapping_mul(1_000_003).wrapping_add(number)
    }
}

/// A seed that nobody can foresee, short enough to be typed again.
///
/// Errors: the machine gives no random numbers.
pub fn drawn_seed() -> Result<i64> {
    let mut bytes = [0; 4];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes).context("drawing a seed")?;
    Ok(u32::from_le_bytes(bytes).into())
}

impl Layout {
    /// The same tree with the subject's own records and report.
    pub fn of_subject(&self, subject: &Subject) -> Self {
        Self { subject: Some(subject.clone()), ..self.clone() }
    }
}

/// The hash of a file's bytes; of a file above [`MOST_SOURCE_BYTES`] its size and the time of its last change.
fn content(file: &Path) -> std::io::Result<String> {
    let data = std::fs::metadata(file)?;
    match data.len() {
        0..=MOST_SOURCE_BYTES => sha256_of_file(file),
        bytes => Ok(format!("{bytes} bytes of {:?}", data.modified()?)),
    }
}

fn python_of(folder: &Path, named: Option<OsString>) -> PathBuf {
    match named.filter(|name| !name.is_empty()) {
        Some(name) => on_path(&name).unwrap_or_else(|| name.into()),
        None if let Some(own) = python::own_of(folder) => own,
        None => on_path(python::interpreter().as_os_str()).unwrap_or_else(python::interpreter),
    }
}

/// Errors: the interpreter is that of the folder's `.venv`, which is a link out of the folder. What a subject links to must not
/// become readable.
fn require_within(folder: &Path, python: &Path) -> Result<()> {
    let own = folder.join(".venv");
    let real = own.canonicalize().ok().filter(|real| python.starts_with(&own) && !real.starts_with(folder));
    real.map_or(Ok(()), |real| {
        let (own, real) = (shown_path(own), shown_path(real));
        bail!("{own} leads out of the subject's folder, to {real}; make it a folder, or name a Python in {PYTHON}")
    })
}

/// Errors: `PYTHONPATH` lists a folder of the subject, whose modules a Python of ours would import unconfined.
fn require_foreign_modules(folder: &Path, listed: Option<OsString>) -> Result<()> {
    let listed = listed.unwrap_or_default();
    let mut named = std::env::split_paths(&listed).filter(|listed| !listed.as_os_str().is_empty());
    let own = named.find(|listed| comes_from(listed, folder));
    own.map_or(Ok(()), |own| {
        let (name, own) = (python::FOLDERS, shown_path(own));
        bail!("{name} lists {own}, which is the subject's; unset it: adapters find the subject's own modules anyway")
    })
}

/// Whether the program lies in this folder, or is reached by a link in it, wherever that leads. `folder` has no links.
fn comes_from(program: &Path, folder: &Path) -> bool {
    // Of a path with too many links nobody knows.
    !way_to(program).is_ok_and(|(links, real)| !links.iter().chain([&real]).any(|step| step.starts_with(folder)))
}

/// Whether the file may exist, but this user may not look.
fn is_denied<T>(found: &std::io::Result<T>) -> bool {
    found.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// A program as a shell would find it, with its whole path.
fn on_path(name: &OsStr) -> Option<PathBuf> {
    if Path::new(name).components().count() > 1 {
        return std::path::absolute(name).ok();
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// What Python loads from the folder of its installation or environment. The whole folder is never granted: it may be ~ or
/// ~/.local.
const OWN_FILES: [&str; 7] = ["bin", "include", "lib", "lib64", "libexec", "share", "pyvenv.cfg"];

/// The interpreter's own files: those of its environment, and those of the installation that its link leads to.
///
/// A subject makes its own `.venv`, so what that says of itself decides nothing: `pyvenv.cfg` is not read. The interpreter's
/// link is followed, as `uv`, `pyenv`, `conda` and `python -m venv` make it; a folder counts only where it holds an
/// environment or Python's standard library, and of that only what lies in the folder itself and not behind a link out of it.
pub fn own_files(python: &Path) -> Vec<PathBuf> {
    let prefix = |program: &Path| program.parent()?.parent()?.canonicalize().ok();
    let real = python.canonicalize().ok();
    let found = [Some(python), real.as_deref()].into_iter().flatten().filter_map(prefix);
    // Of /bin/python3 it would be the whole machine.
    let prefixes = found.filter(|folder| folder.parent().is_some() && is_python(folder));
    let files = prefixes.flat_map(|folder| {
        let of_it = OWN_FILES.map(|name| folder.join(name).canonicalize().ok());
        of_it.into_iter().flatten().filter(move |file| file.starts_with(&folder)).collect::<Vec<_>>()
    });
    BTreeSet::from_iter(files).into_iter().collect()
}

/// Whether the folder holds an environment or an installation of Python.
fn is_python(folder: &Path) -> bool {
    let entries = ["lib", "lib64"].into_iter().filter_map(|name| std::fs::read_dir(folder.join(name)).ok()).flatten();
    let is_library = |path: PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
            && path.join("os.py").is_file()
    };
    folder.join("pyvenv.cfg").is_file() || entries.flatten().any(|entry| is_library(entry.path()))
}

/// The interpreter that a script such as pyenv's shim starts, which only it can tell.
fn started_by(script: &Path) -> Option<PathBuf> {
    let asked =
        python::run(script, &["-I", "-c", "import sys; print(sys.executable)"], python::LIMIT, &|| false).ok()?;
    let real = PathBuf::from(asked.last_output.trim());
    (asked.is_success() && real.is_file()).then_some(real)
}

#[cfg(test)]
mod tests;
