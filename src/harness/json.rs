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

/// The error of a parser, which may quote what it has read.
pub fn refusal(error: impl Display) -> anyhow::Error {
    anyhow!(one_line(&error.to_string()))
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
    fn an_unknown_name_cannot_break_the_line_of_its_error() {
        let error = from_str::<crate::harness::worker::Reply>(r#"{"failed\npassed x": 1}"#).unwrap_err().to_string();
        assert!(error.contains(r"`failed\npassed x`") && error.lines().count() == 1, "{error}");
    }
}
