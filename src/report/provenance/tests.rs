//! What appendix D says of made-up cases and runs.

use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::harness::conditions::{Conditions, During, Reading, ReadingRange};
use crate::harness::record::Outcome;

fn case(clock: f64, power: f64, throttle: &[Throttle], again: bool) -> CaseRecord {
    let range = |median: f64| ReadingRange { min: median, median, max: median };
    let reading = Reading {
        sm_clock_hz: clock,
        memory_clock_hz: 3e9,
        power_w: power,
        temperature_c: 50.0,
        throttle: BTreeSet::new(),
    };
    let during = During {
        readings: 3,
        sm_clock_hz: range(clock),
        power_w: range(power),
        max_temperature_c: power / 10.0,
        throttle: throttle.iter().copied().collect(),
    };
    let remeasured_after = if again { [Throttle::HwSlowdown].into() } else { BTreeSet::new() };
    CaseRecord {
        grid: "g".into(),
        params: json!({}),
        run: "r".into(),
        revision: 1,
        kernels: BTreeMap::new(),
        elapsed_s: 1.0,
        conditions: Some(Conditions {
            before: reading.clone(),
            during: Some(during),
            after: reading,
            remeasured_after,
        }),
        busy_processors: None,
        outcome: Outcome::Measured { row: json!({}) },
    }
}

#[test]
fn cases_are_summarised_and_a_slowdown_is_named() {
    let idle = [Throttle::GpuIdle];
    let cases = [case(1.98e9, 400.0, &idle, false), case(1.5e9, 690.0, &[Throttle::SwPowerCap], true)];
    let seen = Seen::of(cases.iter()).unwrap();
    assert_eq!((seen.remeasured, seen.spoiled), (1, 0));
    assert_eq!((seen.sm_clock_hz, seen.power_w, seen.max_temperature_c), (1.74e9, 545.0, 69.0));
    assert_eq!(in_words(seen.reasons()), "power cap");
    let slow = [case(1.0e9, 200.0, &[Throttle::HwSlowdown], true)];
    assert_eq!(Seen::of(slow.iter()).unwrap().spoiled, 1);
    assert_eq!(Seen::of([].iter()), None);
}

#[test]
fn columns_and_captions_are_those_that_a_run_needs() {
    let counted = CaseRecord { busy_processors: Some(3.24), ..case(1.98e9, 400.0, &[], false) };
    let line = |id, case: Option<&CaseRecord>| Line {
        problem: "p",
        profile: Profile::Cpu,
        id,
        commit: "c".into(),
        cases: 1,
        busy: case.and_then(|case| case.busy_processors),
        seen: None,
    };
    assert!(!runs_table(&[line("old", None)]).contains("Busy"));
    let mut edited = line("edited", None);
    assert!(!runs_table(&[line("old", None)]).contains("uncommitted"));
    edited.commit += " +";
    assert!(runs_table(&[edited]).contains("A commit with + had uncommitted or edited files."));
    let table = runs_table(&[line("old", None), line("new", Some(&counted))]);
    assert!(
        table.starts_with("| Run | Problem | Commit | Cases | Busy CPUs |\n|:---|:---|:---|---:|---:|\n"),
        "{table}"
    );
    assert!(table.contains(&format!("| old | `p` (cpu) | c | 1 | {NOTHING} |")), "{table}");
    assert!(table.contains("| new | `p` (cpu) | c | 1 | 3.2 |"), "{table}");
}

#[test]
fn peaks_are_printed_with_their_units() {
    let peaks = Peaks {
        flops_per_s: [("float32".to_string(), 66.9e12)].into(),
        bytes_per_s: 4.8e12,
        cache_bytes: 0.0,
        source: "a data sheet".into(),
    };
    assert_eq!(roofs(&peaks), "66.9 TFLOP/s in float32, 4.80 TB/s of memory (a data sheet)");
}
