//! A bundle: what is packed, that it runs wherever it is unpacked, and that edited files show in its records.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::sync::OnceLock;

use cs336::harness::manifest::PROGRAM;
use cs336::harness::provenance;
use cs336::harness::record::Run;

use super::*;

/// A bundle, unpacked into a folder with a space in its name, and a link to a link to its launcher.
struct Bundle {
    folder: tempfile::TempDir,
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let name = entry.unwrap().file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    } else {
        fs::copy(from, to).unwrap();
    }
}

/// The program with its arguments, which must succeed; gives what it printed.
fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", output_text(&output));
    output_text(&output)
}

/// Makes `folder` a repository of all that it holds.
pub fn commit_all(folder: &Path) {
    for arguments in [&["init", "--quiet"][..], &["add", "."], &["commit", "--quiet", "--message", "all"]] {
        let arguments = [provenance::AS_ANYBODY, arguments].concat();
        provenance::run_git(folder, &arguments, &|| false).unwrap().unwrap();
    }
}

/// Packs this checkout's files, committed to a repository of their own; gives the archive.
fn archive() -> &'static Path {
    static PACKED: OnceLock<PathBuf> = OnceLock::new();
    PACKED.get_or_init(|| {
        let repository = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bundled");
        let _ = fs::remove_dir_all(&repository);
        for name in ["kernels", "suites", "templates", "snapshots"] {
            copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join(name), &repository.join(name));
        }
        let style = "report/writeup.typ";
        fs::create_dir(repository.join("report")).unwrap();
        copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join(style), &repository.join(style));
        fs::set_permissions(repository.join(style), fs::Permissions::from_mode(0o666)).unwrap();
        commit_all(&repository);
        let mut bundle = builder(&repository);
        bundle.arg("bundle").env("CS336_ROOT", &repository);
        // Options of a user's own backups.
        bundle.env("TAR_OPTIONS", "--exclude=*.toml");
        printed(&mut keeping_others_out(&bundle));
        repository.join("dist/cs336.tar.gz")
    })
}

/// As `command`, whose new files others may not read.
fn keeping_others_out(command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell
}

/// The program; where this is root, run by another user, to whom the repository then belongs. Packed by root itself, files
/// would belong to root in any case.
fn builder(repository: &Path) -> Command {
    let nobody = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--clear-groups"]);
        command
    };
    let program = env!("CARGO_BIN_EXE_cs336");
    let succeeds = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    // A checkout in root's home is closed to others, and then root keeps the repository too.
    if succeeds(nobody().args(["test", "-x", program]))
        && succeeds(Command::new("chown").args(["-R", "65534"]).arg(repository))
    {
        let mut command = nobody();
        command.arg(program);
        command
    } else {
        Command::new(program)
    }
}

impl Bundle {
    fn unpack() -> Self {
        let folder = tempfile::Builder::new().prefix("with a space ").tempdir().unwrap();
        printed(Command::new("tar").arg("-xzf").arg(archive()).arg("-C").arg(folder.path()));
        symlink("cs336/cs336", folder.path().join("first link")).unwrap();
        fs::create_dir(folder.path().join("elsewhere")).unwrap();
        symlink("../first link", folder.path().join("elsewhere/second link")).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("cs336").join(name)
    }

    /// Through both links, in a folder that has nothing to do with the bundle.
    fn command(&self, arguments: &[&str]) -> Command {
        let elsewhere = self.folder.path().join("elsewhere");
        let mut command = Command::new(elsewhere.join("second link"));
        command.args(arguments).current_dir(&elsewhere).env("PYTHON", cs336::harness::python::interpreter());
        command.env_remove("CS336_ROOT").env_remove("LD_LIBRARY_PATH").env_remove("CS336_PYTHON");
        command
    }

    /// Measures the quickest problem.
    fn measure(&self) -> Run {
        printed(&mut self.command(&["measure", PROBLEM, "--profile", "cpu"]));
        let layout = Layout::at(self.path(""));
        layout.read_local(Profile::Cpu, problem()).unwrap().unwrap().runs.remove(0)
    }

    fn files(&self) -> Vec<PathBuf> {
        let (mut files, mut folders) = (Vec::new(), vec![self.path("")]);
        while let Some(folder) = folders.pop() {
            let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let (inner, outer): (Vec<_>, Vec<_>) = paths.partition(|path| path.is_dir());
            folders.extend(inner);
            files.extend(outer);
        }
        files
    }
}

fn contains(bytes: &[u8], text: &str) -> bool {
    let text = text.as_bytes();
    bytes.iter().enumerate().any(|(at, byte)| *byte == text[0] && bytes[at..].starts_with(text))
}

#[test]
fn no_packed_file_holds_a_path_of_the_builder() {
    let bundle = Bundle::unpack();
    let program = fs::read(env!("CARGO_BIN_EXE_cs336")).unwrap();
    let home = std::env::var("HOME").unwrap();
    let cargo = std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{home}/.cargo"));
    let paths =
        [env!("CARGO_MANIFEST_DIR").to_string(), std::env::var("LIBTORCH").unwrap(), format!("{cargo}/registry")];
    assert!(paths.iter().all(|path| contains(&program, path)), "a path is not in the program: is it the right one?");
    let files = bundle.files();
    assert!(files.len() > 100, "{files:?}");
    for file in files {
        let bytes = fs::read(&file).unwrap();
        for path in &paths {
            assert!(!contains(&bytes, path), "{} holds {path}", file.display());
        }
    }
    let dynamic = printed(Command::new("readelf").arg("-d").arg(bundle.path(PROGRAM)));
    let library_paths = dynamic.lines().filter(|line| line.contains("RUNPATH") || line.contains("RPATH"));
    for line in library_paths {
        let path = line.split(['[', ']']).nth(1).unwrap();
        assert!(path.trim_matches('/') == "lib", "{line}");
    }
}

#[test]
fn packed_files_belong_to_root_and_all_can_read_them_and_only_their_owner_can_write_to_them() {
    let listed = printed(Command::new("tar").args(["--numeric-owner", "-tvzf"]).arg(archive()));
    assert!(listed.contains("report/writeup.typ"), "{listed}");
    for line in listed.lines() {
        let (mode, rest) = line.split_once(' ').unwrap();
        assert!(rest.trim_start().starts_with("0/0 ") && !mode[4..].contains('w'), "{line}");
        let others = if mode[..4].contains('x') { "r-x" } else { "r--" };
        assert!(mode.ends_with(others), "{line}");
    }
}

#[test]
fn two_bundles_packed_at_once_are_each_whole_and_a_pipe_among_the_files_is_named() {
    let tree = Tree::new();
    commit_all(&tree.path(""));
    // What a killed one left.
    fs::create_dir_all(tree.path("dist/cs336-packing-a.locked/cs336/bin")).unwrap();
    let [first, second] = [0; 2].map(|_| tree.command(&["bundle"]).stdout(Stdio::piped()).spawn().unwrap());
    for child in [first, second] {
        assert!(child.wait_with_output().unwrap().status.success());
    }
    printed(Command::new("tar").arg("-xzf").arg(tree.path("dist/cs336.tar.gz")).arg("-C").arg(tree.path("report")));
    assert!(tree.path("report/cs336/bundle.json").is_file());
    assert_eq!(fs::read_dir(tree.path("dist")).unwrap().count(), 1, "a temporary folder is left");
    fs::remove_file(tree.path("templates/summary.md")).unwrap();
    assert!(Command::new("mkfifo").arg(tree.path("templates/summary.md")).status().unwrap().success());
    let said = tree.refused(&["bundle"]);
    assert!(said.contains("failed to copy templates/summary.md: it is not a regular file"), "{said}");
}

#[test]
fn a_bundle_runs_through_links_from_a_folder_with_a_space() {
    let bundle = Bundle::unpack();
    // Python would import the first in place of its own, and the second by itself.
    for name in ["glob.py", "sitecustomize.py"] {
        fs::write(bundle.folder.path().join("elsewhere").join(name), "raise SystemExit('planted')").unwrap();
    }
    // The loader would take it before the system's, and fail. The shell needs none.
    fs::write(bundle.folder.path().join("elsewhere/libm.so.6"), "planted").unwrap();
    for folders in [":/nowhere", ".", "/nowhere:.:./"] {
        let list = printed(bundle.command(&["list"]).env("PYTHONPATH", folders).env("LD_LIBRARY_PATH", folders));
        assert!(list.contains("21 problems, 107 points"));
    }
    assert!(printed(&mut bundle.command(&["grade", "communication_accounting"])).contains("of 10 points"));
    printed(&mut bundle.command(&["writeup", "--no-measure"]));
    for name in ["pdf", "html", "md"] {
        assert!(bundle.path(&format!("report/writeup.{name}")).is_file(), "{name}");
    }
}

/// Before 3.11 Python looks for modules in the working directory, whatever it is told.
#[test]
fn a_bundle_refuses_an_old_python_before_it_imports_anything() {
    let bundle = Bundle::unpack();
    let place = |name: &str| bundle.folder.path().join("elsewhere").join(name);
    fs::create_dir(place("site")).unwrap();
    fs::write(place("site/sitecustomize.py"), "import sys\nsys.version_info = (3, 10, 13)\nsys.path.insert(0, '')\n")
        .unwrap();
    fs::write(place("glob.py"), "raise SystemExit('planted')").unwrap();
    let output = bundle.command(&["list"]).env("PYTHONPATH", place("site")).output().unwrap();
    let said = output_text(&output);
    assert!(
        !output.status.success() && said.contains("cs336: needs Python 3.11 or newer; name one with PYTHON="),
        "{said}"
    );
}

#[test]
fn a_bundle_runs_no_program_and_no_compiled_module_of_the_working_directory() {
    let bundle = Bundle::unpack();
    let elsewhere = bundle.folder.path().join("elsewhere");
    let ran = elsewhere.join("ran");
    for name in ["dirname", "readlink", "tr", "grep", "git"] {
        fs::write(elsewhere.join(name), format!("#!/bin/sh\ntouch '{}'\nexit 1\n", ran.display())).unwrap();
        fs::set_permissions(elsewhere.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::write(elsewhere.join("planted.py"), format!("open({:?}, 'w')\n", ran.display().to_string())).unwrap();
    // Where Python looks for what it has compiled of the first module that the launcher imports.
    let plant = "import glob, importlib.util, py_compile, sys; sys.pycache_prefix = 'compiled'; \
                 py_compile.compile('planted.py', importlib.util.cache_from_source(glob.__file__), \
                 invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)";
    let python = cs336::harness::python::interpreter();
    printed(Command::new(&python).args(["-c", plant]).current_dir(&elsewhere));
    let alone = Command::new(&python)
        .args(["-c", "import glob"])
        .current_dir(&elsewhere)
        .env("PYTHONPYCACHEPREFIX", "compiled")
        .status();
    assert!(alone.unwrap().success() && fs::remove_file(&ran).is_ok(), "the planted module runs in Python alone");
    let path = std::env::var("PATH").unwrap();
    for verb in ["list", "doctor"] {
        let mut command = bundle.command(&[verb]);
        let output = command
            .env("PATH", format!(":{path}"))
            .env("PYTHONPYCACHEPREFIX", "compiled")
            .env("PYTHONHOME", ".")
            .env("HOME", ".");
        printed(output);
        assert!(!ran.exists(), "{verb} ran what was planted");
    }
}

#[test]
fn what_is_no_python_is_named() {
    let bundle = Bundle::unpack();
    let output = bundle.command(&["list"]).env("PYTHON", "true").output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.ends_with("true names no PyTorch; name a Python that has torch 2.11.0 with PYTHON=...\n"), "{said}");
}

#[test]
fn a_run_of_an_edited_bundle_names_the_files_and_is_not_accepted() {
    let bundle = Bundle::unpack();
    let clean = bundle.measure();
    assert!(!clean.dirty && clean.modified.is_empty() && clean.commit.len() == 40, "{clean:?}");
    printed(&mut bundle.command(&["accept", PROBLEM, "--profile", "cpu"]));
    printed(&mut bundle.command(&["doctor"]));
    let peer = bundle.path("suites/peers/timing.py");
    fs::write(&peer, fs::read_to_string(&peer).unwrap() + "\n# faster\n").unwrap();
    let edited = bundle.measure();
    assert_eq!((edited.dirty, edited.modified), (true, vec!["suites/peers/timing.py".to_string()]));
    assert!(clean.peers_hash.is_some() && edited.peers_hash.is_some() && clean.peers_hash != edited.peers_hash);
    let output = bundle.command(&["accept", PROBLEM, "--profile", "cpu"]).output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("uncommitted changes (modified: suites/peers/timing.py)"), "{said}");
    let output = bundle.command(&["doctor"]).output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("other files than the bundle (suites/peers/timing.py): unpack the bundle again"), "{said}");
}

/// As of a checkout, wherever it runs: here in another tree of this user.
#[test]
fn a_bundle_that_others_can_write_to_is_refused_with_a_remedy_that_works() {
    let (bundle, tree) = (Bundle::unpack(), Tree::new());
    let explained = |variables: &[(&str, &Path)]| {
        let mut command = bundle.command(&["explain", PROBLEM]);
        command.current_dir(tree.folder.path()).envs(variables.iter().copied()).output().unwrap()
    };
    assert!(explained(&[]).status.success());
    let real = bundle.path("").canonicalize().unwrap();
    for part in ["suites/peers/adamw.py", "kernels", "bin/cs336", "cs336"] {
        let mode = fs::metadata(bundle.path(part)).unwrap().permissions();
        fs::set_permissions(bundle.path(part), fs::Permissions::from_mode(mode.mode() | 0o022)).unwrap();
        for variables in [&[][..], &[("CS336_ROOT", tree.folder.path())]] {
            let output = explained(variables);
            let said = output_text(&output);
            assert_eq!(output.status.code(), Some(1), "{part}: {said}");
            assert!(said.contains("other users can write to ") && said.contains(part), "{said}");
            assert!(said.contains("set CS336_ROOT="), "{said}");
        }
        let output = explained(&[("CS336_ROOT", &real)]);
        assert!(output.status.success(), "{}", output_text(&output));
        fs::set_permissions(bundle.path(part), mode).unwrap();
    }
    if std::os::unix::fs::chown(bundle.path("suites/peers"), Some(65_534), None).is_ok() {
        let said = output_text(&explained(&[]));
        assert!(said.contains("suites/peers") && said.contains("belongs to user 65534"), "{said}");
    }
}
