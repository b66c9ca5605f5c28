//! `cs336 grade --subject DIR --install`, without a network: what it makes, what it says, and what it leaves.

use std::os::unix::fs::PermissionsExt as _;

use cs336::process::processes_with;

use super::subject::Graded;
use super::*;

const PROJECT: &str = "[project]\nname = \"theirs\"\nversion = \"1\"\nrequires-python = \">=3.11\"\n";

/// A subject without results, with this `pyproject.toml`, and programs of ours before those of the system.
struct Installed {
    graded: Graded,
    folder: PathBuf,
}

impl Installed {
    /// `uv` is the text of a shell script of that name; without it, there is a uv that does not run, as of a shim.
    fn new(pyproject: &str, uv: Option<&str>) -> Self {
        let graded = Graded::new();
        let folder = graded.add("broken", "theirs", "way.txt", "not_implemented");
        fs::write(folder.join("pyproject.toml"), pyproject).unwrap();
        let program = graded.tree.path("programs/uv");
        fs::create_dir(program.parent().unwrap()).unwrap();
        fs::write(&program, format!("#!/bin/sh\n{}\n", uv.unwrap_or("exit 127"))).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Self { graded, folder }
    }

    /// What grading it with `--install` says.
    fn said(&self) -> String {
        output_text(&self.grading(["--subject", self.folder.to_str().unwrap()]).output().unwrap())
    }

    /// `cs336 grade --install` of what `option` names.
    fn grading(&self, option: [&str; 2]) -> Command {
        let checks = ["grade", "flash_forward", "--check", "official_protocol", "--install"];
        let mut command = self.graded.tree.command(&[&checks[..], &option].concat());
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.graded.tree.path("programs").display()));
        command.env("CS336_PYTHON", Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python"));
        command.env("PIP_NO_INDEX", "1").env_remove("PYTHON");
        command
    }

    fn has(&self, name: &str) -> bool {
        self.folder.join(name).exists()
    }
}

#[test]
fn a_project_that_is_no_file_and_a_check_that_does_not_exist_are_named_before_anything_is_installed() {
    let installed = Installed::new(PROJECT, None);
    let folder = installed.folder.to_str().unwrap();
    let output = installed.grading(["--subject", folder]).args(["--check", "nosuch"]).output().unwrap();
    assert!(output_text(&output).contains("no check of these problems is called \"nosuch\""), "{output:?}");
    fs::remove_file(installed.folder.join("pyproject.toml")).unwrap();
    fs::create_dir(installed.folder.join("pyproject.toml")).unwrap();
    assert!(installed.said().contains("pyproject.toml is not a regular file"), "{}", installed.said());
    assert!(!installed.has(".venv"));
}

#[test]
fn a_project_without_dependencies_has_its_own_environment_offline_and_what_that_lacks_is_named() {
    let installed = Installed::new(PROJECT, None);
    let said = installed.said();
    assert!(installed.has(".venv/bin/python") && said.contains("running `") && !said.contains("pip install"), "{said}");
    assert!(said.contains(".venv/bin/python has no module torch, which every adapter needs; name it"), "{said}");
    // A second time it is there.
    assert!(installed.said().contains("has no module torch"));
}

#[rstest]
#[case::dependency("dependencies = [\"a_package_of_nobody\"]\n")]
#[case::build_system("[build-system]\nrequires = [\"a_package_of_nobody\"]\nbuild-backend = \"theirs\"\n")]
fn a_package_that_pip_cannot_install_is_named_with_the_command_and_nothing_is_left(#[case] more: &str) {
    let installed = Installed::new(&format!("{PROJECT}{more}"), None);
    let said = installed.said();
    for words in ["--install failed: `", "-m pip install", "exited with status 1", "a_package_of_nobody"] {
        assert!(said.contains(words), "{words:?} is not in: {said}");
    }
    assert!(!installed.has(".venv") && !said.contains("earned"), "{said}");
}

#[test]
fn a_project_that_cannot_be_read_is_named_before_anything_is_made() {
    let installed = Installed::new("[project\n", None);
    let said = installed.said();
    assert!(said.contains("--install cannot read") && said.contains("theirs/pyproject.toml: TOML parse"), "{said}");
    assert!(!installed.has(".venv") && !said.contains("running"), "{said}");
}

#[test]
fn uv_is_asked_first_and_where_it_fails_only_what_was_there_before_is_left() {
    let uv =
        "[ \"$1\" = --version ] || { mkdir -p .venv; touch uv.lock; echo no $UV_PROJECT_ENVIRONMENT for $*; exit 3; }";
    let installed = Installed::new(PROJECT, Some(uv));
    let said = installed.said();
    assert!(said.contains("--install failed: `uv sync --inexact --no-progress` in "), "{said}");
    assert!(said.contains("exited with status 3; its last output:\n    no .venv for sync"), "{said}");
    assert!(!installed.has(".venv") && !installed.has("uv.lock"));
    fs::create_dir(installed.folder.join(".venv")).unwrap();
    fs::write(installed.folder.join(".venv/theirs"), "").unwrap();
    installed.said();
    assert!(installed.has(".venv/theirs") && !installed.has("uv.lock"));
}

#[rstest]
#[case::one_subject(&["--subject", "subjects/theirs"], "TERM")]
#[case::the_first_of_two_by_sigterm(&["--subjects", "subjects"], "TERM")]
#[case::the_first_of_two_by_ctrl_c(&["--subjects", "subjects"], "INT")]
fn an_interrupt_ends_an_installation_that_hangs_with_no_row_and_no_process_left(
    #[case] option: &[&str; 2],
    #[case] signal: &str,
) {
    let uv = "[ \"$1\" = --version ] || { mkdir .venv; setsid sleep 3600 & touch \"$CS336_ROOT/hangs\"; sleep 3600; }";
    let installed = Installed::new(PROJECT, Some(uv));
    let other = installed.graded.add("broken", "zoe", "way.txt", "not_implemented");
    fs::write(other.join("pyproject.toml"), PROJECT).unwrap();
    let mut command = installed.grading(*option);
    let grading = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let tree = &installed.graded.tree;
    assert!(wait_until(Duration::from_secs(60), || tree.path("hangs").exists()), "uv was not started");
    assert!(Command::new("kill").args(["-s", signal, &grading.id().to_string()]).status().unwrap().success());
    let output = grading.wait_with_output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(!tree.path("grades").exists() && !said.contains("zoe") && !said.contains("not graded"), "{said}");
    let of_this_tree = format!("CS336_ROOT={}", tree.folder.path().display());
    assert!(wait_until(Duration::from_secs(60), || processes_with(&of_this_tree).is_empty()), "uv is left");
    assert!(!installed.has(".venv"));
}

/// Standard error as a full disk, or as a pipe that nobody reads.
#[rstest]
#[case::a_full_disk(true)]
#[case::a_reader_that_ends(false)]
fn grades_are_written_where_nothing_can_be_said(#[case] is_full: bool) {
    let installed = Installed::new(PROJECT, Some("exit 0"));
    // This name is an error of its own, and must cost the others nothing.
    for name in ["grades.csv", "zoe"] {
        let folder = installed.graded.add("broken", name, "way.txt", "not_implemented");
        fs::write(folder.join("pyproject.toml"), PROJECT).unwrap();
    }
    let mut command = installed.grading(["--subjects", "subjects"]);
    let stderr = match is_full {
        true => Stdio::from(fs::File::options().write(true).open("/dev/full").unwrap()),
        false => interruption::unread().into(),
    };
    let output = installed.graded.with_python(&mut command).stderr(stderr).output().unwrap();
    let table = fs::read_to_string(installed.graded.tree.path("grades/grades.csv"));
    let table = table.unwrap_or_else(|error| panic!("{error}: {}", output_text(&output)));
    assert_eq!(output.status.code(), Some(1), "{table}");
    for name in ["theirs", "grades.csv", "zoe"] {
        assert!(table.contains(&format!("\n{name},0,15,")), "{table}");
    }
    assert!(output_text(&output).contains("3 subjects; "), "{}", output_text(&output));
}

#[test]
fn an_environment_that_nobody_may_list_is_removed_after_a_failure() {
    let uv = "[ \"$1\" = --version ] || { mkdir -p .venv/a/b; chmod 0 .venv/a; exit 3; }";
    let installed = Installed::new(PROJECT, Some(uv));
    let mut command = installed.grading(["--subject", installed.folder.to_str().unwrap()]);
    // Root may list any folder; without these rights it is as others are.
    let output = match rustix::process::geteuid().is_root() {
        true => {
            let mut setpriv = Command::new("setpriv");
            setpriv.args(["--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]);
            setpriv.arg(command.get_program()).args(command.get_args()).current_dir(installed.graded.tree.path(""));
            setpriv.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).output()
        }
        false => command.output(),
    };
    let said = output_text(&output.unwrap());
    assert!(said.contains("exited with status 3"), "{said}");
    assert!(installed.folder.join(".venv").symlink_metadata().is_err());
}
