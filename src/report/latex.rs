//! Converts LaTeX formulas to typst formulas. `latex.typ` defines the functions that the converter uses.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, anyhow, ensure};

use super::escape::typst_string;
use super::latex_symbols;

/// Definitions that converted formulas rely on.
pub const PRELUDE: &str = include_str!("latex.typ");

/// One formula as a typst expression in markup; `block` sets it on a line of its own.
pub fn typst(latex: &str, block: bool) -> Result<String> {
    let latex = latex.trim();
    ensure!(!latex.is_empty(), "an empty formula");
    ensure!(is_balanced(latex), "the formula ${latex}$ does not convert: its braces do not balance");
    let converted = convert(latex).map_err(|reason| anyhow!("the formula ${latex}$ does not convert: {reason}"))?;
    let converted = latex_symbols::fixed(converted.trim());
    let alt = typst_string(&latex.split_whitespace().collect::<Vec<_>>().join(" "));
    let block = if block { "block: true, " } else { "" };
    Ok(format!("#formula({alt}, {block}$ {converted} $);"))
}

/// The converter closes open braces, but the formula in the Markdown would stay broken.
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

/// The converter can panic on malformed input, so the panic is caught.
fn convert(latex: &str) -> Result<String, String> {
    match catch_unwind(AssertUnwindSafe(|| mitex::convert_math(latex, None))) {
        Ok(converted) => converted,
        Err(_) => Err("the converter panicked on it".into()),
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
    fn empty_and_unbalanced_formulas_are_errors() {
        assert!(typst(" ", true).is_err());
        assert!(typst(r"\frac{1}{", true).is_err());
        assert!(typst(r"a}{b", true).is_err());
        assert!(typst(r"\{ a \}", true).is_ok());
    }
}
