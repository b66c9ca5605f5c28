//! Files that somebody changes while they are measured: a record, the code that a run names, the program.

use std::os::unix::fs::PermissionsExt as _;

use super::interruption::{
    MEASURE, cases, permissions_bind, require_intact, set_cases, through_shell, wait_for_cases, worker_of,
};
use super::*;

/// A measurement of eight slow cases, of which two are recorded.
fn measuring(tree: &Tree) -> Child {
    set_cases(tree, 200_000..200_008);
    let mut child = tree.command(MEASURE).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_cases(tree, &mut child, 2);
    child
}

#[test]
fn a_record_that_is_changed_while_it_is_measured_is_moved_aside_and_no_case_is_lost() {
    let tree = Tree::new();
    let child = measuring(&tree);
    let changed = fs::read_to_string(tree.record_path()).unwrap().replace("200000", "200001");
    // In one step, since measuring may replace the record meanwhile.
    fs::write(tree.path("changed"), &changed).unwrap();
    fs::rename(tree.path("changed"), tree.record_path()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = output_text(&output);
    assert!(output.status.success() && said.contains("the record was changed while it was measured: moved "), "{said}");
    let aside = tree.record_path().with_extension("json.changed");
    assert_eq!(fs::read_to_string(aside).unwrap(), changed);
    assert_eq!(cases(&tree).len(), 8);
    require_intact(&tree, &[]);
}

/// The record names the code that its run began with.
#[test]
fn no_case_is_recorded_whose_peers_were_edited_during_the_measurement() {
    let tree = Tree::new();
    let peer = tree.path("suites/peers/timing.py");
    fs::create_dir_all(peer.parent().unwrap()).unwrap();
    fs::write(&peer, "as it was").unwrap();
    let child = measuring(&tree);
    fs::write(&peer, "faster").unwrap();
    let output = child.wait_with_output().unwrap();
    let (said, recorded) = (output_text(&output), cases(&tree).len());
    assert!(!output.status.success() && recorded < 8, "{recorded} cases: {said}");
    assert!(
        said.contains("suites/peers changed during the measurement, so no more cases are recorded: run it"),
        "{said}"
    );
    assert!(tree.command(MEASURE).arg("--resume").output().unwrap().status.success());
    assert_eq!(cases(&tree).len(), 8);
    require_intact(&tree, &[]);
}

/// As a build does while this program measures.
#[test]
fn a_program_that_was_replaced_goes_on_with_workers_of_its_own_version() {
    let tree = Tree::new();
    set_cases(&tree, 200_000..200_008);
    let program = tree.path("program");
    if fs::hard_link(env!("CARGO_BIN_EXE_cs336"), &program).is_err() {
        fs::copy(env!("CARGO_BIN_EXE_cs336"), &program).unwrap();
    }
    let mut child = Command::new(&program).args(MEASURE).env("CS336_ROOT", tree.folder.path()).spawn().unwrap();
    wait_for_cases(&tree, &mut child, 2);
    fs::remove_file(&program).unwrap();
    let worker = worker_of(&child).expect("a worker");
    assert!(Command::new("kill").args(["-KILL", &worker.to_string()]).status().unwrap().success());
    child.wait().unwrap();
    let recorded = cases(&tree);
    let failed = recorded.iter().filter(|case| matches!(case.outcome, Outcome::Failed { .. })).count();
    assert!(recorded.len() == 8 && failed <= 1, "{recorded:?}");
    require_intact(&tree, &[]);
}

/// On a CPU the trials of `flash_backward` run their kernels in the emulator.
#[test]
fn a_trial_in_the_emulator_is_stale_once_its_kernel_is_edited() {
    const TRIALS: &str = "flash_backward";
    let tree = Tree::new();
    let accepted = Layout::at(env!("CARGO_MANIFEST_DIR").into()).accepted(Profile::Cpu, TRIALS);
    let local = tree.layout().local(Profile::Cpu, TRIALS);
    fs::create_dir_all(local.parent().unwrap()).unwrap();
    let mut record: Value = serde_json::from_str(&fs::read_to_string(accepted).unwrap()).unwrap();
    // What another type of machine measured would be measured again.
    let here = cs336::harness::provenance::machine(&[]).unwrap();
    record["runs"]
        .as_array_mut()
        .unwrap()
        .iter_mut()
        .for_each(|run| run["machine"] = serde_json::to_value(&here).unwrap());
    fs::write(local, record.to_string()).unwrap();
    let planned = || output_text(&tree.run(&["measure", TRIALS, "--profile", "cpu", "--resume", "--dry-run"]));
    assert!(planned().contains("nothing to measure"), "{}", planned());
    let edit = |file: &str| {
        let path = tree.path("kernels").join(file);
        let edited = fs::read_to_string(&path).unwrap() + "__device__ int edited;\n";
        fs::write(path, edited).unwrap();
    };
    let planned = || ["hopper", "portable"].map(|name| planned().matches(&format!("implementation={name}")).count());
    edit("flash_forward.cu");
    assert_eq!(planned(), [2, 0], "of each two trials");
    edit("emulator/block.h");
    assert_eq!(planned(), [2, 2]);
}

#[test]
fn a_record_of_another_type_of_machine_is_copied_before_the_first_of_its_cases_is_replaced() {
    let tree = Tree::new();
    set_cases(&tree, 2..4);
    assert!(tree.command(MEASURE).status().unwrap().success());
    let mut record: Value = serde_json::from_str(&fs::read_to_string(tree.record_path()).unwrap()).unwrap();
    let cores = record["runs"][0]["machine"]["cores"].as_u64().unwrap() + 1;
    record["runs"][0]["machine"]["cores"] = cores.into();
    for case in record["cases"].as_array_mut().unwrap() {
        case["elapsed_s"] = 100.0.into();
    }
    fs::write(tree.record_path(), record.to_string()).unwrap();
    let name = format!("report/records/cpu/{PROBLEM}.json.elsewhere");
    let (copy, again) = (tree.path(&name), tree.path(format!("{name}-2")));
    let resumed = |more: &[&str]| output_text(&tree.command(MEASURE).arg("--resume").args(more).output().unwrap());
    let said = resumed(&["--budget", "1s"]);
    assert!(said.contains("0 measured") && !copy.exists(), "{said}");
    let said = resumed(&[]);
    let words =
        format!("another type of machine measured {PROBLEM}, and this one does so again; its record is kept as {name}");
    assert!(said.contains(&words) && said.contains("2 measured"), "{said}");
    assert_eq!(fs::read_to_string(copy).unwrap(), record.to_string());
    assert!(!again.exists(), "one copy holds both cases");
    let runs = tree.layout().read_local(Profile::Cpu, problem()).unwrap().unwrap().runs;
    assert!(runs.len() == 1 && runs[0].machine.cores as u64 + 1 == cores, "{runs:?}");
}

#[test]
fn cases_that_have_left_the_suite_leave_the_record_and_a_copy_of_it_is_kept() {
    let tree = Tree::new();
    let measured = |options: &[&str]| output_text(&tree.command(MEASURE).args(options).output().unwrap());
    let count = || tree.layout().read_local(Profile::Cpu, problem()).unwrap().map(|record| record.cases.len());
    let copy = |end: &str| fs::read_to_string(tree.record_path().with_extension(format!("json.earlier{end}")));
    set_cases(&tree, 2..5);
    measured(&[]);
    let three = fs::read_to_string(tree.record_path()).unwrap();
    set_cases(&tree, 2..4);
    let said = measured(&["--resume"]);
    let words =
        format!("1 cases of {PROBLEM} have left the suite; their record is kept as report/records/cpu/{PROBLEM}");
    assert!(said.contains(&words) && said.contains("nothing to measure: all 2 cpu cases"), "{said}");
    assert_eq!((count(), copy("").unwrap()), (Some(2), three));
    let two = fs::read_to_string(tree.record_path()).unwrap();
    set_cases(&tree, 7..8);
    let said = measured(&["--resume"]);
    assert!(said.contains(&format!("2 cases of {PROBLEM} have left the suite; moved ")), "{said}");
    assert_eq!((count(), copy("-2").unwrap()), (Some(1), two));
    let suite = fs::read_to_string(tree.path(format!("suites/{PROBLEM}.toml"))).unwrap();
    tree.suite(&suite.replace("[cpu.", "[gpu."));
    let said = measured(&["--resume"]);
    assert!(said.contains(&format!("1 cases of {PROBLEM} have left the suite; moved ")) && count().is_none(), "{said}");
    assert!(measured(&["--resume"]).contains("nothing to measure: no suite has a cpu grid"));
}

/// It lies behind a link in a folder that cannot be written.
#[test]
fn a_record_that_cannot_lose_its_left_cases_stays_whole_and_costs_its_problem_alone() {
    let tree = Tree::new();
    set_cases(&tree, 2..5);
    assert!(tree.command(MEASURE).status().unwrap().success());
    let (folder, record) = (tree.path("read-only"), tree.record_path());
    fs::create_dir(&folder).unwrap();
    fs::rename(&record, folder.join("record")).unwrap();
    std::os::unix::fs::symlink(folder.join("record"), &record).unwrap();
    let before = fs::read_to_string(&record).unwrap();
    let set_mode = |mode| fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o555);
    set_cases(&tree, 2..4);
    let output = through_shell(&tree, permissions_bind(), &[MEASURE, &["--resume"]].concat()).output().unwrap();
    set_mode(0o755);
    let said = output_text(&output);
    assert!(!output.status.success() && said.contains(&format!("{PROBLEM} is not measured: ")), "{said}");
    assert!(said.contains("0 measured, 0 out of memory, 0 not run, 0 failed: "), "{said}");
    assert_eq!(fs::read_to_string(&record).unwrap(), before);
    assert!(!record.with_extension("json.earlier").exists(), "a copy of what is there is left");
}

/// As on a login node beside records that a GPU's machine made.
#[test]
fn a_machine_that_cannot_run_a_case_leaves_the_record_of_another_one_alone() {
    let tree = Tree::new();
    let accepted = Layout::at(env!("CARGO_MANIFEST_DIR").into()).accepted(Profile::Gpu, PROBLEM);
    let local = tree.layout().local(Profile::Gpu, PROBLEM);
    fs::create_dir_all(local.parent().unwrap()).unwrap();
    let mut record: Value = serde_json::from_str(&fs::read_to_string(accepted).unwrap()).unwrap();
    // A stale one, and a missing one.
    let cases = record["cases"].as_array_mut().unwrap();
    cases[0]["revision"] = 0.into();
    cases.pop().unwrap();
    let suite = cases.len() + 1;
    for (options, planned) in [(&["--resume"][..], 2), (&[], suite)] {
        fs::write(&local, record.to_string()).unwrap();
        let mut command = tree.command(&["measure", PROBLEM, "--profile", "gpu"]);
        let said = output_text(&command.args(options).env("CUDA_VISIBLE_DEVICES", "").output().unwrap());
        let words = format!("{planned} not run ({planned} of them leave the record as it is), 0 failed");
        assert!(said.contains(&words), "{said}");
        assert_eq!(fs::read_to_string(&local).unwrap(), record.to_string());
    }
}
