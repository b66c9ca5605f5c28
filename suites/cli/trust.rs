//! Other users of the machine: they cannot change what the program writes, and their files do not run.

use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

use super::interruption::{permissions_bind, through_shell};
use super::*;

#[rstest]
#[case::lets_everybody_write("0")]
#[case::keeps_everybody_out("777")]
fn this_user_alone_writes_to_new_files_whatever_the_mask_is(#[case] mask: &str) {
    let tree = Tree::new();
    let mut command = Command::new("sh");
    command.args([
        "-c",
        &format!("umask {mask}; exec \"$0\" \"$@\""),
        env!("CARGO_BIN_EXE_cs336"),
        "measure",
        PROBLEM,
        "--profile",
        "cpu",
    ]);
    let output = command.env("CS336_ROOT", tree.path("")).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    for name in [
        "report/records",
        "report/records/.lock",
        "report/records/cpu",
        "report/records/cpu/mixed_precision_accumulation.json",
    ] {
        let mode = fs::metadata(tree.path(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o622, 0o600, "{name} has mode {mode:o}");
    }
}

/// Grades and records are read by whom the user's mask lets read.
#[rstest]
#[case::of_the_user_alone("077", 0o600)]
#[case::of_the_group("027", 0o640)]
#[case::of_all("022", 0o644)]
fn a_new_file_is_read_by_whom_the_mask_lets_read(#[case] mask: &str, #[case] expected: u32) {
    let tree = Tree::new();
    let results = tree.path("results.xml");
    let arguments = ["grade", "device", "--junit", results.to_str().unwrap()];
    let output = through_shell(&tree, &format!("umask {mask}"), &arguments).output().unwrap();
    assert!(results.exists(), "{}", output_text(&output));
    assert_eq!(fs::metadata(&results).unwrap().permissions().mode() & 0o777, expected);
}

#[test]
fn a_tree_of_another_user_above_the_working_directory_is_refused() {
    let tree = Tree::new();
    if chown(tree.path("suites"), Some(65_534), None).is_err() {
        eprintln!("skipped: only root can give a folder to another user");
        return;
    }
    let said = |command: &mut Command| output_text(&command.output().unwrap());
    let refusal = said(tree.command(&["explain", PROBLEM]).env_remove("CS336_ROOT").current_dir(tree.path("kernels")));
    assert!(refusal.contains("belongs to user 65534") && refusal.contains("set CS336_ROOT="), "{refusal}");
    assert!(said(&mut tree.command(&["explain", PROBLEM])).contains("grid cpu."));
}

#[test]
fn a_python_file_that_others_can_write_to_is_refused() {
    let tree = Tree::new();
    let peer = tree.path("suites/peers/__init__.py");
    fs::create_dir(peer.parent().unwrap()).unwrap();
    fs::write(&peer, "").unwrap();
    fs::set_permissions(&peer, fs::Permissions::from_mode(0o666)).unwrap();
    let output = tree.command(&["explain", PROBLEM]).env_remove("CS336_ROOT").output().unwrap();
    let said = output_text(&output);
    assert!(said.contains("other users can write to ") && said.contains("__init__.py (mode 666)"), "{said}");
}

/// Links to folders of the user's own, and an interpreter of another user, in a folder like /tmp.
#[test]
fn a_tree_that_others_can_write_to_is_refused_and_its_python_does_not_run() {
    let (tree, open) = (Tree::new(), tempfile::tempdir().unwrap());
    for name in ["suites", "kernels"] {
        symlink(tree.path(name), open.path().join(name)).unwrap();
    }
    for name in ["templates", ".venv/bin", "work"] {
        fs::create_dir_all(open.path().join(name)).unwrap();
    }
    let (python, ran) = (open.path().join(".venv/bin/python"), open.path().join("ran"));
    fs::write(&python, format!("#!/bin/sh\ntouch {}\n", ran.display())).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(open.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let mut command = tree.command(&["doctor"]);
    let output =
        command.env_remove("CS336_ROOT").env_remove("CS336_PYTHON").current_dir(open.path().join("work")).output();
    let said = output_text(&output.unwrap());
    assert!(said.contains("other users can write to") && said.contains("(mode 1777): set CS336_ROOT="), "{said}");
    assert!(!ran.exists(), "planted code ran: {said}");
}

#[test]
fn no_program_of_the_working_directory_runs_where_the_path_lists_it() {
    let (tree, folder) = (Tree::new(), tempfile::tempdir().unwrap());
    let ran = folder.path().join("ran");
    for name in ["git", "uv"] {
        let program = folder.path().join(name);
        fs::write(&program, format!("#!/bin/sh\ntouch '{}'\nexit 1\n", ran.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::create_dir(tree.path("subject")).unwrap();
    // Where there is no uv, a Python that is none makes no environment.
    fs::write(tree.path("subject/pyproject.toml"), "[project]\nname = \"x\"\nversion = \"0\"\n").unwrap();
    let subject = tree.path("subject").display().to_string();
    let path = std::env::var("PATH").unwrap();
    for path in [format!(":{path}"), format!(".:{path}"), String::new()] {
        for arguments in [&["doctor"][..], &["grade", "flash_forward", "--install", "--subject", &subject]] {
            let mut command = tree.command(arguments);
            let output = command.current_dir(folder.path()).env("PATH", &path).env("PYTHON", "false").output().unwrap();
            assert!(!ran.exists(), "{arguments:?} with {path:?}: {}", output_text(&output));
        }
    }
}

/// `make wheel` leaves it where it packs.
#[test]
fn an_environment_of_the_wheel_that_others_can_write_to_is_refused_and_does_not_run() {
    let tree = Tree::new();
    let (python, ran) = (tree.path("target/wheel/environment/bin/python"), tree.path("ran"));
    fs::create_dir_all(python.parent().unwrap()).unwrap();
    fs::write(&python, format!("#!/bin/sh\ntouch {}\n", ran.display())).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let said = |tree: &Tree| {
        let mut command = tree.command(&["official", "."]);
        output_text(&command.env_remove("CS336_ROOT").env_remove("PYTHON").output().unwrap())
    };
    for folder in ["target", "target/wheel/environment/bin"] {
        let mode = |mode| fs::set_permissions(tree.path(folder), fs::Permissions::from_mode(mode)).unwrap();
        mode(0o777);
        let refusal = said(&tree);
        assert!(refusal.contains("other users can write to") && refusal.contains(folder), "{refusal}");
        assert!(!ran.exists(), "planted code ran: {refusal}");
        mode(0o755);
    }
    said(&tree);
    assert!(ran.exists(), "this user's own environment runs");
}

/// Doctor says why the cache is not used, or not filled.
#[test]
fn a_kernel_cache_that_others_can_write_to_or_nobody_is_named_with_the_reason() {
    let tree = Tree::new();
    let cache = tree.path("cache/cs336/kernels");
    fs::create_dir_all(&cache).unwrap();
    let expected =
        [(0o755, "ok       kernel cache"), (0o777, "with mode 777; only user"), (0o555, "no file can be made in")];
    for (mode, expected) in expected {
        fs::set_permissions(&cache, fs::Permissions::from_mode(mode)).unwrap();
        let mut command = through_shell(&tree, permissions_bind(), &["doctor"]);
        let said = output_text(&command.env("XDG_CACHE_HOME", tree.path("cache")).output().unwrap());
        assert!(said.contains(expected) && said.contains(&cache.display().to_string()), "{said}");
    }
}
