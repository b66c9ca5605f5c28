//! The answer on made-up steps and memory: each claim both ways, and what is missing.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::{BESIDE_SHARDED, SCHEMES};
use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::collective::Backend;
use crate::harness::answer::Cell;
use crate::harness::answer::made_up::{MadeUp, seconds};
use crate::model::{Precision, SizeName};
use crate::parallel::overlap_bucketed;
use crate::parallel::trainer::ZERO1_IN_BACKWARD;

const CLAIMS: [&str; 4] = ["as-counted", "saves-state", "costs-time", "trade-adds-up"];

const MOMENTS: [&str; 5] =
    ["after init", "before the first step", "after the first step", "before a later step", "after a later step"];

/// What is in use after the first step, of that AdamW's state, and what was not counted.
type Memory = (u64, u64, u64);

/// Five moments of rank 0, each with its own peak; `marked` as by a tracker that starts a new peak.
fn rank((after, state, other): Memory, marked: bool) -> Value {
    let moment = |at: usize| {
        let state = if at < 2 { 0 } else { state };
        json!({"name": MOMENTS[at], "peak": 7000 + at, "in_use": after, "parameters": 0, "gradients": 0,
            "optimizer_state": state, "other": other})
    };
    let mut rank = json!({"owned_values": 50, "moments": (0..MOMENTS.len()).map(moment).collect::<Vec<_>>()});
    if marked {
        rank["peak_since_start"] = true.into();
    }
    json!([rank])
}

/// One case of two ranks with 400 bytes each of parameters and gradients and 800 of state, of which rank 0 owns half.
struct MadeUpCase {
    /// Unsharded, under the handout's scheme, under ZeRO-1.
    memory: [Memory; 3],
    /// Of a step beside the sharded optimizer, with buckets, sharded, under ZeRO-1, and of that stepping in backward.
    times: [f64; 5],
    /// Of the optimizer's phase without sharding; with it, of AdamW and of the broadcasts.
    phases: [f64; 3],
    /// What the handout's scheme puts on a link, in units of what data parallelism does.
    sharded_volume: f64,
    marked: bool,
    params: Params,
}

impl MadeUpCase {
    fn well() -> Self {
        Self {
            memory: [(1600, 810, 0), (1200, 405, 0), (1200, 400, 200)],
            times: [1.0, 1.2, 1.3, 1.2, 1.1],
            phases: [0.2, 0.1, 0.4],
            sharded_volume: 2.0,
            marked: true,
            params: Params { backend: Backend::Nccl, ..params(Precision::Float32, Some(1.0)) },
        }
    }

    fn row(&self) -> Value {
        let names = [BESIDE_SHARDED, overlap_bucketed::STRATEGY.name, SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD];
        let strategies: Vec<Times> = names.iter().zip(self.times).map(|(name, step)| (*name, step, 0.5, 0.1)).collect();
        let mut steps = row(&strategies, None);
        let span = |name: &str, start: f64, end: f64| json!({"name": name, "start_s": start, "end_s": end});
        let [alone, adamw, broadcasts] = self.phases;
        let sharded = &mut steps["strategies"][SHARDED_OPTIMIZER];
        sharded["bus_bytes"] = json!(1e9 * self.sharded_volume);
        sharded["bytes"] = json!(2_000_000_000u64);
        sharded["calls"] = json!(150);
        let end = 10.0 + adamw + broadcasts;
        sharded["timeline"]["compute"] = json!([span("optimizer", 10.0, end)]);
        sharded["timeline"]["communication"] = json!([
            span("all_reduce", 1.0, 2.0),
            span("broadcast", 10.0 + adamw, 10.0 + adamw),
            span("broadcast", end, end)
        ]);
        steps["strategies"][BESIDE_SHARDED]["timeline"]["compute"] = json!([span("optimizer", 5.0, 5.0 + alone)]);
        let memory: BTreeMap<_, _> =
            SCHEMES.iter().zip(self.memory).map(|(name, memory)| (name, rank(memory, self.marked))).collect();
        let predicted = json!({"parameters": 400, "gradients": 400, "optimizer_state": 800,
            "peak_before_first_step": 0, "peak_before_later_step": 0});
        json!({"steps": steps, "memory": memory, "predicted": predicted})
    }

    fn answer(&self) -> Answer {
        answer(&MadeUp::gpu("x").measured("a", &self.params, &self.row()).records(), Audience::Ours).unwrap()
    }
}

#[test]
fn claims_follow_memory_and_steps() {
    let well = MadeUpCase::well().answer();
    assert_eq!(CLAIMS.map(|id| (id, well.holds(id))), CLAIMS.map(|id| (id, Some(true))));
    let ill = MadeUpCase {
        memory: [(1599, 800, 0), (1600, 800, 0), (1200, 400, 0)],
        times: [1.3, 1.0, 1.2, 1.2, 1.1],
        sharded_volume: 1.0,
        ..MadeUpCase::well()
    };
    let ill = ill.answer();
    assert_eq!(CLAIMS.map(|id| (id, ill.holds(id))), CLAIMS.map(|id| (id, Some(false))));
}

#[test]
fn the_trade_is_broadcasts_against_what_adamw_saves() {
    let trade = MadeUpCase::well().answer().quoted().clone();
    let value = |name: &str| trade[name]["value"].as_f64().unwrap();
    for (name, expected) in [
        ("adamw", 0.2),
        ("saved_s", 0.1),
        ("broadcasts", 0.4),
        // 1 GB over a link of 1 GB/s.
        ("at_link", 1.0),
        ("predicted", 0.3),
        ("longer", 0.3),
    ] {
        assert!((value(name) - expected).abs() < 1e-9, "{name}: {trade}");
    }
    assert_eq!(trade["calls"], json!(50));
}

#[test]
fn unstable_steps_are_ranges_and_decide_nothing() {
    let mut row = MadeUpCase::well().row();
    row["steps"]["single"]["last_rank"] = seconds(&[1.0, 1.1]);
    let params = Params { rounds: 2, ..MadeUpCase::well().params };
    let answer = answer(&MadeUp::gpu("x").measured("a", &params, &row).records(), Audience::Ours).unwrap();
    assert!(answer.quoted()["timed"] == false && answer.holds("costs-time").is_none());
    assert_eq!(answer.quoted()["unstable"]["single"]["high"]["value"], json!(1.1));
    assert_eq!(answer.holds("as-counted"), Some(true), "memory is counted and has no turns");
}

/// The record held the unsharded scheme's 30.25 GiB as the sharded one's peak after initialization.
#[test]
fn the_peak_of_the_scheme_before_is_not_printed() {
    let peaks = |case: &MadeUpCase, table: &str| -> Vec<Cell> {
        case.answer().tables()[table].rows.iter().map(|row| row[2].clone()).collect()
    };
    let old = MadeUpCase { marked: false, ..MadeUpCase::well() };
    let missing = |cells: &[Cell]| cells.iter().map(|cell| *cell == Cell::Missing).collect::<Vec<_>>();
    assert_eq!(missing(&peaks(&old, "memory")), [false, false, false, true, false, false]);
    assert_eq!(missing(&peaks(&old, "moments")), [false, false, false, false, true, false, false, false, false]);
    let caption = |case: &MadeUpCase| case.answer().tables()["memory"].caption.clone().unwrap();
    assert!(caption(&old).contains("was not recorded"));
    // New records carry the mark, and on a CPU the counts always began with the tracker.
    let of_a_cpu = Params { backend: Backend::Gloo, ..MadeUpCase::well().params };
    for case in [MadeUpCase::well(), MadeUpCase { params: of_a_cpu, ..old }] {
        assert!(!peaks(&case, "memory").contains(&Cell::Missing) && !peaks(&case, "moments").contains(&Cell::Missing));
        assert!(!caption(&case).contains("was not recorded"));
    }
}

#[test]
fn rounding_is_explained_where_the_allocator_does_not_split_a_block() {
    let block = |size, backend| {
        let params = Params { size, backend, ..MadeUpCase::well().params };
        MadeUpCase { params, ..MadeUpCase::well() }.answer().quoted()["block"].clone()
    };
    let xl = block(SizeName::Xl, Backend::Nccl);
    // 1,600 x 6,400 float32 values take 39.06 MiB and get 40, in three matrices of 48 layers and two moments.
    assert_eq!(xl["block"]["value"], json!(40.0 * 1048576.0));
    assert_eq!(xl["excess"]["value"], json!(288.0 * (40.0 * 1048576.0 - 40_960_000.0)));
    assert!(block(SizeName::Xl, Backend::Gloo).is_null(), "the CPU's counts are exact");
    assert!(block(SizeName::Tiny, Backend::Nccl).is_null(), "small blocks are split");
    assert!(block(SizeName::Medium, Backend::Nccl).is_null(), "16 MiB are a multiple of 2 MiB");
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
