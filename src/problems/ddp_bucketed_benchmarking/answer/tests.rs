//! The answer on made-up steps of several bucket sizes: each claim both ways, and what is missing.

use serde_json::json;

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

/// A bucket size in MB, the seconds of its step, and those of the model's prediction.
type SizeTimes = (f64, f64, f64);

fn answered(sizes: &[SizeTimes], communication: f64, coalesced: f64, calls: u64) -> Answer {
    let add = |made_up, size: &SizeTimes| with_size(made_up, *size, communication, coalesced, calls);
    answer_of(sizes.iter().fold(MadeUp::gpu("x"), add))
}

/// One more size, whose buckets take `calls` calls; the made-up naive strategy takes 100.
fn with_size(made_up: MadeUp, size: SizeTimes, communication: f64, coalesced: f64, calls: u64) -> MadeUp {
    let (mb, step, predicted) = size;
    let times: [Times; 3] =
        [("naive", 2.0, 0.5, 0.5), (STRATEGY, step, communication, 0.1), (COALESCED, coalesced, 0.2, 0.1)];
    let mut steps = row(&times, None);
    steps["strategies"][STRATEGY]["calls"] = json!(calls);
    let model = json!({"predicted_overhead_s": predicted, "best": null});
    let row = json!({"steps": steps, "model": model});
    made_up.measured("a", &params(Precision::Float32, Some(mb)), &row)
}

fn answer_of(made_up: MadeUp) -> Answer {
    let mut records = made_up.records();
    records.others = READS.iter().map(|name| (name.to_string(), Records::default())).collect();
    answer(&records, Audience::Ours).unwrap()
}

fn claims(answer: &Answer) -> [Option<bool>; 5] {
    [
        "middle-is-best",
        "at-the-smallest-size-nearly-every-matrix-travels-alone",
        "no-copies-is-faster",
        "little-to-gain",
        "model-finds-the-best",
    ]
    .map(|id| answer.holds(id))
}

#[test]
fn claims_and_numbers_follow_the_sizes() {
    let well = answered(&[(1.0, 1.5, 0.3), (10.0, 1.25, 0.1), (100.0, 1.4, 0.2)], 0.1, 1.1, 61);
    assert_eq!(claims(&well), [Some(true); 5]);
    let sizes = &well.quoted()["sizes"];
    assert_eq!((&sizes["best"]["mb"], &sizes["worst"]["mb"]), (&json!(10.0), &json!(1.0)));
    assert!((sizes["differ"]["value"].as_f64().unwrap() - 0.2).abs() < 1e-12);
    let ill = answered(&[(1.0, 1.25, 0.3), (10.0, 1.5, 0.1)], 0.5, 1.25, 60);
    assert_eq!(claims(&ill), [Some(false); 5], "60 calls for 100 tensors are no longer nearly one each");
}

#[test]
fn one_size_has_no_curve_and_none_has_no_claims() {
    let one = answered(&[(10.0, 1.5, 0.1)], 0.5, 1.4, 10);
    assert!(one.figures().is_empty() && one.tables().contains_key("predictions"));
    let failed = MadeUp::gpu("x").failed("a", &params(Precision::Float32, Some(1.0)));
    let mut records = failed.records();
    assert!(answer(&records, Audience::Ours).is_err(), "the other problems' records are missing");
    records.others = READS.iter().map(|name| (name.to_string(), Records::default())).collect();
    assert_eq!(claims(&answer(&records, Audience::Ours).unwrap()), [None; 5]);
}

#[test]
fn sizes_of_the_machine_that_measured_fewer_are_left_out_of_every_comparison() {
    let two = [(1.0, 1.5, 0.3), (10.0, 1.25, 0.1)];
    let add = |made_up, size: &SizeTimes| with_size(made_up, *size, 0.1, 1.1, 61);
    let on_h200 = two.iter().fold(MadeUp::gpu("x"), add);
    let mixed = answer_of(add(on_h200.run("b", Some("NVIDIA H100")), &(100.0, 0.5, 0.01)));
    assert_eq!(mixed.quoted()["left_out"], json!(["100.0"]));
    let alone = answered(&two, 0.1, 1.1, 61);
    assert_eq!(alone.quoted()["left_out"], json!([]));
    assert_eq!(mixed.quoted()["sizes"], alone.quoted()["sizes"], "the fastest step is of the other machine");
    assert_eq!(claims(&mixed), claims(&alone));
    let rows = |answer: &Answer| answer.tables()["predictions"].markdown().matches("\n| ").count();
    assert_eq!(rows(&mixed), rows(&alone));
    assert!(mixed.tables()["steps-gpu-float32"].markdown().contains("| 100.0 | "), "what was measured is still shown");
}
