//! The typst compiler as a library, with our own files and embedded fonts; no clock, no network.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use anyhow::{Result, anyhow, bail};
use typst::diag::{FileError, FileResult, SourceDiagnostic};
use typst::foundations::{Bytes, Datetime, Duration};
use typst::syntax::{FileId, RootedPath, Source, VirtualPath, VirtualRoot};
use typst::text::{Font, FontBook};
use typst::utils::LazyHash;
use typst::{Library, LibraryExt as _, World, WorldExt as _};
use typst_kit::fonts::FontStore;
use typst_layout::PagedDocument;
use typst_pdf::{PdfOptions, PdfStandard, PdfStandards};

use super::Rendered;

/// The functions that the generated body uses.
const PAGE_STYLE: &str = include_str!("page_style.typ");

/// Compiles `rendered` in the layout of `writeup_typ` to a tagged PDF/UA-1 file.
///
/// Errors have typst's message and the line of the file.
pub fn pdf(rendered: &Rendered, writeup_typ: &str) -> Result<Vec<u8>> {
    let document = compile(rendered, writeup_typ)?;
    let standards = PdfStandards::new(&[PdfStandard::Ua_1]).map_err(|e| anyhow!("{}", e.message()))?;
    let world = Files::new(rendered, writeup_typ)?;
    typst_pdf::pdf(&document, &PdfOptions { standards, ..PdfOptions::default() })
        .map_err(|errors| anyhow!("exporting the PDF: {}", world.describe(&errors)))
}

/// The pages, for `pdf` and for tests that read them.
pub fn compile(rendered: &Rendered, writeup_typ: &str) -> Result<PagedDocument> {
    let world = Files::new(rendered, writeup_typ)?;
    let compiled = typst::compile::<PagedDocument>(&world);
    let document = compiled.output.map_err(|errors| anyhow!("setting the write-up: {}", world.describe(&errors)))?;
    if !compiled.warnings.is_empty() {
        bail!("setting the write-up gave warnings: {}", world.describe(&compiled.warnings));
    }
    Ok(document)
}

/// Shared by all compilations of this process, because parsing fonts is slow.
static FONTS: LazyLock<FontStore> = LazyLock::new(|| {
    let mut fonts = FontStore::new();
    fonts.extend(typst_kit::fonts::embedded());
    fonts
});

static LIBRARY: LazyLock<LazyHash<Library>> = LazyLock::new(|| LazyHash::new(Library::default()));

struct Files {
    main: FileId,
    sources: HashMap<FileId, Source>,
    data: HashMap<FileId, Bytes>,
}

impl Files {
    fn new(rendered: &Rendered, writeup_typ: &str) -> Result<Self> {
        let piece = |typst: &str| format!("#import \"page_style.typ\": *\n\n{typst}");
        let (summary, body) = (piece(&rendered.summary), piece(&rendered.typst));
        let sources = [
            ("writeup.typ", writeup_typ),
            ("page_style.typ", PAGE_STYLE),
            ("summary.typ", &summary),
            ("body.typ", &body),
        ];
        let sources = sources.into_iter().map(|(path, text)| Ok((id(path)?, Source::new(id(path)?, text.into()))));
        let front = std::iter::once(Ok((id("front.json")?, Bytes::from_string(rendered.front.clone()))));
        let figures = rendered.figures.iter().map(|(path, svg)| Ok((id(path)?, Bytes::new(svg.clone()))));
        Ok(Self {
            main: id("writeup.typ")?,
            sources: sources.collect::<Result<_>>()?,
            data: front.chain(figures).collect::<Result<_>>()?,
        })
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
