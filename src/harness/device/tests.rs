//! Which results count: those that passed with the present kernels and libraries.

use super::super::record::{Gpu, Machine, Peaks};
use super::super::store::write_atomically;
use super::*;

static ONE: DeviceCheck = DeviceCheck::new("one", "One.", || Verdict::passed("")).with_kernels(&["a.cu"]);
static TWO: DeviceCheck = DeviceCheck::new("two", "Two.", || Verdict::passed("")).on_two_gpus();

/// A tree with two kernels.
fn tree() -> (tempfile::TempDir, Layout) {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::at(folder.path().into());
    ["a.cu", "b.cu"].iter().for_each(|file| kernel(&layout, file, "int x;\n"));
    (folder, layout)
}

fn kernel(layout: &Layout, file: &str, text: &str) {
    write_atomically(&layout.root.join("kernels").join(file), text.as_bytes()).unwrap();
}

fn group(layout: &Layout, torch: &str) -> DeviceGroup {
    let versions = [("torch", torch.to_string()), ("nccl", "2.28.9".to_string())];
    DeviceGroup::new(layout, vec![&ONE, &TWO], versions.into()).unwrap()
}

fn gpu() -> Gpu {
    Gpu { name: "a GPU".into(), memory_bytes: 1, compute_capability: "9.0".into() }
}

fn run(id: &str, dirty: bool) -> Run {
    let software = [("torch", "2.11.0"), ("nccl", "2.28.9")].map(|(name, version)| (name.into(), version.into()));
    Run {
        id: id.into(),
        started: "2026-01-01T00:00:00Z".into(),
        commit: "c".into(),
        dirty,
        modified: Vec::new(),
        peers_hash: None,
        suite_hash: String::new(),
        machine: Machine { cpu: "a CPU".into(), cores: 2, memory_bytes: 1, os: "Linux".into(), gpus: vec![gpu(); 2] },
        software: software.into(),
        settings: BTreeMap::new(),
        peaks: Peaks { flops_per_s: BTreeMap::new(), bytes_per_s: 1.0, cache_bytes: 0.0, source: "test".into() },
    }
}

/// Results of one run, in a file.
fn results(group: &DeviceGroup, run: &Run, ended: &[(&DeviceCheck, Result<&str, &str>)]) -> RecordFile {
    let mut file = RecordFile::new(DEVICE, Profile::Gpu);
    for (check, ended) in ended {
        let outcome = match ended {
            Ok(note) => Outcome::Measured { row: json!({ "note": note }) },
            Err(error) => Outcome::Failed { error: error.to_string() },
        };
        group.put(&mut file, run, check, outcome, 1.0);
    }
    file
}

fn write(path: std::path::PathBuf, file: &RecordFile) {
    write_atomically(&path, file.to_json().unwrap().as_bytes()).unwrap();
}

#[test]
fn a_check_runs_wherever_there_is_a_gpu() {
    assert_eq!(ONE.lacks(0).unwrap(), "needs a GPU, this machine has none");
    assert_eq!((ONE.lacks(1), TWO.lacks(1), TWO.lacks(2)), (None, None, None));
}

#[test]
fn a_result_on_a_shared_gpu_leaves_two_gpus_open_and_replaces_no_whole_proof() {
    let (_folder, layout) = tree();
    let group = group(&layout, "2.11.0");
    let mut shared = run("shared", false);
    shared.machine.gpus.truncate(1);
    let passed = [(&ONE, Ok("")), (&TWO, Ok(""))];
    write(layout.accepted(Profile::Gpu, DEVICE), &results(&group, &shared, &passed));
    let open = group.unproven(&layout).unwrap().unwrap();
    assert!(
        open.contains("1 of 2 checks") && open.contains("two (passed on ranks that share a GPU, not yet on 2 GPUs)"),
        "{open}"
    );
    write(layout.accepted(Profile::Gpu, DEVICE), &results(&group, &run("whole", false), &passed));
    write(layout.local(Profile::Gpu, DEVICE), &results(&group, &shared, &passed));
    let kept = group.recorded(&layout).unwrap();
    let of = |check: &DeviceCheck| kept.case(&check.params()).unwrap().run.clone();
    assert_eq!((of(&ONE).as_str(), of(&TWO).as_str()), ("shared", "whole"));
    assert_eq!(group.unproven(&layout).unwrap(), None);
}

#[test]
fn missing_and_stale_results_are_named_with_their_reason() {
    let (_folder, layout) = tree();
    let group_here = |torch| group(&layout, torch);
    let unproven = |torch| group_here(torch).unproven(&layout).unwrap();
    assert!(unproven("2.11.0").unwrap().contains("snapshots/gpu/device.json does not exist"));
    let accepted = layout.accepted(Profile::Gpu, DEVICE);
    write(accepted.clone(), &results(&group_here("2.11.0"), &run("r", false), &[(&ONE, Ok("")), (&TWO, Ok(""))]));
    assert_eq!(unproven("2.11.0"), None);
    kernel(&layout, "b.cu", "int y;\n");
    kernel(&layout, "a.cu", "// A comment.\nint x;\n");
    assert_eq!(unproven("2.11.0"), None, "neither check runs the changed code");
    assert!(unproven("2.12.0").unwrap().ends_with(
        "2 of 2 checks by snapshots/gpu/device.json: one, two (it ran with torch 2.11.0, this machine has 2.12.0)"
    ));
    kernel(&layout, "a.cu", "int y;\n");
    let stale = unproven("2.11.0").unwrap();
    assert!(stale.contains("1 of 2 checks") && stale.ends_with("one (kernels/a.cu has changed since)"), "{stale}");
    write(accepted, &results(&group_here("2.11.0"), &run("r", false), &[(&ONE, Err("wrong"))]));
    assert!(unproven("2.11.0").unwrap().ends_with("one (failed); two (not run)"));
}

#[test]
fn a_skipped_check_keeps_its_accepted_result_while_that_still_counts() {
    let (_folder, layout) = tree();
    let both = results(&group(&layout, "2.11.0"), &run("old", false), &[(&ONE, Ok("old")), (&TWO, Ok("old"))]);
    write(layout.accepted(Profile::Gpu, DEVICE), &both);
    kernel(&layout, "a.cu", "int y;\n");
    let group = group(&layout, "2.11.0");
    let names = |file: &RecordFile| -> Vec<String> {
        file.cases.iter().map(|case| format!("{} {}", case.params["check"].as_str().unwrap(), case.run)).collect()
    };
    assert_eq!(names(&group.recorded(&layout).unwrap()), ["two old"], "the other check's kernel has changed");
    write(layout.local(Profile::Gpu, DEVICE), &results(&group, &run("new", false), &[(&ONE, Ok("new"))]));
    let recorded = group.recorded(&layout).unwrap();
    assert_eq!(names(&recorded), ["one new", "two old"]);
    assert_eq!(recorded.runs.len(), 2);
}

#[test]
fn a_failed_stale_early_or_uncommitted_result_is_not_accepted() {
    let (_folder, layout) = tree();
    let before = group(&layout, "2.11.0");
    let refusal = |group: &DeviceGroup, file: &RecordFile| group.acceptable(file).unwrap_err().to_string();
    let passed = results(&before, &run("r", false), &[(&ONE, Ok(""))]);
    before.acceptable(&passed).unwrap();
    assert!(refusal(&before, &results(&before, &run("r", true), &[(&ONE, Ok(""))])).contains("uncommitted changes"));
    let early = Run { started: "9000-01-01T00:00:00Z".into(), ..run("r", false) };
    assert!(refusal(&before, &results(&before, &early, &[(&ONE, Ok(""))])).contains("which is still to come"));
    assert!(
        refusal(&before, &results(&before, &run("r", false), &[(&TWO, Err("hangs"))])).contains("two failed (hangs)")
    );
    let mut skipped = passed.clone();
    skipped.cases[0].outcome = Outcome::NotRun { reason: "x".into(), needs: "y".into(), has: "z".into() };
    assert!(refusal(&before, &skipped).contains("one was not run, so the record proves nothing of it"));
    kernel(&layout, "a.cu", "int y;\n");
    assert!(refusal(&group(&layout, "2.11.0"), &passed).contains("one is stale: kernels/a.cu has changed since"));
}

#[test]
fn a_result_of_a_kernel_that_was_edited_during_the_checks_is_not_recorded() {
    let (_folder, layout) = tree();
    let group = group(&layout, "2.11.0");
    group.require_same_kernels(&layout, &ONE).unwrap();
    kernel(&layout, "a.cu", "int y;\n");
    let said = group.require_same_kernels(&layout, &ONE).unwrap_err().to_string();
    assert_eq!(said, "a.cu changed during the checks, so the result of one is not recorded: run it again");
    group.require_same_kernels(&layout, &TWO).unwrap();
}
