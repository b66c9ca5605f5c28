//! Refuses placeholder text and control characters in templates. Texts of records are not looked at: an error may say TODO.

use anyhow::{Result, bail};

/// Placeholder words, matched as whole words.
const WORDS: [&str; 6] = ["TODO", "TBD", "XXX", "FIXME", "TKTK", "PLACEHOLDER"];
/// Words of placeholder text, in capitals or not.
const LATIN: [&str; 2] = ["lorem", "ipsum"];

/// Refuses placeholder text, and characters that no edition prints, in `text`; messages call it `origin`.
pub fn check(origin: &str, text: &str) -> Result<()> {
    for (i, line) in text.lines().enumerate() {
        if let Some(control) = line.chars().find(|c| c.is_control() && *c != '\t') {
            bail!("{origin}:{}: the control character {control:?}; delete it", i + 1);
        }
        if let Some(found) = leftover(line) {
            bail!("{origin}:{}: leftover text {found:?}; write what belongs there: {line:?}", i + 1);
        }
    }
    Ok(())
}

fn leftover(line: &str) -> Option<&str> {
    let mut words = line.split(|c: char| !c.is_alphanumeric());
    let word = words.find(|w| WORDS.contains(w) || LATIN.iter().any(|x| w.eq_ignore_ascii_case(x)));
    word.or_else(|| tool_call(line))
}

/// "[1 tool called]", copied from a chat program.
fn tool_call(line: &str) -> Option<&str> {
    let mut bracketed = line.split('[').skip(1).filter_map(|rest| Some(rest.split_once(']')?.0));
    bracketed.find(|text| match text.split_whitespace().collect::<Vec<_>>()[..] {
        [count, "tool" | "tools", "called"] => count.parse::<u32>().is_ok(),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_found_and_named() {
        for line in ["see TODO here", "a TBD", "[1 tool called]", "[12 tools called]", "Lorem ipsum"] {
            let error = check("templates/x.md", &format!("fine\n{line}")).unwrap_err().to_string();
            assert!(error.starts_with("templates/x.md:2: "), "{error}");
        }
    }

    #[test]
    fn control_characters_are_found_and_named() {
        for control in ["\u{1b}[31m", "\0", "\r."] {
            let error = check("templates/x.md", &format!("a\tb\r\nc{control}")).unwrap_err().to_string();
            assert!(error.starts_with("templates/x.md:2: the control character "), "{error}");
        }
    }

    #[test]
    fn ordinary_prose_and_footnotes_pass() {
        check("x", "The todo application. [1] and [^2] and [2 GPUs](https://example.org) {1, 2}").unwrap();
    }
}
