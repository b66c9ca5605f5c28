//! Answers from made-up sums: every claim both ways, and what is missing.

use serde_json::json;

use super::super::measure::Params;
use super::*;
use crate::bench::all_reduce::bus_factor;
use crate::harness::answer::made_up::{MadeUp, seconds};

const SMALL: &str = "latency-bound";
const HOLDS: &str = "busbw-holds";

fn params(backend: Backend, world_size: usize, size_mb: u64) -> Params {
    Params { backend, world_size, size_mb, rounds: 2, warmup: 1, iterations: 1 }
}

/// A sum that takes us these seconds in two turns, and PyTorch as long.
fn sum_in_turns(made_up: MadeUp, params: &Params, turns: [f64; 2]) -> MadeUp {
    let timing = json!({"last_rank": seconds(&turns), "by_rank": vec![seconds(&turns); params.world_size]});
    let row = json!({
        "bytes": params.size_mb * 1_000_000, "bus_factor": bus_factor(params.world_size), "ours": timing, "c10d": timing,
        "software": {"protocol": 1, "python": "3.12", "torch": "2.11.0", "triton": null, "device": "cpu", "threads": 1, "tf32": false},
    });
    made_up.measured("sums", params, &row)
}

fn sum(made_up: MadeUp, params: &Params, time: f64) -> MadeUp {
    sum_in_turns(made_up, params, [time; 2])
}

fn claims(answer: &Answer) -> Vec<(&str, bool)> {
    answer.claims().iter().map(|(id, claim)| (id.as_str(), claim.held)).collect()
}

#[test]
fn claims_follow_bandwidth_and_processes() {
    let two = |mb| params(Backend::Gloo, 2, mb);
    // 100 MB in ten times the time of 1 MB: ten times the bandwidth.
    let sums = |small: [f64; 2], last: f64| {
        let made_up = sum_in_turns(MadeUp::cpu("x"), &two(1), small);
        let made_up = sum(made_up, &two(100), 0.1);
        answer(&sum(made_up, &params(Backend::Gloo, 4, 100), last).records(), Audience::Ours).unwrap()
    };
    let well = sums([0.01; 2], 0.15);
    assert!(well.quoted()["between_gpus"].is_null(), "no GPU took part");
    assert_eq!(claims(&well), [(HOLDS, true), (SMALL, true)]);
    assert!((well.quoted()["time"]["low"]["value"].as_f64().unwrap() - 1.5).abs() < 1e-9);
    // The bus bandwidth falls by half; one turn of the small sum is as fast as the large one's bandwidth.
    let ill = sums([0.01, 0.001], 0.3);
    assert_eq!(claims(&ill), [(HOLDS, false), (SMALL, false)]);
    let least = &ill.quoted()["least"];
    assert!((least["low"]["value"].as_f64().unwrap() - 1e8).abs() < 1.0, "an unstable sum is a range: {least}");
    assert!((least["high"]["value"].as_f64().unwrap() - 1e9).abs() < 1.0, "{least}");
    let table = ill.tables()["sums-cpu-gloo"].markdown();
    assert!(table.contains("| 1 | 2 | 1.00 to 10.0 | 0.10 to 1.00 | 1.00 to 10.0 | 1.00 |"), "{table}");
}

/// "The largest", of which each sentence had another.
#[test]
fn the_sentences_are_of_one_size() {
    let with = |made_up: MadeUp, backend, ranks, mb| sum(made_up, &params(backend, ranks, mb), 1e-9 * mb as f64);
    let nccl = [(2, 1), (2, 100), (4, 100), (4, 1000)];
    let made_up =
        nccl.into_iter().fold(MadeUp::gpu("x"), |made_up, (ranks, mb)| with(made_up, Backend::Nccl, ranks, mb));
    let made_up = [1, 100, 1000].into_iter().fold(made_up, |made_up, mb| with(made_up, Backend::Gloo, 2, mb));
    let answer = answer(&made_up.records(), Audience::Ours).unwrap();
    let sizes = ["most_mb", "mb"].map(|size| answer.quoted()[size].as_u64());
    assert_eq!(sizes, [100, 100].map(Some));
    // Each sum has 1 GB/s, but for the largest of Gloo.
    let busbw = &answer.quoted()["gloo_busbw"]["high"]["value"];
    assert!((busbw.as_f64().unwrap() / 1e15 - 1.0).abs() < 1e-9, "{busbw}");
}

#[test]
fn a_bandwidth_that_falls_by_a_twentieth_falls() {
    let sums = [(2, 1, 1e-3), (2, 100, 0.1), (4, 100, 0.15 / 0.95)];
    let made_up = sums
        .into_iter()
        .fold(MadeUp::cpu("x"), |made_up, (ranks, mb, time)| sum(made_up, &params(Backend::Gloo, ranks, mb), time));
    let answer = answer(&made_up.records(), Audience::Ours).unwrap();
    assert_eq!(answer.holds(HOLDS), Some(false));
}

/// "140 times as fast ... of the same machine" was said of a host with four GPUs and another with one.
#[test]
fn back_ends_of_two_hosts_with_the_same_gpus_have_no_ratio() {
    let [nccl, gloo] = [Backend::Nccl, Backend::Gloo].map(|backend| params(backend, 2, 100));
    let of = |gpus: usize, cores: usize| {
        let made_up = sum(MadeUp::gpu("x").run("nccl", Some("NVIDIA H200")), &nccl, 0.001);
        let mut records = sum(made_up.run("gloo", Some("NVIDIA H200")), &gloo, 0.14).records();
        let host =
            &mut records.gpu.as_mut().unwrap().file.runs.iter_mut().find(|run| run.id == "nccl").unwrap().machine;
        host.gpus = vec![host.gpus[0].clone(); gpus];
        host.cores = cores;
        answer(&records, Audience::Ours).unwrap()
    };
    let one = of(1, 2);
    let ratio = one.quoted()["ratio"]["low"]["value"].as_f64().unwrap();
    assert!((ratio - 140.0).abs() < 1e-9);
    let two = of(4, 64);
    assert!(two.quoted()["ratio"].is_null(), "140 times, but of two hosts");
    assert!(of(1, 64).quoted()["ratio"].is_null(), "other processors");
    let caption = |id: &str| two.tables()[id].caption.clone().unwrap();
    assert!(caption("sums-gpu-nccl").contains("NCCL (4 × NVIDIA H200):"), "{}", caption("sums-gpu-nccl"));
    assert!(caption("sums-gpu-gloo").contains("Gloo (made up, 2 cores):"), "{}", caption("sums-gpu-gloo"));
}

#[test]
fn the_link_is_known_for_some_gpus_only() {
    // 100 MB in 0.3 ms: 333 GB/s.
    let of = |gpu| {
        let made_up = MadeUp::gpu("x").run("a", Some(gpu));
        let made_up = [(2, 1), (2, 100), (4, 100)]
            .iter()
            .fold(made_up, |made_up, &(n, mb)| sum(made_up, &params(Backend::Nccl, n, mb), 3e-4 * bus_factor(n)));
        answer(&made_up.records(), Audience::Ours).unwrap()
    };
    let known = of("NVIDIA H200");
    let share = known.quoted()["link"]["value"].as_f64().unwrap();
    assert!((share - 1e8 / 3e-4 / 450e9).abs() < 1e-9);
    assert!(known.figures()["bandwidth"].caption.as_ref().unwrap().contains("NVLink carries 450 GB/s"));
    assert!(of("NVIDIA H200 NVL").quoted()["link"].is_null());
}

#[test]
fn one_sum_supports_no_claim_and_what_was_not_run_says_why_once() {
    let made_up = sum(MadeUp::gpu("x"), &params(Backend::Nccl, 2, 1), 0.01);
    let made_up = made_up.not_run("sums", &params(Backend::Nccl, 6, 1)).not_run("sums", &params(Backend::Nccl, 6, 10));
    let answer = answer(&made_up.failed("sums", &params(Backend::Nccl, 4, 1)).records(), Audience::Ours).unwrap();
    assert_eq!(claims(&answer), []);
    let reason = "NCCL was not run with 6 processes: each needs a GPU, and the machine has 2.";
    assert_eq!(answer.quoted()["not_run"], json!([reason]));
    let table = answer.tables()["sums-gpu-nccl"].markdown();
    assert!(table.contains("| 1 | 6 | not run | – | – | – |"), "{table}");
    assert!(table.contains("| 1 | 4 | failed | – | – | – |"), "{table}");
}

#[test]
fn without_any_sum_there_is_no_figure_and_without_records_an_error() {
    let none = MadeUp::cpu("x").failed("sums", &params(Backend::Gloo, 2, 1));
    let none = answer(&none.records(), Audience::Ours).unwrap();
    assert!(none.figures().is_empty() && claims(&none).is_empty());
    assert!(answer(&Records::default(), Audience::Ours).is_err());
}
