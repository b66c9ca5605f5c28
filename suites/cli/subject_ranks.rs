//! Subjects whose ranks do not do their part: what they compute is right, and earns nothing.

use super::subject::{Graded, is_confined};
use super::*;

const SHARDING: &str = "optimizer_state_sharding";

/// The grades of a copy of `suites/subjects/cheats` with this trick: the points of each problem, and all that was said.
fn graded(trick: &str, problems: &[&str]) -> (Vec<f64>, String) {
    let graded = Graded::new();
    let folder = graded.add("cheats", trick, "trick.txt", trick);
    let grades = graded.grade(&folder, problems, &["--limit", "20"]);
    let earned = grades.as_array().unwrap().iter().map(|grade| grade["earned"].as_f64().unwrap());
    (earned.collect(), grades.to_string())
}

#[test]
fn ranks_that_compute_from_the_inputs_of_others_earn_nothing() {
    if !is_confined() {
        return;
    }
    let problems = ["ddp_overlap_individual_parameters", "ddp_overlap_bucketed"];
    let (earned, said) = graded("reads_the_other_ranks", &problems);
    assert_eq!(earned, [0.0, 0.0], "{said}");
    assert!(said.contains("raises PermissionError") && !said.contains("no answer"), "{said}");
}

#[test]
fn an_optimizer_that_keeps_the_rest_of_the_state_in_another_one_earns_nothing() {
    let (earned, said) = graded("keeps_the_rest_elsewhere", &[SHARDING]);
    assert_eq!(earned, [0.0], "{said}");
    for words in ["the ranks step [850, 850] of 850 values", "the ranks step [1350, 1350] of 1350 values"] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

/// It is measured although a check before another problem finds no compiler.
#[test]
fn the_state_of_a_right_optimizer_is_measured_on_every_rank() {
    const UNGRADED: &str = "ddp_bucketed_benchmarking";
    const PROBLEM: &str = "optimizer_state_sharding_accounting";
    let graded = Graded::new();
    let suite = "[cpu.step]\nbackend = \"gloo\"\nworld_size = 2\nsize = \"tiny\"\ncontext_length = 16\nbatch_size = 1\n\
                 vocab_size = 500\ndtype = \"float32\"\nrounds = 1\nwarmup = 1\nsteps = 1\n";
    fs::write(graded.tree.path(format!("suites/{PROBLEM}.toml")), suite).unwrap();
    let folder = graded.add("right", "ada", "", "");
    let adapters = folder.join("tests/adapters.py");
    let without = "\nclass InvalidCxxCompiler(RuntimeError):\n    __module__ = 'torch._inductor.exc'\n\n\n\
                   def get_ddp_bucketed(*_, **__):\n    raise InvalidCxxCompiler('no C++ compiler')\n";
    fs::write(&adapters, fs::read_to_string(&adapters).unwrap() + without).unwrap();
    let mut command = graded.tree.command(&["measure", UNGRADED, PROBLEM, "--subject", folder.to_str().unwrap()]);
    let output = graded.with_python(&mut command).output().unwrap();
    let said = output_text(&output);
    let reason = format!("{UNGRADED} is not measured, since a check before it is not graded: ");
    assert!(!output.status.success() && said.contains(&reason) && said.contains("no C++ compiler"), "{said}");
    let row = &graded.rows("ada", PROBLEM)[0];
    let bytes = row["theirs"]["row"]["state_bytes"].as_array().unwrap_or_else(|| panic!("{row}\n{said}"));
    let bytes: Vec<u64> = bytes.iter().map(|bytes| bytes.as_u64().unwrap()).collect();
    // Two moments of four bytes for each parameter.
    assert_eq!(bytes.iter().sum::<u64>(), 8 * row["parameters"].as_u64().unwrap(), "{row}");
    assert!(bytes.len() == 2 && bytes.iter().all(|&bytes| bytes > 0), "{row}");
}
