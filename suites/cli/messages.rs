//! Messages about bad input: each says what is wrong, what was expected, and what to do.

use std::os::unix::fs::symlink;

use super::interruption::through_shell;
use super::*;

/// One bad input: how the tree is damaged, the command, and the expected parts of the message.
struct BadInput {
    what: &'static str,
    spoil: fn(&Tree),
    arguments: &'static [&'static str],
    wrong: &'static str,
    expected: &'static str,
    remedy: &'static str,
}

const UNSPOILT: fn(&Tree) = |_| {};

const fn bad(what: &'static str, arguments: &'static [&'static str], message: [&'static str; 3]) -> BadInput {
    let [wrong, expected, remedy] = message;
    BadInput { what, spoil: UNSPOILT, arguments, wrong, expected, remedy }
}

const fn spoilt(what: &'static str, spoil: fn(&Tree), message: [&'static str; 3]) -> BadInput {
    let [wrong, expected, remedy] = message;
    BadInput { what, spoil, arguments: &["measure", PROBLEM, "--profile", "cpu"], wrong, expected, remedy }
}

/// If one clause says both what was expected and what to do, it is listed for both.
#[rustfmt::skip]
const TABLE: &[BadInput] = &[
    bad("a misspelt problem", &["explain", "flash_bench"],
        ["no problem \"flash_bench\"", "did you mean", "flash_benchmarking"]),
    bad("a letter that most names have", &["explain", "a"],
        ["no problem \"a\"", "see", "`cs336 list`"]),
    bad("a limit of too many ranks", &["launch", "--task", "all_reduce", "--world-size", "2", "--deadline", "18446744073709551615"],
        ["invalid value '18446744073709551615'", "is not in 1..=31536000", "--help"]),
    bad("a misspelt verb", &["gradd"], ["unrecognized subcommand 'gradd'", "similar subcommand", "'grade'"]),
    bad("an unknown profile", &["measure", "--profile", "tpu"], ["invalid value 'tpu'", "possible values: cpu, gpu", "--help"]),
    bad("a time without a unit", &["measure", "--budget", "soon"],
        ["\"soon\" is not a time", "write a whole number and a unit", "as in 90s, 8m or 1h"]),
    bad("a limit of no time", &["measure", "--case-limit", "0"],
        ["invalid value '0'", "0 is not in 1..=31536000", "--help"]),
    bad("a setting without a value", &["measure", PROBLEM, "--set", "addend"],
        ["\"addend\" lacks a value", "key=value", "as in attention=flash"]),
    bad("a setting of an unknown parameter", &["measure", PROBLEM, "--set", "adend=float32"],
        ["no parameter \"adend\"", "it has accumulator, addend", "addend"]),
    bad("a setting with an unknown value", &["measure", PROBLEM, "--set", "addend=float33"],
        ["cannot measure the case", "change the --set options", "expected one of `float32`, `float16`, `bfloat16`"]),
    bad("a setting of a parameter that the first case leaves out", &["measure", "ddp_bucketed_benchmarking", "--set", "wheel=2"],
        ["cannot measure the case", "change the --set options", "expected a boolean"]),
    bad("a setting of no problem", &["measure", "--set", "addend=float32"],
        ["0 are named", "cs336 measure P", "--set key=value"]),
    bad("measuring what has only checks", &["measure", "communication_accounting"],
        ["communication_accounting measures nothing", "it has only checks", "cs336 grade communication_accounting"]),
    bad("accepting without records", &["accept", PROBLEM], ["nothing to accept", "no records here", "cs336 measure"]),
    bad("accepting device checks without results", &["accept", "device"],
        ["nothing to accept", "no results of device checks", "run `cs336 grade --device` on a GPU"]),
    bad("device checks of the cpu", &["accept", "device", "--profile", "cpu"], ["device", "GPUs alone", "leave out"]),
    bad("a seed of no subject", &["grade", "communication_accounting", "--seed", "3"],
        ["--seed is about a subject", "use it with", "--subject"]),
    bad("a limit of no subject", &["measure", PROBLEM, "--limit", "5"],
        ["--limit is about a subject", "use it with", "--subject"]),
    bad("a folder for the grades of no subjects", &["grade", "--output", "there"],
        ["required arguments were not provided", "--subjects <DIR>", "--help"]),
    bad("a profile of what measures nothing", &["writeup", "--check", "--profile", "gpu"],
        ["'--check' cannot be used with '--profile", "Usage", "--help"]),
    bad("a folder of cases that does not exist", &["grade", "--cases", "nowhere"],
        ["nowhere cannot be opened", "name a folder", "*.safetensors"]),
    bad("a folder without cases", &["grade", "--cases", "kernels"],
        ["holds no *.safetensors file", "nothing was graded", "suites/cases/README.md"]),
    bad("an unknown rank task", &["launch", "--task", "nothing", "--world-size", "2"],
        ["no rank task is called \"nothing\"", "give --task one of", "all_reduce"]),
    bad("a task without its input", &["launch", "--task", "training_case", "--world-size", "1"],
        ["this task needs an input", "a JSON file", "--input"]),
    BadInput { spoil: |tree| fs::write(tree.path("input.json"), "{}").unwrap(),
        ..bad("an input for a task without one", &["launch", "--task", "nccl_selftest", "--world-size", "1", "--input", "input.json"],
        ["this task takes no input", "leave out", "--input"]) },
    bad("no rank at all", &["launch", "--task", "all_reduce", "--world-size", "0"],
        ["world_size is 0", "between 1 and 16", "between 1 and 16"]),
    bad("a worker started by hand", &["worker"], ["only cs336 itself starts this process", "run", "`cs336 measure`"]),
    bad("a write-up that was never built", &["writeup", "--fresh"],
        ["no case is recorded", "run", "`cs336 measure`"]),
    spoilt("a suite that is missing", |tree| fs::remove_file(tree.path(format!("suites/{PROBLEM}.toml"))).unwrap(),
        ["cannot be read", "declares what mixed_precision_accumulation measures", "git checkout HEAD -- suites/"]),
    spoilt("a suite with an unknown profile", |tree| tree.suite("[tpu.a]\naddend = \"float32\"\n"),
        ["unknown profile \"tpu\"", "a suite holds", "[cpu.<grid>] and [gpu.<grid>]"]),
    spoilt("a suite with a key outside a grid", |tree| tree.suite("[cpu]\naddend = \"float32\"\n"),
        ["cpu.addend is not a table", "write the key under a grid", "as in [cpu.sweep]"]),
];

#[test]
fn every_message_names_the_fault_what_was_expected_and_what_to_do() {
    for BadInput { what, spoil, arguments, wrong, expected, remedy } in TABLE {
        let tree = Tree::new();
        spoil(&tree);
        let output = tree.run(arguments);
        let said = output_text(&output);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{what}: ended with {}: {said}", output.status);
        assert!(!said.contains("panicked at"), "{what}: {said}");
        for (part, expected_text) in [("the fault", wrong), ("what was expected", expected), ("what to do", remedy)] {
            assert!(
                said.contains(expected_text),
                "{what}: the message does not name {part} by {expected_text:?}:\n{said}"
            );
        }
        assert!(!tree.record_path().exists(), "{what}: a record was written");
    }
}

#[rstest]
#[case::unknown_key("[cpu.a]\nacumulator = \"float32\"\n", "unknown field `acumulator`")]
#[case::wrong_type("[cpu.a]\naccumulator = 3\naddend = \"float32\"\n", "[cpu.a], case")]
#[case::empty_axis("[cpu.a]\naccumulator = []\n", "needs at least one value")]
#[case::duplicate_grid("[cpu.a]\naddend = \"float32\"\n[cpu.a]\naddend = \"float16\"\n", "not valid TOML")]
#[case::huge_grid(
    "[cpu.a]\na = [1,2,3,4,5,6,7,8,9,10]\nb = [1,2,3,4,5,6,7,8,9,10]\nc = [1,2,3,4,5,6,7,8,9,10]\nd = [1,2,3,4,5,6,7,8,9,10]\ne = [1,2]\n",
    "more than 10000 cases"
)]
#[case::not_a_number("[cpu.a]\naddend_value = nan\n", "use a finite number")]
#[case::truncated("[cpu.a\n", "not valid TOML")]
#[case::no_grid("", "declares no grid")]
fn a_bad_suite_is_named_and_the_old_record_stays(#[case] suite: &str, #[case] expected: &str) {
    let tree = Tree::new();
    fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
    fs::write(tree.record_path(), "untouched").unwrap();
    tree.suite(suite);
    let said = tree.refused(&["measure", PROBLEM, "--profile", "cpu"]);
    assert!(said.contains(expected) && said.contains(&format!("suites/{PROBLEM}.toml")), "{said}");
    assert_eq!(fs::read_to_string(tree.record_path()).unwrap(), "untouched");
}

#[test]
fn a_missing_suite_and_a_missing_template_are_named() {
    let tree = Tree::new();
    fs::remove_file(tree.path(format!("suites/{PROBLEM}.toml"))).unwrap();
    assert!(tree.refused(&["measure", PROBLEM]).contains(&format!("suites/{PROBLEM}.toml")));
    let tree = Tree::with_records();
    fs::remove_file(tree.path(format!("templates/{PROBLEM}.md"))).unwrap();
    assert!(tree.refused(&["writeup", "--no-measure"]).contains(&format!("templates/{PROBLEM}.md")));
}

#[test]
fn a_pipe_as_the_input_of_ranks_is_named_and_not_waited_for() {
    let tree = Tree::new();
    assert!(Command::new("mkfifo").arg(tree.path("pipe")).status().unwrap().success());
    for verb in [&["rank"][..], &["launch", "--world-size", "1"]] {
        let said = tree.refused(&[verb, &["--task", "nccl_selftest", "--input", "pipe"]].concat());
        assert!(said.contains("reading pipe: it is not a regular file"), "{said}");
    }
}

/// Opening a pipe waits for a writer, and a device may have no end.
#[rstest]
#[case::record("report/records/cpu/mixed_precision_accumulation.json", &["diff", PROBLEM])]
#[case::accepted("snapshots/cpu/mixed_precision_accumulation.json", &["export", PROBLEM, "--table", "four"])]
#[case::suite("suites/mixed_precision_accumulation.toml", &["explain", PROBLEM])]
#[case::template("templates/mixed_precision_accumulation.md", &["export", PROBLEM, "--table", "four"])]
#[case::shared("templates/shared/steps.md", &["writeup", "--no-measure"])]
#[case::manifest("bundle.json", &["measure", PROBLEM, "--profile", "cpu"])]
#[case::pdf("report/writeup.pdf", &["writeup", "--fresh"])]
#[case::lock("report/records/.lock", &["measure", PROBLEM, "--profile", "cpu"])]
fn what_is_no_regular_file_is_named_and_not_waited_for(#[case] name: &str, #[case] arguments: &[&str]) {
    for kind in ["pipe", "device", "folder"] {
        let tree = Tree::with_records();
        let path = tree.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        match kind {
            "pipe" => assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
            "device" => symlink("/dev/zero", &path).unwrap(),
            _ => fs::create_dir(&path).unwrap(),
        }
        // A lock on a device holds as well as any other.
        if (name, kind) == ("report/records/.lock", "device") {
            continue;
        }
        let mut child = tree.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let ended = wait_until(Duration::from_secs(60), || child.try_wait().unwrap().is_some());
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        let said = output_text(&output);
        assert!(ended, "{name} as a {kind}: {arguments:?} does not end");
        assert_eq!(output.status.code(), Some(1), "{name} as a {kind}: {said}");
        assert!(said.contains(name) && !said.contains("panicked"), "{name} as a {kind}: {said}");
    }
}

#[test]
fn what_editors_leave_beside_templates_costs_no_answer() {
    let tree = Tree::with_records();
    let shared = tree.path("templates/shared");
    fs::write(shared.join(".steps.md.swp"), b"\xff").unwrap();
    fs::create_dir(shared.join("drafts")).unwrap();
    symlink("nowhere", shared.join(".#steps.md")).unwrap();
    let output = tree.run(&["export", PROBLEM, "--table", "four"]);
    assert!(output.status.success(), "{}", output_text(&output));
}

/// Doctor asks the interpreter, which may be any program.
#[test]
fn a_program_that_is_no_python_is_no_peer() {
    let output = Tree::new().command(&["doctor"]).env("CS336_PYTHON", "/bin/true").output().unwrap();
    let said = output_text(&output);
    assert!(said.contains("absent   peers        /bin/true has no PyTorch"), "{said}");
}

/// Without room there, ranks and subjects fail one by one.
#[test]
fn doctor_names_a_temporary_folder_without_room() {
    let (tree, small) = (Tree::new(), tempfile::tempdir().unwrap());
    let said = |line: &str, temporary: &Path| {
        let output = through_shell(&tree, line, &["doctor"]).env("TMPDIR", temporary).output().unwrap();
        output_text(&output)
    };
    let unwritable = said("", Path::new("/proc/self"));
    assert!(unwritable.contains("absent   temporary"), "{unwritable}");
    assert!(unwritable.contains("set TMPDIR to a folder that can be written to and has room"), "{unwritable}");
    let ample = said("", Path::new("/tmp"));
    assert!(ample.contains("ok       temporary    /tmp has room for "), "{ample}");

    let mounted = |size: &str| {
        let mount =
            format!("mount -t tmpfs -o size={size} none \"$TMPDIR\" || {{ echo no mounts; exit; }}; exec \"$@\"");
        said(&format!("set -- unshare --user --map-root-user --mount sh -c '{mount}' sh \"$@\""), small.path())
    };
    let full = mounted("8m");
    if full.contains("no mounts") || full.contains("unshare failed") {
        eprintln!("skipped in part: no mounts here: {full}");
        return;
    }
    assert!(full.contains("has room for 8.00 MiB; set TMPDIR to a folder with more"), "{full}");
    let unlimited = mounted("0");
    assert!(unlimited.contains(&format!("ok       temporary    {}\n", small.path().display())), "{unlimited}");
}

/// Problems whose records no other answer reads; the text of a record that cannot be used, in which PROBLEM stands for the
/// problem's name; and what is said of it.
const UNUSABLE: [(&str, &str, &str); 7] = [
    ("nsys_profile", "{\"schema\": 99}", "has schema 99, from a newer cs336; this one reads schema 1"),
    ("mixed_precision_accumulation", "{}", "no \"schema\" number, so cs336 did not write it"),
    (
        "memory_profiling",
        "{\"schema\": 1, \"problem\": \"PROBLEM\", \"profile\": \"cpu\", \"runs\": [], \"cases\": [], \"extra\": 1}",
        "unknown field `extra`",
    ),
    (
        "pytorch_attention",
        "{\"schema\": 1, \"problem\": \"naive_ddp\", \"profile\": \"cpu\", \"runs\": [], \"cases\": []}",
        "holds records of naive_ddp",
    ),
    ("flash_benchmarking", "{\"schema\": 1, \"problem\": \"PROB", "not valid JSON (truncated?)"),
    ("naive_ddp", "{\"schema\": 1, \"problem\": NaN}", "not valid JSON"),
    ("distributed_communication_single_node", IMPOSSIBLE, "sample 0 is -1"),
];

/// All in one tree, since most of the time goes into the write-up.
#[test]
fn a_record_that_cannot_be_used_costs_its_own_problem_alone() {
    const OTHER: &str = "naive_ddp_benchmarking";
    let tree = Tree::with_records();
    let local = |name: &str| tree.layout().local(Profile::Cpu, name);
    fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
    let unusable = UNUSABLE.map(|(name, record, said)| (name, record.replace("PROBLEM", name), said));
    unusable.iter().for_each(|(name, record, _)| fs::write(local(name), record).unwrap());
    fs::copy(tree.layout().accepted(Profile::Cpu, OTHER), local(OTHER)).unwrap();
    let of_the_other = format!("{OTHER}: ");
    for (verb, of_the_other) in [
        (&["diff"][..], of_the_other.as_str()),
        (&["accept", "--profile", "cpu"], of_the_other.as_str()),
        (&["writeup", "--no-measure"], "writeup.md are ready"),
    ] {
        let said = tree.refused(verb);
        assert!(said.contains(of_the_other), "{verb:?} does not say {of_the_other:?}: {said}");
        for (name, _, expected) in &unusable {
            let file = format!("report/records/cpu/{name}.json");
            let remedy = format!("cs336 measure {name} --profile cpu");
            let of_file = |line: &&str| line.contains(&file) && line.contains(expected) && line.contains(&remedy);
            assert!(said.lines().any(|line| of_file(&line)), "{verb:?} does not say {expected:?} of {file}: {said}");
        }
    }
    let said = output_text(&tree.run(&["export", PROBLEM, "--table", "four"]));
    assert!(said.contains("so cs336 did not write it") && said.contains("from the accepted records"), "{said}");
    let report = fs::read_to_string(tree.path("report/writeup.md")).unwrap();
    for (name, ..) in &unusable {
        let of_problem = format!(" {} (", name.replace('_', "\\_"));
        let heading = report.lines().find(|line| line.starts_with('#') && line.contains(&of_problem)).unwrap();
        let (_, section) = report.split_once(heading).unwrap();
        let (bold, _) = section.trim_start().split_once("**\n").unwrap();
        assert!(bold.starts_with("**report/records/cpu") && bold.ends_with("from the accepted records."), "{bold}");
    }
    assert_eq!(report.matches("**report/records/cpu").count(), unusable.len(), "another problem lost its records");
    assert!(tree.run(&["list"]).status.success());
    let plan = output_text(&tree.run(&["measure", "--dry-run", "--profile", "cpu"]));
    assert!(plan.contains("naive_ddp_benchmarking cpu."), "{plan}");
    for (name, record, expected) in &unusable {
        assert!(plan.contains(expected), "{plan}");
        assert_eq!(fs::read_to_string(local(name)).unwrap(), *record, "only measuring moves it");
    }
}

/// A sound file but for one sample.
const IMPOSSIBLE: &str = r#"{"schema": 1, "problem": "PROBLEM", "profile": "cpu", "runs": [
    {"id": "r", "started": "2026-01-01T00:00:00Z", "commit": "abc", "dirty": false, "suite_hash": "", "machine":
    {"cpu": "a", "cores": 1, "memory_bytes": 1, "os": "b", "gpus": []}, "software": {}, "settings": {}, "peaks":
    {"flops_per_s": {}, "bytes_per_s": 1.0, "cache_bytes": 0.0, "source": "c"}}], "cases": [{"grid": "g", "params": {},
    "run": "r", "revision": 1, "elapsed_s": 1.0, "outcome": {"kind": "measured", "row": {"unit": "s", "samples": [-1.0]}}}]}"#;

#[test]
fn measuring_moves_a_record_that_cannot_be_used_aside_and_says_where() {
    let tree = Tree::new();
    fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
    fs::write(tree.record_path(), "{\"schema\": 0}").unwrap();
    let output = tree.run(&["measure", PROBLEM, "--profile", "cpu", "--resume"]);
    let said = output_text(&output);
    let aside = format!("report/records/cpu/{PROBLEM}.json.unreadable");
    assert!(output.status.success() && said.contains(&format!("to {aside}")), "{said}");
    assert_eq!(fs::read_to_string(tree.path(aside)).unwrap(), "{\"schema\": 0}");
    let text = fs::read_to_string(tree.record_path()).unwrap();
    assert!(!RecordFile::parse(&text, "the record").unwrap().cases.is_empty());
}

#[test]
fn the_help_and_the_readme_name_the_variable_that_bounds_a_ranks_wait() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    for text in [output_text(&Tree::new().run(&["--help"])), readme] {
        assert!(text.contains("CS336_DEADLINE_S") && text.contains("1800"), "{text}");
    }
}
