//! The answer on made-up profiles: every claim both ways, the numbers of the sentences, and what is missing.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::measure::Collector;
use super::super::summary::{Attention, Counted, MatmulKernel, Matmuls, Rest};
use super::*;
use crate::bench::kernels::{Tally, Units};
use crate::harness::answer::made_up::{MadeUp, printed, seconds};
use crate::harness::samples::Samples;

/// Seconds of products, elementwise work and copies.
fn work([products, elementwise, copies]: [f64; 3]) -> RangeWork {
    let kernel = |name: &str, class, seconds| Kernel { name: name.into(), class, count: 1200, seconds };
    let mut kernels = vec![
        kernel("gemm", Class::Matmul, products),
        kernel("mul", Class::Elementwise, elementwise),
        kernel("", Class::Copy, copies),
    ];
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let seconds = products + elementwise + copies;
    let classes: BTreeMap<Class, Tally> =
        kernels.iter().map(|k| (k.class, Tally { count: k.count, seconds: k.seconds })).collect();
    let rest = Rest::default();
    RangeWork { host_s: seconds, seconds, span_s: seconds, busy_s: seconds, count: 3600, classes, kernels, rest }
}

/// An inference and a forward pass of the same work, a backward pass, and an optimizer without products.
fn passes(forward: [f64; 3], backward: [f64; 3]) -> Passes<RangeWork> {
    Passes {
        inference: RangeWork { busy_s: 1.0, span_s: 1.0, ..work(forward) },
        forward: Some(work(forward)),
        backward: Some(work(backward)),
        optimizer: Some(work([0.0, 0.25, 0.0])),
    }
}

fn samples(time: f64) -> Samples {
    serde_json::from_value(seconds(&[time])).unwrap()
}

const FORWARD: [f64; 3] = [0.8, 0.15, 0.05];
/// In place of the backward pass of [`made`]: a step with a higher share of products than inference.
const RISES: [f64; 3] = [1.9, 0.1, 0.0];

/// A case and its row after `change`: 12 layers, so 109 products in a forward pass.
fn made(size: &str, context: i64, change: impl Fn(&mut Row)) -> (Value, Row) {
    let inference = samples(1.0);
    let times = || Passes { inference: inference.clone(), forward: None, backward: None, optimizer: None };
    let mut row = Row {
        collector: Collector::Kineto,
        counted: Counted::Kernels,
        host: times(),
        profiled_before: true,
        kernels: times(),
        passes: passes(FORWARD, [1.4, 0.4, 0.2]),
        top_of_both: Some(Kernel { name: "gemm".into(), class: Class::Matmul, count: 1200, seconds: 1.0 }),
        attention: Attention {
            scores: work([0.1, 0.12, 0.0]),
            softmax: work([0.0, 0.05, 0.0]),
            final_matmul: work([0.0; 3]),
            products: Tally { count: 2, seconds: 0.1 },
        },
        matmuls: Matmuls { operators: 109, kernels: 109, helpers: 0 },
        matmul_kernels: vec![MatmulKernel { name: "gemm".into(), units: Units::CudaCores, count: 9 }],
        outside: Tally::default(),
        launches_unseen: 0,
        trace: None,
    };
    change(&mut row);
    (json!({"size": size, "context_length": context, "optimizer": "fused"}), row)
}

fn small(context: i64, change: impl Fn(&mut Row)) -> (Value, Row) {
    made("small", context, change)
}

fn measured(cases: &[(Value, Row)]) -> MadeUp {
    let made_up = MadeUp::gpu("nsys_profile");
    cases.iter().fold(made_up, |made_up, (params, row)| made_up.measured(GRID, params, row))
}

fn answered(cases: &[(Value, Row)]) -> Answer {
    answer(&measured(cases).records(), Audience::Ours).unwrap()
}

#[test]
fn the_profile_is_compared_with_the_range_of_our_timer() {
    let well = answered(&[small(512, |_| {})]);
    assert_eq!((&well.quoted()["fit"], well.holds("no-tf32")), (&json!("1 of 1"), Some(true)));
    assert_eq!(well.holds("off-where-the-gpu-waits"), None, "nothing is off");
    assert_eq!((&well.quoted()["agreeing"], &well.quoted()["differing"]), (&json!("1 of 1"), &json!("")));
    let tensor_cores = answered(&[small(512, |row| row.matmul_kernels[0].units = Units::TensorCores)]);
    assert_eq!(tensor_cores.holds("no-tf32"), Some(false));
    for (busy, expected) in [(0.3, true), (0.95, false)] {
        let slow = small(128, |row| {
            row.host.inference = serde_json::from_value(seconds(&[0.3, 0.4, 0.5])).unwrap();
            row.passes.inference.busy_s = busy;
        });
        let off = answered(&[small(512, |_| {}), slow]);
        assert_eq!(off.holds("off-where-the-gpu-waits"), Some(expected));
        let quoted = off.quoted();
        assert_eq!((&quoted["agreeing"], &quoted["differing"]), (&json!("1 of 2"), &json!("1 (small at 128)")));
        assert_eq!(quoted["off"]["value"], 1.0, "from the slowest of an unstable sample");
        let table = off.tables()["times"].markdown();
        assert!(table.contains("| small | 1,000 (300–500) | 1,000 (1,000) |"), "{table}");
    }
}

#[test]
fn the_kernels_are_named_with_the_matmuls_that_they_compute() {
    let kernel = |name: &str, count, seconds| Kernel { name: name.into(), class: Class::Matmul, count, seconds };
    // 12 layers: W1, W3 and the scores; q, k, v, o, W2 and the head; PV.
    let kernels = || vec![kernel("tn_64", 36, 0.5), kernel("tn_128", 61, 0.3), kernel("nn", 12, 0.1)];
    let known = |last: u64| {
        small(512, |row| {
            row.passes.inference.kernels = kernels();
            row.attention.scores.kernels = vec![kernel("tn_64", 12, 0.1)];
            row.attention.final_matmul.kernels = vec![kernel("nn", last, 0.1)];
        })
    };
    let answer = answered(&[known(12)]);
    assert_eq!(answer.quoted()["top_computes"], "$W_1$, $W_3$ and $QK^\\top$ (12 each)");
    let table = answer.tables()["kernels"].markdown();
    let others = "| `tn_128` | $W_q$, $W_k$, $W_v$, $W_o$ and $W_2$ (12 each), and the output head (1) | 61 |";
    assert!(table.contains(others) && table.contains("| `nn` | $PV$ (12) | 12 |"), "{table}");
    assert_eq!(answered(&[known(11)]).quoted()["top_computes"], "", "a matmul of attention is missing");
}

#[test]
fn sentences_quote_xl_at_context_512_where_it_was_measured() {
    let xl = made("xl", 512, |row| row.matmuls = Matmuls { operators: 433, kernels: 435, helpers: 0 });
    let wide = made("2.7B", 1024, |row| row.matmuls = Matmuls { operators: 289, kernels: 289, helpers: 0 });
    let (mut plain, row) = made("xl", 512, |row| row.passes = passes(FORWARD, [1.0, 1.0, 0.0]));
    plain["optimizer"] = "plain".into();
    let made_up = measured(&[xl, small(512, |_| {}), wide]).measured(PLAIN, &plain, &row);
    let answer = answer(&made_up.records(), Audience::Ours).unwrap();
    let quoted = printed(&answer);
    for (field, expected) in [
        ("example", json!("xl at context 512")),
        ("slow", json!("1,000 ms (2.7B at context 1,024)")),
        ("run", json!("2 of 3")),
        ("split", json!(2)),
        ("top", json!("`gemm`")),
        ("top_count", json!("1,200")),
        ("led", json!("3 of 3")),
        ("shares", json!("elementwise kernels (15.0%), copies (5.0%), softmax (0.0%) and reductions (0.0%)")),
        ("top_computes", json!("")),
        ("other_heads", json!(" (0.0156 for 2.7B, with heads of width 80)")),
        ("fell", json!("3 of 3")),
        ("both", json!("it still leads, with 1,200 launches")),
    ] {
        assert_eq!(quoted[field], expected, "{field}");
    }
    let value = |field: &str| quoted[field]["value"].as_f64().unwrap();
    let expected = [("inference", 0.8), ("step", 2.2 / 3.25), ("adamw", 0.25 / 3.25), ("ratio", 0.5), ("masking", 0.8)];
    for (field, expected) in expected.into_iter().chain([("masked", 0.12), ("softmax", 0.05)]) {
        assert!((value(field) - expected).abs() < 1e-12, "{field}: {}", value(field));
    }
    assert!((quoted["excesses"]["low"]["value"].as_f64().unwrap() - 0.5 / (5.0 / 256.0)).abs() < 1e-9);
    let plain = quoted["plain"].as_str().unwrap();
    assert_eq!(
        plain,
        " With AdamW in 3,600 kernels instead of 3,600, matmuls take 55.4% of the step of xl at context 512."
    );
    assert_eq!(answer.tables()["shares"].rows.len(), 3, "the plain case is in no table");
}

#[test]
fn a_share_that_rises_is_explained_where_all_that_rise_are_alike() {
    let rises = |context| small(context, |row| row.passes = passes(FORWARD, RISES));
    // 1.5 of 3 seconds are products in the step, too.
    let stays = small(512, |row| row.passes = passes([0.5, 0.5, 0.0], [1.0, 0.75, 0.0]));
    let rose = |cases: &[_]| ["rose", "fell"].map(|field| answered(cases).quoted()[field].clone());
    let one = ["1 (small at 512)", "1 of 2"];
    assert_eq!(rose(&[small(128, |_| {}), rises(512)]), one.map(Value::from));
    assert_eq!(rose(&[rises(512), rises(128)]), [json!(""), json!("0 of 2")]);
    assert_eq!(rose(&[stays]), [json!(""), json!("0 of 1")], "a tie neither rises nor falls");
}

#[test]
fn cases_that_were_not_measured_keep_their_lines() {
    let params = |context| small(context, |_| {}).0;
    let made_up = measured(&[small(512, |_| {})]).out_of_memory(GRID, &params(1024));
    let made_up = made_up.failed(GRID, &params(128)).not_run(GRID, &params(256));
    let some = answer(&made_up.records(), Audience::Ours).unwrap();
    assert_eq!(some.quoted()["fit"], "3 of 4");
    let times = some.tables()["times"].markdown();
    assert!(times.contains("| small | failed | not run | 1,000 (1,000) | OOM |"), "{times}");
    for id in ["top", "shares", "attention"] {
        let words: Vec<&Cell> = some.tables()[id].rows.iter().map(|row| &row[2]).collect();
        assert_eq!(words[1..], [&Cell::from("OOM"), &Cell::from("failed"), &Cell::from("not run")], "{id}");
    }
    let none = answer(&MadeUp::cpu("nsys_profile").failed(GRID, &params(64)).records(), Audience::Ours).unwrap();
    assert_eq!(none.quoted()["measured"], false);
    assert!(none.claims().is_empty() && none.figures().is_empty());
    assert_eq!(none.tables().keys().collect::<Vec<_>>(), ["times"]);
    let error = answer(&Records::default(), Audience::Ours).unwrap_err().to_string();
    assert!(error.contains("cs336 measure"), "{error}");
}

#[test]
fn without_a_training_step_or_known_products_their_parts_say_so() {
    let without = || small(512, |row| row.passes.backward = None);
    let forward_only = answered(&[without()]);
    assert_eq!(forward_only.quoted()["trained"], false);
    assert!(forward_only.tables()["shares"].markdown().contains("| small | 512 | 1,000.0 | 0% | 80.0% | – |"));
    let unknown = answered(&[small(512, |row| row.attention.products.seconds = 0.0)]);
    assert_eq!(unknown.quoted()["compared"], false);
    assert!(!unknown.tables().contains_key("attention"));
    let mixed = answered(&[without(), small(128, |_| {})]);
    assert_eq!(mixed.quoted()["example"], "small at context 128", "the training step is what most parts are about");
}
