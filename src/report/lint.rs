//! Refuses placeholder text in the report.

use anyhow::{Result, bail};

/// Placeholder words, matched as whole words, as written or in capitals.
const WORDS: [&str; 7] = ["TODO", "TBD", "XXX", "FIXME", "TKTK", "lorem", "PLACEHOLDER"];

/// Refuses placeholder text in `text`; messages call it `origin`.
pub fn leftovers(origin: &str, text: &str) -> Result<()> {
    for (i, line) in text.lines().enumerate() {
        if let Some(found) = leftover(line) {
            bail!("{origin} renders to leftover text {found:?} in its line {}: {line:?}", i + 1);
        }
    }
    Ok(())
}

fn leftover(line: &str) -> Option<&str> {
    let words = line.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty());
    let word = words.into_iter().find(|w| WORDS.iter().any(|x| w == x || **w == x.to_uppercase() || is_lorem(w)));
    word.or_else(|| ["{{ ", "{% "].into_iter().find(|x| line.contains(x))).or_else(|| tool_call(line))
}

fn is_lorem(word: &str) -> bool {
    word.eq_ignore_ascii_case("lorem") || word.eq_ignore_ascii_case("ipsum")
}

/// "[1 tool called]", copied from a chat program.
fn tool_call(line: &str) -> Option<&str> {
    line.match_indices('[').find_map(|(start, _)| {
        let inside = &line[start + 1..line[start..].find(']')? + start];
        let mut words = inside.split_whitespace();
        let counted = words.next()?.parse::<u32>().is_ok();
        let rest: Vec<&str> = words.collect();
        (counted && matches!(rest[..], ["tool" | "tools", "called"])).then_some(inside)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_found_and_named() {
        for line in ["see TODO here", "a TBD", "[1 tool called]", "[12 tools called]", "Lorem ipsum", "{{ x }}"] {
            let error = leftovers("templates/x.md", &format!("fine\n{line}")).unwrap_err().to_string();
            assert!(error.contains("templates/x.md") && error.contains("line 2"), "{error}");
        }
    }

    #[test]
    fn ordinary_prose_and_footnotes_pass() {
        leftovers("x", "The todo application. [1] and [^2] and [2 GPUs](https://example.org) {1, 2}").unwrap();
    }
}
