//! The typst compiler as a library, with our own files and embedded fonts; no clock, no network.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::LazyLock;

use anyhow::{Context as _, Result, anyhow, bail};
use typst::diag::{FileError, FileResult, SourceDiagnostic};
use typst::foundations::{Bytes, Datetime, Duration};
use typst::syntax::{FileId, RootedPath, Source, VirtualPath, VirtualRoot};
use typst::text::{Coverage, Font, FontBook};
use typst::utils::LazyHash;
use typst::{Library, LibraryExt as _, World, WorldExt as _};
use typst_kit::fonts::FontStore;
use typst_layout::PagedDocument;
use typst_pdf::{PdfOptions, PdfStandard, PdfStandards};
use unicode_segmentation::UnicodeSegmentation as _;

use super::Rendered;
use crate::process::MORE_PROCESSES;

/// The functions that the generated body uses.
const PAGE_STYLE: &str = include_str!("page_style.typ");

/// Compiles `rendered` in the layout of `writeup_typ` to a tagged PDF/UA-1 file.
///
/// A character that no font has is printed as its code point, ‹U+5F20›. Errors have typst's message and the line of the file.
pub fn pdf(rendered: &Rendered, writeup_typ: &str) -> Result<Vec<u8>> {
    // Where the pool that typst would make itself cannot start, it panics. Stacks are as large as that of a main thread.
    let pool = rayon::ThreadPoolBuilder::new().stack_size(8 << 20).build();
    let pool = pool.with_context(|| format!("typst needs a thread for each processor; {MORE_PROCESSES}"))?;
    pool.install(|| {
        let world = Files::new(rendered, writeup_typ, in_any_font)?;
        let document = world.compile()?;
        world.export(&document).or_else(|error| {
            // A mark and its letter may lie in different fonts, of which none then displays them together.
            let world = Files::new(rendered, writeup_typ, in_every_font)?;
            let document = world.compile()?;
            world.export(&document).map_err(|_| error)
        })
    })
}

/// The pages, for tests that read them.
pub fn compile(rendered: &Rendered, writeup_typ: &str) -> Result<PagedDocument> {
    Files::new(rendered, writeup_typ, in_any_font)?.compile()
}

/// Shared by all compilations of this process, because parsing fonts is slow.
static FONTS: LazyLock<FontStore> = LazyLock::new(|| {
    let mut fonts = FontStore::new();
    fonts.extend(typst_kit::fonts::embedded());
    fonts
});

/// The characters that each font has.
fn coverages() -> impl Iterator<Item = &'static Coverage> {
    (0..).map_while(|font| FONTS.book().info(font)).map(|font| &font.coverage)
}

fn in_any_font(c: char) -> bool {
    coverages().any(|has| has.contains(c.into()))
}

fn in_every_font(c: char) -> bool {
    coverages().all(|has| has.contains(c.into()))
}

/// A letter with its marks is set as one, in time and memory of its length squared; no language writes so many.
const MOST_MARKS: usize = 16;

/// `text` with the code points of the characters that cannot be displayed, which PDF/UA refuses, and of marks above
/// [`MOST_MARKS`]. It may be typst's markup, a string in it, JSON or SVG: the quotes around a code point mean nothing in any of
/// them.
fn displayable(text: &str, is_displayed: fn(char) -> bool) -> Cow<'_, str> {
    let others: BTreeSet<char> = text.chars().filter(|c| !c.is_ascii() && !c.is_whitespace()).collect();
    let lacking: BTreeSet<char> = others.into_iter().filter(|&c| !is_displayed(c)).collect();
    if lacking.is_empty() && text.graphemes(true).all(|letter| letter.chars().nth(MOST_MARKS).is_none()) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    for (place, c) in text.graphemes(true).flat_map(|letter| letter.chars().enumerate()) {
        match lacking.contains(&c) || place >= MOST_MARKS {
            true => out.push_str(&format!("‹U+{:04X}›", u32::from(c))),
            false => out.push(c),
        }
    }
    out.into()
}

static LIBRARY: LazyLock<LazyHash<Library>> = LazyLock::new(|| LazyHash::new(Library::default()));

struct Files {
    main: FileId,
    sources: HashMap<FileId, Source>,
    data: HashMap<FileId, Bytes>,
}

impl Files {
    /// With the code points of what is not `is_displayed`.
    fn new(rendered: &Rendered, writeup_typ: &str, is_displayed: fn(char) -> bool) -> Result<Self> {
        let shown = |text: &str| displayable(text, is_displayed).into_owned();
        let piece = |typst: &str| format!("#import \"page_style.typ\": *\n\n{}", shown(typst));
        let (summary, body) = (piece(&rendered.summary), piece(&rendered.typst));
        let sources = [
            ("writeup.typ", writeup_typ),
            ("page_style.typ", PAGE_STYLE),
            ("summary.typ", &summary),
            ("body.typ", &body),
        ];
        let sources = sources.into_iter().map(|(path, text)| Ok((id(path)?, Source::new(id(path)?, text.into()))));
        let front = std::iter::once(Ok((id("front.json")?, Bytes::from_string(shown(&rendered.front)))));
        let drawn = |svg: &[u8]| Bytes::from_string(shown(&String::from_utf8_lossy(svg)));
        let figures = rendered.figures.iter().map(|(path, svg)| Ok((id(path)?, drawn(svg))));
        Ok(Self {
            main: id("writeup.typ")?,
            sources: sources.collect::<Result<_>>()?,
            data: front.chain(figures).collect::<Result<_>>()?,
        })
    }

    fn compile(&self) -> Result<PagedDocument> {
        let compiled = typst::compile::<PagedDocument>(self);
        let document = compiled.output.map_err(|errors| anyhow!("setting the write-up: {}", self.describe(&errors)))?;
        if !compiled.warnings.is_empty() {
            bail!("setting the write-up gave warnings: {}", self.describe(&compiled.warnings));
        }
        Ok(document)
    }

    fn export(&self, document: &PagedDocument) -> Result<Vec<u8>> {
        let standards = PdfStandards::new(&[PdfStandard::Ua_1]).map_err(|e| anyhow!("{}", e.message()))?;
        typst_pdf::pdf(document, &PdfOptions { standards, ..PdfOptions::default() })
            .map_err(|errors| anyhow!("exporting the PDF: {}", self.describe(&errors)))
    }

    /// Every diagnostic with its file, its line and the line's text.
    fn describe(&self, diagnostics: &[SourceDiagnostic]) -> String {
        let mut out = String::new();
        for diagnostic in diagnostics {
            let _ = write!(out, "\n  {}", diagnostic.message);
            for hint in &diagnostic.hints {
                let _ = write!(out, " ({})", hint.v);
            }
            let spans = std::iter::once(diagnostic.span).chain(diagnostic.trace.iter().map(|t| t.span.into()));
            for span in spans {
                let Some((source, range)) = span.id().and_then(|id| self.sources.get(&id)).zip(self.range(span)) else {
                    continue;
                };
                let before = &source.text()[..range.start];
                let line = source.text().lines().nth(before.matches('\n').count()).unwrap_or_default();
                let _ = write!(out, "\n    {} {}", source.id().vpath().get_without_slash(), origin(before));
                let _ = write!(out, ": {}", line.trim().chars().take(240).collect::<String>());
            }
        }
        out
    }
}

/// The template of the last `// from` comment before a position in the body.
fn origin(before: &str) -> &str {
    let line = before.rfind("// from ").map(|at| before[at + 8..].lines().next().unwrap_or_default());
    line.unwrap_or_default()
}

fn id(path: &str) -> Result<FileId> {
    let vpath = VirtualPath::new(path).map_err(|e| anyhow!("{path} is not a valid path for typst: {e:?}"))?;
    Ok(RootedPath::new(VirtualRoot::Project, vpath).intern())
}

impl World for Files {
    fn library(&self) -> &LazyHash<Library> {
        &LIBRARY
    }

    fn book(&self) -> &LazyHash<FontBook> {
        FONTS.book()
    }

    fn main(&self) -> FileId {
        self.main
    }

    fn source(&self, id: FileId) -> FileResult<Source> {
        self.sources.get(&id).cloned().ok_or_else(|| FileError::NotFound(id.vpath().get_without_slash().into()))
    }

    fn file(&self, id: FileId) -> FileResult<Bytes> {
        match self.sources.get(&id) {
            Some(source) => Ok(Bytes::from_string(source.text().to_string())),
            None => {
                self.data.get(&id).cloned().ok_or_else(|| FileError::NotFound(id.vpath().get_without_slash().into()))
            }
        }
    }

    fn font(&self, index: usize) -> Option<Font> {
        FONTS.font(index)
    }

    fn today(&self, _: Option<Duration>) -> Option<Datetime> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_no_font_has_becomes_its_code_point() {
        for text in ["a − é λ Ж ‹U+5F20› ≤ × 𝑁\u{a0}\u{2009}\n", "אב", ""] {
            assert_eq!(displayable(text, in_any_font), text);
        }
        assert_eq!(displayable("a 张😀", in_any_font), "a ‹U+5F20›‹U+1F600›");
        let marks = "\u{301}".repeat(MOST_MARKS);
        let [some, many] = [&marks[2..], &marks].map(|marks| format!("a{marks}b"));
        assert_eq!(displayable(&some, in_any_font), some);
        assert_eq!(displayable(&many, in_any_font), format!("a{}‹U+0301›b", &marks[2..]));
        assert!("‹›azé".chars().all(in_every_font) && !in_every_font('א'));
    }
}
