//! The Python interpreter that runs the peers of `suites/peers`; it must have PyTorch.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::store::Layout;
use crate::error::Fault;
use crate::printable::shown_path;
use crate::process::{Answer, Cause, ChildProcess, Death, program};
use crate::root::{COMPILER_PATHS, installing};

/// The environment variable in which a bundle's launcher passes the interpreter whose PyTorch it uses.
pub const VARIABLE: &str = "CS336_PYTHON";

/// Finding a module takes a fraction of a second locally, and seconds on a file server.
pub const LIMIT: Duration = Duration::from_secs(60);

/// `$CS336_PYTHON`, else the checkout's own `.venv/bin/python`, else the `python3` of the path.
pub fn interpreter() -> PathBuf {
    let root = Layout::find().ok().map(|layout| layout.root);
    choose(std::env::var_os(VARIABLE), root.as_deref())
}

/// The variable that lists folders with modules.
pub const FOLDERS: &str = "PYTHONPATH";

/// The interpreter, which runs nothing from the working directory: others may write there.
pub fn command() -> Command {
    command_of(&interpreter())
}

/// As [`command`], of this interpreter.
pub fn command_of(interpreter: &Path) -> Command {
    safe(interpreter, |name| std::env::var_os(name))
}

/// Calls `main` of a module of the package in `suites/peers`. Of the folder around it Python can import nothing, and of the package
/// only sources: [`super::manifest::peers_hash`] covers no other file. Its name leaves `peers` to a subject, and a process that
/// multiprocessing spawns has nothing of it to import.
const RUN_OF_PEERS: &str = "\
import importlib.machinery, importlib.util, os, sys
class Source(importlib.machinery.SourceFileLoader):
    def path_stats(self, path):
        raise OSError('compiled modules are not looked for')
folder, module = sys.argv[1:3]
del sys.argv[1:3]
sys.path_importer_cache[folder] = importlib.machinery.FileFinder(folder, (Source, ['.py']))
init = os.path.join(folder, '__init__.py')
spec = importlib.util.spec_from_file_location('cs336_peers', init, loader=Source('cs336_peers', init), submodule_search_locations=[folder])
sys.modules['cs336_peers'] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules['cs336_peers'])
importlib.import_module('cs336_peers.' + module).main(*sys.argv[1:])
";

/// The arguments with which Python runs `module` of the package in `suites/peers`; the module's own follow.
pub fn of_peers(suites: &Path, module: &str) -> [OsString; 5] {
    // -B: write no .pyc files into the measured tree.
    ["-B".into(), "-c".into(), RUN_OF_PEERS.into(), suites.join("peers").into(), module.into()]
}

/// `interpreter` in an environment that has these variables.
fn safe(interpreter: &Path, variable: impl Fn(&str) -> Option<OsString>) -> Command {
    let mut command = program(interpreter);
    // The variable is for what it starts. Before 3.11 Python knows neither, and the option ends it.
    command.arg("-P").env("PYTHONSAFEPATH", "1");
    if let Some(folders) = variable(FOLDERS) {
        command.env(FOLDERS, absolute(&folders));
    }
    command.env("USER", user(&variable));
    // PyTorch runs CUDA's compilers. Python does not check who owns the compiled modules of PYTHONPYCACHEPREFIX.
    let homes = ["CUDA_HOME", "CUDA_PATH", "PYTHONHOME", "PYTHONUSERBASE"].into_iter();
    // PYTHONHOME may name two folders.
    let is_absolute = |value: OsString| std::env::split_paths(&value).all(|home| home.is_absolute());
    let homes = homes.filter(|name| !variable(name).is_some_and(is_absolute));
    for name in homes.chain(COMPILER_PATHS).chain(["PYTHONPYCACHEPREFIX"]) {
        command.env_remove(name);
    }
    command
}

/// The user's name, else its number. Of one that is in no passwd file PyTorch's compiler would look for the name, and fail.
pub fn user(variable: impl Fn(&str) -> Option<OsString>) -> OsString {
    // In the order of Python's getpass.getuser.
    let mut names = ["LOGNAME", "USER", "LNAME", "USERNAME"].into_iter().filter_map(variable);
    let number = || rustix::process::geteuid().as_raw().to_string().into();
    names.find(|name| !name.is_empty()).unwrap_or_else(number)
}

/// [`FOLDERS`] with [`named`] alone.
pub fn absolute(folders: &OsStr) -> OsString {
    std::env::join_paths(named(folders)).expect("what a colon ended holds none")
}

/// The folders that [`FOLDERS`] lists, but those that lie in the working directory: relative ones, and empty ones, which mean it.
pub fn named(folders: &OsStr) -> impl Iterator<Item = PathBuf> {
    std::env::split_paths(folders).filter(|folder| folder.is_absolute())
}

/// Checks that the interpreter runs and has `module`, without importing it.
///
/// Errors: [`Fault::NotAvailable`], with the remedy.
pub fn require(module: &str) -> Result<(), Fault> {
    require_of(&interpreter(), module)
}

/// As [`require`], of this interpreter.
pub fn require_of(interpreter: &Path, module: &str) -> Result<(), Fault> {
    let ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)";
    let has = match run(interpreter, &["-c", ask, module], LIMIT, &|| false) {
        Ok(death) if death.is_success() => return Ok(()),
        Ok(death) if matches!(death.cause, Cause::Exited { status, .. } if status.code() == Some(1)) => {
            format!("{}, which has none", shown_path(interpreter))
        }
        Ok(death) => format!("{}, which {death}", shown_path(interpreter)),
        Err(why) => format!("{why:#}"),
    };
    Err(Fault::NotAvailable {
        needs: format!("a Python of 3.11 or newer with {module} ({}, or set {VARIABLE})", installing()),
        has,
    })
}

/// How the interpreter ended with these arguments, and what it printed last.
///
/// Errors: it does not run, or not end within `limit`, or was ended since the command is `interrupted`.
pub fn run(interpreter: &Path, arguments: &[&str], limit: Duration, interrupted: &dyn Fn() -> bool) -> Result<Death> {
    let shown = shown_path(interpreter);
    let mut command = command_of(interpreter);
    command.args(arguments);
    let python = ChildProcess::start(command);
    match python.with_context(|| format!("{shown}, which does not run"))?.receive(limit, interrupted) {
        Answer::Died(death) => Ok(death),
        Answer::Interrupted => bail!("{shown}, which was interrupted"),
        _ => bail!("{shown}, which did not end within {} s", limit.as_secs_f64()),
    }
}

fn choose(named: Option<OsString>, root: Option<&Path>) -> PathBuf {
    let in_checkout = || root.and_then(own_of);
    let named = named.filter(|name| !name.is_empty()).map(PathBuf::from);
    named.or_else(in_checkout).unwrap_or_else(|| "python3".into())
}

/// The interpreter of the `.venv` in `folder`; `None` if there is none. One that is there and cannot be run must fail by its
/// name, since another Python would have other packages.
pub fn own_of(folder: &Path) -> Option<PathBuf> {
    let environment = folder.join(".venv");
    let python = environment.join("bin/python");
    let missing = [ErrorKind::NotFound, ErrorKind::NotADirectory];
    let is_missing = python.symlink_metadata().is_err_and(|why| missing.contains(&why.kind()));
    (!is_missing || environment.is_symlink() && !environment.exists()).then_some(python)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_without_the_option_that_leaves_the_working_directory_out_runs_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (python, ran) = (folder.path().join("python"), folder.path().join("python.ran"));
        // As an older one: the first thing that it does not know ends it.
        let script = "#!/bin/sh\n[ \"$1\" != -P ] || { echo Unknown option: $1 >&2; exit 2; }\ntouch \"$0.ran\"\n";
        std::fs::write(&python, script).unwrap();
        std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let message = require_of(&python, "json").unwrap_err().to_string();
        assert!(message.contains("3.11 or newer") && message.contains("Unknown option: -P"), "{message}");
        assert!(!ran.exists());
    }

    #[test]
    fn a_missing_module_is_a_fault_with_the_remedy() {
        let python = interpreter();
        assert_eq!(require_of(&python, "json").map_err(|fault| fault.to_string()), Ok(()));
        for (python, module) in [(python.as_path(), "no_such_module"), (Path::new("/nowhere/python"), "json")] {
            let message = require_of(python, module).unwrap_err().to_string();
            assert!(message.contains(module) && message.contains("make setup"), "{message}");
        }
    }

    #[test]
    fn the_working_directory_is_not_among_the_folders() {
        assert_eq!(["", ":"].map(|folders| absolute(OsStr::new(folders))), ["", ""]);
        assert_eq!(absolute(OsStr::new("/a::/b:.:c")), "/a:/b");
    }

    #[test]
    fn of_the_folder_around_the_peers_nothing_is_imported_and_of_the_peers_only_sources() {
        let folder = tempfile::tempdir().unwrap();
        let suites = folder.path().join("a:b");
        std::fs::create_dir_all(suites.join("peers")).unwrap();
        for name in ["sitecustomize.py", "usercustomize.py", "planted.py"] {
            std::fs::write(suites.join(name), "print('planted')").unwrap();
        }
        let own = suites.join("peers/own.py");
        std::fs::write(suites.join("peers/__init__.py"), "").unwrap();
        std::fs::write(&own, "print('compiled')").unwrap();
        let compile = "import py_compile, sys; mode = py_compile.PycInvalidationMode.UNCHECKED_HASH\n\
                       py_compile.compile(sys.argv[1], invalidation_mode=mode)";
        assert!(command().args(["-c", compile]).arg(&own).status().unwrap().success());
        std::fs::write(&own, "print('a source')").unwrap();
        let main = "import importlib.util; from . import own\n\
                    def main(*given): print(*map(importlib.util.find_spec, ['planted', 'peers']), given)";
        std::fs::write(suites.join("peers/serve.py"), main).unwrap();
        let output = command().args(of_peers(&suites, "serve")).arg("cpu").output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert_eq!(said, ["a source\nNone None ('cpu',)\n", ""]);
    }

    #[test]
    fn an_interpreter_that_does_not_end_is_ended_at_the_limit_and_at_an_interrupt() {
        let (python, sleep) = (interpreter(), ["-c", "import time; time.sleep(60)"]);
        let error = run(&python, &sleep, Duration::from_millis(100), &|| false).unwrap_err();
        assert_eq!(format!("{error:#}"), format!("{}, which did not end within 0.1 s", shown_path(&python)));
        let error = run(&python, &sleep, LIMIT, &|| true).unwrap_err();
        assert_eq!(format!("{error:#}"), format!("{}, which was interrupted", shown_path(&python)));
    }

    #[test]
    fn python_runs_nothing_from_the_working_directory_whatever_folders_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        // Python imports the second one by itself.
        for name in ["planted.py", "sitecustomize.py"] {
            std::fs::write(folder.path().join(name), "print('it ran')").unwrap();
        }
        for folders in
            [None, Some(""), Some(":"), Some(":/nowhere"), Some("/nowhere::/nowhere"), Some("."), Some("./:..")]
        {
            let mut python = safe(&interpreter(), |name| folders.filter(|_| name == FOLDERS).map(OsString::from));
            let output = python.args(["-c", "import planted"]).current_dir(folder.path()).output().unwrap();
            let [printed, said] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
            assert!(said.contains("No module named 'planted'") && printed.is_empty(), "{folders:?}: {printed}{said}");
        }
    }

    #[test]
    fn python_inherits_no_home_in_the_working_directory_no_path_of_a_compiler_and_no_folder_of_compiled_modules() {
        let homes =
            [("CUDA_HOME", "cuda"), ("CUDA_PATH", "/opt/cuda"), ("PYTHONHOME", "/usr:."), ("PYTHONUSERBASE", "/u")];
        let of = |name: &str| homes.iter().find(|(known, _)| *known == name).map(|(_, home)| OsString::from(home));
        let removed: Vec<_> = safe(Path::new("python3"), of)
            .get_envs()
            .filter(|(_, value)| value.is_none())
            .map(|(name, _)| name.to_owned())
            .collect();
        let relative = ["CUDA_HOME", "PYTHONHOME", "PYTHONPYCACHEPREFIX"];
        let expected: std::collections::BTreeSet<_> = COMPILER_PATHS.into_iter().chain(relative).collect();
        assert_eq!(removed, Vec::from_iter(expected));
    }

    #[test]
    fn a_user_without_a_name_is_called_by_number() {
        let named = |values: &[(&str, &str)]| {
            user(|name| values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
        };
        assert_eq!(named(&[("USER", "ada"), ("LOGNAME", "")]), "ada");
        assert_eq!(named(&[("USER", "ada"), ("LOGNAME", "bob")]), "bob");
        assert_eq!(named(&[]), OsString::from(rustix::process::geteuid().as_raw().to_string()));
    }

    #[test]
    fn the_variable_precedes_the_checkout_and_the_checkout_precedes_the_path() {
        let tree = tempfile::tempdir().unwrap();
        assert_eq!(choose(None, Some(tree.path())), Path::new("python3"));
        assert_eq!(choose(Some("".into()), None), Path::new("python3"));
        let own = tree.path().join(".venv/bin/python");
        std::fs::create_dir_all(own.parent().unwrap()).unwrap();
        for link in [own.as_path(), &tree.path().join(".venv")] {
            let _ = std::fs::remove_dir_all(link);
            std::os::unix::fs::symlink("nowhere", link).unwrap();
            assert_eq!(choose(None, Some(tree.path())), own, "a link that leads nowhere is not passed over");
            std::fs::remove_file(link).unwrap();
        }
        std::fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::fs::write(&own, "").unwrap();
        assert_eq!(choose(None, Some(tree.path())), own);
        assert_eq!(choose(Some("/opt/python".into()), Some(tree.path())), Path::new("/opt/python"));
    }
}
