//! A subject: somebody else's implementation of the assignment's adapters, in a folder, and the checks that it is put to.

use std::collections::BTreeMap;
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
        let python = python_of(&folder, std::env::var_os(PYTHON));
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

/// The folders that an interpreter loads its own files from: its prefix, and the one that its environment was made from.
pub fn prefixes(python: &Path) -> Vec<PathBuf> {
    let prefix = |program: &Path| program.parent().and_then(Path::parent).map(Path::to_path_buf);
    let mut found: Vec<PathBuf> = prefix(python).into_iter().collect();
    found.extend(python.canonicalize().ok().and_then(|real| prefix(&real)));
    let settings = found.iter().filter_map(|folder| std::fs::read_to_string(folder.join("pyvenv.cfg")).ok());
    let homes: Vec<PathBuf> = settings.filter_map(|text| home(&text)).collect();
    for home in homes {
        let real = home.canonicalize().unwrap_or_else(|_| home.clone());
        found.extend([&home, &real].into_iter().filter_map(|bin| bin.parent().map(Path::to_path_buf)));
    }
    found.extend(found.clone().iter().filter_map(|folder| folder.canonicalize().ok()));
    // Of /bin/python3 it would be the whole machine.
    found.retain(|folder| folder.parent().is_some());
    found.sort();
    found.dedup();
    found
}

/// The folder of programs that `pyvenv.cfg` calls home.
fn home(settings: &str) -> Option<PathBuf> {
    let line = settings.lines().find_map(|line| line.trim_start().strip_prefix("home")?.trim_start().strip_prefix('='));
    line.map(|path| path.trim().into())
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

    #[test]
    fn an_interpreter_needs_its_environment_and_the_one_that_it_was_made_from() {
        let folder = tempfile::tempdir().unwrap();
        let (own, base) = (folder.path().join("own"), folder.path().join("base"));
        for prefix in [&own, &base] {
            std::fs::create_dir_all(prefix.join("bin")).unwrap();
        }
        std::fs::write(base.join("bin/python3"), "").unwrap();
        std::os::unix::fs::symlink(base.join("bin/python3"), own.join("bin/python")).unwrap();
        std::fs::write(own.join("pyvenv.cfg"), format!("home = {}\nversion = 3\n", base.join("bin").to_string_lossy()))
            .unwrap();
        assert_eq!(prefixes(&own.join("bin/python")), [base, own]);
        assert!(prefixes(Path::new("/bin/sh")).iter().all(|folder| folder.parent().is_some()));
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
    }
}
