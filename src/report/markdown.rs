//! Converts Markdown to typst markup. An unsupported element is an error that names it.

use std::collections::BTreeSet;
use std::ops::Range;

use anyhow::{Context as _, Result, bail, ensure};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use super::anchors::{self, Place, Tables};
use super::escape::{typst as escape, typst_string};
use super::latex;
use super::table::{LONG, TypstTable};

/// The most elements in one another: typst refuses a document with too many, whichever problem's they are.
const MOST_NESTED: usize = 16;
/// The most characters of a line that an error quotes.
const MOST_SHOWN: usize = 200;

/// The running numbers of tables and figures; one for the whole document.
#[derive(Debug, Default, Clone)]
pub struct Counters {
    pub tables: usize,
    pub figures: usize,
    /// Level of the last heading in the typst document, so that none is skipped.
    pub heading: usize,
    /// How many levels deeper than in the body headings stand: one in the appendices.
    pub deeper: usize,
    /// Whether the text at hand stands in an appendix, where tables may break.
    pub in_appendix: bool,
    /// Where the text at hand stands.
    pub place: Place,
    pub ids: Tables,
    /// The paths of the figures that stand where they are mentioned.
    pub in_place: BTreeSet<String>,
}

/// The two forms of one piece of the document.
#[derive(Debug)]
pub struct Converted {
    pub typst: String,
    /// The input Markdown with numbered captions, ids and links to appendices.
    pub markdown: String,
}

/// Converts one template's Markdown; `origin` names it in errors.
///
/// A table is followed by a paragraph "Table: ...", a picture by a paragraph "Figure: ..."; headings begin at level 3.
pub fn convert(origin: &str, markdown: &str, counters: &mut Counters) -> Result<Converted> {
    let mut writer = Writer::new(counters);
    let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES | Options::ENABLE_MATH;
    for (event, range) in Parser::new_ext(markdown, options).into_offset_iter() {
        let start = range.start;
        writer.event(event, range).with_context(|| {
            let line = markdown[..start].matches('\n').count() + 1;
            let text: String = markdown[start..].lines().next().unwrap_or_default().chars().take(MOST_SHOWN).collect();
            format!("{origin}, line {line} of the Markdown it renders to: {text:?}")
        })?;
    }
    writer.finish(markdown).with_context(|| origin.to_string())
}

/// An open element, with its content so far.
struct Frame {
    kind: Open,
    typst: String,
    /// The text, as long as it has no markup.
    plain: Option<String>,
}

enum Open {
    Root,
    Paragraph { caption: bool },
    Heading(usize),
    Quote,
    Code(Option<String>),
    List { start: Option<u64>, items: Vec<String> },
    Item,
    Table(TypstTable),
    Cell,
    Emphasis,
    Strong,
    Link(String),
    Image(String),
}

/// A table or picture that waits for its caption paragraph.
enum Waiting {
    Table(TypstTable),
    Picture { path: String, alt: String },
}

struct Writer<'c> {
    counters: &'c mut Counters,
    stack: Vec<Frame>,
    waiting: Option<Waiting>,
    /// Replacements in the Markdown, by position.
    edits: Vec<(Range<usize>, String)>,
}

impl<'c> Writer<'c> {
    fn new(counters: &'c mut Counters) -> Self {
        let root = Frame { kind: Open::Root, typst: String::new(), plain: None };
        Self { counters, stack: vec![root], waiting: None, edits: Vec::new() }
    }

    fn event(&mut self, event: Event<'_>, range: Range<usize>) -> Result<()> {
        match event {
            Event::Start(tag) => self.start(tag, range.start)?,
            Event::End(tag) => self.end(tag, range)?,
            Event::Text(text) => self.text(&text, range),
            Event::Code(code) => {
                let code = code.replace('\n', " ");
                self.inline(&format!("#raw({});", typst_string(&code)));
            }
            Event::InlineMath(latex) => self.inline(&latex::typst(&latex, false)?),
            Event::DisplayMath(latex) => self.inline(&latex::typst(&latex, true)?),
            Event::SoftBreak => self.text(" ", range),
            Event::HardBreak => self.inline("#linebreak();"),
            Event::Html(html) | Event::InlineHtml(html) => bail!("HTML ({:?}) is not supported; use Markdown", &*html),
            Event::FootnoteReference(_) => bail!("a footnote is not supported; say it in the text"),
            Event::Rule => bail!("a line across the page is not supported; use a heading"),
            other => bail!("{other:?} is not supported"),
        }
        Ok(())
    }

    fn start(&mut self, tag: Tag<'_>, at: usize) -> Result<()> {
        ensure!(self.stack.len() <= MOST_NESTED, "more than {MOST_NESTED} elements in one another; nest less");
        let is_root = matches!(self.top().kind, Open::Root);
        if is_root && self.waiting.is_some() && !matches!(tag, Tag::Paragraph) {
            self.no_caption()?;
        }
        let kind = match tag {
            Tag::Paragraph => Open::Paragraph { caption: false },
            Tag::Heading { level, .. } => {
                let level = level as usize;
                ensure!(level >= 3, "headings of levels 1 and 2 are the document's; begin at ###");
                self.edits.push((at..at, "#".repeat(self.counters.deeper)));
                Open::Heading((level - 1 + self.counters.deeper).min(self.counters.heading + 1))
            }
            Tag::BlockQuote(_) => Open::Quote,
            Tag::CodeBlock(CodeBlockKind::Fenced(lang)) => Open::Code(Some(lang.to_string()).filter(|l| !l.is_empty())),
            Tag::CodeBlock(CodeBlockKind::Indented) => bail!(
                "an indented code block (a line that begins with four spaces); fence code with ```, indent prose less"
            ),
            Tag::List(start) => Open::List { start, items: Vec::new() },
            Tag::Item => Open::Item,
            Tag::Table(alignments) => {
                ensure!(is_root, "a table inside a list or a quotation is not supported");
                Open::Table(TypstTable::new(alignments))
            }
            Tag::TableHead | Tag::TableRow => {
                if let Open::Table(table) = &mut self.top().kind {
                    table.begin_row();
                }
                return Ok(());
            }
            Tag::TableCell => Open::Cell,
            Tag::Emphasis => Open::Emphasis,
            Tag::Strong => Open::Strong,
            Tag::Link { dest_url, .. } => {
                let known = ["https://", "http://", "mailto:"].iter().any(|scheme| dest_url.starts_with(scheme));
                ensure!(known, "the link to {:?} does not work in a PDF; use an https address", &*dest_url);
                Open::Link(dest_url.to_string())
            }
            Tag::Image { dest_url, .. } => Open::Image(dest_url.to_string()),
            Tag::HtmlBlock => bail!("HTML is not supported; use Markdown"),
            other => bail!("{other:?} is not supported"),
        };
        self.stack.push(Frame { kind, typst: String::new(), plain: Some(String::new()) });
        Ok(())
    }

    fn end(&mut self, tag: TagEnd, range: Range<usize>) -> Result<()> {
        if matches!(tag, TagEnd::TableHead | TagEnd::TableRow) {
            return Ok(());
        }
        let Some(Frame { kind, typst, plain }) = self.stack.pop() else { bail!("an end without a beginning") };
        match kind {
            Open::Root => bail!("an end without a beginning"),
            Open::Paragraph { caption: true } => self.caption(&typst, range.end)?,
            Open::Paragraph { caption: false } => self.paragraph(&typst)?,
            Open::Heading(level) => {
                self.counters.heading = level;
                self.block(&format!("#heading(level: {level})[{typst}]"));
            }
            Open::Quote => self.block(&format!("#quote(block: true)[{typst}]")),
            Open::Code(lang) => {
                let lang = lang.map(|l| format!(", lang: {}", typst_string(&l))).unwrap_or_default();
                let code = typst_string(plain.unwrap_or_default().trim_end_matches('\n'));
                self.block(&format!("#raw(block: true{lang}, {code})"));
            }
            Open::List { start, items } => {
                let items: String = items.iter().map(|item| format!("[{item}], ")).collect();
                self.block(&match start {
                    Some(start) => format!("#enum(start: {start}, {items})"),
                    None => format!("#list({items})"),
                });
            }
            Open::Item => {
                if let Open::List { items, .. } = &mut self.top().kind {
                    items.push(typst);
                }
            }
            Open::Table(table) => {
                let Counters { tables, place, ids, .. } = &mut *self.counters;
                let mut before = anchors::markdown(&ids.next(place));
                if table.rows() > LONG {
                    before += &format!("<details>\n<summary>Table {}</summary>\n\n", *tables + 1);
                }
                self.edits.push((range.start..range.start, before));
                self.waiting = Some(Waiting::Table(table));
            }
            Open::Cell => {
                if let Open::Table(table) = &mut self.top().kind {
                    table.cell(typst, plain);
                }
            }
            Open::Emphasis => self.inline(&format!("#emph[{typst}];")),
            Open::Strong => self.inline(&format!("#strong[{typst}];")),
            Open::Link(url) => self.inline(&format!("#link({})[{typst}];", typst_string(&url))),
            Open::Image(path) => {
                let alt = plain.unwrap_or_default();
                ensure!(!alt.trim().is_empty(), "the picture {path} has no alternative text");
                ensure!(self.waiting.is_none(), "the picture {path} stands where a caption is expected");
                self.edits.push((range.start..range.start, anchors::markdown(&anchors::figure(&path))));
                self.waiting = Some(Waiting::Picture { path, alt });
            }
        }
        Ok(())
    }

    fn text(&mut self, text: &str, range: Range<usize>) {
        self.link_appendices(text, range.start);
        let depth = self.stack.len();
        let waiting = match &self.waiting {
            Some(Waiting::Table(_)) => Some(("Table:", self.counters.tables + 1)),
            Some(Waiting::Picture { .. }) => Some(("Figure:", self.counters.figures + 1)),
            None => None,
        };
        let top = self.top();
        if let (Open::Paragraph { caption }, Some((word, number)), 2, true) =
            (&mut top.kind, waiting, depth, top.typst.is_empty())
            && let Some(rest) = text.strip_prefix(word)
        {
            *caption = true;
            top.typst = escape(rest.trim_start());
            let numbered = format!("**{} {number}.**", word.trim_end_matches(':'));
            self.edits.push((range.start..range.start + word.len(), numbered));
            return;
        }
        if !matches!(top.kind, Open::Code(_)) {
            top.typst += &escape(text);
        }
        if let Some(plain) = &mut top.plain {
            plain.push_str(text);
        }
    }

    /// Links the appendices that a text names, whose source begins at `start`.
    fn link_appendices(&mut self, text: &str, start: usize) {
        let prose =
            |frame: &Frame| !matches!(frame.kind, Open::Code(_) | Open::Heading(_) | Open::Link(_) | Open::Image(_));
        if self.stack.iter().all(prose) {
            for (name, id) in self.counters.place.named(text) {
                let [from, to] = [start + name.start, start + name.end];
                self.edits.push((from..from, "[".into()));
                self.edits.push((to..to, format!("](#{id})")));
            }
        }
    }

    /// Markup inside a line.
    fn inline(&mut self, typst: &str) {
        let top = self.top();
        top.typst += typst;
        // a picture's alternative text is text alone, whatever its Markdown says
        if !matches!(top.kind, Open::Image(_)) {
            top.plain = None;
        }
    }

    /// A block of its own.
    fn block(&mut self, typst: &str) {
        let top = self.top();
        if !top.typst.is_empty() {
            top.typst += "\n\n";
        }
        top.typst += typst;
    }

    fn paragraph(&mut self, typst: &str) -> Result<()> {
        match &self.waiting {
            Some(Waiting::Picture { path, .. }) if typst.is_empty() => {
                ensure!(self.stack.len() == 1, "the picture {path} stands inside a list or a quotation");
                Ok(())
            }
            Some(_) => self.no_caption(),
            None => {
                self.block(typst);
                Ok(())
            }
        }
    }

    /// Sets what waits with its caption, which ends at `end` of the Markdown.
    fn caption(&mut self, caption: &str, end: usize) -> Result<()> {
        ensure!(!caption.is_empty(), "the caption is empty");
        let typst = match self.waiting.take() {
            Some(Waiting::Table(table)) => {
                self.counters.tables += 1;
                if table.rows() > LONG {
                    self.edits.push((end..end, "\n</details>\n".into()));
                }
                table.typst(caption, self.counters.in_appendix)?
            }
            Some(Waiting::Picture { path, alt }) => {
                self.counters.figures += 1;
                let floats = !self.counters.in_place.contains(&path);
                let (path, alt) = (typst_string(&path), typst_string(&alt));
                format!("#picture({path}, alt: {alt}, floats: {floats}, caption: [{caption}])")
            }
            None => bail!("a caption without a table or a figure before it"),
        };
        self.block(&typst);
        Ok(())
    }

    fn no_caption(&self) -> Result<()> {
        match &self.waiting {
            Some(Waiting::Table(_)) => bail!("a table is followed by a paragraph \"Table: ...\", its caption"),
            Some(Waiting::Picture { path, .. }) => {
                bail!("the picture {path} is followed by a paragraph \"Figure: ...\", its caption")
            }
            None => Ok(()),
        }
    }

    fn finish(mut self, markdown: &str) -> Result<Converted> {
        self.no_caption()?;
        let Some(root) = self.stack.pop() else { bail!("nothing was written") };
        self.edits.sort_by_key(|(range, _)| range.start);
        let (mut numbered, mut at) = (String::new(), 0);
        for (range, text) in &self.edits {
            numbered += &markdown[at..range.start];
            numbered += text;
            at = range.end;
        }
        numbered += &markdown[at..];
        Ok(Converted { typst: root.typst, markdown: numbered })
    }

    fn top(&mut self) -> &mut Frame {
        // the root is pushed first and popped only by `finish`
        self.stack.last_mut().expect("the root frame is always there")
    }
}
