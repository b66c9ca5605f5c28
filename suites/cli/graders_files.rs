//! The files that `cs336 grade` writes for graders, and what stops neither them nor the other problems.

use std::os::unix::fs::symlink;

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
fn a_record_that_cannot_be_read_is_a_reason_of_its_own_problem_alone() {
    let tree = Tree::new();
    fs::create_dir_all(tree.record_path().parent().unwrap()).unwrap();
    fs::write(tree.record_path(), "{\"schema\": 99}").unwrap();
    let output = tree.run(&["grade", PROBLEM, "communication_accounting", "--json", "--junit", "j.xml"]);
    let grades = json(&output);
    assert_eq!(grades.as_array().unwrap().len(), 2, "{grades}");
    let lost = grades[0]["parts"][0]["lost"].to_string();
    assert!(lost.contains("has schema 99"), "{grades}");
    assert!(!grades[1].to_string().contains("has schema 99") && tree.path("j.xml").exists(), "{grades}");
}
