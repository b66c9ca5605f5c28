//! The files that `cs336 grade` writes for graders, and what stops neither them nor the other problems.

use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::subject::Graded;
use super::*;

#[test]
fn grading_gives_points_with_reasons_and_files_for_graders() {
    let tree = Tree::new();
    let output =
        tree.run(&["grade", PROBLEM, "communication_accounting", "--junit", "j.xml", "--gradescope", "g.json"]);
    let said = output_text(&output);
    assert!(
        output.status.success() && said.contains("run `cs336 measure mixed_precision_accumulation --resume`"),
        "{said}"
    );
    assert!(said.contains("of 11 points"), "{said}");
    assert!(fs::read_to_string(tree.path("j.xml")).unwrap().contains("testcase"));
    let gradescope: Value = serde_json::from_slice(&fs::read(tree.path("g.json")).unwrap()).unwrap();
    assert_eq!(gradescope["tests"].as_array().unwrap().len(), 1 + 4, "one for each part");
}

#[test]
fn a_file_for_graders_goes_through_its_link_and_a_device_stays_one() {
    let tree = Tree::new();
    fs::create_dir(tree.path("results")).unwrap();
    symlink("results/j.xml", tree.path("j.xml")).unwrap();
    symlink("/dev/full", tree.path("full")).unwrap();
    let grade = ["grade", "communication_accounting", "--junit", "j.xml", "--gradescope"];
    for (gradescope, code) in [("g.json", 0), ("full", 1)] {
        let _ = fs::remove_file(tree.path("results/j.xml"));
        let output = tree.run(&[&grade[..], &[gradescope]].concat());
        let said = output_text(&output);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert_eq!(said.contains("full cannot be written: ") && said.contains("No space left"), code == 1, "{said}");
        assert_eq!(fs::read_link(tree.path("j.xml")).unwrap(), Path::new("results/j.xml"));
        assert!(fs::read_to_string(tree.path("results/j.xml")).unwrap().contains("testcase"));
    }
    assert_eq!(fs::read_link(tree.path("full")).unwrap(), Path::new("/dev/full"));
}

#[test]
fn one_path_for_two_files_is_refused_before_any_is_written() {
    let tree = Tree::new();
    fs::write(tree.path("file"), "kept").unwrap();
    let launch = ["launch", "--task", "nccl_selftest", "--world-size", "1"];
    for arguments in [
        &["grade", "communication_accounting", "--junit", "file", "--gradescope", "./file"][..],
        &[&launch[..], &["--trace", "file", "--output", "file"]].concat(),
        &[&launch[..], &["--input", "file", "--output", "file"]].concat(),
    ] {
        let said = tree.refused(arguments);
        assert!(said.contains("both name the file ") && said.contains("name another one"), "{said}");
        assert_eq!(fs::read_to_string(tree.path("file")).unwrap(), "kept");
    }
}

/// The trace that it would leave shows that no rank ran.
#[test]
fn a_task_whose_results_could_not_be_written_does_not_run() {
    let tree = Tree::new();
    fs::write(tree.path("file"), "").unwrap();
    let task = ["--task", "fault_test", "--trace", "trace.json", "--output"];
    for (output, words) in [("file/below", "file/below cannot be written"), (".", "--output . is a folder")] {
        let launch = [&["launch", "--world-size", "1"], &task[..], &[output]].concat();
        let launched = tree.command(&launch).output().unwrap();
        let mut alone = tree.command(&[&["rank"], &task[..], &[output]].concat());
        alone.envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")]);
        let alone = alone.env("MASTER_PORT", "1").output().unwrap();
        for ended in [launched, alone] {
            let said = output_text(&ended);
            assert!(ended.status.code() == Some(1) && said.contains(words), "{said}");
            assert!(!tree.path("trace.json").exists(), "{said}");
        }
    }
}

#[test]
fn results_for_an_open_file_follow_what_it_holds() {
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    let sound = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases/rmsnorm.safetensors");
    fs::copy(sound, tree.path("cases/sound.safetensors")).unwrap();
    for (file, redirection) in [("/dev/stdout", "> out"), ("/dev/fd/3", "> out 3>> out")] {
        let line = format!("exec \"$0\" grade --cases cases --junit {file} {redirection}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &line, env!("CARGO_BIN_EXE_cs336")]).current_dir(tree.path(""));
        let output = shell.env("CS336_ROOT", tree.path("")).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        let said = fs::read_to_string(tree.path("out")).unwrap();
        let (printed, xml) = said.split_once("1 of 1 cases passed\n").unwrap();
        assert!(printed.starts_with("passed sound.safetensors") && xml.starts_with("<?xml"), "{said}");
    }
}

#[test]
fn a_record_that_cannot_be_read_is_a_reason_of_its_own_problem_alone() {
    let tree = Tree::new();
    fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
    fs::write(tree.record_path(), "{\"schema\": 99}").unwrap();
    let output = tree.run(&["grade", PROBLEM, "communication_accounting", "--json", "--junit", "j.xml"]);
    let grades = json(&output);
    assert_eq!((output.status.code(), grades.as_array().unwrap().len()), (Some(1), 2), "{grades}");
    let lost = grades[0]["parts"][0]["lost"].to_string();
    assert!(lost.contains("has schema 99"), "{grades}");
    assert!(!grades[1].to_string().contains("has schema 99") && tree.path("j.xml").exists(), "{grades}");
}

/// What was not measured is no failure; a template that does not render is one.
#[test]
fn an_answer_that_cannot_be_built_fails() {
    let tree = Tree::with_records();
    assert_eq!(tree.run(&["grade", PROBLEM]).status.code(), Some(0));
    fs::write(tree.path(format!("templates/{PROBLEM}.md")), "{{ nothing_of_this_name }}").unwrap();
    let said = tree.refused(&["grade", PROBLEM]);
    assert!(said.contains("its answer does not render") && said.contains("earned 0 of 1 points"), "{said}");
}

#[test]
fn a_folder_that_takes_no_file_is_named_before_anything_is_graded() {
    let tree = Tree::new();
    fs::create_dir_all(tree.path("subjects/ada")).unwrap();
    fs::write(tree.path("subjects/ada/adapters.py"), "").unwrap();
    fs::write(tree.path("file"), "").unwrap();
    for arguments in [
        &["grade", "--subjects", "subjects", "--output", "file/grades"][..],
        &["grade", "communication_accounting", "--junit", "file/j.xml"],
        &["grade", "communication_accounting", "--gradescope", "/proc/g.json"],
    ] {
        let said = tree.refused(arguments);
        assert!(said.starts_with("cs336: ") && said.contains(" cannot be written: "), "{said}");
    }
    assert!(!tree.path("grades").exists());
}

#[test]
fn an_empty_path_leaves_no_temporary_folder() {
    let tree = Tree::new();
    fs::create_dir(tree.path("tmp")).unwrap();
    let mut command = tree.command(&["grade", "communication_accounting"]);
    let output = command.env("PATH", "").env("TMPDIR", tree.path("tmp")).output().unwrap();
    assert!(output_text(&output).contains("earned"), "{}", output_text(&output));
    assert_eq!(fs::read_dir(tree.path("tmp")).unwrap().count(), 0);
}

#[test]
fn a_mistake_leaves_no_older_grades() {
    let tree = Tree::new();
    for file in ["j.xml", "g.json"] {
        fs::write(tree.path(file), "older grades").unwrap();
    }
    for (mistake, why) in [(&["nosuch"][..], "nosuch"), (&["--check", "x"], "--check chooses")] {
        let said = tree.refused(&[&["grade", "--junit", "j.xml", "--gradescope", "g.json"], mistake].concat());
        for file in ["j.xml", "g.json"] {
            let left = fs::read_to_string(tree.path(file)).unwrap();
            assert!(said.contains(why) && left.contains(why) && !left.contains("older"), "{said}{left}");
        }
    }
}

#[test]
fn grades_go_into_no_folder_that_others_write_to_or_that_another_command_fills() {
    let tree = Tree::new();
    fs::create_dir_all(tree.path("subjects/ada")).unwrap();
    fs::write(tree.path("subjects/ada/adapters.py"), "").unwrap();
    let output = tree.path("grades");
    fs::create_dir(&output).unwrap();
    let refused = || tree.refused(&["grade", "flash_forward", "--subjects", "subjects"]);
    let shared = fs::Permissions::from_mode(0o777);
    fs::set_permissions(&output, shared).unwrap();
    let said = refused();
    assert!(said.contains("with mode 777") && said.contains("name a folder that only user"), "{said}");
    fs::set_permissions(&output, fs::Permissions::from_mode(0o755)).unwrap();
    let above = tree.folder.path();
    fs::set_permissions(above, fs::Permissions::from_mode(0o757)).unwrap();
    let said = refused();
    assert!(said.contains("(mode 757): others can put links there; name another folder by --output"), "{said}");
    fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
    if rustix::process::geteuid().is_root() {
        fs::rename(&output, tree.path("own")).unwrap();
        std::os::unix::fs::symlink(tree.path("own"), &output).unwrap();
        std::os::unix::fs::lchown(&output, Some(65_534), None).unwrap();
        let said = refused();
        assert!(said.contains("/grades is a link of user 65534: others can put links there"), "{said}");
        fs::rename(&output, tree.path("theirs")).unwrap();
        std::os::unix::fs::symlink(tree.path("theirs"), &output).unwrap();
        let said = refused();
        assert!(said.contains("/theirs is a link of user 65534: others can put links there"), "{said}");
        fs::remove_file(&output).unwrap();
        fs::rename(tree.path("own"), &output).unwrap();
        // A subject's own folder, which a grader once gave to it.
        fs::create_dir(output.join("ada")).unwrap();
        fs::write(tree.path("victim"), "precious").unwrap();
        std::os::unix::fs::symlink(tree.path("victim"), output.join("ada/results.json")).unwrap();
        std::os::unix::fs::chown(output.join("ada"), Some(65_534), None).unwrap();
        let said = refused();
        assert!(said.contains("grades/ada, of --output, belongs to user 65534"), "{said}");
        assert_eq!(fs::read_to_string(tree.path("victim")).unwrap(), "precious");
        fs::remove_dir_all(output.join("ada")).unwrap();
        fs::remove_file(output.join("grades.csv")).unwrap();
    }
    let other = fs::File::open(&output).unwrap();
    other.lock().unwrap();
    let said = refused();
    assert!(said.contains("another cs336 writes its grades into grades: wait for it"), "{said}");
    assert_eq!(fs::read_dir(&output).unwrap().count(), 0);
}

/// A subject could leave a link of that name.
#[test]
fn a_file_for_graders_that_lies_among_a_subjects_files_is_refused_before_it_is_written() {
    let tree = Tree::new();
    fs::create_dir(tree.path("subject")).unwrap();
    fs::write(tree.path("victim"), "kept").unwrap();
    symlink(tree.path("victim"), tree.path("subject/results.json")).unwrap();
    symlink(tree.path("subject"), tree.path("alias")).unwrap();
    for (option, file) in [("--gradescope", "subject/results.json"), ("--junit", "alias/new.xml")] {
        let said = tree.refused(&["grade", "flash_forward", "--subject", "subject", option, file]);
        assert!(said.contains(&format!("{option} {file} must not lie in subject, whose files others write")), "{said}");
    }
    assert_eq!(fs::read_to_string(tree.path("victim")).unwrap(), "kept");
    assert!(!tree.path("subject/new.xml").exists());
}

#[test]
fn no_link_gives_a_subject_anothers_points_without_a_word() {
    let graded = Graded::new();
    let of_bob = graded.write("bob", "");
    let subjects = graded.tree.path("subjects");
    symlink("bob", subjects.join("ada")).unwrap();
    let table = || {
        let said = output_text(&graded.grading(&["flash_forward", "--subjects", "subjects"]).output().unwrap());
        (said, fs::read_to_string(graded.tree.path("grades/grades.csv")).unwrap())
    };
    let (said, rows) = table();
    for (name, other) in [("ada", "bob"), ("bob", "ada")] {
        let words = format!("its folder is also that of {other}");
        assert!(said.contains(&format!("{name}: {words}")) && rows.contains(&words), "{said}{rows}");
    }
    if std::os::unix::fs::lchown(subjects.join("ada"), Some(1234), None).is_err() {
        eprintln!("skipped in part: only root can give a link to another user");
        return;
    }
    let (said, rows) = table();
    let words = format!(
        "/ada is a link of user 1234 to {}, which belongs to user ",
        of_bob.canonicalize().unwrap().to_str().unwrap()
    );
    assert!(said.contains("not graded  ada: ") && rows.contains(&words), "{said}{rows}");
}

#[test]
fn a_table_of_an_earlier_run_is_kept_until_a_new_one_has_all_of_it() {
    let graded = Graded::new();
    let grading = || graded.grading(&["flash_forward", "--subjects", "subjects"]);
    let text = |name: &str| fs::read_to_string(graded.tree.path("grades").join(name)).unwrap_or_default();
    let has = |name: &str, rows: &[&str]| {
        let table = text(name);
        let names = table.lines().skip(1).map(|line| line.split(',').next().unwrap());
        assert_eq!(names.collect::<Vec<_>>(), rows, "{name}: {table}");
    };
    graded.write("ada", "");
    let bob = graded.write("bob", "").join("adapters.py");
    for _ in 0..2 {
        let said = output_text(&grading().output().unwrap());
        assert!(said.contains("2 subjects; "), "{said}");
        has("grades.csv", &["ada", "bob"]);
        assert_eq!(text("grades.csv.before"), "", "the second table has all of the first");
    }
    let results = text("ada/results.json");
    let said = output_text(&grading().env("PYTHON", "/bin/false").output().unwrap());
    assert!(said.contains("not graded  ada") && text("grades.csv.before").contains("\nada,0,15,"), "{said}");
    assert!(said.contains("ada: grades/ada/results.json is of an earlier run, since this one"), "{said}");
    assert_eq!(text("ada/results.json"), results);
    fs::rename(graded.tree.path("grades/grades.csv.before"), graded.tree.path("grades/grades.csv")).unwrap();

    fs::write(bob, "import time\ntime.sleep(3600)\n").unwrap();
    let interrupted = grading().stderr(Stdio::piped()).spawn().unwrap();
    let is_replaced = || text("grades.csv").lines().count() == 2;
    assert!(wait_until(Duration::from_secs(60), is_replaced), "ada has no row");
    assert!(Command::new("kill").args(["-INT", &interrupted.id().to_string()]).status().unwrap().success());
    let said = output_text(&interrupted.wait_with_output().unwrap());
    assert!(said.contains("kept as grades/grades.csv.before until this one has all of it"), "{said}");
    has("grades.csv", &["ada"]);
    has("grades.csv.before", &["ada", "bob"]);

    fs::rename(graded.tree.path("subjects/bob"), graded.tree.path("subjects/zoe")).unwrap();
    graded.write("zoe", "");
    assert!(output_text(&grading().arg("--check").arg("large_scores").output().unwrap()).contains("2 subjects; "));
    has("grades.csv", &["ada", "zoe"]);
    has("grades.csv.before", &["ada", "bob"]);
    has("grades.csv.before-2", &["ada"]);
}
