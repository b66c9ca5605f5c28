//! LaTeX formulas as MathML.

use anyhow::{Result, anyhow};
use pulldown_latex::config::{DisplayMode, RenderConfig};
use pulldown_latex::{ParserError, Storage, push_mathml};

use crate::harness::answer::mark;
use crate::report::latex;

/// One formula; `block` sets it on a line of its own. Numbers inside lose their marks.
///
/// Errors name the formula.
pub fn mathml(latex: &str, block: bool) -> Result<String> {
    let latex = mark::plain(latex);
    let storage = Storage::new();
    let events = latex::events(&latex, &storage)?.into_iter().map(Ok::<_, ParserError>);
    let display_mode = if block { DisplayMode::Block } else { DisplayMode::Inline };
    let config = RenderConfig { display_mode, ..RenderConfig::default() };
    let mut out = String::new();
    push_mathml(&mut out, events, config).map_err(|e| anyhow!("the formula ${latex}$ does not become MathML: {e}"))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formula_becomes_mathml_and_a_broken_one_an_error() {
        let inline = mathml("\\frac{a}{\u{E000}x.cpu.1\u{E001}2\u{E002}}", false).unwrap();
        assert!(inline.starts_with("<math") && inline.contains("<mfrac>") && inline.contains(">2<"), "{inline}");
        assert!(!inline.contains('\u{E000}'));
        assert!(mathml("\\nosuchcommand", true).unwrap_err().to_string().contains("nosuchcommand"));
    }

    #[test]
    fn a_space_between_words_is_no_text() {
        let set = mathml(r"20\ \text{bytes}", false).unwrap();
        assert!(!set.contains("&amp;") && set.contains("<mspace"), "{set}");
    }
}
