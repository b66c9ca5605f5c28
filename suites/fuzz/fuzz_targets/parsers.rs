//! Feeds arbitrary text to the suite and record parsers: they may refuse it, and may never panic or accept nonsense.
#![no_main]
#![allow(dead_code)]

use libfuzzer_sys::fuzz_target;

#[path = "../../../src/error.rs"]
mod error;
#[path = "../../../src/harness/mod.rs"]
mod harness;
#[path = "../../../src/root.rs"]
mod root;
#[path = "../../../src/units.rs"]
mod units;

use harness::record::RecordFile;
use harness::suite;

fuzz_target!(|text: &str| {
    if let Ok(suite) = suite::parse(text, "fuzz.toml", &|case, _| Ok(case.clone())) {
        for grid in &suite.grids {
            assert!(!grid.cases.is_empty() && grid.cases.len() <= suite::MAX_CASES);
        }
    }
    if let Ok(record) = RecordFile::parse(text, "fuzz.json") {
        let written = record.to_json().expect("a record that was read can be written");
        assert_eq!(RecordFile::parse(&written, "fuzz.json").expect("and read again"), record);
    }
});
