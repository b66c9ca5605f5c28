//! The answer on made-up steps and memory: each claim both ways, and what is missing.

use serde_json::{Value, json};

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

/// Five moments, of which the third holds `in_use` bytes, `other` of them not counted.
fn rank(in_use: u64, other: u64) -> Value {
    let moment = |in_use: u64| {
        json!({"name": "m", "peak": in_use, "in_use": in_use, "parameters": 0, "gradients": 0,
            "optimizer_state": 0, "other": other})
    };
    let moments = [100, 100, in_use, in_use, in_use].map(moment);
    json!([{"owned_values": 25, "moments": moments}])
}

/// 400 bytes each of parameters and gradients, 800 of state, half of it owned by rank 0.
fn answered(sharded: u64, zero1_other: u64, times: [f64; 5]) -> Answer {
    let names = [BESIDE_SHARDED, overlap_bucketed::STRATEGY.name, SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD];
    let strategies: Vec<Times> = names.iter().zip(times).map(|(name, step)| (*name, step, 0.5, 0.1)).collect();
    let memory =
        json!({BESIDE_SHARDED: rank(1600, 0), SHARDED_OPTIMIZER: rank(sharded, 0), ZERO1: rank(sharded, zero1_other)});
    let predicted = json!({"parameters": 400, "gradients": 400, "optimizer_state": 800,
        "peak_before_first_step": 0, "peak_before_later_step": 0});
    let row = json!({"steps": row(&strategies, None), "memory": memory, "predicted": predicted});
    answer(&MadeUp::gpu("x").measured("a", &params(Precision::Float32, Some(1.0)), &row).records(), Audience::Ours)
        .unwrap()
}

#[test]
fn claims_follow_memory_and_steps() {
    let well = answered(1000, 200, [1.0, 1.2, 1.3, 1.2, 1.1]);
    for id in [
        "as-counted",
        "saves-the-rest",
        "keeps-a-shard",
        "same-before",
        "costs-time",
        "zero1-is-faster",
        "costs-no-time",
    ] {
        assert_eq!(well.holds(id), Some(true), "{id}");
    }
    // Every made-up strategy moves the same volume.
    assert_eq!(well.holds("moves-no-more"), Some(false));
    let ill = answered(1600, 0, [1.3, 1.0, 1.2, 1.2, 1.1]);
    for id in ["saves-the-rest", "keeps-a-shard", "costs-time", "zero1-is-faster", "costs-no-time"] {
        assert_eq!(ill.holds(id), Some(false), "{id}");
    }
}

#[test]
fn without_a_measured_case_its_ending_is_told() {
    let records = MadeUp::gpu("x").not_run("a", &params(Precision::Float32, Some(1.0))).records();
    let none = answer(&records, Audience::Ours).unwrap();
    assert!(none.claims().is_empty());
    assert_eq!(none.quoted()["endings"], json!(["float32: not run: needs 6 GPUs, has 2"]));
    let table = none.tables()["steps-gpu"].markdown();
    assert!(table.contains("| float32, 1 MB | not run: needs 6 GPUs, has 2 |"), "{table}");
}
