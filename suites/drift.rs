//! The drift gate: every answer, rendered from the committed records alone, is what `snapshots/rendered` holds.
//!
//! After a wanted change: `INSTA_UPDATE=always cargo test --test drift`, look at the diff, commit.

use std::collections::BTreeSet;
use std::path::Path;

use cs336::cli::writeup::{Source, accepted_markdown, document};
use cs336::harness::store::Layout;

fn layout() -> Layout {
    Layout { root: Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf() }
}

#[test]
fn every_answer_renders_from_the_committed_records_as_accepted() {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(layout().root.join("snapshots").join("rendered"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| {
        for (name, markdown) in accepted_markdown(&layout()).unwrap() {
            insta::assert_snapshot!(name, markdown);
        }
    });
}

#[test]
fn no_rendered_snapshot_is_without_its_answer() {
    let folder = layout().root.join("snapshots").join("rendered");
    let files: BTreeSet<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    let answers: BTreeSet<String> =
        accepted_markdown(&layout()).unwrap().iter().map(|(n, _)| format!("{n}.snap")).collect();
    assert_eq!(files, answers, "snapshots/rendered and the registry differ");
}

#[test]
fn the_whole_write_up_gives_the_same_bytes_twice() {
    let frame = std::fs::read_to_string(layout().report().join("writeup.typ")).unwrap();
    let pdf = || {
        let rendered = cs336::report::render(&document(&layout(), Source::Accepted).unwrap()).unwrap();
        cs336::report::pdf(&rendered, &frame).unwrap()
    };
    let (first, second) = (pdf(), pdf());
    assert!(first.starts_with(b"%PDF-1.") && first.len() > 50_000, "{} bytes", first.len());
    assert!(first == second, "two renderings of the same records differ");
}
