//! The answer on made-up profiles: every claim both ways, the numbers of the sentences, and what is missing.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::kernels::Units;
use super::super::measure::Collector;
use super::super::summary::{Attention, Counted, MatmulKernel, Matmuls, Rest, Tally};
use super::*;
use crate::harness::answer::made_up::{MadeUp, seconds};
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
fn claims_follow_the_profiles() {
    let well = answered(&[small(512, |_| {})]);
    assert_eq!(well.holds("all-cases-fit"), Some(true));
    assert_eq!(well.holds("off-where-the-gpu-waits"), None, "nothing is off");
    type Edit = fn(&mut Row);
    let ill: [(&str, Edit); 9] = [
        ("profile-matches-the-clock", |row| row.host.inference = samples(0.5)),
        ("calls-are-9L-plus-1", |row| row.matmuls.operators = 108),
        ("products-are-9L-plus-1", |row| row.matmuls.kernels = 120),
        ("no-tf32", |row| row.matmul_kernels[0].units = Units::TensorCores),
        ("top-is-a-product", |row| row.passes.inference = work([0.4, 0.5, 0.1])),
        ("same-in-both", |row| row.top_of_both.as_mut().unwrap().name = "gemm_nt".into()),
        ("elementwise-leads-the-rest", |row| row.passes.inference = work([0.8, 0.05, 0.15])),
        ("products-lose-share", |row| row.passes = passes(FORWARD, RISES)),
        ("softmax-takes-more-than-its-operations", |row| row.attention.softmax = work([0.0, 0.001, 0.0])),
    ];
    for (id, change) in ill {
        assert_eq!(well.holds(id), Some(true), "{id}");
        assert_eq!(answered(&[small(512, change)]).holds(id), Some(false), "{id}");
    }
    for (busy, expected) in [(0.3, true), (0.95, false)] {
        let slow = small(128, |row| {
            row.host.inference = samples(0.5);
            row.passes.inference.busy_s = busy;
        });
        let off = answered(&[small(512, |_| {}), slow]);
        assert_eq!(off.holds("off-where-the-gpu-waits"), Some(expected));
        let quoted = off.quoted();
        assert_eq!((&quoted["agreeing"], &quoted["differing"]), (&json!("1 of 2"), &json!("1 (small at 128)")));
        assert_eq!(quoted["off"]["value"], 1.0);
    }
}

#[test]
fn sentences_quote_xl_at_context_512_where_it_was_measured() {
    let xl = made("xl", 512, |row| row.matmuls = Matmuls { operators: 433, kernels: 435, helpers: 0 });
    let wide = made("2.7B", 1024, |row| row.matmuls = Matmuls { operators: 289, kernels: 289, helpers: 0 });
    let (mut plain, row) = made("xl", 512, |row| row.passes = passes(FORWARD, [1.0, 1.0, 0.0]));
    plain["optimizer"] = "plain".into();
    let made_up = measured(&[xl, small(512, |_| {}), wide]).measured(PLAIN, &plain, &row);
    let answer = answer(&made_up.records(), Audience::Ours).unwrap();
    let quoted = answer.quoted();
    for (field, expected) in [
        ("example", json!("xl at context 512")),
        ("slow", json!("1,000.0 ms (2.7B at context 1,024)")),
        ("before", json!("3 of 3")),
        ("run", json!(2)),
        ("split", json!(2)),
        ("top", json!("`gemm`")),
        ("top_count", json!("1,200")),
        ("led", json!("3 of 3")),
        ("largest", json!(["`mul` (15.0%, 1,200 times)", "the driver's copies and fills (5.0%, 1,200 times)"])),
        ("other_heads", json!(" (0.016 for 2.7B, whose heads are 80 wide)")),
        ("fell", json!("3 of 3")),
        ("d_head", json!(64)),
    ] {
        assert_eq!(quoted[field], expected, "{field}");
    }
    let value = |field: &str| quoted[field]["value"].as_f64().unwrap();
    let expected = [("inference", 0.8), ("step", 2.2 / 3.25), ("adamw", 0.25 / 3.25), ("ratio", 0.5), ("masking", 0.8)];
    for (field, expected) in expected.into_iter().chain([("masked", 0.12), ("masked_ratio", 2.4)]) {
        assert!((value(field) - expected).abs() < 1e-12, "{field}: {}", value(field));
    }
    assert!((quoted["excesses"]["low"]["value"].as_f64().unwrap() - 0.5 / (5.0 / 256.0)).abs() < 1e-9);
    let plain = quoted["plain"].as_str().unwrap();
    assert!(plain.starts_with(" (55.4% with AdamW") && plain.contains("3,600 kernels instead of 3,600"), "{plain}");
    assert_eq!(answer.tables()["training"].rows.len(), 3, "the plain case is in no table");
}

#[test]
fn a_share_that_rises_is_explained_where_all_that_rise_are_alike() {
    let rises = |context| small(context, |row| row.passes = passes(FORWARD, RISES));
    // 1.5 of 3 seconds are products in the step, too.
    let stays = small(512, |row| row.passes = passes([0.5, 0.5, 0.0], [1.0, 0.75, 0.0]));
    let rose = |cases: &[_]| ["rose", "fell"].map(|field| answered(cases).quoted()[field].clone());
    let one = ["1 (small), all at context 512", "1 of 2"];
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
    assert_eq!(some.holds("all-cases-fit"), Some(false));
    for id in ["times-gpu", "top", "training", "attention"] {
        let words: Vec<&Cell> = some.tables()[id].rows.iter().map(|row| &row[2]).collect();
        assert_eq!(words[1..], [&Cell::from("OOM"), &Cell::from("failed"), &Cell::from("not run")], "{id}");
    }
    let none = answer(&MadeUp::cpu("nsys_profile").failed(GRID, &params(64)).records(), Audience::Ours).unwrap();
    assert_eq!(none.quoted()["measured"], false);
    assert!(none.claims().is_empty() && none.figures().is_empty());
    assert_eq!(none.tables().keys().collect::<Vec<_>>(), ["times-cpu"]);
    let error = answer(&Records::default(), Audience::Ours).unwrap_err().to_string();
    assert!(error.contains("cs336 measure"), "{error}");
}

#[test]
fn without_a_training_step_or_known_products_their_parts_say_so() {
    let without = || small(512, |row| row.passes.backward = None);
    let forward_only = answered(&[without()]);
    assert_eq!((forward_only.quoted()["trained"].clone(), forward_only.holds("same-in-both")), (json!(false), None));
    assert!(!forward_only.tables().contains_key("training") && forward_only.tables().contains_key("top"));
    let unknown = answered(&[small(512, |row| row.attention.products.seconds = 0.0)]);
    assert_eq!(unknown.quoted()["compared"], false);
    assert_eq!(unknown.holds("softmax-takes-more-than-its-operations"), None);
    let mixed = answered(&[without(), small(128, |_| {})]);
    assert_eq!(mixed.quoted()["example"], "small at context 128", "the training step is what most parts are about");
}
