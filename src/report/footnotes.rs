//! Footnotes: in Markdown the text may be anywhere; typst needs it at the first reference.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

/// Encloses a label in typst markup until the note's text is known. Escaped text never contains it.
const MARK: char = '\u{1}';

/// The footnotes of one piece of Markdown, by label.
#[derive(Default)]
pub struct Footnotes(BTreeMap<String, Note>);

#[derive(Default)]
struct Note {
    number: usize,
    text: Option<String>,
    used: bool,
}

impl Footnotes {
    /// The note's number in the whole document; a new note counts `last` up.
    pub fn number(&mut self, label: &str, last: &mut usize) -> usize {
        let note = self.0.entry(label.to_string()).or_default();
        if note.number == 0 {
            *last += 1;
            note.number = *last;
        }
        note.number
    }

    pub fn define(&mut self, label: String, typst: String) {
        self.0.entry(label).or_default().text = Some(typst);
    }

    /// The placeholder of a reference, which [`Self::place`] replaces.
    pub fn mark(label: &str) -> String {
        format!("{MARK}{label}{MARK}")
    }

    /// Inserts every note's text at its first reference. A note without a reference is an error.
    pub fn place(&mut self, marked: &str) -> Result<String> {
        let mut typst = String::new();
        for (i, piece) in marked.split(MARK).enumerate() {
            if i % 2 == 0 {
                typst += piece;
                continue;
            }
            let note = self.0.get_mut(piece).with_context(|| format!("the footnote {piece:?} has no text"))?;
            let text = note.text.as_ref().with_context(|| format!("the footnote {piece:?} has no text"))?;
            typst += &match note.used {
                false => format!("#footnote[{text}]<note-{}>", note.number),
                true => format!("#footnote(<note-{}>);", note.number),
            };
            note.used = true;
        }
        if let Some((label, _)) = self.0.iter().find(|(_, note)| !note.used) {
            bail!("the footnote {label:?} is never referred to");
        }
        Ok(typst)
    }
}
