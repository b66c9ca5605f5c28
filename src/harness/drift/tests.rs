//! What differs between records, and which replace an accepted one.

use serde_json::json;

use super::super::answer::made_up::MadeUp;
use super::*;

fn file(cpu: &str, outcome: Outcome) -> RecordFile {
    let mut file = MadeUp::cpu("p").failed("g", &json!({"n": 1})).set().file;
    file.runs[0].machine.cpu = cpu.into();
    file.cases[0].outcome = outcome;
    file
}

fn measured(value: i64, scale: f64) -> Outcome {
    let samples: Vec<f64> = (0..20).map(|i| scale * (1.0 + 0.001 * f64::from(i))).collect();
    Outcome::Measured { row: json!({"value": value, "seconds": scale, "forward": {"unit": "s", "samples": samples}}) }
}

fn findings(local: Outcome, accepted: Outcome) -> Vec<Finding> {
    drift(&file("a", local), &file("a", accepted)).unwrap().cases.remove(0).changes
}

#[test]
fn a_changed_exact_value_is_a_contradiction_and_timings_are_compared_by_rank() {
    let found = findings(measured(2, 1.5), measured(1, 1.0));
    assert!(matches!(&found[0], Finding::Value { path, .. } if path == "value") && found[0].is_contradiction());
    assert!(
        matches!(&found[1], Finding::Timing { comparison, .. } if comparison.change == Change::Slower),
        "{found:?}"
    );
    assert!(findings(measured(1, 1.001), measured(1, 1.0)).iter().all(|f| !f.is_difference()));
}

#[test]
fn what_follows_from_timings_need_not_repeat() {
    let row = |x: f64| {
        json!({"link": {"bytes_per_s": x}, "strategies": {"naive": {"overlap": x}}, "model": {"best": {"calls": x}},
            "timeline": {"bytes": [x, x]}, "moments": {"time_s": [x, x]}, "seconds": x, "error": {"words": x.to_string()},
            "kernels": [{"name": x.to_string(), "count": 1}]})
    };
    let [old, new] = [1.0, 2.0].map(|x| Outcome::Measured { row: row(x) });
    assert!(findings(new, old).is_empty());
}

#[test]
fn on_another_machine_only_exact_values_are_compared() {
    let drift = drift(&file("a", measured(2, 9.0)), &file("b", measured(1, 1.0))).unwrap();
    assert!(drift.other_machine.is_some() && drift.cases[0].changes.len() == 1, "{drift:?}");
}

#[test]
fn timings_are_compared_where_one_machine_ran_the_case_whatever_ran_the_others() {
    let row = json!({"forward": {"unit": "s", "samples": [1.0, 1.1, 1.2]}});
    let both = MadeUp::cpu("p").measured("g", &json!({"n": 1}), &row);
    let both = both.run("20260102T000000Z-gpu0", Some("NVIDIA H200")).measured("g", &json!({"n": 2}), &row).set().file;
    let same = drift(&both, &both).unwrap();
    assert!(same.other_machine.is_none() && same.cases.iter().all(|case| case.changes.len() == 1), "{same:?}");
    let mut moved = both.clone();
    moved.runs[1].machine.cores += 1;
    let one = drift(&moved, &both).unwrap();
    let said = "of 1 cases the accepted figures come from ";
    assert!(one.other_machine.is_some_and(|words| words.starts_with(said)) && one.cases[1].changes.is_empty());
    assert_eq!(one.cases[0].changes.len(), 1);
    moved.runs[0].machine.cores += 2;
    let all = drift(&moved, &both).unwrap().other_machine.unwrap();
    assert_eq!(all.matches(said).count(), 2, "{all}");
}

#[test]
fn another_outcome_is_a_contradiction() {
    let oom = Outcome::OutOfMemory { requested_bytes: None, predicted_bytes: None, message: String::new() };
    assert!(findings(oom, measured(1, 1.0))[0].is_contradiction());
}

#[test]
fn a_list_of_samples_with_another_work_or_unit_is_named() {
    let work = json!({"flops": 1.0, "bytes": 1.0, "precision": "float32"});
    let with = json!({"passes": [{"unit": "s", "samples": [1.0], "work": work}]});
    let without = json!({"passes": [{"unit": "s", "samples": [1e-9]}]});
    let (mut less, mut bytes) = (with.clone(), with.clone());
    less["passes"][0]["work"]["flops"] = 0.0.into();
    bytes["passes"][0]["unit"] = "B".into();
    for (old, new, changed) in [
        (&with, &without, Some("passes.0")),
        (&with, &less, Some("passes.0")),
        (&with, &bytes, Some("passes.0")),
        (&with, &with, None),
        (&without, &with, None),
        (&with, &json!({}), None),
    ] {
        assert_eq!(changed_bound(old, new).unwrap().as_deref(), changed);
    }
}

#[test]
fn a_part_that_was_measured_and_is_not_there_now_is_lost() {
    let samples = json!({"unit": "s", "samples": [1.0]});
    let old = json!({"forward": samples, "device": samples, "columns": [{"kind": "measured", "row": samples}], "note": 1, "errors": {"a": 1}, "largest": [1]});
    let lost = |new: Value, all_parts| {
        lost_measurement("", &old, Some(&new), all_parts).map(|(path, is)| format!("{path} {is}"))
    };
    assert_eq!(lost(old.clone(), true), None);
    for (part, changed, expected) in [
        ("device", Value::Null, "device missing"),
        ("columns", json!([]), "columns.0 missing"),
        ("errors", json!({}), "errors missing"),
        ("largest", json!([]), "largest missing"),
        ("largest", json!([2, 3]), ""),
        ("columns", json!([{"kind": "failed", "error": "x"}]), "columns.0 failed"),
        ("note", Value::Null, ""),
    ] {
        let mut new = old.clone();
        new[part] = changed;
        assert_eq!(lost(new.clone(), true).unwrap_or_default(), expected);
        // Rows of another revision may have other parts.
        assert_eq!(lost(new, false).is_some(), expected.ends_with("failed"), "{expected}");
    }
    let without: serde_json::Map<String, Value> =
        old.as_object().unwrap().clone().into_iter().filter(|(key, _)| key != "device").collect();
    assert_eq!(lost(without.into(), true).unwrap(), "device missing");
}

#[test]
fn samples_that_may_be_zero_are_compared_without_a_ratio() {
    let row = |bytes: f64| Outcome::Measured { row: json!({"held": {"unit": "B", "samples": [bytes, 2.0]}}) };
    let found = findings(row(0.0), row(1.0));
    assert!(matches!(&found[..], [Finding::Value { path, .. }] if path == "held"), "{found:?}");
    assert!(findings(row(0.0), row(0.0)).is_empty());
}
