//! Whole steps at their best on made-up records: who is faster, the fastest mode, and what was not measured.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::{ALONE, answer};
use crate::harness::answer::made_up::{MadeUp, printed, seconds};
use crate::harness::answer::{Answer, Audience, Records};
use crate::harness::record::Profile;
use crate::harness::suite::{self, Suite};

fn params(size: &str) -> Value {
    json!({"measure": "best", "size": size, "context_length": 512, "batch_size": 4, "dtype": "bfloat16",
        "attention": "flash", "execution": "captured", "rounds": 2, "warmup": 1, "iterations": 1, "energy_s": 2.0,
        "autotune_limit_s": 120})
}

fn measured(times: &[f64]) -> Value {
    json!({"kind": "measured", "row": {"step": seconds(times)}})
}

/// Our step and a mode of PyTorch; one without times was not compiled.
fn compared(ours: &[f64], theirs: &[f64]) -> Value {
    if theirs.is_empty() {
        let python = json!({"kind": "not_run", "reason": "did not compile within 120 s"});
        return json!({"rust": measured(ours), "python": python, "compiled": null});
    }
    let samples = |unit: &str, value: f64| json!({"unit": unit, "samples": [value]});
    let errors = json!({"loss": 0.0, "gradients": 2e-3, "worst_gradient": 0.0, "worst_gradient_name": "x"});
    let compile = json!({"functions": 1, "graphs": 1, "graph_breaks": 0, "cache_hits": 0,
        "first_call": {"forward": seconds(&[40.0]), "backward": seconds(&[20.0])}});
    json!({"rust": measured(ours), "python": measured(theirs), "compiled": {"errors": errors, "compile": compile,
        "graphs_skipped": 0, "peak": samples("B", f64::from(1 << 30)),
        "energy": {"joules": samples("J", 45.0), "sm_clock": samples("Hz", 1.9e9)}}})
}

fn row(default: Value, reduce_overhead: Value, max_autotune: Value) -> Value {
    json!({"default": default, "reduce_overhead": reduce_overhead, "max_autotune": max_autotune,
        "ours": {"preparation": seconds(&[3.0]), "loss_error": 1e-6, "peak": null, "energy": null},
        "energy_missing": null, "software": {"protocol": 1, "python": "3.12", "torch": "2.11", "triton": null,
            "device": "cpu", "threads": 2, "tf32": false}})
}

/// Our step takes `ours` milliseconds, the fastest mode of PyTorch 80.
fn case(ours: f64) -> Value {
    let ours = [ours / 1e3; 2];
    row(compared(&[0.2; 2], &[0.09; 2]), compared(&ours, &[0.08; 2]), compared(&[0.2; 2], &[]))
}

fn answered(made_up: MadeUp, suite: Option<Suite>) -> Answer {
    let others = BTreeMap::from([(ALONE.to_string(), Records::default())]);
    answer(&Records { others, suite, ..made_up.records() }, Audience::Ours).unwrap()
}

fn gpu() -> MadeUp {
    MadeUp::gpu("torch_compile")
}

#[test]
fn our_step_is_compared_with_the_fastest_mode_in_the_turns_that_they_took_together() {
    let made_up = gpu().measured("best", &params("small"), &case(60.0)).measured("best", &params("xl"), &case(40.0));
    let answer = answered(made_up.not_run("best", &params("2.7B")), None);
    let best = &printed(&answer)["best"];
    let expected = json!({"execution": "captured", "ratio": "0.50 to 0.75", "faster": 2, "of": 2});
    assert_eq!((best, answer.holds("our-step-is-faster")), (&expected, Some(true)));
    let table = answer.tables()["best"].markdown();
    assert!(
        table.contains("| xl | 512 | 4 | bfloat16 | captured | 40.0 | 90.0 | 80.0 | not run | 0.50 |\n"),
        "{table}"
    );
    let outcome = "| 2.7B | 512 | 4 | bfloat16 | captured | not run | not run | not run | not run | – |";
    assert!(table.contains(outcome), "{table}");
    assert!(table.contains("Without a time: `max-autotune` did not compile within 120 s."), "{table}");
    let costs = answer.tables()["best-costs"].markdown();
    assert!(costs.contains("| small | 512 | 4 | bfloat16 | ours, captured | 3.0 | – | – |"), "{costs}");
    assert!(costs.contains("| small | 512 | 4 | bfloat16 | `reduce-overhead` | 60.0 | 1.0 | 45.0 |"), "{costs}");
}

#[test]
fn a_slower_step_is_said_to_be_slower() {
    let made_up = gpu().measured("best", &params("small"), &case(120.0)).measured("best", &params("xl"), &case(40.0));
    let answer = answered(made_up, None);
    let best = &printed(&answer)["best"];
    assert_eq!((&best["ratio"], &best["faster"], &best["of"]), (&json!("0.50 to 1.50"), &json!(1), &json!(2)));
    assert_eq!(answer.holds("our-step-is-faster"), Some(false));
    let tie = answered(gpu().measured("best", &params("xl"), &case(80.0)), None);
    assert_eq!((tie.holds("our-step-is-faster"), &printed(&tie)["best"]["faster"]), (Some(false), &json!(0)));
}

#[test]
fn of_turns_that_differ_the_least_stands_with_a_mark() {
    let row = row(compared(&[0.12, 0.10], &[0.2, 0.2]), compared(&[0.1; 2], &[]), compared(&[0.1; 2], &[]));
    let answer = answered(gpu().measured("best", &params("xl"), &row), None);
    let table = answer.tables()["best"].markdown();
    assert!(table.contains("| captured | 100 † | 200 | not run | not run | 0.50 † |"), "{table}");
}

#[test]
fn cases_that_are_planned_and_not_recorded_are_dashes_and_claim_nothing() {
    let root = crate::root::find().unwrap();
    let suite = suite::load(&root, &super::super::super::PROBLEM).unwrap();
    let other = json!({"measure": "attention", "batch": 8, "d_model": 16, "seq": 256, "rounds": 2, "warmup": 1,
        "iterations": 3});
    let answer = answered(gpu().failed("a", &other), suite);
    assert!(printed(&answer)["best"].is_null() && answer.claims().is_empty());
    let table = answer.tables()["best"].markdown();
    assert!(table.contains("| xl | 512 | 4 | bfloat16 | fused | – | – | – | – | – |"), "{table}");
    assert!(table.contains("AdamW; not measured yet.") && !answer.tables().contains_key("best-costs"), "{table}");
    let suite = suite::load(&root, &super::super::super::PROBLEM).unwrap();
    let of_suite =
        suite.iter().flat_map(|suite| suite.cases(Profile::Gpu)).filter(|(_, case)| case["measure"] == "best").count();
    let records = Records { suite, ..Records::default() };
    let planned = super::unmeasured(&records, &gpu().failed("best", &params("small")).set());
    assert_eq!(planned.len(), of_suite);
    assert!(of_suite > 1);
}
