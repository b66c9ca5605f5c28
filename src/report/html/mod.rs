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

use anyhow::{Context as _, Result};

use self::body::{Setting, Shared};
use self::cases::Sets;
use self::escape::{escape, slug};
use super::{Document, Rendered, points};
use crate::harness::answer::mark;
use crate::harness::handout::HandoutProblem;
use crate::harness::store::write_atomically;

/// The page's style, whose colours the tests read.
pub const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("page.js");

/// The document as marked Markdown, in its order.
#[derive(Debug, Clone, Default)]
pub struct Edition {
    /// The first page.
    pub front: String,
    pub chapters: Vec<Chapter>,
    /// What follows the problems: titles and text.
    pub appendices: Vec<(String, String)>,
}

/// One problem: its heading, its answer, and what the PDF prints in its appendices.
#[derive(Debug, Clone)]
pub struct Chapter {
    pub problem: HandoutProblem,
    pub body: String,
    /// Titles ("Tables") and text.
    pub folds: Vec<(String, String)>,
}

impl Chapter {
    /// A problem from its template's Markdown: what stands under headings of level 2 folds.
    pub fn new(problem: HandoutProblem, markdown: &str) -> Self {
        let (mut pieces, mut in_code) = (vec![(String::new(), String::new())], false);
        for line in markdown.lines() {
            in_code ^= line.starts_with("```");
            match line.strip_prefix("## ").filter(|_| !in_code) {
                Some(title) => pieces.push((mark::plain(title).trim().to_string(), String::new())),
                None => {
                    let last = pieces.len() - 1;
                    pieces[last].1 += &format!("{line}\n");
                }
            }
        }
        let body = pieces.remove(0).1;
        Self { problem, body, folds: pieces }
    }

    /// Adds a paragraph below the answer.
    pub fn add(&mut self, markdown: &str) {
        self.body += &format!("\n{markdown}\n");
    }

    fn heading(&self) -> String {
        let HandoutProblem { name, section, points: worth, .. } = self.problem;
        let plural = if worth == 1.0 { "" } else { "s" };
        format!("{section} <code>{name}</code> <span class=\"points\">({} point{plural})</span>", points(worth))
    }

    /// The appendices in which the PDF prints the folds, with the ids of the folds.
    fn appendices(&self) -> Vec<(char, String)> {
        let letter = |title: &str| match title {
            "CPU grids" => Some('A'),
            "Tables" => Some('B'),
            "Method" => Some('C'),
            _ => None,
        };
        let id = |title: &str| format!("{}-{}", self.problem.name, slug(title));
        let folds = self.folds.iter().filter_map(|(title, _)| Some((letter(title)?, id(title))));
        folds.chain([('D', "records".to_string())]).collect()
    }

    fn html(&self, shared: &mut Shared) -> Result<String> {
        let name = self.problem.name;
        let appendices = self.appendices();
        let mut setting = Setting { prefix: name.into(), above: 2, deeper: 0, fold: false, appendices };
        let mut out = format!("<section aria-labelledby=\"{name}\"><h2 id=\"{name}\">{}</h2>\n", self.heading());
        out += &body::html(&self.body, &setting, shared)?;
        (setting.above, setting.deeper, setting.fold) = (3, 1, true);
        for (title, markdown) in &self.folds {
            let id = format!("{name}-{}", slug(title));
            let inside = body::html(markdown, &setting, shared)?;
            let _ = writeln!(out, "<details class=\"fold\" id=\"{id}\"><summary><h3>{}</h3></summary>{inside}</details>", escape(title));
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
    let setting = Setting { prefix: "front".into(), ..Setting::default() };
    let mut main = format!("<section id=\"front\">{}</section>\n", body::html(front, &setting, &mut shared)?);
    let mut contents = String::new();
    for chapter in &edition.chapters {
        let html = chapter.html(&mut shared).with_context(|| format!("{} in HTML", chapter.problem.name))?;
        contents += &chapter.contents(&html);
        main += &html;
    }
    for (title, markdown) in &edition.appendices {
        let (id, title) = (format!("appendix-{}", slug(title)), escape(title));
        let setting = Setting { prefix: id.clone(), above: 2, fold: true, ..Setting::default() };
        let html = body::html(markdown, &setting, &mut shared).with_context(|| format!("{title} in HTML"))?;
        let _ = writeln!(main, "<section aria-labelledby=\"{id}\"><h2 id=\"{id}\">{title}</h2>\n{html}</section>");
        let _ = writeln!(contents, "<li><a href=\"#{id}\">{title}</a></li>");
    }
    let sets = Sets::of(document);
    let (list, data) = (sets.list(&shared.cases)?, sets.json(&shared.cases)?);
    let page = include_str!("page.html");
    let title = escape(&document.title);
    let fields = [("title", title.as_str()), ("style", STYLE), ("script", SCRIPT), ("contents", &contents),
        ("main", &main), ("list", &list), ("data", &data)];
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

    #[test]
    fn what_stands_under_headings_of_level_two_folds() {
        let problem = HandoutProblem { name: "x", section: "1.1", points: 1.0, ..HandoutProblem::default() };
        let chapter = Chapter::new(problem, "So (appendix B).\n\n```text\n## no\n```\n\n## Tables\n\n### All\n\nRows.\n");
        assert_eq!(chapter.folds, [("Tables".to_string(), "\n### All\n\nRows.\n".to_string())]);
        let html = chapter.html(&mut Shared::default()).unwrap();
        assert!(html.contains("<h2 id=\"x\">1.1 <code>x</code> <span class=\"points\">(1 point)</span></h2>"), "{html}");
        assert!(html.contains("(<a href=\"#x-tables\">appendix B</a>)"), "{html}");
        assert!(html.contains("<details class=\"fold\" id=\"x-tables\"><summary><h3>Tables</h3></summary><h4 id=\"x-all\">"));
    }

    #[test]
    fn a_frame_is_filled_once() {
        assert_eq!(filled("a {{x}} b {{y}}", &[("x", "{{y}}"), ("y", "2")]), "a {{y}} b 2");
    }
}
