//! Templates hold prose, with look-ups and choices between wordings, but no computations.

#[path = "words.rs"]
mod words;

use std::fs;

use cs336::problems::REGISTRY;

use super::{root, stems};

/// The largest share of a template's characters inside `{{ }}`, `{% %}` and `{# #}`.
const MOST_JINJA: f64 = 0.30;

/// The tags of a template.
fn tags(text: &str) -> Vec<&str> {
    let mut tags = Vec::new();
    let mut at = 0;
    while let Some(start) = text[at..].find('{').map(|found| at + found) {
        let close = match text.get(start..start + 2) {
            Some("{{") => "}}",
            Some("{%") => "%}",
            Some("{#") => "#}",
            _ => {
                at = start + 1;
                continue;
            }
        };
        let end = text[start..].find(close).map_or(text.len(), |found| start + found + 2);
        tags.push(&text[start..end]);
        at = end;
    }
    tags
}

/// The text with each `{% include "shared/x.md" %}` replaced by that file's text.
fn with_includes(text: &str) -> String {
    let (open, close) = ("{% include \"", "\" %}");
    let mut pieces = text.split(open);
    let mut out = pieces.next().unwrap_or_default().to_string();
    for piece in pieces {
        let (name, rest) = piece.split_once(close).expect("an include names its file");
        out += &fs::read_to_string(root().join("templates").join(name)).expect("an included template");
        out += rest;
    }
    out
}

/// Computing and repeating is refused by `report::jinja` when a template is rendered.
#[test]
fn templates_hold_prose_and_no_program() {
    let names = |folder: &'static str| stems(folder, "md").into_iter().map(move |stem| format!("{folder}/{stem}.md"));
    let folders = ["templates", "templates/subject", "suites/newcomer/templates"];
    for name in folders.into_iter().flat_map(names) {
        let text = with_includes(&fs::read_to_string(root().join(&name)).unwrap());
        let tags = tags(&text);
        let share = tags.iter().map(|tag| tag.len()).sum::<usize>() as f64 / text.len() as f64;
        assert!(share <= MOST_JINJA, "{name} is {:.0} % Jinja; at most {:.0} %", 100.0 * share, 100.0 * MOST_JINJA);
    }
}

#[test]
fn every_template_answers_through_its_problems_answer() {
    for problem in REGISTRY {
        let text = fs::read_to_string(root().join("templates").join(format!("{}.md", problem.name))).unwrap();
        for part in problem.answers {
            assert!(text.contains(&format!("part(\"{part}\")")), "templates/{}.md lacks part {part:?}", problem.name);
        }
    }
}

#[test]
fn tags_are_told_from_prose() {
    let tags = |text: &'static str| tags(text);
    assert_eq!(tags("a {{ x | ms(1) }} b {% if y %}c{% endif %}"), ["{{ x | ms(1) }}", "{% if y %}", "{% endif %}"]);
    assert_eq!(tags("$x^{2}$ {{ open"), ["{{ open"]);
}
