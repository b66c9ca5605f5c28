//! No argument, path or variable prints a line of its own or acts on a terminal.

use super::*;

/// A shell makes arguments of the names of files.
#[rstest]
#[case::a_verb(&["a\npassed all"])]
#[case::a_flag(&["list", "--a\npassed all"])]
#[case::a_value(&["measure", "--case-limit", "a\npassed all"])]
#[case::codes(&["grade", "--\u{7}passed\u{1b}]0;title\u{7}"])]
fn no_argument_can_forge_a_line_or_act_on_a_terminal(#[case] arguments: &[&str]) {
    // As on a terminal; elsewhere clap removes codes.
    let output = Tree::new().command(arguments).env("CLICOLOR_FORCE", "1").output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("passed") && !said.contains("\npassed") && !said.contains('\u{7}'), "{said}");
}

#[rstest]
#[case::a_folder_of_cases(&["grade", "--cases", "a\nforged line"], &[])]
#[case::a_results_file(&["grade", "--cases", concat!(env!("CARGO_MANIFEST_DIR"), "/suites/cases"), "--junit", "/dev/null/a\nforged line"], &[])]
#[case::a_rank_s_input(&["rank", "--task", "nccl_selftest", "--input", "a\nforged line"], &[])]
#[case::the_tree(&["list"], &[("CS336_ROOT", "a\nforged line")])]
#[case::the_tree_of_doctor(&["doctor"], &[("CS336_ROOT", "a\nforged line")])]
#[case::the_interpreter(&["doctor"], &[("CS336_PYTHON", "a\nforged line")])]
#[case::the_cache(&["doctor"], &[("XDG_CACHE_HOME", "/dev/null/a\nforged line")])]
#[case::the_cuda_toolkit(&["doctor"], &[("CUDA_HOME", "/a\nforged line")])]
#[case::the_first_rank(&["rank", "--task", "nccl_selftest"], &[("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29500"), ("MASTER_ADDR", "a\nforged line")])]
#[case::slurm_s_nodes(&["rank", "--task", "nccl_selftest"], &[("SLURM_PROCID", "1"), ("SLURM_LOCALID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_NODELIST", "a\nforged line"), ("CS336_DEADLINE_S", "0.1")])]
#[case::the_store(&["rank", "--task", "nccl_selftest"], &[("RANK", "1"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29500"), ("MASTER_ADDR", "a\nforged line"), ("CS336_DEADLINE_S", "0.1")])]
#[case::a_rank(&["rank", "--task", "nccl_selftest"], &[("RANK", "a\nforged line")])]
fn no_path_or_variable_can_forge_a_line(#[case] arguments: &[&str], #[case] variables: &[(&str, &str)]) {
    let output = Tree::new().command(arguments).envs(variables.iter().copied()).output().unwrap();
    let said = output_text(&output);
    assert!(!said.contains("\nforged"), "{said}");
    let names_it = said.contains("forged line");
    assert!(
        names_it || variables.iter().any(|(name, _)| ["XDG_CACHE_HOME", "CUDA_HOME", "CS336_ROOT"].contains(name)),
        "{said}"
    );
}

/// Only an outcome may hold line breaks: it quotes what libraries say.
#[test]
fn no_text_of_an_outcome_can_forge_a_line() {
    let tree = Tree::with_records();
    let accepted = fs::read_to_string(tree.layout().accepted(Profile::Cpu, PROBLEM)).unwrap();
    let text = "a\nforged line";
    for outcome in [
        serde_json::json!({"kind": "not_run", "reason": text, "needs": text, "has": text}),
        serde_json::json!({"kind": "failed", "error": text}),
        serde_json::json!({"kind": "measured", "row": {text: {"samples": text}}}),
        serde_json::json!({"kind": "measured", "row": {text: 1}}),
    ] {
        let mut record: Value = serde_json::from_str(&accepted).unwrap();
        record["cases"][0]["outcome"] = outcome;
        fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
        fs::write(tree.record_path(), record.to_string()).unwrap();
        for verb in [&["diff", PROBLEM][..], &["accept", PROBLEM], &["explain", PROBLEM], &["grade", PROBLEM]] {
            let said = output_text(&tree.run(verb));
            assert!(!said.contains("\nforged"), "{verb:?}: {said}");
        }
        let said = output_text(&tree.run(&["measure", "--dry-run", PROBLEM, "--profile", "cpu"]));
        assert!(!said.contains("\nforged"), "{said}");
    }
}

/// Its class passes for one of PyTorch's, whose words say what the machine lacks.
#[test]
fn no_words_of_a_subject_that_is_not_graded_can_forge_a_line() {
    let graded = subject::Graded::new();
    let raises = "raise type('InvalidCxxCompiler', (Exception,), {'__module__': 'torch.x'})('none\\nforged line')\n";
    graded.add("right", "mallory", "tests/adapters.py", raises);
    let (_, said) = graded.grade_all(&["flash_forward"], &["official_protocol"]);
    let results = fs::read_to_string(graded.tree.path("grades/mallory/results.json")).unwrap();
    assert!(said.contains("forged line") && !said.contains("\nforged"), "{said}");
    assert!(results.contains("forged line") && !results.contains("\\nforged"), "{results}");
}

/// A spreadsheet would compute it.
#[test]
fn no_name_of_a_subject_becomes_a_formula_of_the_table() {
    let tree = Tree::new();
    let names = ["+1", "-1", "=HYPERLINK(\"http:x\")", "@sum", "x;=1+1"];
    names.iter().for_each(|name| fs::create_dir_all(tree.path("subjects").join(name)).unwrap());
    let said = tree.refused(&["grade", "flash_forward", "--subjects", "subjects"]);
    let table = fs::read_to_string(tree.path("grades/grades.csv")).unwrap_or_else(|error| panic!("{error}: {said}"));
    let cells = ["'+1,0", "'-1,0", "\"'=HYPERLINK(\"\"http:x\"\")\",0", "'@sum,0", "x;'=1+1,0"];
    assert_eq!(table.lines().count(), 1 + cells.len(), "{table}");
    for (line, cell) in table.lines().skip(1).zip(cells) {
        assert!(line.starts_with(cell), "{line} does not begin with {cell}");
    }
}
