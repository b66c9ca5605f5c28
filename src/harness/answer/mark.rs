//! Invisible marks around printed numbers, which name the cases that each number comes from.
//!
//! A mark is three private-use characters: one before the key of the cases, one between key and text, one after the text. The
//! HTML edition turns it into a link; every other form is made from [`plain`] text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::Serializer;

use super::records::CaseId;
use crate::harness::record::Profile;

pub const KEY: char = '\u{E000}';
pub const TEXT: char = '\u{E001}';
pub const END: char = '\u{E002}';

/// One case of the accepted or local records: problem, profile and the case's index.
pub type CaseKey = (String, Profile, usize);

/// `text` with a mark; without a key, `text` itself.
pub fn marked(text: &str, key: &str) -> String {
    if key.is_empty() { text.into() } else { format!("{KEY}{key}{TEXT}{text}{END}") }
}

impl CaseId {
    /// `text`, which prints numbers of this case, with its mark.
    pub fn mark(&self, text: &str) -> String {
        marked(text, &key(std::slice::from_ref(self)))
    }
}

/// The cases as one word, each once: "flash_benchmarking.gpu.0-3,7;naive_ddp.cpu.1".
pub fn key(sources: &[CaseId]) -> String {
    let mut groups: BTreeMap<(&str, Profile), BTreeSet<usize>> = BTreeMap::new();
    for source in sources {
        groups.entry((&source.problem, source.profile)).or_default().insert(source.case);
    }
    let mut out = String::new();
    for ((problem, profile), cases) in groups {
        let separator = if out.is_empty() { "" } else { ";" };
        let _ = write!(out, "{separator}{problem}.{profile}.{}", runs(cases));
    }
    out
}

/// "0-3,7".
fn runs(cases: BTreeSet<usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for case in cases {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == case => *last = case,
            _ => runs.push((case, case)),
        }
    }
    let words = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
    words.collect::<Vec<_>>().join(",")
}

/// More cases than all records have.
const MOST_CASES: usize = 100_000;

/// The keys of a text's marks.
pub fn keys(text: &str) -> impl Iterator<Item = &str> {
    text.split(KEY).skip(1).filter_map(|rest| Some(rest.split_once(TEXT)?.0))
}

/// The cases of a key; what is no key, or names more cases than there are, gives none.
pub fn cases(key: &str) -> Vec<CaseKey> {
    let mut out = Vec::new();
    for group in key.split(';') {
        let [problem, profile, numbers] = group.split('.').collect::<Vec<_>>()[..] else { continue };
        let Some(profile) = Profile::ALL.into_iter().find(|known| known.name() == profile) else { continue };
        for run in numbers.split(',') {
            let (from, to) = run.split_once('-').unwrap_or((run, run));
            if let (Ok(from), Ok(to)) = (from.parse::<usize>(), to.parse::<usize>()) {
                if to.saturating_sub(from) >= MOST_CASES - out.len() {
                    return Vec::new();
                }
                out.extend((from..=to).map(|case| (problem.to_string(), profile, case)));
            }
        }
    }
    out
}

/// `text` without its marks.
pub fn plain(text: &str) -> String {
    let mut in_key = false;
    let keep = |c: &char| {
        match *c {
            KEY => in_key = true,
            TEXT => in_key = false,
            END => {}
            _ => return !in_key,
        }
        false
    };
    text.chars().filter(keep).collect()
}

/// `text` of a record, which may hold these characters by chance, without them.
pub fn removed(text: &str) -> String {
    text.replace([KEY, TEXT, END], "")
}

/// Serialises sources as their key, for filters of templates.
pub(super) fn serialize<S: Serializer>(sources: &[CaseId], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&key(sources))
}

#[cfg(test)]
mod tests {
    use super::super::made_up::{machine, source};
    use super::*;

    #[test]
    fn a_key_names_each_case_once_and_is_read_back() {
        let mut sources = vec![source("a", machine(None)); 5];
        for (source, case) in sources.iter_mut().zip([7, 2, 0, 1, 2]) {
            source.case = case;
        }
        let key = key(&sources);
        assert_eq!(key, "made_up.cpu.0-2,7");
        let read: Vec<usize> = cases(&key).into_iter().map(|(_, _, case)| case).collect();
        assert_eq!(read, [0, 1, 2, 7]);
        assert!(cases("").is_empty() && cases("x").is_empty());
        for many in ["x.cpu.0-99999999999", "x.cpu.0-18446744073709551615", "x.cpu.0-60000,0-60000"] {
            assert!(cases(many).is_empty(), "{many}");
        }
    }

    #[test]
    fn a_mark_leaves_the_text_as_it_was() {
        let text = format!("so {} and {}", marked("12.5", "x.gpu.3"), marked("7", ""));
        assert_eq!(plain(&text), "so 12.5 and 7");
        assert_eq!(Vec::from_iter(keys(&text)), ["x.gpu.3"]);
        assert!(text.contains(KEY) && !text.contains("7\u{E002}"));
    }
}
