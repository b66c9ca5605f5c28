//! The answer on made-up steps and memory: each claim both ways, and what is missing.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

const CLAIMS: [&str; 8] = [
    "memory-is-as-counted",
    "saves-the-others-state",
    "same-before-the-first-step",
    "keeps-a-gradient-shard",
    "sharding-costs-time",
    "zero1-is-faster",
    "free-in-backward",
    "zero1-moves-like-ddp",
];

/// Bytes in use before and after the first step, and how many of the latter were not counted.
type Memory = (u64, u64, u64);

/// Five moments of rank 0.
fn rank((before, after, other): Memory) -> Value {
    let moment = |in_use: u64| {
        json!({"name": "m", "peak": in_use, "in_use": in_use, "parameters": 0, "gradients": 0,
            "optimizer_state": 0, "other": other})
    };
    let moments = [before, before, after, after, after].map(moment);
    json!([{"owned_values": 50, "moments": moments}])
}

/// One case of two ranks with 400 bytes each of parameters and gradients and 800 of state, of which rank 0 owns half.
struct MadeUpCase {
    /// Unsharded, under the handout's scheme, under ZeRO-1.
    memory: [Memory; 3],
    /// Of a step beside the sharded optimizer, with buckets, sharded, under ZeRO-1, and of that stepping in backward.
    times: [f64; 5],
    /// What the handout's scheme puts on a link, in units of what data parallelism does.
    sharded_volume: f64,
    params: Params,
}

impl MadeUpCase {
    fn well() -> Self {
        Self {
            memory: [(1000, 1600, 0), (1000, 1200, 0), (1000, 1200, 200)],
            times: [1.0, 1.2, 1.3, 1.2, 1.1],
            sharded_volume: 2.0,
            params: params(Precision::Float32, Some(1.0)),
        }
    }

    fn answer(&self) -> Answer {
        let names = [BESIDE_SHARDED, overlap_bucketed::STRATEGY.name, SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD];
        let strategies: Vec<Times> = names.iter().zip(self.times).map(|(name, step)| (*name, step, 0.5, 0.1)).collect();
        let mut steps = row(&strategies, None);
        steps["strategies"][SHARDED_OPTIMIZER]["bus_bytes"] = json!(1e9 * self.sharded_volume);
        let memory: BTreeMap<_, _> =
            SCHEMES.iter().zip(self.memory).map(|(name, memory)| (name, rank(memory))).collect();
        let predicted = json!({"parameters": 400, "gradients": 400, "optimizer_state": 800,
            "peak_before_first_step": 0, "peak_before_later_step": 0});
        let row = json!({"steps": steps, "memory": memory, "predicted": predicted});
        answer(&MadeUp::gpu("x").measured("a", &self.params, &row).records(), Audience::Ours).unwrap()
    }
}

#[test]
fn claims_follow_memory_and_steps() {
    let well = MadeUpCase::well().answer();
    assert_eq!(CLAIMS.map(|id| (id, well.holds(id))), CLAIMS.map(|id| (id, Some(true))));
    assert_eq!(well.quoted()["shard"]["value"], json!(200.0));
    let ill = MadeUpCase {
        memory: [(1000, 1599, 0), (1010, 1600, 0), (1000, 1200, 0)],
        times: [1.3, 1.0, 1.2, 1.2, 1.1],
        sharded_volume: 1.0,
        ..MadeUpCase::well()
    };
    let ill = ill.answer();
    assert_eq!(CLAIMS.map(|id| (id, ill.holds(id))), CLAIMS.map(|id| (id, Some(false))));
}

#[test]
fn a_shard_is_a_fraction_of_the_gradients_and_no_rank_has_none() {
    let case =
        |world_size| MadeUpCase { params: Params { world_size, ..MadeUpCase::well().params }, ..MadeUpCase::well() };
    assert_eq!(case(3).answer().quoted()["shard"]["value"], json!(400.0 / 3.0));
    let none = case(0).answer();
    assert!(none.claims().is_empty() && none.quoted()["measured"] == false);
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
