//! Makes one document from records and templates: minijinja to Markdown, Markdown to typst, typst to a tagged PDF.
//!
//! This code names no tensor, device or problem: the caller passes in plain data, and the same data gives the same bytes.
//! The order of the steps is `template`, `markdown`, `document`, `pdf`.

mod anchors;
pub mod document;
pub mod escape;
pub mod figures;
pub mod filters;
pub mod html;
mod jinja;
pub mod latex;
pub mod lint;
pub mod markdown;
pub mod pdf;
pub mod provenance;
pub mod sections;
mod session;
pub mod table;
pub mod template;
pub mod title_page;
pub mod warnings;

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context as _, Error, Result, ensure};

use crate::harness::answer::{Answer, Claim, Records};
use crate::harness::handout::HandoutProblem;
use crate::harness::store::{cannot_write, write_atomically};
use crate::printable::{one_line, shown_path};

pub use crate::harness::grade::points;
pub use pdf::pdf;

/// The inputs of the write-up.
pub struct Document {
    pub title: String,
    /// The assignment and its version, for the title page.
    pub assignment: String,
    /// Whose implementation it reports on, where that is not ours.
    pub subject: Option<String>,
    /// The text of `templates/summary.md`, or why there is none; `None` for a document without a summary.
    pub summary: Option<Result<String, String>>,
    /// All problems in the handout's order, answered or not.
    pub problems: Vec<ProblemInput>,
}

/// One problem: its questions, and the inputs of our answer.
#[derive(Default)]
pub struct ProblemInput {
    pub handout: HandoutProblem,
    /// The ids of the parts that the template must answer, each exactly once.
    pub answers: Vec<String>,
    /// The text of `templates/<name>.md`; `None` lists the problem as unanswered.
    pub template: Option<String>,
    /// The template's folder in `templates`, with a slash; empty for our own answers.
    pub subfolder: &'static str,
    /// Texts that templates can include: name, such as "shared/x.md", and text, or why there is none.
    pub shared: Vec<(String, Result<String, String>)>,
    /// The problem's answer from its records.
    pub answer: Answer,
    pub records: Records,
    /// Why there is no answer or template to print; the problem's section then says so.
    pub fault: Option<String>,
}

/// A finished write-up: the generated files, and the claims and answered parts for grading.
pub struct Rendered {
    /// `writeup.md`; its pictures are the `figures`.
    pub markdown: String,
    /// The summary that `writeup.typ` sets on the first page; empty without one.
    pub summary: String,
    /// The body that `writeup.typ` includes: answers and appendices.
    pub typst: String,
    /// The title page and contents, as JSON that `writeup.typ` reads.
    pub front: String,
    /// Paths relative to `writeup.md`, and SVG.
    pub figures: Vec<(String, Vec<u8>)>,
    /// The claims that each problem's template states, with the problem's name.
    pub claims: Vec<(&'static str, Claim)>,
    pub answered: Vec<AnsweredPart>,
    /// What the document says in place of an answer, or beside it: each was reported where it belongs.
    pub faults: Vec<Fault>,
    /// The same pieces with marks, for the HTML edition.
    pub edition: html::Edition,
}

/// Why the report lacks an answer, or does not print the records that it should.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// The problem's name, or the summary's template.
    pub place: String,
    pub reason: String,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.reason)
    }
}

impl Rendered {
    /// The same document. Errors: it has faults.
    pub fn complete(self) -> Result<Self> {
        let faults: Vec<String> = self.faults.iter().map(|fault| one_line(&fault.to_string())).collect();
        ensure!(faults.is_empty(), "{}", faults.join("\n"));
        Ok(self)
    }
}

/// One part that a template answers.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredPart {
    pub problem: &'static str,
    pub part: &'static str,
    pub points: f64,
}

/// Renders every template and assembles the document.
///
/// A problem whose template cannot be rendered becomes a fault, which its section prints. The fault names the template, and
/// the line if there is one: an undefined variable, a claim that does not hold, a part answered twice or not at all, a formula
/// that does not convert, placeholder text.
pub fn render(document: &Document) -> Result<Rendered> {
    // A template may quote text of several lines, such as a formula.
    document::assemble(document).map_err(|error| Error::msg(one_line(&format!("{error:#}"))))
}

/// Writes `writeup.md`, its figures and (if given) `writeup.pdf` into `dir`, each file whole or not at all.
///
/// Figures of an earlier rendering that this one no longer has are removed, but for a folder that a link leads to: it may be for
/// other files too.
pub fn write(dir: &Path, rendered: &Rendered, pdf: Option<&[u8]>) -> Result<()> {
    let figures = dir.join("figures");
    std::fs::create_dir_all(&figures).map_err(|error| cannot_write(&figures, &shown_path(&figures), &error))?;
    for (path, svg) in &rendered.figures {
        write_atomically(&dir.join(path), svg)?;
    }
    let is_own = !figures.is_symlink() && !dir.is_symlink();
    for entry in std::fs::read_dir(&figures).with_context(|| format!("listing {}", shown_path(&figures)))? {
        let path = entry?.path();
        let is_wanted = rendered.figures.iter().any(|(figure, _)| dir.join(figure) == path);
        if is_own && !is_wanted && path.extension().is_some_and(|ending| ending == "svg") {
            match std::fs::remove_file(&path) {
                // Another command writes the same report.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed.with_context(|| format!("removing the old figure {}", shown_path(&path)))?,
            }
        }
    }
    write_atomically(&dir.join("writeup.md"), rendered.markdown.as_bytes())?;
    if let Some(pdf) = pdf {
        write_atomically(&dir.join("writeup.pdf"), pdf)?;
    }
    Ok(())
}
