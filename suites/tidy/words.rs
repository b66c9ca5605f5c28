//! The words of the report: templates use none of the phrases that readers stumbled over.

use std::fs;

use super::super::{root, stems};

/// A phrase, and what to write in its place.
const TICS: &[(&str, &str)] = &[
    ("so that", "\"therefore\", or two sentences"),
    ("of its own", "\"its own\", or nothing"),
    ("of their own", "\"their own\", or nothing"),
    ("goes through", "\"uses\""),
    ("go through", "\"use\""),
    ("is held to", "\"is compared with\""),
    ("are held to", "\"are compared with\""),
    ("just before", "when exactly"),
    ("is told by", "\"shows\""),
    ("by more than", "the number itself, without a negation"),
    ("each column", "\"each implementation\""),
    ("plain operations", "\"plain attention\""),
    ("a rank holds", "\"per rank\""),
    ("calls a step", "\"calls per step\""),
    ("bytes a parameter", "\"bytes per parameter\""),
    ("values a parameter", "\"values per parameter\""),
    ("operations a score", "\"operations per score\""),
    ("tokens a rank", "\"tokens per rank\""),
    ("joules a call", "\"joules per call\""),
    ("what goes are", "the subject first"),
    ("beyond the handout:", "an ordinary sentence"),
    ("rust eager", "\"ours\""),
    ("the same ranks", "which ranks"),
];

#[test]
fn templates_use_none_of_the_banned_phrases() {
    let mut found = Vec::new();
    let folders = ["templates", "templates/shared", "templates/subject"];
    for path in
        folders.iter().flat_map(|folder| stems(folder, "md").into_iter().map(move |stem| format!("{folder}/{stem}.md")))
    {
        let text = fs::read_to_string(root().join(&path)).unwrap();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
        for (tic, instead) in TICS {
            found.extend(text.contains(tic).then(|| format!("{path}: {tic:?}; write {instead}")));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
