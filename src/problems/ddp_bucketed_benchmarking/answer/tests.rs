//! The answer on made-up steps of several bucket sizes: each claim both ways, and what is missing.

use serde_json::json;

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::{MadeUp, seconds};

/// A bucket size in MB, the seconds of its step, and its calls.
type SizeTimes = (f64, f64, u64);

fn answered(sizes: &[SizeTimes], coalesced: Times) -> Answer {
    answer_of(sizes.iter().fold(MadeUp::gpu("x"), |made_up, size| with_size(made_up, *size, coalesced)))
}

/// One more size; its tail takes 0.1 s.
fn with_size(made_up: MadeUp, (mb, step, calls): SizeTimes, coalesced: Times) -> MadeUp {
    let times: [Times; 3] = [("naive", 2.0, 0.5, 0.5), (STRATEGY, step, 0.5, 0.1), coalesced];
    let mut steps = row(&times, None);
    steps["strategies"][STRATEGY]["calls"] = json!(calls);
    let model = json!({"predicted_overhead_s": 1.0, "best": null});
    made_up.measured("a", &params(Precision::Float32, Some(mb)), &json!({"steps": steps, "model": model}))
}

pub fn answer_of(made_up: MadeUp) -> Answer {
    let mut records = made_up.records();
    records.others = READS.iter().map(|name| (name.to_string(), Records::default())).collect();
    answer(&records, Audience::Ours).unwrap()
}

fn claims(answer: &Answer) -> [Option<bool>; 6] {
    [
        "best-lies-between",
        "copies-cost-time",
        "small-buckets-copy-longer",
        "backward-is-slower",
        "model-finds-the-best",
        "fixed-costs-are-hidden",
    ]
    .map(|id| answer.holds(id))
}

const FAST: Times = (COALESCED, 1.2, 0.2, 0.1);

#[test]
fn claims_and_numbers_follow_the_sizes() {
    // By the fit a call costs 10 ms and 1 GB takes a second: ten calls are best.
    let well = answered(&[(1.0, 1.5, 100), (10.0, 1.25, 10), (100.0, 1.4, 1)], FAST);
    assert_eq!(claims(&well), [Some(true); 6]);
    let sizes = well.quoted();
    assert_eq!((&sizes["mb"], &sizes["small"]["mb"], &sizes["preferred"]), (&json!(10.0), &json!(1.0), &json!(10.0)));
    let value = |of: &serde_json::Value| of["value"].as_f64().unwrap();
    assert!((value(&sizes["differ"]) - 0.2).abs() < 1e-9 && (value(&sizes["share"]) - 0.5).abs() < 1e-9);
    assert!(
        well.tables()["sizes"].markdown().contains("| 10 | 10 | 1,250.0 | 250.0 | 75% | 200.0 | 80% |"),
        "by the step"
    );
    assert!((value(&sizes["model_bucket"]) / 1e8 - 1.0).abs() < 1e-6);
    let table = well.tables()["predictions"].markdown();
    assert!(table.contains("| 10 | 10 | 200.00 | 100.00 | 250.0 |"), "{table}");
    let ill = answered(&[(1.0, 1.25, 9), (10.0, 1.5, 12)], (COALESCED, 1.25, 0.2, 0.25));
    let expected = [Some(false), Some(false), None, Some(false), Some(true), Some(false)];
    assert_eq!(claims(&ill), expected, "ties; only where sizes between are best is it asked why small ones are slower");
    let tie = answered(&[(1.0, 1.5, 100), (10.0, 1.4, 10), (100.0, 1.4, 1)], FAST);
    assert_eq!(claims(&tie)[0], Some(false), "two sizes are best");
}

#[test]
fn what_small_buckets_cost_is_split_into_copies_and_the_rest() {
    // Without copies the steps take 1.3 and 1.2 s, with them 1.5 and 1.25 s.
    let records = with_size(MadeUp::gpu("x"), (1.0, 1.5, 100), (COALESCED, 1.3, 0.2, 0.1));
    let answer = answer_of(with_size(with_size(records, (10.0, 1.25, 10), FAST), (100.0, 1.4, 1), FAST));
    let small = &answer.quoted()["small"];
    for (part, expected) in [("more", 0.25), ("copies", 0.15), ("without_copies", 0.1)] {
        let value = small[part]["value"].as_f64().unwrap();
        assert!((value - expected).abs() < 1e-9, "{part}: {value}");
    }
    assert_eq!(answer.holds("small-buckets-copy-longer"), Some(true));
}

#[test]
fn a_size_that_the_model_prefers_to_the_best_is_told_with_its_margin() {
    // By the fit 12 calls cost 0.203 s and 10 calls 0.2 s.
    let other = answered(&[(1.0, 1.25, 12), (10.0, 1.5, 10)], FAST);
    assert_eq!((other.holds("model-finds-the-best"), &other.quoted()["preferred"]), (Some(false), &json!(10.0)));
    let margin = other.quoted()["dispreferred"]["value"].as_f64().unwrap();
    assert!((margin - (0.12 + 1.0 / 12.0 - 0.2)).abs() < 1e-6, "{margin}");
}

#[test]
fn equal_calls_have_equal_predictions() {
    let same = answered(&[(1.0, 1.5, 38), (10.0, 1.25, 38)], FAST);
    let table = same.tables()["predictions"].markdown();
    let predicted = |row: &str| {
        let row = table.lines().find(|line| line.starts_with(row)).unwrap();
        row.split('|').nth(3).unwrap().to_string()
    };
    assert_eq!(predicted("| 1 |"), predicted("| 10 |"));
}

#[test]
fn a_size_that_is_not_stable_is_quoted_nowhere() {
    let mut steps = row(&[("naive", 2.0, 0.5, 0.5), (STRATEGY, 1.1, 0.5, 0.1), FAST], None);
    steps["single"]["last_rank"] = seconds(&[0.9, 1.0]);
    let noisy = json!({"steps": steps, "model": {"predicted_overhead_s": 1.0, "best": null}});
    let records = with_size(MadeUp::gpu("x"), (10.0, 1.25, 10), FAST);
    let answer = answer_of(records.measured("a", &params(Precision::Float32, Some(1.0)), &noisy));
    assert_eq!(answer.quoted()["mb"], json!(10.0));
    assert_eq!(answer.quoted()["unstable"], json!(["float32 (1 MB)"]));
    assert!(answer.tables()["steps-gpu-float32"].markdown().contains("900 to 1,000"));
}

#[test]
fn without_a_measured_size_there_are_no_claims() {
    let failed = MadeUp::gpu("x").failed("a", &params(Precision::Float32, Some(1.0)));
    let mut records = failed.records();
    assert!(answer(&records, Audience::Ours).is_err(), "the other problems' records are missing");
    records.others = READS.iter().map(|name| (name.to_string(), Records::default())).collect();
    let none = answer(&records, Audience::Ours).unwrap();
    assert_eq!(claims(&none), [None; 6]);
    assert!(none.figures().is_empty() && !none.tables().contains_key("sizes"));
}

#[test]
fn buckets_and_single_parameters_are_compared_in_turns_of_one_run() {
    let steps = |bucketed| row(&[(STRATEGY, bucketed, 0.5, 0.1), (SINGLE_CALLS, 1.2, 0.5, 0.1)], None);
    let answer_with = |bucketed: f64| {
        let mut records = with_size(MadeUp::gpu("x"), (10.0, 1.25, 10), FAST).records();
        records.others = READS.iter().map(|name| (name.to_string(), Records::default())).collect();
        let on_two = params(Precision::Float32, Some(100.0));
        // What is said is of the fewest ranks.
        let on_four = Params { world_size: 4, ..on_two.clone() };
        let shared = MadeUp::gpu(SHARDED_PROBLEM).measured("a", &on_four, &steps(2.4 - bucketed));
        let shared = shared.measured("a", &on_two, &steps(bucketed));
        records.others.insert(SHARDED_PROBLEM.into(), shared.records());
        answer(&records, Audience::Ours).unwrap().holds("single-calls-win")
    };
    assert_eq!([1.25, 1.2].map(answer_with), [Some(true), Some(false)]);
}

#[test]
fn sizes_of_the_machine_that_measured_fewer_are_left_out_of_every_comparison() {
    let two = [(1.0, 1.5, 100), (10.0, 1.25, 10)];
    let on_h200 = two.iter().fold(MadeUp::gpu("x"), |made_up, size| with_size(made_up, *size, FAST));
    let mixed = answer_of(with_size(on_h200.run("b", Some("NVIDIA H100")), (100.0, 1.01, 1), FAST));
    assert!(mixed.tables()["sizes"].markdown().contains("Another machine measured buckets of 100 MB."));
    let alone = answered(&two, FAST);
    for name in ["mb", "step", "differ", "copies", "link", "predicted"] {
        assert_eq!(mixed.quoted()[name], alone.quoted()[name], "{name}: the fastest step is of the other machine");
    }
    assert_eq!(claims(&mixed), claims(&alone));
    let rows = |answer: &Answer| answer.tables()["predictions"].markdown().matches("\n| ").count();
    assert_eq!(rows(&mixed), rows(&alone));
    assert!(mixed.tables()["steps-gpu-float32"].markdown().contains("| 100 | "), "what was measured is still shown");
}
