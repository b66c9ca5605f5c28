//! Code that a subject brings along: none of it runs unconfined, and no tree of it is taken for that of the program.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::subject::Graded;
use super::subject_faults::{python, through_sh};
use super::*;

const FORWARD: &str = "flash_forward";

#[rstest]
fn nothing_behind_a_link_in_a_subjects_folder_runs_unconfined(
    #[values(".venv", ".venv/bin")] link: &str,
    #[values("a_script", "an_environment")] kind: &str,
) {
    let graded = Graded::new();
    let folder = graded.add("right", "linked", "", "");
    let (ran, target) = (graded.tree.path("ran"), graded.tree.path("elsewhere").join(link));
    let program = graded.tree.path("elsewhere/.venv/bin/python");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    let script = format!("#!/bin/sh\necho it ran >> '{}'\necho '{}'\n", ran.display(), python().display());
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    if kind == "an_environment" {
        fs::write(graded.tree.path("elsewhere/.venv/pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    }
    fs::create_dir_all(folder.join(link).parent().unwrap()).unwrap();
    symlink(target, folder.join(link)).unwrap();
    let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]);
    let said = output_text(&grading.env_remove("PYTHON").output().unwrap());
    assert!(!ran.exists(), "the subject's program ran unconfined: {said}");
    let is_refused = said.contains("linked/.venv leads out of the subject's folder, to ");
    assert_eq!(is_refused, link == ".venv", "{said}");
}

#[rstest]
#[case::alone("--subject", ".")]
#[case::as_one_of_many("--subjects", "..")]
fn a_tree_that_a_subject_brings_is_not_taken_for_that_of_the_program(#[case] flag: &str, #[case] named: &str) {
    let graded = Graded::new();
    let (folder, ran) = (graded.add("right", "mallory", "", ""), graded.tree.path("ran"));
    graded.add("right", "bob", "", "");
    for name in ["suites/peers", "templates", ".venv/bin"] {
        fs::create_dir_all(folder.join(name)).unwrap();
    }
    let mut grading = graded.grading(&[FORWARD, flag, named]);
    let program = format!("#!/bin/sh\necho it ran >> '{}'\necho '{}'\n", ran.display(), python().display());
    fs::write(folder.join(".venv/bin/python"), program).unwrap();
    fs::set_permissions(folder.join(".venv/bin/python"), Permissions::from_mode(0o755)).unwrap();
    let output = grading.env_remove("CS336_ROOT").env_remove("PYTHON").current_dir(&folder).output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("mallory lies in the subject ") && said.contains("or set CS336_ROOT"), "{said}");
    assert!(!said.contains("earned") && !said.contains("has a row") && !ran.exists(), "{said}");
}

#[test]
fn a_package_is_found_where_the_subject_has_pytest_find_it_and_its_place_is_named_elsewhere() {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    fs::create_dir(folder.join("src")).unwrap();
    fs::rename(folder.join("cs336_systems"), folder.join("src/cs336_systems")).unwrap();
    let arguments = [FORWARD, "--subject", folder.to_str().unwrap(), "--check", "official_protocol", "--json"];
    let first_check = || Graded::checks(&json(&graded.grading(&arguments).output().unwrap())).remove(0);
    let (name, status, words) = first_check();
    assert_eq!((name.as_str(), status.as_str()), ("official_protocol", "failed"), "{words}");
    let place = "it lies in src: add pythonpath = [\"src\"] to [tool.pytest.ini_options] in pyproject.toml";
    assert!(words.contains(place) && !words.contains("pip install"), "{words}");
    // As pytest does, Python looks in the folder itself first: assignment 1 has `tests` too.
    fs::create_dir(folder.join("src/tests")).unwrap();
    for name in ["__init__.py", "adapters.py"] {
        fs::write(folder.join("src/tests").join(name), "").unwrap();
    }
    let project = fs::read_to_string(folder.join("pyproject.toml")).unwrap();
    let settings = "[tool.pytest.ini_options]\npythonpath = [\"src\"]\n";
    fs::write(folder.join("pyproject.toml"), format!("{project}\n{settings}")).unwrap();
    let (name, status, words) = first_check();
    assert_eq!((name.as_str(), status.as_str()), ("official_protocol", "passed"), "{words}");
    fs::write(folder.join("pyproject.toml"), format!("{project}\n{settings}[tool.black\n")).unwrap();
    let (_, _, words) = first_check();
    let why = "it lies in src, and pyproject.toml, which may name that, cannot be read: ";
    assert!(words.contains(why) && !words.contains("add pythonpath"), "{words}");
    fs::write(folder.join("pyproject.toml"), format!("{project}\n{settings}")).unwrap();
    fs::remove_file(folder.join("src/cs336_systems/flash.py")).unwrap();
    let (_, _, words) = first_check();
    assert!(words.contains("needs the module cs336_systems.flash, which cs336_systems does not hold"), "{words}");
    assert!(!words.contains("pip install") && !words.contains("add "), "{words}");
}

#[test]
fn a_folder_of_pythonpath_that_is_the_subjects_is_refused_before_a_python_starts() {
    let graded = Graded::new();
    let (folder, ran) = (graded.add("right", "mallory", "", ""), graded.tree.path("ran"));
    fs::write(folder.join("sitecustomize.py"), format!("open({:?}, 'w').close()\n", ran.to_str().unwrap())).unwrap();
    symlink(&folder, graded.tree.path("modules")).unwrap();
    for listed in [folder.clone(), graded.tree.path("modules"), "subjects/mallory".into()] {
        let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]);
        let list = std::env::join_paths([Path::new("/nowhere"), &listed]).unwrap();
        let said = output_text(&grading.env_remove("PYTHON").env("PYTHONPATH", list).output().unwrap());
        assert!(said.contains("which is the subject's; unset it") && !said.contains("earned"), "{said}");
        assert!(!ran.exists(), "the subject's module ran unconfined: {said}");
    }
}

#[test]
fn a_python_of_the_subjects_that_does_not_start_earns_nothing_whatever_limit_was_not_reached() {
    let graded = Graded::new();
    let folder = graded.add("right", "mallory", "", "");
    fs::create_dir_all(folder.join(".venv/bin")).unwrap();
    let python = folder.join(".venv/bin/python");
    fs::write(&python, "#!/bin/sh\necho no interpreter\nexit 3\n").unwrap();
    fs::set_permissions(&python, Permissions::from_mode(0o755)).unwrap();
    for limit in ["exec", "ulimit -v 60000000; exec"] {
        let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]);
        let output = through_sh(&graded, limit, grading.env_remove("PYTHON"), "");
        let said = output_text(&output);
        assert!(said.contains("earned 0 of 15 points") && said.contains("no interpreter"), "{limit}: {said}");
        assert!(!said.contains("ulimit"), "{limit}: {said}");
    }
}

#[test]
fn a_subject_has_a_package_named_peers_and_spawns_a_process() {
    let graded = Graded::new();
    let folder = graded.add("right", "peers", "", "");
    fs::create_dir(folder.join("peers")).unwrap();
    fs::write(folder.join("peers/__init__.py"), "").unwrap();
    fs::write(folder.join("peers/util.py"), "def send(pipe):\n    pipe.send('a word')\n").unwrap();
    let adapters = folder.join("tests/adapters.py");
    let spawns = "import multiprocessing
import peers.util

spawn = multiprocessing.get_context('spawn')
receiver, sender = spawn.Pipe(duplex=False)
child = spawn.Process(target=peers.util.send, args=(sender,))
child.start()
assert receiver.recv() == 'a word'
child.join()
";
    fs::write(&adapters, fs::read_to_string(&adapters).unwrap() + spawns).unwrap();
    let grades = graded.grade(&folder, &[FORWARD], &[]);
    assert_eq!(grades[0]["earned"], grades[0]["points"], "{grades}");
}
