//! The answer on made-up cells: headline numbers, each claim both ways, and cells that ended in every way.

use serde_json::{Value, json};

use super::*;
use crate::harness::answer::made_up::{MadeUp, seconds};

/// One implementation's samples of every pass, in seconds.
type Times<'a> = (&'a str, &'a [f64]);

fn params(dtype: &str, d: i64, seq: i64, batch: i64, launch: &str) -> Value {
    json!({"measure": "cell", "dtype": dtype, "d_model": d, "seq": seq, "batch": batch, "cache": "cold", "launch": launch,
        "rounds": 16, "warmup_ms": 5.0, "rep_ms": 10.0, "most_repeats": 8})
}

fn cell(seq: i64) -> Value {
    params("bfloat16", 64, seq, 1, "eager")
}

fn board() -> Value {
    json!({"measure": "leaderboard", "dtype": "bfloat16", "n_heads": 16, "d_head": 64, "seq": 16384,
        "warmup_ms": 1000.0, "rep_ms": 10000.0})
}

fn timed(samples: &[f64]) -> Value {
    let mut timing = seconds(samples);
    timing["work"] = json!({"flops": 1e9, "bytes": 1.0, "precision": "bfloat16"});
    json!({"kind": "measured", "row": timing})
}

fn ended_as(passes: Value) -> Value {
    json!({"errors": {"o": 1e-3, "dq": 2e-3, "dk": 1e-3, "dv": 1e-3}, "verified_seq": 1024, "passes": passes})
}

fn entry(samples: &[f64]) -> Value {
    ended_as(json!({"forward": timed(samples), "backward": timed(samples), "both": timed(samples)}))
}

fn row(columns: &[Times]) -> Value {
    let columns: serde_json::Map<_, _> =
        columns.iter().map(|(name, samples)| (name.to_string(), entry(samples))).collect();
    json!({"columns": columns})
}

fn ended(records: &Records) -> Answer {
    answer(records, Audience::Ours).unwrap()
}

/// A record of one cell where plain attention takes 4 ms and cuDNN 2 ms, ours as given.
fn of_ours(samples: &[f64]) -> Answer {
    let columns: [Times; 3] = [("naive", &[4e-3]), ("flash", samples), ("sdpa_cudnn", &[2e-3])];
    ended(&MadeUp::gpu("x").measured("grid", &cell(1024), &row(&columns)).records())
}

const CLAIMS: [&str; 5] = [
    "faster-than-plain-attention",
    "faster-than-pytorch",
    "faster-by-geometric-mean",
    "no-cell-slower",
    "means-are-near-medians",
];

#[test]
fn claims_and_ratios_follow_the_medians() {
    let fast = of_ours(&[1e-3, 1e-3, 1e-3]);
    assert_eq!(CLAIMS.map(|id| fast.holds(id)), [Some(true); 5]);
    assert_eq!(fast.quoted()["plain"]["ratios"]["low"]["value"], 4.0);
    assert_eq!(fast.quoted()["pytorch"]["ratios"]["high"]["value"], 2.0);
    assert_eq!(fast.quoted()["least"]["value"], 2.0);
    // Its mean is twice its median.
    let slow = of_ours(&[5e-3, 5e-3, 20e-3]);
    assert_eq!(CLAIMS.map(|id| slow.holds(id)), [Some(false); 5]);
    assert_eq!(slow.quoted()["mean"]["near"], 6, "of nine figures the three of ours are skewed");
    assert!((slow.quoted()["mean"]["farthest"]["value"].as_f64().unwrap() - 1.0).abs() < 1e-12);
}

#[test]
fn a_tie_is_not_faster_and_no_slower() {
    let tie = of_ours(&[2e-3]);
    assert_eq!(CLAIMS.map(|id| tie.holds(id)), [Some(true), Some(false), Some(false), Some(true), Some(true)]);
    let columns: [Times; 3] = [("flash", &[1e-3]), ("sdpa_flash", &[2e-3]), ("sdpa_cudnn", &[2e-3])];
    let two = ended(&MadeUp::gpu("x").measured("grid", &cell(1024), &row(&columns)).records());
    let table = two.tables()["times-bfloat16-forward"].markdown();
    assert!(
        table.contains("| 64 | 1,024 | 1.000 | 2.000 | 2.000 | SDPA flash | – | 2.00 |"),
        "the first of two: {table}"
    );
}

#[test]
fn flash_attention_3_is_beside_the_cells_that_it_was_measured_on() {
    let heads = params("bfloat16", 64, 16_384, 16, "eager");
    let beside = |ours: f64| {
        let columns: [Times; 2] = [("flash", &[ours]), ("sdpa_cudnn", &[2.0])];
        let made_up = MadeUp::gpu("x").measured("grid", &cell(8192), &row(&columns));
        ended(&made_up.measured("heads", &heads, &row(&columns)).records())
    };
    // 0.097 ms and 0.149 ms of one head; 1.067, 2.599 and 3.664 ms of 16.
    for (ours, faster) in [(0.05e-3, 5), (2e-3, 2), (5e-3, 0)] {
        let answer = beside(ours);
        assert_eq!(answer.quoted()["beside"]["rows"], 5);
        assert_eq!(answer.quoted()["beside"]["faster"], faster);
        assert_eq!(answer.holds("faster-than-flash-attention-3"), Some(faster == 5));
    }
    let table = beside(2e-3).tables()["flash-attention-3"].markdown();
    assert!(table.contains("| 16 | 16,384 | 64 | both | 2.000 | 0 | 2,000.0 | 1,000.00 | 3.664 | 1.83 |"), "{table}");
    assert_eq!(of_ours(&[1e-3]).holds("faster-than-flash-attention-3"), None, "no cell of 16 heads");
}

#[test]
fn a_pass_without_a_time_says_why() {
    let forward = |column: Value| ended_as(json!({"forward": column}));
    let columns = json!({"columns": {
        "naive": {"predicted_bytes": {"forward": 64u64 << 30},
            "passes": {"forward": {"kind": "out_of_memory", "requested_bytes": null, "message": "full"}}},
        "tiled": forward(json!({"kind": "not_run", "reason": "on the CPU only"})),
        "flash": forward(json!({"kind": "failed", "error": "off by 3 of the norm"})),
        "sdpa_cudnn": forward(timed(&[2e-3])),
    }});
    let answer = ended(&MadeUp::gpu("x").measured("grid", &cell(1024), &columns).records());
    let table = answer.tables()["times-bfloat16-forward"].markdown();
    assert!(table.contains("| 64 | 1,024 | OOM (64 GiB) | wrong | 2.000 | cuDNN | – | – |"), "{table}");
    let quoted = answer.quoted();
    assert_eq!(quoted["not_run"], json!(["tiled in bfloat16 (on the CPU only)"]));
    assert_eq!(quoted["failed"], json!(["ours in bfloat16 at $d = 64$, $T = 1,024$: off by 3 of the norm"]));
    assert_eq!(quoted["oom"], json!(["plain, forward, bfloat16, $d = 64$, $T = 1,024$"]));
    assert_eq!(CLAIMS.map(|id| answer.holds(id)), [None, None, None, None, Some(true)], "nothing of ours was timed");
}

#[test]
fn a_cell_without_a_row_is_named() {
    let made_up = MadeUp::gpu("x").failed("grid", &cell(128)).out_of_memory("long", &cell(65536));
    let answer = ended(&made_up.not_run("leaderboard", &board()).records());
    let missing = answer.quoted()["missing"].as_array().unwrap();
    assert_eq!(missing[0], "bfloat16, $d = 64$, $T = 128$ (the worker died)");
    assert_eq!(missing.len(), 2);
    assert_eq!(answer.quoted()["board"]["why"], "it needs 6 GPUs, and has 2");
    assert!(answer.quoted()["grid"].is_null() && answer.tables().is_empty() && answer.claims().is_empty());
    assert!(format!("{:#}", super::answer(&Records::default(), Audience::Ours).unwrap_err()).contains("cs336 measure"));
}

#[test]
fn other_conditions_stand_beside_their_cell_of_the_same_machine() {
    let columns = |ours: f64| row(&[("flash", &[ours])]);
    let graph = params("bfloat16", 64, 1024, 1, "graph");
    let made_up = || MadeUp::gpu("x").measured("grid", &cell(1024), &columns(2e-3));
    let same = ended(&made_up().measured("graph", &graph, &columns(1e-3)).records());
    let table = same.tables()["conditions"].markdown();
    assert!(table.contains("| bfloat16 | 1,024 | backward | cold | graph | 1.000 | 0.50 |"), "{table}");
    let other = made_up().run("b", Some("NVIDIA H100")).measured("graph", &graph, &columns(1e-3));
    let table = ended(&other.records()).tables()["conditions"].markdown();
    assert!(table.contains("| bfloat16 | 1,024 | backward | cold | graph | 1.000 | – |"), "{table}");
}

#[test]
fn the_leaderboard_has_a_row_for_each_implementation() {
    let summed = |column: Value| json!({"passes": {"summed": column}});
    let columns = json!({"columns": {
        "naive": summed(json!({"kind": "out_of_memory", "requested_bytes": null, "message": "full"})),
        "tiled": summed(json!({"kind": "not_run", "reason": "on the CPU only"})),
        "flash": summed(timed(&[1e-3, 1e-3, 4e-3])),
    }});
    let answer = ended(&MadeUp::gpu("x").measured("leaderboard", &board(), &columns).records());
    let table = answer.tables()["leaderboard"].markdown();
    assert!(table.contains("| plain | OOM |  |") && table.contains("| tiled | not run |  |"), "{table}");
    assert!(table.contains("| ours | 2.000 | 1.000 | 1.000 | 3.940 | 3 | 1 |"), "{table}");
}

#[test]
fn a_cpu_has_its_grid_beside_a_gpus_and_alone() {
    let small = params("float32", 64, 128, 1, "eager");
    let cpu = || MadeUp::cpu("x").measured("grid", &small, &row(&[("naive", &[1e-3]), ("tiled", &[2e-3])]));
    let alone = ended(&cpu().records());
    assert_eq!(alone.quoted()["plain"]["ratios"]["low"]["value"], 0.5);
    assert!(!alone.tables().contains_key("cpu-times") && alone.holds("no-cell-slower").is_none());
    let gpu = MadeUp::gpu("x").measured("grid", &cell(1024), &row(&[("flash", &[1e-3])])).set();
    let both = ended(&Records { cpu: Some(cpu().set()), gpu: Some(gpu), ..Records::default() });
    assert!(both.tables()["cpu-times"].markdown().contains("here the tiled version"));
}
