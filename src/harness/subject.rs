//! A subject: somebody else's implementation of the assignment's adapters, in a folder, and the checks that it is put to.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::problem::Verdict;
use super::python;
use super::store::{Layout, sha256};
use crate::printable::{one_line, shown_path};
use crate::root::read;

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
    /// Inputs are drawn from it. The subject does not learn it.
    pub seed: i64,
    /// The adapters that are not timed, each with the words of the check that it fails.
    #[serde(default)]
    pub refused: BTreeMap<String, String>,
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
const SOURCES: [&str; 11] = ["py", "toml", "txt", "cu", "cuh", "cpp", "cc", "c", "h", "hpp", "so"];

/// The variable that names the Python of a subject.
pub const PYTHON: &str = "PYTHON";

/// How long its Python may take to start: PyTorch may be imported from a cold disk, on every rank.
pub const STARTING: Duration = Duration::from_secs(300);

impl Subject {
    /// The subject in `folder`, with `$PYTHON`, else its own `.venv`, else the Python of this program.
    ///
    /// Errors: the folder does not exist or has no adapters.
    pub fn find(folder: &Path, limit_s: u64, memory_bytes: u64, seed: i64) -> Result<Self> {
        let shown = shown_path(folder);
        let folder = folder.canonicalize().with_context(|| format!("the subject {shown} cannot be opened"))?;
        ensure!(
            ADAPTERS.iter().any(|name| folder.join(name).is_file()),
            "the subject {shown} has neither {}; name a checkout of the assignment's starter code",
            ADAPTERS.join(" nor ")
        );
        ensure!(folder.to_str().is_some(), "the subject {shown} has a name that is not UTF-8; rename it");
        let mut python = python_of(&folder, std::env::var_os(PYTHON));
        let is_theirs = [Some(python.as_path()), python.parent()].into_iter().flatten();
        let is_theirs = is_theirs.filter_map(|path| path.canonicalize().ok()).any(|path| path.starts_with(&folder));
        if !is_theirs && own_files(&python).is_empty() {
            python = started_by(&python).unwrap_or(python);
        }
        Ok(Self { folder, python, limit_s, memory_bytes, seed, refused: BTreeMap::new() })
    }

    /// The folder's name, which its report has.
    pub fn name(&self) -> String {
        one_line(&self.folder.file_name().unwrap_or_default().to_string_lossy())
    }

    /// The arguments of a command that name it, after a space.
    pub fn argument(&self) -> String {
        format!(" --subject {}", shown_path(&self.folder))
    }

    /// SHA-256 of its code: the names and bytes of its sources. Folders that begin with a dot are left out, and links.
    pub fn hash(&self) -> Result<String> {
        let (mut folders, mut sources) = (vec![self.folder.clone()], BTreeMap::new());
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).with_context(|| format!("listing {}", shown_path(&folder)))? {
                let (entry, path) = {
                    let entry = entry?;
                    (entry.file_type()?, entry.path())
                };
                let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
                let is_source = path.extension().is_some_and(|ending| SOURCES.iter().any(|source| ending == *source));
                if entry.is_dir() && !is_hidden {
                    folders.push(path);
                } else if entry.is_file() && is_source {
                    let bytes = read(&path).with_context(|| format!("reading {}", shown_path(&path)))?;
                    sources.insert(path, sha256(&bytes));
                }
            }
        }
        let lines = sources.iter().map(|(path, hash)| format!("{hash} {}\n", path.to_string_lossy()));
        Ok(sha256(lines.collect::<String>().as_bytes()))
    }

    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_s)
    }

    /// How long a check or a case may take that has `least` without a subject: its calls end at their own limit, and the first
    /// that does not end ends the check.
    pub fn patience(&self, least: Duration) -> Duration {
        least.max(STARTING + 2 * self.limit())
    }

    /// A seed of its own for each use.
    pub fn seed_for(&self, number: i64) -> i64 {
        self.seed.wrapping_mul(1_000_003).wrapping_add(number)
    }
}

impl Layout {
    /// The same tree with the subject's own records and report.
    pub fn of_subject(&self, subject: &Subject) -> Self {
        Self { subject: Some(subject.clone()), ..self.clone() }
    }
}

fn python_of(folder: &Path, named: Option<OsString>) -> PathBuf {
    let own = folder.join(".venv/bin/python");
    match named.filter(|name| !name.is_empty()) {
        Some(name) => on_path(&name).unwrap_or_else(|| name.into()),
        None if own.exists() => own,
        None => on_path(python::interpreter().as_os_str()).unwrap_or_else(python::interpreter),
    }
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
    let asked = python::run(script, &["-I", "-c", "import sys; print(sys.executable)"], python::LIMIT).ok()?;
    let real = PathBuf::from(asked.last_output.trim());
    (asked.is_success() && real.is_file()).then_some(real)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_precedes_the_subjects_own_environment_and_that_precedes_ours() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join(".venv/bin/python");
        assert_ne!(python_of(folder.path(), None), own);
        std::fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::fs::write(&own, "").unwrap();
        assert_eq!(python_of(folder.path(), None), own);
        assert_eq!(python_of(folder.path(), Some("".into())), own);
        assert_eq!(python_of(folder.path(), Some("/opt/python".into())), Path::new("/opt/python"));
    }

    /// Makes an environment in `own` whose interpreter links to `to`.
    fn link_interpreter(own: &Path, to: &Path) -> PathBuf {
        std::fs::create_dir_all(own.join("bin")).unwrap();
        std::fs::write(own.join("pyvenv.cfg"), "home = /root\n").unwrap();
        std::os::unix::fs::symlink(to, own.join("bin/python")).unwrap();
        own.join("bin/python")
    }

    #[test]
    fn an_interpreter_needs_its_environment_and_the_installation_that_its_link_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        let (own, base) = (folder.path().join("own"), folder.path().join("base"));
        std::fs::create_dir_all(base.join("bin")).unwrap();
        std::fs::create_dir_all(base.join("lib/python3.12")).unwrap();
        std::fs::write(base.join("lib/python3.12/os.py"), "").unwrap();
        std::fs::write(base.join("bin/python3"), "").unwrap();
        let python = link_interpreter(&own, &base.join("bin/python3"));
        assert_eq!(own_files(&python), [base.join("bin"), base.join("lib"), own.join("bin"), own.join("pyvenv.cfg")]);
    }

    #[test]
    fn no_link_and_no_setting_of_an_environment_makes_other_folders_readable() {
        let folder = tempfile::tempdir().unwrap();
        let (own, secret) = (folder.path().join("own"), folder.path().join("secret"));
        std::fs::create_dir_all(secret.join("bin")).unwrap();
        std::fs::create_dir_all(secret.join("lib")).unwrap();
        std::fs::write(secret.join("bin/tool"), "").unwrap();
        let python = link_interpreter(&own, &secret.join("bin/tool"));
        for settings in ["home = SECRET/bin", "HOME = SECRET/bin\nhome = /usr/bin"] {
            std::fs::write(own.join("pyvenv.cfg"), settings.replace("SECRET", secret.to_str().unwrap())).unwrap();
            assert_eq!(own_files(&python), [own.join("bin"), own.join("pyvenv.cfg")]);
        }
        // Whoever read it would wait for a writer.
        std::fs::remove_file(own.join("pyvenv.cfg")).unwrap();
        let (pipe, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, own.join("pyvenv.cfg"), pipe, mode, 0).unwrap();
        assert!(own_files(&python).is_empty());
        std::fs::remove_file(own.join("pyvenv.cfg")).unwrap();
        std::fs::write(own.join("pyvenv.cfg"), "").unwrap();
        std::os::unix::fs::symlink(&secret, own.join("lib")).unwrap();
        assert_eq!(own_files(&python), [own.join("bin"), own.join("pyvenv.cfg")]);
    }

    #[test]
    fn a_folder_without_adapters_is_refused_with_what_is_expected() {
        let folder = tempfile::tempdir().unwrap();
        let said = format!("{:#}", Subject::find(folder.path(), 1, 1, 0).unwrap_err());
        assert!(said.contains("has neither tests/adapters.py nor adapters.py"), "{said}");
        let said = format!("{:#}", Subject::find(&folder.path().join("nowhere"), 1, 1, 0).unwrap_err());
        assert!(said.contains("nowhere cannot be opened"), "{said}");
        std::fs::write(folder.path().join("adapters.py"), "").unwrap();
        let subject = Subject::find(folder.path(), 1, 1, 0).unwrap();
        assert_ne!(subject.seed_for(0), subject.seed_for(1));
        let patience = |limit_s| Subject { limit_s, ..subject.clone() }.patience(Duration::from_secs(600)).as_secs();
        assert_eq!([patience(60), patience(1000)], [600, 2300]);
    }
}
