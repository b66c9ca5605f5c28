//! The HTML edition: one file without network, made from the same answers as the PDF.
//!
//! `Edition` collects the document's pieces in their order; [`page`] sets them; [`gate::check`] holds what a reader relies on.

mod body;
mod cases;
mod escape;
mod figure;
mod formula;
pub mod gate;
mod table;

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Error, Result};

use self::body::{Setting, Shared};
pub use self::cases::Sets;
use self::escape::escape;
use super::anchors::{self, PROVENANCE, Place};
use super::sections::{APPENDICES, Sections};
use super::{Document, Rendered, points};
use crate::harness::handout::HandoutProblem;
use crate::harness::store::write_atomically;
use crate::printable::one_line;

/// The page's style, whose colours the tests read.
pub const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("page.js");

/// The document as marked Markdown, in its order.
#[derive(Debug, Clone, Default)]
pub struct Edition {
    /// The first page.
    pub front: String,
    pub chapters: Vec<Chapter>,
    /// The appendix about records: title and text.
    pub provenance: (String, String),
}

/// One problem: its answer, and what the PDF prints in the appendices that templates fill.
#[derive(Debug, Clone)]
pub struct Chapter {
    problem: HandoutProblem,
    pub body: String,
    folds: [Option<String>; APPENDICES.len()],
}

impl Chapter {
    pub fn of(problem: HandoutProblem) -> Self {
        Self { problem, body: String::new(), folds: Default::default() }
    }

    /// Adds a paragraph.
    pub fn add(&mut self, markdown: &str) {
        self.body += &format!("\n{markdown}\n\n");
    }

    /// Adds a filled template.
    pub fn answer(&mut self, sections: &Sections) {
        self.body += &sections.body;
        self.folds.clone_from(&sections.appendices);
    }

    /// Letter, title, id and text of each fold.
    fn folds(&self) -> impl Iterator<Item = (char, &str, String, &str)> {
        APPENDICES.iter().zip(&self.folds).filter_map(|((name, title, _), text)| {
            let (letter, title) = title.split_once(". ")?;
            let id = anchors::appendix(self.problem.name, name);
            Some((letter.chars().next()?, title, id, text.as_deref()?))
        })
    }

    fn heading(&self) -> String {
        let HandoutProblem { name, section, points: worth, .. } = self.problem;
        let plural = if worth == 1.0 { "" } else { "s" };
        format!("{section} <code>{name}</code> <span class=\"points\">({} point{plural})</span>", points(worth))
    }

    fn html(&self, shared: &mut Shared) -> Result<String> {
        let name = self.problem.name;
        let folds = self.folds().map(|(letter, _, id, _)| (letter, id));
        let mut setting = Setting { place: Place::new(name, folds), above: 2, deeper: 0, fold: false };
        let mut out = format!("<section aria-labelledby=\"{name}\"><h2 id=\"{name}\">{}</h2>\n", self.heading());
        out += &body::html(&self.body, &setting, shared)?;
        (setting.above, setting.deeper, setting.fold) = (3, 1, true);
        for (letter, title, id, text) in self.folds() {
            let inside = body::html(text, &setting, shared)?;
            let _ = writeln!(
                out,
                "<details class=\"fold\" id=\"{id}\"><summary><h3>{title} <span class=\"points\">(appendix {letter})</span></h3>\
                 </summary>\n{inside}</details>"
            );
        }
        Ok(out + "</section>\n")
    }

    /// The problem's line of the contents, with a link to each part that its section has.
    fn contents(&self, html: &str) -> String {
        let name = self.problem.name;
        let parts = self.problem.parts.iter().filter(|part| html.contains(&format!("id=\"{name}-{}\"", part.id)));
        let link = |id: &str| format!(" <a href=\"#{name}-{id}\" aria-label=\"{name}, part {id}\">({id})</a>");
        let parts: String = parts.map(|part| link(part.id)).collect();
        format!("<li><a href=\"#{name}\">{}</a>{parts}</li>\n", self.heading())
    }
}

/// The finished page.
///
/// Errors name the problem: a formula that does not convert, a number whose case is not recorded.
pub fn page(document: &Document, rendered: &Rendered) -> Result<String> {
    let edition = &rendered.edition;
    let text = |(path, svg): &(String, Vec<u8>)| (path.clone(), String::from_utf8_lossy(svg).into_owned());
    let mut shared = Shared::new(rendered.figures.iter().map(text).collect());
    let front = edition.front.split("\n## Contents").next().unwrap_or_default();
    let setting = Setting { place: Place::new("front", []), ..Setting::default() };
    let mut main = format!("<section id=\"front\">{}</section>\n", body::html(front, &setting, &mut shared)?);
    let mut contents = String::new();
    for chapter in &edition.chapters {
        // A formula that does not convert is quoted with its surroundings, in several lines.
        let html = chapter.html(&mut shared).map_err(|error| one_line(&format!("{error:#}"))).map_err(Error::msg);
        let html = html.with_context(|| format!("{} in HTML", chapter.problem.name))?;
        contents += &chapter.contents(&html);
        main += &html;
    }
    let (title, markdown) = &edition.provenance;
    let place = Place { prefix: PROVENANCE.into(), ..Place::default() };
    let setting = Setting { place, above: 2, fold: true, ..Setting::default() };
    let (title, html) = (escape(title), body::html(markdown, &setting, &mut shared)?);
    let _ = writeln!(
        main,
        "<section aria-labelledby=\"{PROVENANCE}\"><h2 id=\"{PROVENANCE}\">{title}</h2>\n{html}</section>"
    );
    let _ = writeln!(contents, "<li><a href=\"#{PROVENANCE}\">{title}</a></li>");
    let sets = Sets::of(document);
    let (list, data) = (sets.list(&shared.cases)?, sets.json(&shared.cases)?);
    let page = include_str!("page.html");
    let title = escape(&document.title);
    let fields = [
        ("title", title.as_str()),
        ("style", STYLE),
        ("script", SCRIPT),
        ("contents", &contents),
        ("main", &main),
        ("list", &list),
        ("data", &data),
    ];
    Ok(filled(page, &fields))
}

/// Writes `writeup.html` into `dir`, whole or not at all.
pub fn write(dir: &Path, page: &str) -> Result<()> {
    write_atomically(&dir.join("writeup.html"), page.as_bytes())
}

/// The frame with each `{{name}}` replaced; what is put in is not looked at again.
fn filled(frame: &str, fields: &[(&str, &str)]) -> String {
    let mut out = String::new();
    for piece in frame.split("{{") {
        let (name, rest) = piece.split_once("}}").unwrap_or(("", piece));
        out += fields.iter().find(|(known, _)| *known == name).map_or("", |(_, text)| text);
        out += rest;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sections;

    #[test]
    fn what_the_appendices_hold_folds_below_the_answer() {
        let problem = HandoutProblem { name: "x", section: "1.1", points: 1.0, ..HandoutProblem::default() };
        let mut chapter = Chapter::of(problem);
        chapter
            .answer(&sections::split("x", "So (appendix B, appendix C).\n\n## Tables\n\n### All\n\nRows.\n").unwrap());
        let html = chapter.html(&mut Shared::default()).unwrap();
        assert!(
            html.contains("<h2 id=\"x\">1.1 <code>x</code> <span class=\"points\">(1 point)</span></h2>"),
            "{html}"
        );
        assert!(html.contains("(<a href=\"#x-tables\">appendix B</a>, appendix C)"), "{html}");
        let fold = "<details class=\"fold\" id=\"x-tables\"><summary><h3>Full tables <span class=\"points\">(appendix B)</span></h3>";
        assert!(html.contains(fold) && html.contains("<h4 id=\"x-all\">All</h4>"), "{html}");
    }

    #[test]
    fn a_frame_is_filled_once() {
        assert_eq!(filled("a {{x}} b {{y}}", &[("x", "{{y}}"), ("y", "2")]), "a {{y}} b 2");
    }
}
