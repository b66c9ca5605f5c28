//! What texts and integers a record may hold.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::printable::one_line;

/// JSON numbers hold larger integers inexactly, and sums of them could overflow.
const MAX_COUNT: u64 = 1 << 53;

/// Errors: an integer beyond [`MAX_COUNT`].
pub(super) fn require_counts(value: &Value) -> Result<()> {
    match value {
        Value::Number(number) if !number.is_f64() => {
            let is_count = number.as_i64().is_some_and(|count| count.unsigned_abs() <= MAX_COUNT);
            ensure!(is_count, "the count {number} is larger than 2^53");
            Ok(())
        }
        Value::Array(items) => items.iter().try_for_each(require_counts),
        Value::Object(fields) => fields.values().try_for_each(require_counts),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

/// Names of machines, software and parameters have at most some hundred.
const MOST_LETTERS: usize = 1_000;

/// Errors: a text or a key that is not one printable line, or too long for one. They are printed as parts of lines; only
/// outcomes, which are printed apart, may hold others.
pub(super) fn require_lines(value: &Value) -> Result<()> {
    let is_line = |text: &str| {
        let letters = text.chars().count();
        ensure!(
            letters <= MOST_LETTERS,
            "a text of {letters} characters: at most {MOST_LETTERS} are one line; correct it"
        );
        ensure!(text == one_line(text), "the text {text:?} is not one printable line; correct it");
        Ok(())
    };
    match value {
        Value::String(text) => is_line(text),
        Value::Array(items) => items.iter().try_for_each(require_lines),
        Value::Object(fields) => fields
            .iter()
            .filter(|(key, _)| *key != "outcome")
            .try_for_each(|(key, value)| is_line(key).and_then(|()| require_lines(value))),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}
