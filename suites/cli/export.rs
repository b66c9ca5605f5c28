//! `cs336 export`: tables and figures with their provenance, and messages about names that do not exist.

use super::*;

/// What `export` prints of the quickest problem, from the committed records.
fn exported(tree: &Tree, arguments: &[&str]) -> String {
    let output = tree.run(&[&["export", PROBLEM], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", output_text(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_table_and_a_figure_are_printed_with_their_provenance() {
    let tree = Tree::with_records();
    let record = fs::read_to_string(tree.path(format!("snapshots/cpu/{PROBLEM}.json"))).unwrap();
    let run = &RecordFile::parse(&record, PROBLEM).unwrap().runs[0];
    let (id, commit) = (format!("run {}", run.id), format!("commit {}", run.commit));
    for (arguments, begins, holds) in [
        (&["--table", "loops"][..], "<!-- table loops of ", "\n| "),
        (&["--table", "loops", "--format", "tex"], "% table loops of ", "\\toprule\n"),
        (&["--table", "loops", "--format", "typ"], "// table loops of ", "#three-line-table("),
        (&["--table", "loops", "--format", "csv"], "# table loops of ", ","),
        (&["--figure", "error"], "<!-- figure error of ", "<svg "),
    ] {
        let text = exported(&tree, arguments);
        assert!(text.starts_with(begins) && text.contains(holds), "{arguments:?}: {text}");
        assert!(text.contains(&id) && text.contains(&commit), "{arguments:?} lacks {id} or {commit}: {text}");
    }
}

#[test]
fn names_that_do_not_exist_are_answered_with_those_that_do() {
    let tree = Tree::with_records();
    for (arguments, expected) in [
        (["--table", "loop"], "has no table \"loop\"; it has \"binades\", \"loops\""),
        (["--figure", "loops"], "has no figure \"loops\"; it has \"error\""),
    ] {
        let said = tree.refused(&[&["export", PROBLEM], &arguments[..]].concat());
        assert!(said.contains(expected), "{said}");
    }
    let said = tree.refused(&["export", PROBLEM, "--figure", "error", "--format", "csv"]);
    assert!(said.contains("a figure is exported as svg"), "{said}");
    let said = tree.refused(&["export", PROBLEM, "--table", "loops", "--format", "svg"]);
    assert!(said.contains("a table is exported as tex, typ, md or csv"), "{said}");
}
