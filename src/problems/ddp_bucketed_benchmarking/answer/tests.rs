//! The answer on made-up steps of several bucket sizes: each claim both ways, and what is missing.

use serde_json::json;

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

/// Each size in MB with the seconds of its step, and of the model's prediction.
fn answered(sizes: &[(f64, f64, f64)], communication: f64, coalesced: f64) -> Answer {
    let mut made_up = MadeUp::gpu("x");
    for &(mb, step, predicted) in sizes {
        let times: [Times; 3] =
            [("naive", 2.0, 0.5, 0.5), (STRATEGY, step, communication, 0.1), (COALESCED, coalesced, 0.2, 0.1)];
        let model = json!({"predicted_overhead_s": predicted, "best": null});
        let row = json!({"steps": row(&times, None), "model": model});
        made_up = made_up.measured("a", &params(Precision::Float32, Some(mb)), &row);
    }
    let mut records = made_up.records();
    records.others = READS.iter().map(|name| (name.to_string(), Records::default())).collect();
    answer(&records, Audience::Ours).unwrap()
}

fn claims(answer: &Answer) -> [Option<bool>; 5] {
    ["middle-is-best", "small-buckets-are-no-buckets", "no-copies-is-faster", "little-to-gain", "model-finds-the-best"]
        .map(|id| answer.holds(id))
}

#[test]
fn claims_and_numbers_follow_the_sizes() {
    let well = answered(&[(1.0, 1.5, 0.3), (10.0, 1.25, 0.1), (100.0, 1.4, 0.2)], 0.1, 1.1);
    // The made-up rows have 100 calls under every strategy.
    assert_eq!(claims(&well), [Some(true); 5]);
    assert_eq!((&well.quoted()["sizes"]["best_mb"], &well.quoted()["sizes"]["worst_mb"]), (&json!(10.0), &json!(1.0)));
    assert!((well.quoted()["sizes"]["differ"]["value"].as_f64().unwrap() - 0.2).abs() < 1e-12);
    let ill = answered(&[(1.0, 1.25, 0.3), (10.0, 1.5, 0.1)], 0.5, 1.25);
    assert_eq!(claims(&ill), [Some(false), Some(true), Some(false), Some(false), Some(false)]);
}

#[test]
fn one_size_has_no_curve_and_none_has_no_claims() {
    let one = answered(&[(10.0, 1.5, 0.1)], 0.5, 1.4);
    assert!(one.figures().is_empty() && one.tables().contains_key("predictions"));
    let failed = MadeUp::gpu("x").failed("a", &params(Precision::Float32, Some(1.0)));
    let mut records = failed.records();
    assert!(answer(&records, Audience::Ours).is_err(), "the other problems' records are missing");
    records.others = READS.iter().map(|name| (name.to_string(), Records::default())).collect();
    assert_eq!(claims(&answer(&records, Audience::Ours).unwrap()), [None; 5]);
}
