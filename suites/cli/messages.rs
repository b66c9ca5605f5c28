//! Messages about bad input: each says what is wrong, what was expected, and what to do.

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
    bad("a setting of no problem", &["measure", "--set", "addend=float32"],
        ["0 are named", "cs336 measure P", "--set key=value"]),
    bad("measuring what has only checks", &["measure", "communication_accounting"],
        ["communication_accounting measures nothing", "it has only checks", "cs336 grade communication_accounting"]),
    bad("accepting without records", &["accept", PROBLEM], ["nothing to accept", "no records here", "cs336 measure"]),
    bad("a folder of cases that does not exist", &["grade", "--cases", "nowhere"],
        ["nowhere cannot be opened", "name a folder", "*.safetensors"]),
    bad("a folder without cases", &["grade", "--cases", "kernels"],
        ["holds no *.safetensors file", "nothing was graded", "suites/cases/README.md"]),
    bad("an unknown rank task", &["launch", "--task", "nothing", "--world-size", "2"],
        ["no rank task is called \"nothing\"", "give --task one of", "all_reduce"]),
    bad("a task without its input", &["launch", "--task", "training_case", "--world-size", "1"],
        ["this task needs an input", "a JSON file", "--input"]),
    bad("no rank at all", &["launch", "--task", "all_reduce", "--world-size", "0"],
        ["world_size is 0", "between 1 and 16", "between 1 and 16"]),
    bad("a worker started by hand", &["worker"], ["only cs336 itself starts this process", "run", "`cs336 measure`"]),
    bad("a write-up that was never built", &["writeup", "--fresh"],
        ["there are no records", "run", "`cs336 measure`"]),
    spoilt("a suite that is missing", |tree| fs::remove_file(tree.path(format!("suites/{PROBLEM}.toml"))).unwrap(),
        ["cannot be read", "declares what mixed_precision_accumulation measures", "git checkout suites/"]),
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

#[rstest]
#[case::truncated("{\"schema\": 1, \"problem\": \"mixed", "not valid JSON (truncated?)")]
#[case::newer("{\"schema\": 99}", "has schema 99, from a newer cs336; this one reads schema 1")]
#[case::no_schema("{}", "no \"schema\" number, so cs336 did not write it")]
#[case::unknown_key(
    "{\"schema\": 1, \"problem\": \"mixed_precision_accumulation\", \"profile\": \"cpu\", \"runs\": [], \"cases\": [], \"extra\": 1}",
    "unknown field `extra`"
)]
#[case::another_problem(
    "{\"schema\": 1, \"problem\": \"naive_ddp\", \"profile\": \"cpu\", \"runs\": [], \"cases\": []}",
    "holds records of naive_ddp"
)]
#[case::not_a_number("{\"schema\": 1, \"problem\": NaN}", "not valid JSON")]
fn a_bad_record_is_named_and_never_overwritten(#[case] record: &str, #[case] expected: &str) {
    let tree = Tree::with_records();
    fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
    fs::write(tree.record_path(), record).unwrap();
    for verb in [
        &["measure", PROBLEM, "--profile", "cpu"][..],
        &["diff", PROBLEM],
        &["accept", PROBLEM],
        &["writeup", "--no-measure"],
    ] {
        let said = tree.refused(verb);
        assert!(
            said.contains(expected) && said.contains(&format!("report/records/cpu/{PROBLEM}.json")),
            "{verb:?}: {said}"
        );
    }
    assert_eq!(fs::read_to_string(tree.record_path()).unwrap(), record);
}

#[test]
fn the_help_and_the_readme_name_the_variable_that_bounds_a_ranks_wait() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    for text in [output_text(&Tree::new().run(&["--help"])), readme] {
        assert!(text.contains("CS336_DEADLINE_S") && text.contains("1800"), "{text}");
    }
}
