//! JSON from outside, read with errors that print as one line: serde quotes unknown names as they are.

use std::fmt::Display;

use anyhow::{Result, anyhow};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::printable::one_line;

pub fn from_str<T: DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(refusal)
}

pub fn from_value<T: DeserializeOwned>(value: &Value) -> Result<T> {
    T::deserialize(value).map_err(refusal)
}

/// The error of a parser, which may quote what it has read.
pub fn refusal(error: impl Display) -> anyhow::Error {
    anyhow!(one_line(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_cannot_break_the_line_of_its_error() {
        let error = from_str::<crate::harness::worker::Reply>(r#"{"failed\npassed x": 1}"#).unwrap_err().to_string();
        assert!(error.contains(r"`failed\npassed x`") && error.lines().count() == 1, "{error}");
    }
}
