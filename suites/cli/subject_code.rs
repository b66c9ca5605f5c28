//! Code that a subject brings along: none of it runs unconfined, and no tree of it is taken for that of the program.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::subject::Graded;
use super::subject_faults::python;
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
