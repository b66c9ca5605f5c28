//! The Python that loads a subject: whose it is, and what it may read of its installation and its environment.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, bail};

use super::PYTHON;
use crate::harness::python;
use crate::printable::shown_path;
use crate::root::{Way, way_to};

pub(super) struct Interpreter {
    pub program: PathBuf,
    /// What of its installation and its environment it may read, without links.
    pub files: Vec<PathBuf>,
    /// Whether it was found through the subject's folder.
    pub is_own: bool,
}

impl Interpreter {
    /// `$PYTHON`, else that of the subject's own `.venv`, else that of this program. `folder` has no links.
    ///
    /// Errors: it is behind a `.venv` that leads out of the folder.
    pub fn of(folder: &Path) -> Result<Self> {
        let program = python_of(folder, std::env::var_os(PYTHON));
        require_within(folder, &program)?;
        let found = Self::at(program, folder);
        let is_script = !found.is_own && found.files.is_empty();
        let started = is_script.then(|| started_by(&found.program)).flatten();
        Ok(started.map_or(found, |program| Self::at(program, folder)))
    }

    fn at(program: PathBuf, folder: &Path) -> Self {
        Self { files: own_files(&program, folder), is_own: comes_from(&program, folder), program }
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

/// Whether the program lies in this folder, or is reached by a link in it, wherever that leads. `folder` has no links.
pub(super) fn comes_from(program: &Path, folder: &Path) -> bool {
    // A folder above both may be a link by now.
    let lies_there = program.starts_with(folder) && !program.components().any(|part| part == Component::ParentDir);
    // Of a path with too many links nobody knows.
    lies_there
        || !way_to(program).is_ok_and(|Way { links, real, .. }| {
            !links.iter().map(|link| &link.path).chain([&real]).any(|step| step.starts_with(folder))
        })
}

fn on_path(name: &OsStr) -> Option<PathBuf> {
    if Path::new(name).components().count() > 1 {
        return std::path::absolute(name).ok();
    }
    found_in(&std::env::var_os("PATH")?, name)
}

/// The program in the first of the listed folders that has it. One in the working directory is passed over: others may write there.
fn found_in(folders: &OsStr, name: &OsStr) -> Option<PathBuf> {
    let folders = std::env::split_paths(folders).filter(|folder| folder.is_absolute());
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// What Python loads from the folder of its installation or environment. The whole folder is never granted: it may be ~ or
/// ~/.local. With them goes what conda's compilers load, from folders such as `x86_64-conda-linux-gnu`.
const OWN_FILES: [&str; 7] = ["bin", "include", "lib", "lib64", "libexec", "share", "pyvenv.cfg"];

/// The interpreter's own files: those of its environment, and those of the installation that its link leads to.
///
/// A subject makes its own `.venv`, so what that says of itself decides nothing: `pyvenv.cfg` is not read. The interpreter's
/// link is followed, as `uv`, `pyenv`, `conda` and `python -m venv` make it; a folder counts only where it holds an
/// environment or Python's standard library, and of that only what lies in the folder itself and not behind a link out of it.
pub(super) fn own_files(python: &Path, subject: &Path) -> Vec<PathBuf> {
    let prefix = |program: &Path| program.parent()?.parent()?.canonicalize().ok();
    // The environment in a subject's folder may have become a link since it was looked at.
    let environment = prefix(python).filter(|real| !python.starts_with(subject) || real.starts_with(subject));
    let installation = python.canonicalize().ok().and_then(|real| prefix(&real));
    let found = [environment, installation].into_iter().flatten();
    // Of /bin/python3 it would be the whole machine.
    let prefixes = found.filter(|folder| folder.parent().is_some() && is_python(folder));
    let files = prefixes.flat_map(|folder| {
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let compilers = entries.filter(|path| path.as_os_str().as_encoded_bytes().ends_with(b"-linux-gnu"));
        let of_it = OWN_FILES.map(|name| folder.join(name)).into_iter().chain(compilers);
        let of_it = of_it.map(|file| file.canonicalize().ok());
        of_it.flatten().filter(move |file| file.starts_with(&folder)).collect::<Vec<_>>()
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
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_variable_precedes_the_subjects_own_environment_and_that_precedes_ours() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join(".venv/bin/python");
        assert_ne!(python_of(folder.path(), None), own);
        fs::create_dir_all(own.parent().unwrap()).unwrap();
        fs::write(&own, "").unwrap();
        assert_eq!(python_of(folder.path(), None), own);
        assert_eq!(python_of(folder.path(), Some("".into())), own);
        assert_eq!(python_of(folder.path(), Some("/opt/python".into())), Path::new("/opt/python"));
    }

    #[test]
    fn a_program_that_a_link_in_the_folder_leads_to_comes_from_the_folder() {
        let outer = tempfile::tempdir().unwrap();
        let at = |name: &str| outer.path().canonicalize().unwrap().join(name);
        fs::create_dir_all(at("subject/env/bin")).unwrap();
        fs::create_dir_all(at("tools/bin")).unwrap();
        fs::write(at("tools/bin/python"), "").unwrap();
        for (link, target) in [
            ("subject/.venv", "../tools"),
            ("subject/env/bin/python", "../../../tools/bin/python"),
            ("subject/loop", "loop"),
            ("by_link", "subject/.venv/bin"),
            ("base", "tools"),
            ("loop", "loop"),
        ] {
            symlink(target, at(link)).unwrap();
        }
        for (program, comes) in [
            ("subject/.venv/bin/python", true),
            ("subject/env/bin/python", true),
            ("by_link/python", true),
            ("base/../subject/.venv/bin/python", true),
            ("subject/loop", true),
            ("loop", true),
            ("tools/bin/python", false),
            ("base/bin/python", false),
            ("subject/env/../../tools/bin/python", false),
            ("nowhere", false),
        ] {
            assert_eq!(comes_from(&at(program), &at("subject")), comes, "{program}");
        }
    }

    /// Makes an environment in `own` whose interpreter links to `to`.
    fn link_interpreter(own: &Path, to: &Path) -> PathBuf {
        fs::create_dir_all(own.join("bin")).unwrap();
        fs::write(own.join("pyvenv.cfg"), "home = /root\n").unwrap();
        symlink(to, own.join("bin/python")).unwrap();
        own.join("bin/python")
    }

    #[test]
    fn an_interpreter_needs_its_environment_and_the_installation_that_its_link_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        let (own, base) = (folder.path().join("own"), folder.path().join("base"));
        fs::create_dir_all(base.join("bin")).unwrap();
        fs::create_dir_all(base.join("lib/python3.12")).unwrap();
        fs::write(base.join("lib/python3.12/os.py"), "").unwrap();
        fs::write(base.join("bin/python3"), "").unwrap();
        let python = link_interpreter(&own, &base.join("bin/python3"));
        assert_eq!(
            own_files(&python, Path::new("/none")),
            [base.join("bin"), base.join("lib"), own.join("bin"), own.join("pyvenv.cfg")]
        );
    }

    #[test]
    fn no_link_and_no_setting_of_an_environment_makes_other_folders_readable() {
        let folder = tempfile::tempdir().unwrap();
        let (own, secret) = (folder.path().join("own"), folder.path().join("secret"));
        fs::create_dir_all(secret.join("bin")).unwrap();
        fs::create_dir_all(secret.join("lib")).unwrap();
        fs::write(secret.join("bin/tool"), "").unwrap();
        let python = link_interpreter(&own, &secret.join("bin/tool"));
        for settings in ["home = SECRET/bin", "HOME = SECRET/bin\nhome = /usr/bin"] {
            fs::write(own.join("pyvenv.cfg"), settings.replace("SECRET", secret.to_str().unwrap())).unwrap();
            assert_eq!(own_files(&python, Path::new("/none")), [own.join("bin"), own.join("pyvenv.cfg")]);
        }
        // Whoever read it would wait for a writer.
        fs::remove_file(own.join("pyvenv.cfg")).unwrap();
        let (pipe, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, own.join("pyvenv.cfg"), pipe, mode, 0).unwrap();
        assert!(own_files(&python, Path::new("/none")).is_empty());
        fs::remove_file(own.join("pyvenv.cfg")).unwrap();
        fs::write(own.join("pyvenv.cfg"), "").unwrap();
        symlink(&secret, own.join("lib")).unwrap();
        assert_eq!(own_files(&python, Path::new("/none")), [own.join("bin"), own.join("pyvenv.cfg")]);
    }

    #[test]
    fn no_program_is_found_in_the_working_directory() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("python3"), "").unwrap();
        let listed = std::env::join_paths([Path::new("src"), Path::new(""), folder.path()]).unwrap();
        assert_eq!(found_in(&listed, "python3".as_ref()), Some(folder.path().join("python3")));
        // Tests run in the folder of the checkout.
        assert!(Path::new("src/lib.rs").is_file() && found_in(&listed, "lib.rs".as_ref()).is_none());
    }

    /// A subject can exchange a folder above its own for a link while it is graded.
    #[test]
    fn a_link_that_takes_the_place_of_a_folder_later_changes_nothing() {
        let outer = tempfile::tempdir().unwrap();
        let at = |name: &str| outer.path().canonicalize().unwrap().join(name);
        let python = link_interpreter(&at("home/subject/.venv"), Path::new("/none/python"));
        link_interpreter(&at("theirs/.venv"), Path::new("/none/python"));
        let subject = at("home/subject");
        let files = [subject.join(".venv/bin"), subject.join(".venv/pyvenv.cfg")];
        assert_eq!(own_files(&python, &subject), files);
        for (place, target) in [("home/subject/.venv", "theirs/.venv"), ("home", "moved")] {
            fs::rename(at(place), at("moved")).unwrap();
            symlink(at(target), at(place)).unwrap();
            assert!(comes_from(&python, &subject), "{place}");
            assert!(own_files(&python, &subject).is_empty(), "{place}");
            fs::remove_file(at(place)).unwrap();
            fs::rename(at("moved"), at(place)).unwrap();
        }
    }
}
