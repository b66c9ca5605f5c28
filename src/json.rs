//! JSON from outside, read with errors that print as one line: serde quotes unknown names as they are.

use std::collections::HashSet;
use std::fmt::{self, Display};

use anyhow::{Result, anyhow};
use serde::de::{DeserializeOwned, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::printable::one_line;

/// Errors: what is no JSON or no `T`; a name that an object has twice, since a reader of the text may see the other value.
pub fn from_str<T: DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str::<EachNameOnce>(text).map_err(refusal)?;
    serde_json::from_str(text).map_err(refusal)
}

pub fn from_value<T: DeserializeOwned>(value: &Value) -> Result<T> {
    T::deserialize(value).map_err(refusal)
}

/// Any JSON whose objects have each name once.
struct EachNameOnce;

impl<'de> Deserialize<'de> for EachNameOnce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for EachNameOnce {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self, A::Error> {
        let mut names = HashSet::new();
        while let Some((name, Self)) = fields.next_entry::<String, Self>()? {
            if let Some(twice) = names.replace(name) {
                return Err(A::Error::custom(format_args!("an object has the name {twice:?} twice: remove one")));
            }
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }
}

/// The error of a parser, which may quote what it has read, in words without Rust's types.
pub fn refusal(error: impl Display) -> anyhow::Error {
    anyhow!(in_plain_words(&one_line(&error.to_string())))
}

/// What serde says of a wrong type, as in "invalid type: null, expected struct Row at line 2", without the types' names.
fn in_plain_words(error: &str) -> String {
    const UNTAGGED: &str = "data did not match any variant of untagged enum ";
    const OBJECTS: &[&str] =
        &["internally tagged enum ", "adjacently tagged enum ", "enum ", "struct variant ", "struct "];
    const OF_JSON: &[(&str, &str)] = &[
        ("type: map,", "type: an object,"),
        ("type: sequence,", "type: a list,"),
        ("expected a map", "expected an object"),
        ("expected string or map", "expected a string or an object"),
        ("expected a sequence", "expected a list"),
    ];
    let error = &OF_JSON.iter().fold(error.to_string(), |error, (serde, json)| error.replacen(serde, json, 1));
    let of_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | ':');
    if let Some((before, after)) = error.split_once(UNTAGGED) {
        return format!("{before}it has none of the known forms{}", after.trim_start_matches(of_name));
    }
    let Some((before, after)) = error.split_once(", expected ") else { return error.into() };
    if let Some(named) = OBJECTS.iter().find_map(|kind| after.strip_prefix(kind)) {
        return format!("{before}, expected an object{}", named.trim_start_matches(of_name));
    }
    let rest = after.trim_start_matches(of_name);
    let words = match &after[..after.len() - rest.len()] {
        integer @ ("u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "isize") => {
            let range = before.contains("invalid value: integer").then(|| range_of(integer));
            &format!("a whole number{}", range.unwrap_or_default())
        }
        "f32" | "f64" => "a number",
        "variant" => return format!("{before}, expected a name{}", rest.trim_start_matches(" identifier")),
        _ => return error.into(),
    };
    format!("{before}, expected {words}{rest}")
}

/// " from 0 to 255", of "u8".
fn range_of(integer: &str) -> String {
    let bits = integer[1..].parse().unwrap_or(64);
    let (lowest, highest) = if integer.starts_with('i') {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    };
    format!(" from {lowest} to {highest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_an_object_has_twice_is_refused() {
        let read = |text| from_str::<Value>(text).map_err(|error| error.to_string());
        assert_eq!(read(r#"[{"a": 1, "b": {"a": -1.5}}, "a", null, true]"#).unwrap()[0]["b"]["a"], -1.5);
        let error = read(r#"{"a": [{"b\n": 1, "b\n": 2}]}"#).unwrap_err();
        assert!(error.contains(r#"an object has the name "b\n" twice"#) && error.lines().count() == 1, "{error}");
    }

    #[test]
    fn a_wrong_type_is_named_without_types_of_rust() {
        for (serde, plain) in [
            (
                "invalid type: string \"a\", expected usize at line 1",
                "invalid type: string \"a\", expected a whole number at line 1",
            ),
            (
                "invalid value: integer `-1`, expected u8",
                "invalid value: integer `-1`, expected a whole number from 0 to 255",
            ),
            (
                "invalid value: integer `9`, expected i64",
                "invalid value: integer `9`, expected a whole number from -9223372036854775808 to 9223372036854775807",
            ),
            ("invalid type: null, expected f64", "invalid type: null, expected a number"),
            (
                "invalid type: null, expected struct Row with 3 elements",
                "invalid type: null, expected an object with 3 elements",
            ),
            ("invalid type: null, expected internally tagged enum Outcome", "invalid type: null, expected an object"),
            ("invalid type: null, expected struct variant Row::A", "invalid type: null, expected an object"),
            ("invalid type: integer `1`, expected variant identifier", "invalid type: integer `1`, expected a name"),
            ("data did not match any variant of untagged enum AnyRow", "it has none of the known forms"),
            ("expected `,` or `}` at line 1 column 3", "expected `,` or `}` at line 1 column 3"),
            ("invalid type: null, expected a string", "invalid type: null, expected a string"),
            ("invalid type: map, expected string or map", "invalid type: an object, expected a string or an object"),
            ("invalid type: sequence, expected a map", "invalid type: a list, expected an object"),
            ("invalid type: null, expected a sequence", "invalid type: null, expected a list"),
        ] {
            assert_eq!(in_plain_words(serde), plain);
        }
    }

    #[test]
    fn an_unknown_name_cannot_break_the_line_of_its_error() {
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Empty {}
        let error = from_str::<Empty>(r#"{"failed\npassed x": 1}"#).unwrap_err().to_string();
        assert!(error.contains(r"`failed\npassed x`") && error.lines().count() == 1, "{error}");
    }
}
