//! Damaged suites and records: a parser must refuse them or read valid data, and must not panic.

use std::fs;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::{Just, any, any_with, prop_oneof};
use proptest::sample::{Index, select};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use serde_json::json;

use super::answer::made_up::{MadeUp, seconds};
use super::record::RecordFile;
use super::suite;

/// Tokens of TOML and JSON, and limit values of types.
const PIECES: [&str; 24] = [
    "[",
    "]",
    "{",
    "}",
    "\"",
    "'",
    "=",
    ":",
    ",",
    ".",
    "\n",
    "\\u0000",
    "é",
    "null",
    "true",
    "nan",
    "-1",
    "0.0",
    "1e308",
    "9223372036854775808",
    "[cpu.a]",
    "x = [1, 2]",
    "\"run\"",
    "\"samples\": []",
];

/// A change of a text; positions and lengths are in characters.
#[derive(Debug, Clone)]
enum Edit {
    Remove(Index, usize),
    Insert(Index, &'static str),
    /// Copies characters from the first position to the second.
    Repeat(Index, usize, Index),
}

impl Edit {
    fn apply(&self, text: &mut Vec<char>) {
        let place = |at: &Index| at.index(text.len() + 1);
        let range = |at: &Index, length: usize| place(at)..text.len().min(place(at) + length);
        match self {
            Self::Remove(at, length) => {
                let range = range(at, *length);
                text.drain(range);
            }
            Self::Insert(at, piece) => {
                let at = place(at);
                text.splice(at..at, piece.chars());
            }
            Self::Repeat(at, length, to) => {
                let (copied, to) = (text[range(at, *length)].to_vec(), place(to));
                text.splice(to..to, copied);
            }
        }
    }
}

/// Every suite of the repository, and a record with a case of every outcome.
fn sound_texts() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut suites: Vec<_> = files.filter(|path| path.extension().is_some_and(|ext| ext == "toml")).collect();
    suites.sort();
    let case = |n: u32| json!({"n": n});
    let record = MadeUp::gpu("x").measured("a", &case(0), &json!({"time": seconds(&[1.0, 2.0])}));
    let record = record.out_of_memory("a", &case(1)).not_run("a", &case(2)).failed("b", &case(3)).set();
    suites.iter().map(|path| fs::read_to_string(path).unwrap()).chain([record.file.to_json().unwrap()]).collect()
}

fn damaged() -> impl Strategy<Value = String> {
    let edit = prop_oneof![
        (any::<Index>(), 1..40usize).prop_map(|(at, length)| Edit::Remove(at, length)),
        (any::<Index>(), select(PIECES.to_vec())).prop_map(|(at, piece)| Edit::Insert(at, piece)),
        (any::<Index>(), 1..200usize, any::<Index>()).prop_map(|(at, length, to)| Edit::Repeat(at, length, to)),
    ];
    let edited = (select(sound_texts()), vec(edit, 0..6)).prop_map(|(text, edits)| {
        let mut text: Vec<char> = text.chars().collect();
        edits.iter().for_each(|edit| edit.apply(&mut text));
        text.into_iter().collect()
    });
    let of_pieces = vec(select(PIECES.to_vec()), 0..30).prop_map(|pieces| pieces.concat());
    prop_oneof![8 => edited, 1 => of_pieces, 1 => any_with::<String>(".{0,200}".into()), 1 => Just(String::new())]
}

/// Whether each of the two parsers accepts the text. Accepted text must be valid data.
fn parse(text: &str) -> (bool, bool) {
    let suite = suite::parse(text, "fuzz.toml", &|case, _| Ok(case.clone()));
    for grid in suite.iter().flat_map(|suite| &suite.grids) {
        assert!(!grid.cases.is_empty() && grid.cases.len() <= suite::MAX_CASES, "{} cases", grid.cases.len());
    }
    let record = RecordFile::parse(text, "fuzz.json");
    if let Ok(record) = &record {
        let written = record.to_json().expect("a record that was read can be written");
        let again = RecordFile::parse(&written, "fuzz.json").expect("and read again");
        assert_eq!(again.to_json().unwrap(), written);
    }
    (suite.is_ok(), record.is_ok())
}

/// `CS336_FUZZ_CASES=1000000 cargo test --lib harness::fuzz` tries as many texts.
#[test]
fn damaged_suites_and_records_are_refused_or_read_as_valid_data() {
    let asked = std::env::var("CS336_FUZZ_CASES").ok();
    let cases = asked.map_or(2000, |text| text.parse().expect("CS336_FUZZ_CASES is a number"));
    let config = Config { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(336), ..Config::default() };
    let outcome = TestRunner::new(config).run(&damaged(), |text| {
        parse(&text);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn each_undamaged_text_is_accepted_by_one_parser() {
    let taken: Vec<_> = sound_texts().iter().map(|text| parse(text)).collect();
    let (last, suites) = taken.split_last().unwrap();
    assert!(suites.len() > 10 && suites.iter().all(|taken| *taken == (true, false)), "{suites:?}");
    assert_eq!(*last, (false, true));
}
