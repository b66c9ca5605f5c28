//! `cs336 export`: tables and figures with their provenance, and messages about names that do not exist.

use super::*;

/// A problem whose answer has a figure from a CPU's records.
const DRAWN: &str = "benchmarking_script";

#[test]
fn a_table_and_a_figure_are_printed_with_their_provenance() {
    let tree = Tree::with_records();
    for (problem, arguments, begins, holds) in [
        (PROBLEM, &["--table", "four"][..], "<!-- table four of ", "\n| "),
        (PROBLEM, &["--table", "four", "--format", "tex"], "% table four of ", "\\toprule\n"),
        (PROBLEM, &["--table", "four", "--format", "typ"], "// table four of ", "#three-line-table("),
        (PROBLEM, &["--table", "four", "--format", "csv"], "# table four of ", ","),
        (DRAWN, &["--figure", "passes"], "<!-- figure passes of ", "<svg "),
    ] {
        let output = tree.run(&[&["export", problem], arguments].concat());
        assert!(output.status.success(), "{arguments:?}: {}", output_text(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with(begins) && text.contains(holds), "{arguments:?}: {text}");
        let record = fs::read_to_string(tree.path(format!("snapshots/cpu/{problem}.json"))).unwrap();
        let run = &RecordFile::parse(&record, problem).unwrap().runs[0];
        for origin in [format!("run {}", run.id), format!("commit {}", run.commit)] {
            assert!(text.contains(&origin), "{arguments:?} lacks {origin}: {text}");
        }
    }
}

#[test]
fn names_that_do_not_exist_are_answered_with_those_that_do() {
    let tree = Tree::with_records();
    for (arguments, expected) in [
        (&[PROBLEM, "--table", "five"][..], "has no table \"five\"; it has \"binades\", \"four\""),
        (
            &[PROBLEM, "--table", "five"],
            "Records of the gpu, which may have more, are missing: `git checkout HEAD -- snapshots/gpu/",
        ),
        (&[DRAWN, "--figure", "four"], "has no figure \"four\"; it has \"passes\""),
        (&[DRAWN, "--figure", "passes", "--format", "csv"], "a figure is exported as svg"),
        (&[PROBLEM, "--table", "four", "--format", "svg"], "a table is exported as tex, typ, md or csv"),
    ] {
        let said = tree.refused(&[&["export"], arguments].concat());
        assert!(said.contains(expected), "{said}");
    }
}
