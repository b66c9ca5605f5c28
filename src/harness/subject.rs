//! A subject: somebody else's implementation of the assignment's adapters, in a folder, and the checks that it is put to.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use self::interpreter::{Interpreter, comes_from};
use super::problem::Verdict;
use super::python;
use super::store::{Layout, sha256, sha256_of_file};
use crate::error::{Fault, NotGraded};
use crate::printable::{one_line, shell_word, shown_path};
use crate::process::Death;
use crate::root::{installing, open};

mod interpreter;

/// The folder that is graded, the Python that loads it, and its limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// Absolute, without links.
    pub folder: PathBuf,
    pub python: PathBuf,
    /// What of its installation and its environment it may read, without links.
    pub python_files: Vec<PathBuf>,
    /// Whether its Python was found through its folder, so that it may be of its making, and runs confined only. Asked once, since
    /// the subject's links may lead elsewhere later.
    pub has_own_python: bool,
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
        let Interpreter { program: python, files: python_files, is_own: has_own_python } = Interpreter::of(&folder)?;
        let (refused, not_graded) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { folder, python, python_files, has_own_python, limit_s, memory_bytes, seed, refused, not_graded })
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

    /// Checks that a Python that is not of the subject's making has `module`: the one of this program, or of [`PYTHON`].
    pub fn require_of_foreign_python(&self, module: &str) -> Result<()> {
        let missing = (!self.has_own_python).then(|| python::require_of(&self.python, module).err()).flatten();
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

/// Whether the file may exist, but this user may not look.
fn is_denied<T>(found: &std::io::Result<T>) -> bool {
    found.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// A program as a shell would find it, with its whole path.
#[cfg(test)]
mod tests;
