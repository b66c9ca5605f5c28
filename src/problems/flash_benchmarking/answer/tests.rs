//! The answer on made-up cells: both regimes, each claim both ways, unstable turns, and cells that ended in every way.

use serde_json::{Value, json};

use super::*;
use crate::harness::answer::made_up::{MadeUp, printed, seconds};

/// One implementation's samples of every pass, in seconds.
pub type Times<'a> = (&'a str, &'a [f64]);

pub fn params(dtype: &str, d: i64, seq: i64, batch: i64, launch: &str) -> Value {
    json!({"measure": "cell", "dtype": dtype, "d_model": d, "seq": seq, "batch": batch, "cache": "cold", "launch": launch,
        "rounds": 2, "warmup_ms": 5.0, "rep_ms": 10.0, "most_repeats": 3})
}

fn cell(seq: i64) -> Value {
    params("bfloat16", 64, seq, 1, "eager")
}

fn board() -> Value {
    json!({"measure": "leaderboard", "dtype": "bfloat16", "n_heads": 16, "d_head": 64, "seq": 16384,
        "warmup_ms": 1000.0, "rep_ms": 10000.0})
}

pub fn timed(samples: &[f64]) -> Value {
    let mut timing = seconds(samples);
    timing["work"] = json!({"flops": 1e9, "bytes": 1.0, "precision": "bfloat16"});
    json!({"kind": "measured", "row": timing})
}

pub fn ended_as(passes: Value) -> Value {
    json!({"errors": {"o": 1e-3, "dq": 2e-3, "dk": 1e-3, "dv": 1e-3}, "verified_seq": 1024, "passes": passes})
}

fn entry(samples: &[f64]) -> Value {
    ended_as(json!({"forward": timed(samples), "backward": timed(samples), "both": timed(samples)}))
}

pub fn row(columns: &[Times]) -> Value {
    let columns: serde_json::Map<_, _> =
        columns.iter().map(|(name, samples)| (name.to_string(), entry(samples))).collect();
    json!({"columns": columns})
}

pub fn ended(records: &Records) -> Answer {
    answer(records, Audience::Ours).unwrap()
}

/// A record of one cell where plain attention takes 4 ms and cuDNN 2 ms, ours as given.
fn of_ours(samples: &[f64]) -> Answer {
    let columns: [Times; 3] = [("naive", &[4e-3, 4e-3]), ("flash", samples), ("sdpa_cudnn", &[2e-3, 2e-3])];
    ended(&MadeUp::gpu("x").measured("grid", &cell(1024), &row(&columns)).records())
}

const CLAIMS: [&str; 2] = ["faster-than-plain-attention", "no-pass-slower-than-pytorch"];

pub fn value(answer: &Answer, path: &str) -> f64 {
    answer.quoted().pointer(path).unwrap_or_else(|| panic!("no {path}"))["value"].as_f64().unwrap()
}

#[test]
fn a_claim_holds_only_if_every_turn_does() {
    for (ours, held) in [
        ([1e-3, 1e-3], [true, true]),
        ([3e-3, 3e-3], [true, false]),
        ([5e-3, 5e-3], [false, false]),
        // One turn of two is slower than plain attention; the other is faster than cuDNN.
        ([1e-3, 5e-3], [false, true]),
        // A tie is neither faster nor slower.
        ([2e-3, 2e-3], [true, true]),
        ([4e-3, 4e-3], [false, false]),
    ] {
        let answer = of_ours(&ours);
        assert_eq!(CLAIMS.map(|id| answer.holds(id)), held.map(Some), "{ours:?}");
    }
    let slow = of_ours(&[2.5e-3, 2.5e-3]);
    assert_eq!(printed(&slow)["passes"]["slower"][1], "bfloat16, backward, $d = 64$, $T = 1,024$ (0.80)");
    assert_eq!(value(&slow, "/wins/least"), 1.6);
}

#[test]
fn turns_are_paired_where_each_round_had_as_many_calls() {
    // Three calls a round, or one: 4 / 1 and 8 / 2. Four calls in two rounds cannot be divided: 4 / 2 to 8 / 1.
    let [one, two, four, eight] = [1e-3, 2e-3, 4e-3, 8e-3];
    for (plain, ours, expected) in [
        (vec![four, four, four, eight, eight, eight], vec![one, two], 4.0),
        (vec![four, eight], vec![one, one, one, two, two, two], 4.0),
        (vec![four, four, eight, eight], vec![one, two], 2.0),
    ] {
        let columns: [Times; 2] = [("naive", &plain), ("flash", &ours)];
        let answer = ended(&MadeUp::gpu("x").measured("grid", &cell(1024), &row(&columns)).records());
        assert!((value(&answer, "/wins/least") - expected).abs() < 1e-12, "{plain:?} {ours:?}");
    }
}

#[test]
fn an_unstable_time_is_marked_and_the_least_of_a_row_is_bold() {
    let table = |answer: &Answer| answer.tables()["full-times-bfloat16"].markdown();
    let stable = table(&of_ours(&[1e-3, 1.05e-3]));
    assert!(stable.contains("| forward, d = 64 | 1,024 | 4.00 | **1.02** | 2.00 |"), "{stable}");
    let unstable = table(&of_ours(&[1e-3, 1.06e-3]));
    assert!(unstable.contains("| 4.00 | **1.03** † | 2.00 |"), "{unstable}");
    let tie = table(&of_ours(&[1.9999e-3, 2e-3]));
    assert!(tie.contains("| 4.00 | **2.00** | **2.00** |"), "they print alike: {tie}");
    let slow = of_ours(&[3e-3, 4e-3]);
    assert!(table(&slow).contains("| 4.00 | 3.50 † | **2.00** |"), "{}", table(&slow));
    let answered = slow.tables()["answer"].markdown();
    assert!(answered.contains("| 64 | 1,024 | 4.00 | 3.50 † | 4.00 | 3.50 † | 4.00 | 3.50 † |"), "{answered}");
}

#[test]
fn short_graphs_and_long_cells_are_two_regimes() {
    let made_up = |graph: &str| {
        ["bfloat16", "float32"].iter().fold(MadeUp::gpu("x"), |made_up, dtype| {
            let columns = |plain: f64, ours: f64| {
                row(&[("naive", &[plain; 2]), ("flash", &[ours; 2]), ("sdpa_cudnn", &[plain; 2])])
            };
            made_up
                .measured("grid", &params(dtype, 64, 1024, 1, "eager"), &columns(8e-3, 1e-3))
                .measured("graph", &params(dtype, 64, 1024, 1, graph), &columns(2e-3, 1e-3))
                .measured("graph", &params(dtype, 64, 4096, 1, graph), &columns(7e-3, 1e-3))
                .measured("long", &params(dtype, 64, 16_384, 1, "eager"), &columns(20e-3, 1e-3))
                .measured("long", &params(dtype, 128, 65_536, 1, "eager"), &columns(10e-3, 1e-3))
        })
    };
    let answer = ended(&made_up("graph").records());
    let of = |path: &str| ["low", "high"].map(|end| value(&answer, &format!("/speed/{path}/{end}")).round());
    assert_eq!(of("short/bf16/plain"), [2.0, 2.0], "neither launched cells nor longer ones");
    assert_eq!(of("long/f32/plain"), [10.0, 20.0]);
    assert_eq!(of("launched"), [4.0, 4.0]);
    let regimes = answer.tables()["full-regimes"].markdown();
    assert!(regimes.contains("| as graphs, float32 | backward | 2.00 | 2.00 | 2.00 | 2.00 |"), "{regimes}");
    let without = ended(&MadeUp::gpu("x").measured("long", &cell(16_384), &row(&[("flash", &[1e-3])])).records());
    assert!(without.quoted()["speed"].is_null() && !without.tables().contains_key("full-regimes"));
}

#[test]
fn plain_attention_alone_is_not_the_fastest_of_pytorch() {
    let columns = row(&[("naive", &[2e-3, 2e-3]), ("flash", &[1e-3, 1e-3])]);
    let answer = ended(&MadeUp::gpu("x").measured("grid", &cell(1024), &columns).records());
    assert_eq!(CLAIMS.map(|id| answer.holds(id)), [Some(true), None]);
}

#[test]
fn launches_of_another_run_are_not_compared() {
    let columns = row(&[("naive", &[2e-3, 2e-3]), ("flash", &[1e-3, 1e-3]), ("sdpa_cudnn", &[2e-3, 2e-3])]);
    let graph = |dtype| params(dtype, 64, 1024, 1, "graph");
    let made_up = |other: bool| {
        let eager = ["bfloat16", "float32"].iter().fold(MadeUp::gpu("x"), |made_up, dtype| {
            let short = params(dtype, 64, 1024, 1, "eager");
            let long = params(dtype, 64, 16_384, 1, "eager");
            made_up.measured("grid", &short, &columns).measured("long", &long, &columns)
        });
        let run = if other { eager.run("b", Some("NVIDIA H200")) } else { eager };
        let answer = ended(
            &run.measured("graph", &graph("bfloat16"), &columns)
                .measured("graph", &graph("float32"), &columns)
                .records(),
        );
        answer.quoted()["speed"]["launched"].is_null()
    };
    assert_eq!([false, true].map(made_up), [false, true]);
}

#[test]
fn tiles_of_neighbouring_lengths_share_a_row_and_need_a_hopper_gpu() {
    let columns = row(&[("flash", &[1e-3])]);
    let lengths = [128, 1024, 2048, 8192, 16_384, 65_536];
    let answer = ended(
        &lengths
            .iter()
            .fold(MadeUp::gpu("x"), |made_up, seq| made_up.measured("grid", &cell(*seq), &columns))
            .records(),
    );
    let table = answer.tables()["full-tiles"].markdown();
    for line in [
        "| bfloat16, d = 64 | 128 to 1,024 | 64 × 128 | 64 × 64 | 128 × 32 |",
        "| bfloat16, d = 64 | 2,048 to 8,192 | 64 × 128 | 128 × 128 | with dK and dV |",
        "| bfloat16, d = 64 | 16,384 to 65,536 | 192 × 128 | 128 × 128 | with dK and dV |",
    ] {
        assert!(table.contains(line), "{table}");
    }
    let example = json!({"d": 64, "short": [64, 128], "until": "8,192", "long": [192, 128]});
    assert_eq!(answer.quoted()["tiles"], example);
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
    let table = answer.tables()["full-times-bfloat16"].markdown();
    assert!(table.contains("| forward, d = 64 | 1,024 | OOM (64 GiB) | wrong | **2.00** |"), "{table}");
    let quoted = answer.quoted();
    let endings = [
        "Not run on this machine: tiled in bfloat16 (on the CPU only).",
        "Refused before timing: ours in bfloat16 at $d = 64$, $T = 1,024$: off by 3 of the norm.",
        "Out of memory: plain, forward, bfloat16, $d = 64$, $T = 1,024$.",
    ];
    assert_eq!(quoted["endings"], json!(endings));
    assert!(quoted["wins"].is_null() && answer.claims().is_empty(), "nothing of ours was timed");
}

#[test]
fn a_cell_without_a_row_is_named() {
    let made_up = MadeUp::gpu("x").failed("grid", &cell(128)).out_of_memory("long", &cell(65536));
    let answer = ended(&made_up.not_run("leaderboard", &board()).records());
    let missing = answer.quoted()["endings"][0].as_str().unwrap();
    assert!(
        missing.starts_with("Cells without any time: bfloat16, $d = 64$, $T = 128$ (the worker died); "),
        "{missing}"
    );
    assert_eq!(answer.quoted()["board"]["why"], "it needs 6 GPUs, and has 2");
    assert!(answer.quoted()["grid"].is_null() && answer.tables().is_empty() && answer.claims().is_empty());
    assert!(format!("{:#}", super::answer(&Records::default(), Audience::Ours).unwrap_err()).contains("cs336 measure"));
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
    assert!(table.contains("| plain | OOM |  |") && !table.contains("tiled"), "{table}");
    assert!(table.contains("| ours | 2.00 | 1.00 | 1.00 | 3 | 1 |"), "{table}");
}

#[test]
fn a_cpu_has_a_table_of_its_grid_and_nothing_else() {
    let small = params("float32", 64, 128, 1, "eager");
    let cpu = || MadeUp::cpu("x").measured("grid", &small, &row(&[("naive", &[1e-3]), ("tiled", &[2e-3])]));
    let alone = ended(&cpu().records());
    assert_eq!(alone.tables().keys().collect::<Vec<_>>(), ["cpu-times"]);
    assert!(alone.claims().is_empty() && alone.figures().is_empty());
    let gpu = MadeUp::gpu("x").measured("grid", &cell(1024), &row(&[("flash", &[1e-3])])).set();
    let both = ended(&Records { cpu: Some(cpu().set()), gpu: Some(gpu), ..Records::default() });
    let table = both.tables()["cpu-times"].markdown();
    assert!(table.contains("| forward and backward, d = 64 | 128 | **1.00** | 2.00 |"), "{table}");
    assert!(table.contains("\"tiled\" is ours"), "{table}");
}
