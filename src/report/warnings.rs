//! What a reader must know before an answer: stale and failed cases, and why cases failed.

use std::fmt::Write as _;

use serde_json::Value;

use super::escape;
use crate::harness::answer::{RecordSet, Records};
use crate::harness::record::CaseRecord;

/// The warnings about a problem's records, in Markdown; empty if there are none.
pub fn before_answer(records: &Records) -> String {
    let warning = |set: &RecordSet| {
        let counts = [(set.stale.len(), "stale"), (set.failures().count(), "failed")];
        let counts = counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("**{n} {what}**"));
        let counts = counts.collect::<Vec<_>>().join(", ");
        let of = format!("{counts} of {} {} cases.{}", set.file.cases.len(), set.file.profile, failures(set));
        (!counts.is_empty()).then_some(of)
    };
    records.sets().filter_map(warning).collect::<Vec<_>>().join(" ")
}

/// A sentence for each of the first errors, with the first case that ended in it.
fn failures(set: &RecordSet) -> String {
    const MOST_ERRORS: usize = 3;
    const MOST_LETTERS: usize = 200;
    let mut by_error: Vec<(&str, &CaseRecord, usize)> = Vec::new();
    for (case, error) in set.failures() {
        match by_error.iter_mut().find(|(known, ..)| *known == error) {
            Some((.., count)) => *count += 1,
            None => by_error.push((error, case, 1)),
        }
    }
    let sentence = |(error, case, count): &(&str, &CaseRecord, usize)| {
        let others = if *count > 1 { format!(" and {} more", count - 1) } else { String::new() };
        let why: String = error.trim().chars().take(MOST_LETTERS).collect();
        escape::markdown(&format!(" {} ({}){others}: {why}.", case.grid, in_line(&case.params)))
    };
    let mut sentences: String = by_error.iter().take(MOST_ERRORS).map(sentence).collect();
    if by_error.len() > MOST_ERRORS {
        let _ = write!(sentences, " {} other errors are in the record.", by_error.len() - MOST_ERRORS);
    }
    sentences
}

/// A case's parameters in a line: "size xl, dtype bfloat16".
pub fn in_line(params: &Value) -> String {
    let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let fields = params.as_object().into_iter().flatten();
    fields.map(|(key, value)| format!("{key} {}", shown(value))).collect::<Vec<_>>().join(", ")
}
