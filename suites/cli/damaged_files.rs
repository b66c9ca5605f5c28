//! Files of the tree that cannot be used, or say what cannot be: which answers they cost, and how they come back.

use super::*;

#[test]
fn an_accepted_record_that_cannot_be_used_is_restored_from_git_by_its_name() {
    let tree = Tree::with_records();
    fs::write(tree.layout().accepted(Profile::Cpu, PROBLEM), "{").unwrap();
    let remedy = format!("git checkout HEAD -- snapshots/cpu/{PROBLEM}.json");
    for verb in [&["writeup", "--no-measure"][..], &["writeup", "--check"]] {
        assert!(tree.refused(verb).contains(&remedy), "{verb:?}");
    }
    let report = fs::read_to_string(tree.path("report/writeup.md")).unwrap();
    assert!(report.contains("**This answer could not be built: snapshots/cpu/mixed"), "the section does not say it");
}

/// From a folder below the root, where the bad file is also staged.
#[test]
fn the_command_that_is_advised_restores_a_record() {
    let tree = Tree::with_records();
    super::bundle::commit_all(&tree.path(""));
    let accepted = tree.layout().accepted(Profile::Cpu, PROBLEM);
    let sound = fs::read_to_string(&accepted).unwrap();
    fs::write(&accepted, "{").unwrap();
    let git = |arguments: &[&str]| {
        assert!(Command::new("git").args(arguments).current_dir(tree.path("")).status().unwrap().success())
    };
    git(&["add", "snapshots"]);
    let below = tree.path("suites");
    let said = output_text(&tree.command(&["writeup", "--check"]).current_dir(&below).output().unwrap());
    let advised = said.split('`').find(|text| text.starts_with("git ")).unwrap();
    let restored = Command::new("sh").args(["-c", advised]).current_dir(&below).output().unwrap();
    assert!(restored.status.success(), "{advised}: {}", output_text(&restored));
    assert_eq!(fs::read_to_string(&accepted).unwrap(), sound);
}

/// `accept` alone refused it, and the report printed it.
#[test]
fn a_record_that_contradicts_its_case_is_not_read_and_the_accepted_one_answers() {
    let tree = Tree::with_records();
    let accepted = fs::read_to_string(tree.layout().accepted(Profile::Cpu, PROBLEM)).unwrap();
    let mut record: Value = serde_json::from_str(&accepted).unwrap();
    record["cases"][0]["outcome"]["row"]["last_change"] = 123_456_789.into();
    fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
    fs::write(tree.record_path(), record.to_string()).unwrap();
    for verb in [&["diff", PROBLEM, "--profile", "cpu"][..], &["accept", PROBLEM], &["writeup", "--no-measure"]] {
        let said = tree.refused(verb);
        assert!(said.contains("holds what no run can write: case 0 (") && said.contains("moves it aside"), "{said}");
    }
    let report = fs::read_to_string(tree.path("report/writeup.md")).unwrap();
    assert!(!report.contains("123,456,789"), "the report quotes it");
    // An older revision's row may have meant another thing.
    record["cases"][0]["revision"] = 0.into();
    fs::write(tree.record_path(), record.to_string()).unwrap();
    let said = output_text(&tree.run(&["measure", PROBLEM, "--profile", "cpu", "--resume", "--dry-run"]));
    assert!(said.contains("estimate: "), "{said}");
}

#[test]
fn a_damaged_file_of_a_bundle_is_unpacked_again() {
    let tree = Tree::with_records();
    fs::write(tree.path("bundle.json"), "").unwrap();
    fs::write(tree.layout().accepted(Profile::Cpu, PROBLEM), "{").unwrap();
    fs::remove_file(tree.path("templates/flash_forward.md")).unwrap();
    let said = tree.refused(&["writeup", "--no-measure"]);
    assert_eq!(said.matches("unpack the bundle again").count(), 2, "{said}");
}

#[test]
fn results_of_device_checks_that_cannot_be_read_are_moved_aside_without_a_gpu_and_restored_where_they_are_accepted() {
    let tree = Tree::with_records();
    let (local, accepted) =
        [Layout::local, Layout::accepted].map(|of| of(&tree.layout(), Profile::Gpu, "device")).into();
    fs::create_dir_all(local.parent().unwrap()).unwrap();
    fs::write(&local, "{\"schema\":0}").unwrap();
    assert!(
        tree.refused(&["accept", "device"]).contains("run `cs336 grade --device`, which moves these results aside")
    );
    let said = output_text(&tree.run(&["grade", "--device"]));
    assert!(
        said.contains("moved report/records/gpu/device.json to report/records/gpu/device.json.unreadable"),
        "{said}"
    );
    assert!(!local.exists());
    fs::create_dir_all(accepted.parent().unwrap()).unwrap();
    fs::write(&accepted, "{\"schema\":0}").unwrap();
    let said = tree.refused(&["writeup", "--check"]);
    assert!(said.contains("Restore it: `git checkout HEAD -- snapshots/gpu/device.json`"), "{said}");
}

#[test]
fn a_suite_that_cannot_be_read_costs_its_own_problem_alone() {
    let tree = Tree::with_records();
    fs::write(tree.path("suites/naive_ddp.toml"), "x = [").unwrap();
    let said = tree.refused(&["measure", "naive_ddp", PROBLEM, "--dry-run"]);
    assert!(said.contains("not measured: suites/naive_ddp.toml, line 1: not valid TOML"), "{said}");
    assert!(said.contains(&format!("{PROBLEM} cpu.")) && said.contains("estimate: "), "{said}");
    let said = tree.refused(&["measure", "naive_ddp", "--dry-run"]);
    assert!(said.starts_with("cs336: suites/naive_ddp.toml, line 1: not valid TOML"), "{said}");
    let said = tree.refused(&["writeup", "--check"]);
    assert!(said.contains("naive_ddp: ") && said.contains("1 of 21 answers are not as committed. Mend"), "{said}");
    fs::rename(tree.layout().accepted(Profile::Cpu, PROBLEM).parent().unwrap(), tree.path("accepted")).unwrap();
    fs::create_dir_all(tree.path("report/records")).unwrap();
    fs::rename(tree.path("accepted"), tree.path("report/records/cpu")).unwrap();
    let said = tree.refused(&["writeup", "--profile", "cpu"]);
    assert!(said.contains("writeup.md are ready") && said.contains("naive_ddp.toml, line 1"), "{said}");
}

#[test]
fn a_shared_template_that_cannot_be_read_costs_only_what_includes_it() {
    let tree = Tree::with_records();
    fs::write(tree.path("templates/shared/alone.md"), b"\xff").unwrap();
    fs::write(tree.path("templates/shared/names.md"), "{% include \"shared/steps.md\" %}").unwrap();
    assert!(!output_text(&tree.run(&["writeup", "--no-measure"])).contains("alone.md"));
    fs::write(tree.path("templates/shared/steps.md"), b"\xff").unwrap();
    let said = tree.refused(&["writeup", "--no-measure"]);
    assert!(said.contains("minimal_ddp_flat_benchmarking: ") && !said.contains("flash_benchmarking: "), "{said}");
    assert!(
        said.contains("templates/shared/steps.md: ") && said.contains("git checkout HEAD -- templates/shared/steps.md")
    );
}

#[test]
fn a_summary_that_cannot_be_read_costs_its_page_alone() {
    let tree = Tree::with_records();
    fs::remove_file(tree.path("templates/summary.md")).unwrap();
    let said = tree.refused(&["writeup", "--no-measure"]);
    assert!(
        said.contains("writeup.md are ready") && said.contains("git checkout HEAD -- templates/summary.md"),
        "{said}"
    );
}

#[test]
fn timings_below_the_floor_are_refused_wherever_a_record_is_read() {
    const TIMED: &str = "pytorch_attention";
    let tree = Tree::with_records();
    let (local, accepted) = (tree.layout().local(Profile::Cpu, TIMED), tree.layout().accepted(Profile::Cpu, TIMED));
    let mut record: Value = serde_json::from_str(&fs::read_to_string(&accepted).unwrap()).unwrap();
    scale_samples(&mut record, 1e-3);
    fs::create_dir_all(local.parent().unwrap()).unwrap();
    for path in [&local, &accepted] {
        fs::write(path, record.to_string()).unwrap();
        for verb in [&["diff", TIMED][..], &["accept", TIMED], &["writeup", "--no-measure"]] {
            let said = tree.refused(verb);
            assert!(said.contains("s is below the floor of ") && said.contains("case "), "{verb:?}: {said}");
        }
    }
    assert!(tree.refused(&["writeup", "--check"]).contains("is below the floor of "));
}

#[test]
fn a_local_record_with_other_work_than_the_accepted_one_is_not_printed() {
    const TIMED: &str = "pytorch_attention";
    let tree = Tree::with_records();
    let (local, accepted) = (tree.layout().local(Profile::Cpu, TIMED), tree.layout().accepted(Profile::Cpu, TIMED));
    let record = fs::read_to_string(&accepted).unwrap();
    fs::create_dir_all(local.parent().unwrap()).unwrap();
    for (text, is_refused) in
        [(record.clone(), false), (record.replace("\"precision\":\"float32\"", "\"precision\":\"tf32\""), true)]
    {
        fs::write(&local, text).unwrap();
        let said = output_text(&tree.run(&["writeup", "--no-measure"]));
        assert_eq!(said.contains("has another work or unit in "), is_refused, "{said}");
    }
}

fn scale_samples(value: &mut Value, factor: f64) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::Array(samples) if key == "samples" => {
                        samples.iter_mut().for_each(|x| *x = (factor * x.as_f64().unwrap()).into());
                    }
                    value => scale_samples(value, factor),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| scale_samples(item, factor)),
        _ => {}
    }
}

/// Advice that can be followed: nothing moves a folder of records aside, and not every problem is measured.
#[test]
fn a_local_record_that_measuring_does_not_move_aside_is_to_be_mended_or_removed() {
    let tree = Tree::new();
    fs::create_dir(tree.path("report/records")).unwrap();
    std::os::unix::fs::symlink(tree.path("nowhere"), tree.path("report/records/cpu")).unwrap();
    let said = tree.refused(&["accept", PROBLEM, "--profile", "cpu", "--dry-run"]);
    assert!(said.contains("report/records/cpu is a link that leads nowhere: mend or remove it\n"), "{said}");
    fs::remove_file(tree.path("report/records/cpu")).unwrap();
    fs::create_dir(tree.path("report/records/cpu")).unwrap();
    fs::write(tree.path("report/records/cpu/communication_accounting.json"), "{}").unwrap();
    let said = tree.refused(&["accept", "communication_accounting", "--profile", "cpu", "--dry-run"]);
    assert!(said.contains("Remove it: this problem measures nothing."), "{said}");
    fs::remove_dir_all(tree.path("report/records")).unwrap();
    std::os::unix::fs::symlink(tree.path("nowhere"), tree.path("report/records")).unwrap();
    let said = tree.refused(&["measure", PROBLEM, "--profile", "cpu"]);
    assert!(said.contains("report/records is a link that leads nowhere: mend or remove it"), "{said}");
}

#[test]
fn a_wrong_name_beside_device_promotes_nothing() {
    let tree = Tree::new();
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/gpu/device.json");
    fs::create_dir_all(tree.path("report/records/gpu")).unwrap();
    fs::copy(committed, tree.path("report/records/gpu/device.json")).unwrap();
    let said = output_text(&tree.run(&["accept", "device", "--dry-run"]));
    assert!(said.contains("1 would be accepted"), "{said}");
    assert!(tree.refused(&["accept", "device", "nosuch"]).contains("no problem \"nosuch\""));
    assert!(!tree.path("snapshots").exists(), "the device's results were promoted");
}

#[test]
fn the_command_that_completes_a_record_measures_its_profile() {
    let tree = Tree::new();
    for profile in ["cpu", "gpu"] {
        let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("snapshots/{profile}/{PROBLEM}.json"));
        let mut record: Value = serde_json::from_str(&fs::read_to_string(committed).unwrap()).unwrap();
        record["cases"].as_array_mut().unwrap().pop();
        fs::create_dir_all(tree.path("report/records").join(profile)).unwrap();
        fs::write(tree.path(format!("report/records/{profile}/{PROBLEM}.json")), record.to_string()).unwrap();
        let said = tree.refused(&["accept", PROBLEM, "--profile", profile]);
        assert!(said.contains(&format!("cs336 measure {PROBLEM} --profile {profile} --resume`")), "{said}");
    }
}
