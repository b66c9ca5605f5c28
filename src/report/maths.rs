//! LaTeX formulas become typst formulas; what the converter writes is defined in `maths.typ`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, anyhow, ensure};

use super::escape::typst_string;
use super::latex;

/// Definitions that converted formulas rely on.
pub const PRELUDE: &str = include_str!("maths.typ");

/// One formula as a typst expression in markup; `block` sets it on a line of its own.
pub fn typst(latex: &str, block: bool) -> Result<String> {
    let latex = latex.trim();
    ensure!(!latex.is_empty(), "an empty formula");
    ensure!(is_balanced(latex), "the formula ${latex}$ does not convert: its braces do not balance");
    let converted = convert(&latex::prepared(latex))
        .map_err(|reason| anyhow!("the formula ${latex}$ does not convert: {reason}"))?;
    let converted = current_names(converted.trim());
    let alt = typst_string(&latex.split_whitespace().collect::<Vec<_>>().join(" "));
    let block = if block { "block: true, " } else { "" };
    Ok(format!("#formula({alt}, {block}$ {converted} $);"))
}

/// The converter closes what a formula leaves open; a reader of the Markdown would see it broken.
fn is_balanced(latex: &str) -> bool {
    let (mut depth, mut escaped) = (0i32, false);
    for c in latex.chars() {
        match c {
            '{' if !escaped => depth += 1,
            '}' if !escaped => depth -= 1,
            _ => {}
        }
        escaped = c == '\\' && !escaped;
        if depth < 0 {
            return false;
        }
    }
    depth == 0
}

/// The converter meets malformed input with an `expect` here and there, and a template's formula is input.
fn convert(latex: &str) -> Result<String, String> {
    match catch_unwind(AssertUnwindSafe(|| mitex::convert_math(latex, None))) {
        Ok(converted) => converted,
        Err(_) => Err("the converter gave up on it".into()),
    }
}

/// Symbols under the names that this typst knows; the converter writes those of typst 0.13.
fn current_names(converted: &str) -> String {
    let mut out = String::with_capacity(converted.len());
    let mut rest = converted;
    while let Some(first) = rest.chars().next() {
        let name = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '.').unwrap_or(rest.len());
        let length = match first {
            // text in brackets, after which the converter writes a semicolon
            '#' => rest.find("];").map_or(rest.len(), |end| end + 2),
            c if c.is_ascii_alphabetic() => {
                out.push_str(&current_name(&rest[..name]));
                rest = &rest[name..];
                continue;
            }
            c => c.len_utf8(),
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out
}

fn current_name(name: &str) -> String {
    let (base, modifiers) = name.split_once('.').map_or((name, ""), |(base, rest)| (base, rest));
    match (base, modifiers) {
        ("sect", _) => name.replacen("sect", "inter", 1),
        ("diff", _) => name.replacen("diff", "partial", 1),
        ("angle", "l" | "r") => name.replacen("angle", "chevron", 1),
        ("planck", "reduce") => "planck".into(),
        ("ast", "circle") => "ast.op.o".into(),
        ("plus" | "minus" | "times" | "dot" | "dash", _) => name.replace(".circle", ".o"),
        ("bracket", _) => name.replace(".double", ".stroked"),
        ("gt" | "lt", "tri" | "tri.eq" | "tri.not" | "tri.eq.not") => name.replacen(".tri", ".closed", 1),
        ("tack", "r.double") => "tack.rr".into(),
        _ => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formula_keeps_its_source_as_alternative_text() {
        let typst = typst(r"O_i = \frac{1}{2}", false).unwrap();
        assert!(typst.starts_with(r#"#formula("O_i = \\frac{1}{2}", $"#), "{typst}");
    }

    #[test]
    fn an_unknown_command_is_an_error_that_shows_the_formula() {
        let error = typst(r"a \notacommand b", false).unwrap_err().to_string();
        assert!(error.contains(r"\notacommand"), "{error}");
    }

    #[test]
    fn symbols_get_their_new_names_and_text_keeps_its_words() {
        let typst = typst(r"\langle x \cap y \odot z \rangle \text{a diff of sect}", false).unwrap();
        assert!(typst.contains("chevron.l") && typst.contains("inter") && typst.contains("dot.o"), "{typst}");
        assert!(typst.contains("a diff of sect"), "{typst}");
    }

    #[test]
    fn empty_and_unbalanced_formulas_are_errors() {
        assert!(typst(" ", true).is_err());
        assert!(typst(r"\frac{1}{", true).is_err());
        assert!(typst(r"a}{b", true).is_err());
        assert!(typst(r"\{ a \}", true).is_ok());
    }
}
