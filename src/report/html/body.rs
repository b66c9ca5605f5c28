//! Markdown with marks becomes HTML: numbers link to their cases, questions and long tables fold.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd};

use super::escape::{attribute, escape, text_of};
use super::table::Table;
use super::{cases, figure, formula};
use crate::harness::answer::mark::{self, CaseKey};
use crate::report::anchors::{self, Place, Tables};

/// What all pieces of the page share.
#[derive(Default)]
pub struct Shared {
    /// SVG by the path that the Markdown names.
    figures: BTreeMap<String, String>,
    /// The cases that the numbers so far come from.
    pub cases: BTreeSet<CaseKey>,
    tables: Tables,
}

/// How one piece of Markdown is set.
#[derive(Default)]
pub struct Setting {
    pub place: Place,
    /// The level of the heading above, so that none is skipped.
    pub above: usize,
    /// Added to the level of each heading.
    pub deeper: usize,
    /// Whether long tables fold.
    pub fold: bool,
}

/// The HTML of one piece of Markdown.
///
/// Errors: a formula that does not convert, a picture that does not exist, an element that no template uses.
pub fn html(markdown: &str, setting: &Setting, shared: &mut Shared) -> Result<String> {
    let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES | Options::ENABLE_MATH;
    let mut writer = Writer::new(setting, shared);
    for event in Parser::new_ext(markdown, options) {
        writer.event(event)?;
    }
    writer.release(None)?;
    Ok(writer.stack.pop().unwrap_or_default().html)
}

/// The summary of the fold that holds the handout's question.
const QUESTION: &str = "Question";

/// An open element: its content so far, and an address, first number or summary.
#[derive(Default)]
struct Frame {
    html: String,
    detail: String,
}

/// A table or picture that waits for its caption.
enum Waiting {
    Table(Table),
    Picture { path: String, alt: String },
}

struct Writer<'a> {
    setting: &'a Setting,
    shared: &'a mut Shared,
    stack: Vec<Frame>,
    table: Table,
    waiting: Option<Waiting>,
    /// The key of the mark that is being read.
    key: Option<String>,
    in_link: bool,
    /// How many open elements allow no link inside: links, code, a picture's text.
    closed: usize,
    /// Whether a quotation here is the handout's question: nothing stands before it but a heading.
    at_start: bool,
    /// The level of the last heading.
    level: usize,
}

impl Shared {
    pub fn new(figures: BTreeMap<String, String>) -> Self {
        Self { figures, ..Self::default() }
    }
}

impl<'a> Writer<'a> {
    fn new(setting: &'a Setting, shared: &'a mut Shared) -> Self {
        let stack = vec![Frame::default()];
        let table = Table::default();
        let (waiting, key, in_link, closed, level) = (None, None, false, 0, setting.above);
        Self { setting, shared, stack, table, waiting, key, in_link, closed, at_start: true, level }
    }

    fn event(&mut self, event: Event<'_>) -> Result<()> {
        match event {
            Event::Start(tag) => self.start(tag)?,
            Event::End(tag) => self.end(tag)?,
            Event::Text(text) => self.text(&text),
            Event::Code(code) => self.push(&format!("<code>{}</code>", escape(&mark::plain(&code)))),
            Event::InlineMath(latex) => self.push(&formula::mathml(&latex, false)?),
            Event::DisplayMath(latex) => self.push(&formula::mathml(&latex, true)?),
            Event::SoftBreak => self.push(" "),
            Event::HardBreak => self.push("<br/>"),
            other => bail!("{other:?} is not supported"),
        }
        Ok(())
    }

    fn start(&mut self, tag: Tag<'_>) -> Result<()> {
        if self.stack.len() == 1 && !matches!(tag, Tag::Paragraph) {
            self.release(None)?;
        }
        let detail: CowStr<'_> = match tag {
            Tag::Table(alignments) => {
                self.table = Table { alignments, rows: Vec::new() };
                return Ok(());
            }
            Tag::TableHead | Tag::TableRow => {
                self.table.rows.push(Vec::new());
                return Ok(());
            }
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                self.closed += 1;
                dest_url
            }
            Tag::CodeBlock(_) => {
                self.closed += 1;
                "".into()
            }
            Tag::List(Some(first)) => first.to_string().into(),
            Tag::BlockQuote(_) if self.at_start && self.stack.len() == 1 => QUESTION.into(),
            _ => "".into(),
        };
        self.stack.push(Frame { html: String::new(), detail: detail.to_string() });
        Ok(())
    }

    fn end(&mut self, tag: TagEnd) -> Result<()> {
        match tag {
            TagEnd::TableHead | TagEnd::TableRow => return Ok(()),
            TagEnd::Table => {
                self.waiting = Some(Waiting::Table(std::mem::take(&mut self.table)));
                return Ok(());
            }
            _ => {}
        }
        let Frame { html, detail } = self.stack.pop().context("an end without a beginning")?;
        match tag {
            TagEnd::Paragraph => self.paragraph(html)?,
            TagEnd::Heading(level) => self.heading(level as usize, &html),
            TagEnd::BlockQuote(_) if detail == QUESTION => {
                self.block(&format!("<details class=\"question\"><summary>{QUESTION}</summary>{html}</details>"));
            }
            TagEnd::BlockQuote(_) => self.block(&format!("<blockquote>{html}</blockquote>")),
            TagEnd::CodeBlock => {
                self.closed -= 1;
                self.block(&format!("<pre tabindex=\"0\"><code>{html}</code></pre>"));
            }
            TagEnd::List(true) => self.block(&format!("<ol start=\"{detail}\">{html}</ol>")),
            TagEnd::List(false) => self.block(&format!("<ul>{html}</ul>")),
            TagEnd::Item => self.push(&format!("<li>{html}</li>")),
            TagEnd::TableCell => self.table.rows.last_mut().context("a cell without a row")?.push(html),
            TagEnd::Emphasis => self.push(&format!("<em>{html}</em>")),
            TagEnd::Strong => self.push(&format!("<strong>{html}</strong>")),
            TagEnd::Link => {
                self.closed -= 1;
                self.push(&format!("<a href=\"{}\">{html}</a>", attribute(&detail)));
            }
            TagEnd::Image => {
                self.closed -= 1;
                self.release(None)?;
                self.waiting = Some(Waiting::Picture { path: detail, alt: text_of(&html) });
            }
            other => bail!("{other:?} is not supported"),
        }
        Ok(())
    }

    /// Text, with the beginnings and ends of marks.
    fn text(&mut self, text: &str) {
        let marks = [mark::KEY, mark::TEXT, mark::END];
        for piece in text.split_inclusive(marks) {
            let words = piece.trim_end_matches(marks);
            match &mut self.key {
                Some(key) => key.push_str(words),
                None => self.words(words),
            }
            match piece.chars().last() {
                Some(mark::KEY) => self.key = Some(String::new()),
                Some(mark::TEXT) => self.open_link(),
                Some(mark::END) if std::mem::take(&mut self.in_link) => self.push("</a>"),
                _ => {}
            }
        }
    }

    fn open_link(&mut self) {
        let key = self.key.take().unwrap_or_default();
        let found = mark::cases(&key);
        let Some(first) = found.first().filter(|_| self.closed == 0) else { return };
        let all = if found.len() > 1 { format!(" data-q=\"{key}\"") } else { String::new() };
        self.push(&format!("<a class=\"q\" href=\"#case-{}\"{all}>", cases::name(first)));
        self.shared.cases.extend(found);
        self.in_link = true;
    }

    /// Words, in which the name of an appendix links to it.
    fn words(&mut self, words: &str) {
        let (mut html, mut at) = (String::new(), 0);
        if self.closed == 0 && !self.in_link {
            for (name, id) in self.setting.place.named(words) {
                html += &format!("{}<a href=\"#{id}\">{}</a>", escape(&words[at..name.start]), &words[name.clone()]);
                at = name.end;
            }
        }
        self.push(&(html + &escape(&words[at..])));
    }

    fn push(&mut self, html: &str) {
        self.top().html += html;
    }

    /// A block on a line of its own.
    fn block(&mut self, html: &str) {
        self.at_start = false;
        let top = self.top();
        top.html += html;
        top.html.push('\n');
    }

    fn paragraph(&mut self, html: String) -> Result<()> {
        if self.stack.len() == 1 {
            let caption = match &self.waiting {
                Some(Waiting::Picture { .. }) if html.trim().is_empty() => return Ok(()),
                Some(Waiting::Picture { .. }) => html.strip_prefix("Figure:"),
                Some(Waiting::Table(_)) => html.strip_prefix("Table:"),
                None => None,
            };
            self.release(caption.map(str::trim))?;
            if caption.is_some() {
                return Ok(());
            }
        }
        self.block(&format!("<p>{html}</p>"));
        Ok(())
    }

    /// The part's letter is the heading's id, else its words are.
    fn heading(&mut self, level: usize, html: &str) {
        let (words, level) = (text_of(html), (level + self.setting.deeper).min(self.level + 1).min(6));
        self.level = level;
        let name = match words.split_once('(').and_then(|(before, rest)| Some((before, rest.split_once(')')?.0))) {
            Some((before, letter)) if before.len() <= 5 && letter.len() == 1 => letter.to_string(),
            _ => anchors::slug(&words),
        };
        let id = format!("{}-{name}", self.setting.place.prefix);
        self.block(&format!("<h{level} id=\"{id}\">{html}</h{level}>"));
        self.at_start = true;
    }

    /// Prints the table or picture that waits, if one does.
    fn release(&mut self, caption: Option<&str>) -> Result<()> {
        let html = match self.waiting.take() {
            None => return Ok(()),
            Some(Waiting::Table(table)) => {
                table.html(&self.shared.tables.next(&self.setting.place), caption, self.setting.fold)
            }
            Some(Waiting::Picture { path, alt }) => {
                let svg = self.shared.figures.get(&path).with_context(|| format!("there is no figure {path}"))?;
                figure::html(svg, &anchors::figure(&path), &alt, caption)
            }
        };
        self.block(&html);
        Ok(())
    }

    fn top(&mut self) -> &mut Frame {
        // the piece itself is pushed first and popped last
        self.stack.last_mut().expect("the piece is always there")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(markdown: &str) -> (String, Shared) {
        let mut shared = Shared::default();
        shared.figures.insert("figures/x-a.svg".into(), "<svg viewBox=\"0 0 1 1\"><g/></svg>".into());
        let place = Place::new("x", [('B', "x-tables".to_string())]);
        let setting = Setting { place, above: 2, ..Setting::default() };
        (html(markdown, &setting, &mut shared).unwrap(), shared)
    }

    #[test]
    fn a_marked_number_links_to_its_cases_also_around_a_formula() {
        let number = mark::marked("12.5", "naive_ddp.gpu.3");
        let (html, shared) = set(&format!("It takes **{number} ms** (appendix B)."));
        let link = "<a class=\"q\" href=\"#case-naive_ddp.gpu.3\">12.5</a>";
        assert_eq!(
            html,
            format!("<p>It takes <strong>{link} ms</strong> (<a href=\"#x-tables\">appendix B</a>).</p>\n")
        );
        assert_eq!(shared.cases.len(), 1);
        let (html, _) = set(&mark::marked("$10^{-4}$", "a_b.cpu.0-2"));
        assert!(html.starts_with("<p><a class=\"q\" href=\"#case-a_b.cpu.0\" data-q=\"a_b.cpu.0-2\"><math"), "{html}");
        assert!(html.ends_with("</math></a></p>\n"), "{html}");
        let (html, _) = set(&format!("[{number}](https://a.b) and `{number}`"));
        assert_eq!(html, "<p><a href=\"https://a.b\">12.5</a> and <code>12.5</code></p>\n");
    }

    #[test]
    fn the_question_folds_and_a_later_quotation_does_not() {
        let (html, _) = set("#### Part (a) · 2 points\n\n> Why?\n\n**So.**\n\n> Quoted.");
        assert!(html.starts_with("<h3 id=\"x-a\">Part (a) · 2 points</h3>\n<details class=\"question\">"), "{html}");
        assert!(html.ends_with("<p><strong>So.</strong></p>\n<blockquote><p>Quoted.</p>\n</blockquote>\n"), "{html}");
    }

    #[test]
    fn tables_and_figures_take_their_captions() {
        let (html, _) = set(
            "| a | b |\n|:--|---:|\n| 1 | 2 |\n\nTable: Two.\n\n![one line](figures/x-a.svg)\n\nFigure: One.\n\nEnd.",
        );
        assert!(html.contains("<table id=\"x-table-1\"><caption>Two.</caption>"), "{html}");
        assert!(
            html.contains("<figure id=\"figure-x-a\"><svg viewBox=\"0 0 1 1\" role=\"img\" aria-label=\"one line\">")
        );
        assert!(html.ends_with("<figcaption>One.</figcaption></figure>\n<p>End.</p>\n"), "{html}");
        let (html, _) = set("| a |\n|---|\n| 1 |\n\n1. x\n   - y");
        assert!(html.contains("</table></div>\n<ol start=\"1\"><li>x<ul><li>y</li></ul>\n</li></ol>"), "{html}");
    }
}
