//! Tests of the command line: its output, its messages about bad input, and that errors lose no data.

#[path = "cli/bundle.rs"]
mod bundle;
#[path = "cli/cases.rs"]
mod cases;
#[path = "cli/damaged_files.rs"]
mod damaged_files;
#[path = "cli/edited.rs"]
mod edited;
#[path = "cli/export.rs"]
mod export;
#[path = "cli/forged_lines.rs"]
mod forged_lines;
#[path = "cli/graders_files.rs"]
mod graders_files;
#[path = "cli/install.rs"]
mod install;
#[path = "cli/interruption.rs"]
mod interruption;
#[path = "cli/leftovers.rs"]
mod leftovers;
#[path = "cli/limits.rs"]
mod limits;
#[path = "cli/messages.rs"]
mod messages;
#[path = "cli/official.rs"]
mod official;
#[path = "cli/seeded.rs"]
mod seeded;
#[path = "cli/subject.rs"]
mod subject;
#[path = "cli/subject_attacks.rs"]
mod subject_attacks;
#[path = "cli/subject_code.rs"]
mod subject_code;
#[path = "cli/subject_faults.rs"]
mod subject_faults;
#[path = "cli/subject_machine.rs"]
mod subject_machine;
#[path = "cli/subject_ranks.rs"]
mod subject_ranks;
#[path = "cli/timed.rs"]
mod timed;
#[path = "cli/trace.rs"]
mod trace;
#[path = "cli/trust.rs"]
mod trust;
#[path = "cli/wheel.rs"]
mod wheel;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use cs336::harness::record::{Outcome, Profile, RecordFile};
use cs336::harness::records_lock::lock_records;
use cs336::harness::store::Layout;
use cs336::harness::suite;
use cs336::process::wait_until;
use rstest::rstest;
use serde_json::Value;

/// The quickest problem that measures: four scalar loops, exact values.
const PROBLEM: &str = "mixed_precision_accumulation";

/// A temporary tree with this checkout's suites, templates and kernels.
struct Tree {
    folder: tempfile::TempDir,
}

impl Tree {
    fn new() -> Self {
        let tree = Self { folder: tempfile::tempdir().unwrap() };
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let kinds = [
            ("suites", "toml"),
            ("templates", "md"),
            ("templates/shared", "md"),
            ("templates/subject", "md"),
            ("report", "typ"),
            ("kernels", "cu"),
            ("kernels/lib", "cuh"),
            ("kernels/emulator", "h"),
        ];
        for (folder, extension) in kinds {
            fs::create_dir(tree.path(folder)).unwrap();
            for entry in fs::read_dir(root.join(folder)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|e| e == extension) {
                    fs::copy(&path, tree.path(folder).join(path.file_name().unwrap())).unwrap();
                }
            }
        }
        tree
    }

    /// A tree that also has the committed records, so that every answer renders.
    fn with_records() -> Self {
        let tree = Self::new();
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/cpu");
        fs::create_dir_all(tree.path("snapshots/cpu")).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, tree.path("snapshots/cpu").join(path.file_name().unwrap())).unwrap();
        }
        tree
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(name)
    }

    fn layout(&self) -> Layout {
        Layout::at(self.folder.path().to_path_buf())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cs336"));
        command.args(arguments).env("CS336_ROOT", self.folder.path()).current_dir(self.folder.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a command that must fail with exit code 1, and returns its output.
    fn refused(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = output_text(&output);
        assert_eq!(output.status.code(), Some(1), "{arguments:?} did not fail cleanly: {said}");
        assert!(!said.contains("panicked at"), "{arguments:?} panicked: {said}");
        said
    }

    fn suite(&self, text: &str) {
        fs::write(self.path(format!("suites/{PROBLEM}.toml")), text).unwrap();
    }

    fn record_path(&self) -> PathBuf {
        self.layout().local(Profile::Cpu, PROBLEM)
    }
}

fn output_text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output_text(output)))
}

#[test]
fn list_shows_21_problems_and_107_points() {
    let tree = Tree::new();
    let list = json(&tree.run(&["list", "--json"]));
    let problems = list.as_array().unwrap();
    assert_eq!(problems.len(), 21);
    assert_eq!(problems.iter().map(|p| p["points"].as_f64().unwrap()).sum::<f64>(), 107.0);
    for problem in problems {
        assert!(
            ["name", "section", "points", "parts", "answers"].iter().all(|key| problem.get(key).is_some()),
            "{problem}"
        );
        assert!(["all", "some", "none"].contains(&problem["answers"].as_str().unwrap()));
    }
    let text = output_text(&tree.run(&["list"]));
    assert!(text.contains("21 problems, 107 points"), "{text}");
}

#[test]
fn a_problem_is_explained_and_a_misspelt_one_gets_a_suggestion() {
    let tree = Tree::new();
    let said = output_text(&tree.run(&["explain", PROBLEM]));
    assert!(said.contains("grid cpu.") && said.contains(&format!("{PROBLEM}::golden_sums")), "{said}");
    assert!(tree.refused(&["explain", "flash_foward"]).contains("flash_forward"));
    assert!(tree.refused(&["measure", "flash_benchmark"]).contains("flash_benchmarking"));
}

#[test]
fn a_wrong_command_line_exits_with_2() {
    assert_eq!(Tree::new().run(&["measure", "--profile", "tpu"]).status.code(), Some(2));
}

#[test]
fn outside_a_tree_the_remedy_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = Tree::new().command(&["doctor"]).env("CS336_ROOT", folder.path()).output().unwrap();
    assert!(output_text(&output).contains("CS336_ROOT"), "{}", output_text(&output));
}

#[test]
fn measuring_writes_a_record_that_resumes_to_nothing_and_is_not_accepted_from_no_commit() {
    let tree = Tree::new();
    let output = tree.run(&["measure", PROBLEM, "--profile", "cpu"]);
    assert!(output.status.success(), "{}", output_text(&output));
    let text = fs::read_to_string(tree.record_path()).unwrap();
    let record = RecordFile::parse(&text, "the record").unwrap();
    assert!(!record.cases.is_empty() && record.runs.len() == 1);
    let resumed = tree.run(&["measure", PROBLEM, "--profile", "cpu", "--resume"]);
    let said = output_text(&resumed);
    assert!(resumed.status.success() && said.contains("nothing to measure: all "), "{said}");
    assert_eq!(fs::read_to_string(tree.record_path()).unwrap(), text, "--resume measured what was there");
    let said = tree.refused(&["accept", PROBLEM]);
    assert!(said.contains("is of no known commit: git failed or is missing, or the tree is no checkout"), "{said}");
    assert!(!tree.path("snapshots").exists(), "a refused record was promoted");
}

#[test]
fn a_changed_exact_value_shows_in_diff() {
    let tree = Tree::new();
    assert!(tree.run(&["measure", PROBLEM, "--profile", "cpu"]).status.success());
    let accepted = tree.layout().accepted(Profile::Cpu, PROBLEM);
    fs::create_dir_all(accepted.parent().unwrap()).unwrap();
    let text = fs::read_to_string(tree.record_path()).unwrap();
    fs::write(&accepted, &text).unwrap();
    assert!(tree.run(&["diff", PROBLEM]).status.success());
    fs::write(&accepted, text.replace("9.953125", "9.96875").replace("-0.046875", "-0.03125")).unwrap();
    let said = tree.refused(&["diff", PROBLEM]);
    assert!(said.contains("9.953125") && said.contains("must repeat exactly"), "{said}");
}

#[test]
fn a_folder_that_cannot_be_written_is_named_and_nothing_is_lost() {
    let tree = Tree::new();
    // A file in place of the folder also stops root, unlike permissions.
    fs::write(tree.path("report/records"), "in the way").unwrap();
    let said = tree.refused(&["measure", PROBLEM, "--profile", "cpu"]);
    assert!(said.contains("report/records") && said.contains("move the file that has its folder's name"), "{said}");
    assert_eq!(fs::read_to_string(tree.path("report/records")).unwrap(), "in the way");
}

#[test]
fn two_measures_at_once_are_refused() {
    let tree = Tree::new();
    let lock = lock_records(&tree.layout()).unwrap();
    let said = tree.refused(&["measure", PROBLEM, "--profile", "cpu"]);
    assert!(said.contains("another cs336 is writing records here"), "{said}");
    assert!(tree.refused(&["accept", PROBLEM, "--dry-run"]).contains("nothing to accept"), "it writes nothing");
    drop(lock);
    assert!(tree.run(&["measure", PROBLEM, "--profile", "cpu"]).status.success());
}

fn problem() -> &'static cs336::harness::problem::Problem {
    cs336::problems::REGISTRY.iter().find(|p| p.name == PROBLEM).unwrap()
}

#[test]
fn one_case_by_option_is_printed_and_not_recorded() {
    let tree = Tree::new();
    let output = tree.run(&["measure", PROBLEM, "--profile", "cpu", "--set", "iterations=10"]);
    assert!(output.status.success(), "{}", output_text(&output));
    assert!(json(&output).is_object() && !tree.record_path().exists());
    assert!(tree.refused(&["measure", PROBLEM, "--set", "itterations=10"]).contains("it has"));
    assert!(tree.refused(&["measure", PROBLEM, "--set", "iterations"]).contains("key=value"));
    assert!(tree.refused(&["nsys", "--set", "sise=xl"]).contains("it has"));
}

#[test]
fn a_broken_template_is_named_with_its_line_and_the_other_answers_are_printed() {
    let tree = Tree::with_records();
    let path = tree.path(format!("templates/{PROBLEM}.md"));
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text + "\n{{ nothing_of_this_name }}\n").unwrap();
    let said = tree.refused(&["writeup", "--no-measure"]);
    assert!(said.contains(&format!("{PROBLEM}.md")) && said.contains("undefined"), "{said}");
    let report = fs::read_to_string(tree.path("report/writeup.md")).unwrap();
    assert!(
        report.contains(&format!("**This answer could not be built: templates/{}.md:", PROBLEM.replace('_', "\\_")))
    );
    assert_eq!(report.matches("could not be built").count(), 1, "{report}");
    assert!(fs::read(tree.path("report/writeup.pdf")).unwrap().starts_with(b"%PDF-1."));
    assert!(tree.refused(&["writeup", "--fresh"]).contains(PROBLEM));
}

/// With a GPU the visit measures it, and the new record counts. Without a GPU the accepted record must stay in use.
#[test]
fn records_without_a_measured_case_do_not_replace_accepted_ones() {
    let tree = Tree::with_records();
    assert!(tree.run(&["measure", PROBLEM, "--profile", "gpu"]).status.success());
    let visit = tree.layout().read_local(Profile::Gpu, problem()).unwrap().unwrap();
    let ran = visit.cases.iter().any(|case| !matches!(case.outcome, Outcome::NotRun { .. }));
    let output = tree.run(&["writeup", "--no-measure"]);
    assert!(output.status.success(), "{}", output_text(&output));
    let report = fs::read_to_string(tree.path("report/writeup.md")).unwrap();
    assert_eq!(report.contains(&visit.runs[0].id), ran, "{}", visit.runs[0].id);
}

#[test]
fn the_write_up_is_built_and_a_changed_answer_makes_it_stale() {
    let tree = Tree::with_records();
    let output = tree.run(&["writeup", "--no-measure"]);
    assert!(output.status.success(), "{}", output_text(&output));
    assert!(fs::read(tree.path("report/writeup.pdf")).unwrap().starts_with(b"%PDF-1."));
    assert!(fs::read_to_string(tree.path("report/writeup.md")).unwrap().contains("points"));
    assert!(tree.run(&["writeup", "--fresh"]).status.success());
    let path = tree.path(format!("templates/{PROBLEM}.md"));
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text + "\nOne more sentence.\n").unwrap();
    assert!(tree.refused(&["writeup", "--fresh"]).contains("stale"));
}

#[test]
fn without_a_gpu_every_device_check_is_skipped_with_a_reason_and_nothing_is_recorded() {
    let tree = Tree::new();
    let without_gpu = |arguments: &[&str]| tree.command(arguments).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let output = without_gpu(&["grade", "--device"]);
    let said = output_text(&output);
    let skipped = said.lines().filter(|line| line.starts_with("skipped ") && line.contains(": needs ")).count();
    assert!(output.status.success() && skipped > 30, "{said}");
    assert!(said.contains(&format!("{skipped} device checks: 0 passed, 0 failed, {skipped} skipped")), "{said}");
    assert!(said.contains("nothing is recorded") && said.contains("device.json does not exist"), "{said}");
    let one = json(&without_gpu(&["grade", "--device", "dropping_a_graph_frees_its_memory", "--json"]));
    assert_eq!(
        (one[0]["status"].as_str(), one[0]["gpus"].as_u64(), one.as_array().unwrap().len()),
        (Some("skipped"), Some(1), 1)
    );
    assert!(!tree.layout().local(Profile::Gpu, "device").exists());
    assert!(tree.refused(&["accept", "device"]).contains("nothing to accept"));
    assert!(tree.refused(&["grade", "--device", "no_such_check"]).contains("no_such_check"));
}

#[rstest]
#[case::compiler("g++", "apt-get install g++")]
#[case::make("make", "apt-get install make")]
#[case::cargo("cargo", "rustup")]
#[case::python("python3", "apt-get install python3 python3-venv")]
fn setup_names_a_missing_tool_and_how_to_install_it(#[case] tool: &str, #[case] remedy: &str) {
    let tools = tempfile::tempdir().unwrap();
    for name in ["sh", "dirname", "cat", "cksum", "sed", "grep", "g++", "make", "cargo", "python3"] {
        let found =
            std::env::split_paths(&std::env::var_os("PATH").unwrap()).map(|p| p.join(name)).find(|p| p.exists());
        if name != tool {
            std::os::unix::fs::symlink(found.unwrap(), tools.path().join(name)).unwrap();
        }
    }
    let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cargo/setup.sh");
    let output = Command::new("/bin/sh").arg(setup).env("PATH", tools.path()).output().unwrap();
    let said = output_text(&output);
    assert!(!output.status.success() && said.contains(tool) && said.contains(remedy), "{said}");
}
