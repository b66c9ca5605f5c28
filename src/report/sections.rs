//! Splits a filled template into its answer and what belongs to the appendices.

use anyhow::{Result, bail, ensure};

use super::anchors::{self, Place};

/// The appendices that templates fill, in order: the heading that begins such a section in a template, the appendix's title,
/// and what it holds.
pub const APPENDICES: [(&str, &str, &str); 3] = [
    ("CPU grids", "A. CPU grids", "The same code on two cores of a machine without a GPU, by the suites' small grids."),
    ("Tables", "B. Full tables", "Every cell behind the answers."),
    ("Method", "C. Method", "How each problem was measured and checked, and what goes beyond the handout."),
];

/// One template's Markdown, section by section.
#[derive(Debug, Default, PartialEq)]
pub struct Sections {
    pub body: String,
    /// In the order of [`APPENDICES`].
    pub appendices: [Option<String>; APPENDICES.len()],
}

impl Sections {
    /// Where the problem's texts stand: they may name the appendices that its template fills.
    pub fn place(&self, problem: &str) -> Place {
        let filled = APPENDICES.iter().zip(&self.appendices).filter(|(_, text)| text.is_some());
        let named = filled
            .filter_map(|((heading, title, _), _)| Some((title.chars().next()?, anchors::appendix(problem, heading))));
        Place::new(problem, named)
    }
}

/// Splits at the headings of level two; `origin` names the template in errors.
///
/// Errors: a heading that begins no appendix, one that comes twice or too late, a section without text.
pub fn split(origin: &str, markdown: &str) -> Result<Sections> {
    let mut sections = Sections::default();
    let (mut section, mut is_code) = (None, false);
    for line in markdown.lines() {
        is_code ^= line.starts_with("```");
        if let Some(heading) = line.strip_prefix("## ").filter(|_| !is_code) {
            let known = APPENDICES.iter().position(|(name, ..)| *name == heading.trim());
            let Some(next) = known else {
                let names = APPENDICES.map(|(name, ..)| format!("\"## {name}\"")).join(", ");
                bail!(
                    "{origin}: the heading \"## {heading}\" begins no appendix; use {names}, or ### for a heading within"
                );
            };
            let in_order = section.is_none_or(|before| before < next);
            ensure!(in_order, "{origin}: \"## {heading}\" comes twice or out of order");
            section = Some(next);
            continue;
        }
        let text = match section {
            None => &mut sections.body,
            Some(at) => sections.appendices[at].get_or_insert_default(),
        };
        *text += line;
        text.push('\n');
    }
    for text in &mut sections.appendices {
        *text = text.take().filter(|text| !text.trim().is_empty());
    }
    Ok(sections)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_of_level_two_begin_the_appendices() {
        let markdown = "Answer.\n\n```\n## Tables\n```\n## CPU grids\n\nSlow.\n## Method\nClock.\n";
        let sections = split("templates/x.md", markdown).unwrap();
        assert_eq!(sections.body, "Answer.\n\n```\n## Tables\n```\n");
        assert_eq!(sections.appendices, [Some("\nSlow.\n".into()), None, Some("Clock.\n".into())]);
    }

    #[test]
    fn an_appendix_without_text_is_left_out() {
        assert_eq!(split("x", "a\n## Tables\n\n## Method\nb").unwrap().appendices, [None, None, Some("b\n".into())]);
    }

    #[test]
    fn unknown_repeated_and_misplaced_headings_are_errors() {
        for markdown in ["## Notes\na", "## Method\na\n## Tables\nb", "## Tables\na\n## Tables\nb"] {
            let error = split("templates/x.md", markdown).unwrap_err().to_string();
            assert!(error.starts_with("templates/x.md: "), "{error}");
        }
    }
}
