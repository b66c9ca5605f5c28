//! Answers from made-up sums: every claim both ways, and what is missing.

use serde_json::json;

use super::*;
use crate::bench::all_reduce::bus_factor;
use crate::harness::answer::made_up::{MadeUp, seconds};

const SMALL: &str = "latency-bounds-small-sums";
const HOLDS: &str = "busbw-holds";
const FASTER: &str = "nccl-is-faster";
const NOT_SLOWER: &str = "as-fast-as-pytorch";

fn params(backend: Backend, world_size: usize, size_mb: u64) -> Params {
    Params { backend, world_size, size_mb, rounds: 2, warmup: 1, iterations: 5 }
}

/// A sum that takes us `ours` seconds and PyTorch `theirs`.
fn sum(made_up: MadeUp, params: &Params, ours: f64, theirs: f64) -> MadeUp {
    let timing = |t: f64| json!({"last_rank": seconds(&[t]), "by_rank": vec![seconds(&[t]); params.world_size]});
    let row = json!({
        "bytes": params.size_mb * 1_000_000, "bus_factor": bus_factor(params.world_size),
        "ours": timing(ours), "c10d": timing(theirs),
        "software": {"protocol": 1, "python": "3.12", "torch": "2.11.0", "triton": null, "device": "cpu", "threads": 1, "tf32": false},
    });
    made_up.measured("sums", params, &row)
}

fn claims(answer: &Answer) -> Vec<(&str, bool)> {
    answer.claims().iter().map(|(id, claim)| (id.as_str(), claim.held)).collect()
}

#[test]
fn claims_follow_bandwidth_processes_and_pytorch() {
    let two = |mb| params(Backend::Gloo, 2, mb);
    let four = params(Backend::Gloo, 4, 100);
    // 100 MB in ten times the time of 1 MB: ten times the bandwidth; four processes at half the bus bandwidth.
    let sums = |last: f64, theirs: f64| {
        let made_up = sum(MadeUp::cpu("x"), &two(1), 0.01, 0.01);
        let made_up = sum(made_up, &two(100), 0.1, theirs);
        answer(&sum(made_up, &four, last, last).records(), Audience::Ours).unwrap()
    };
    let well = sums(0.15, 0.1);
    assert_eq!(claims(&well), [(NOT_SLOWER, true), (HOLDS, true), (SMALL, true)]);
    assert!((well.quoted()["sizes"]["gain"]["value"].as_f64().unwrap() - 10.0).abs() < 1e-9);
    assert!((well.quoted()["processes"]["time"]["value"].as_f64().unwrap() - 1.5).abs() < 1e-9);
    let slow = sums(0.3, 0.05);
    assert_eq!(claims(&slow), [(NOT_SLOWER, false), (HOLDS, false), (SMALL, true)]);
    assert_eq!(slow.quoted()["worst_at"], "100 MB over gloo on 2 processes");
}

#[test]
fn back_ends_are_compared_on_one_machine_alone() {
    let nccl = params(Backend::Nccl, 2, 100);
    let gloo = params(Backend::Gloo, 2, 100);
    let of = |gpu| sum(sum(MadeUp::gpu("x"), &nccl, 0.001, 0.001).run("b", Some(gpu)), &gloo, 0.14, 0.14).records();
    let one = answer(&of("NVIDIA H200"), Audience::Ours).unwrap();
    assert_eq!(one.holds(FASTER), Some(true));
    assert!((one.quoted()["backends"]["ratio"]["value"].as_f64().unwrap() - 140.0).abs() < 1e-9);
    let two = answer(&of("NVIDIA H100"), Audience::Ours).unwrap();
    assert_eq!(two.holds(FASTER), None, "140 times, but of two machines");
    assert!(two.quoted()["backends"]["ratio"].is_null());
}

#[test]
fn one_sum_supports_no_claim_on_sizes_and_what_was_not_run_says_why() {
    let made_up = sum(MadeUp::gpu("x"), &params(Backend::Nccl, 2, 1), 0.01, 0.01);
    let made_up = made_up.not_run("sums", &params(Backend::Nccl, 6, 1)).failed("sums", &params(Backend::Nccl, 4, 1));
    let answer = answer(&made_up.records(), Audience::Ours).unwrap();
    assert_eq!(claims(&answer), [(NOT_SLOWER, true)]);
    let table = answer.tables()["sums-gpu-nccl"].markdown();
    assert!(table.contains("| 1 | 6 | – | not run | – | – | – | – | – | – |"), "{table}");
    assert!(
        table.contains("4 processes at 1 MB (the worker died); 6 processes at 1 MB (needs 6 GPUs, the machine has 2)")
    );
}

#[test]
fn without_any_sum_there_is_no_figure_and_without_records_an_error() {
    let none = MadeUp::cpu("x").failed("sums", &params(Backend::Gloo, 2, 1));
    let none = answer(&none.records(), Audience::Ours).unwrap();
    assert!(none.figures().is_empty() && claims(&none).is_empty());
    assert!(answer(&Records::default(), Audience::Ours).is_err());
}
