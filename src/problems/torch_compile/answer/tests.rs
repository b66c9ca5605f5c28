//! The answer on made-up passes, steps and updates: each number and claim, and what was not measured.

use serde_json::{Value, json};

use super::*;
use crate::harness::answer::made_up::{MadeUp, printed, seconds};

fn software() -> Value {
    json!({"protocol": 1, "python": "3.12", "torch": "2.11", "triton": null, "device": "cpu", "threads": 2, "tf32": false})
}

/// A column whose two passes took these times, or one that was not run.
fn column(passes: [&str; 2], times: &[f64]) -> Value {
    match times {
        [] => json!({"kind": "not_run", "reason": "needs a_compiler, has none"}),
        times => json!({"kind": "measured", "row": {passes[0]: seconds(times), passes[1]: seconds(times)}}),
    }
}

fn compile(graphs: u64) -> Value {
    json!({"functions": 2, "graphs": graphs, "graph_breaks": 0, "cache_hits": 0,
        "first_call": {"forward": seconds(&[1.0]), "backward": seconds(&[0.5])}})
}

fn cell(seq: i64, d: i64) -> Value {
    json!({"measure": "attention", "batch": 8, "d_model": d, "seq": seq, "rounds": 2, "warmup": 1, "iterations": 3})
}

/// Rust eager, Python eager, compiled, captured; zero was not run.
fn passes(times: [f64; 4]) -> Value {
    let columns = times.map(|t| column(["forward", "backward"], &vec![t; usize::from(t > 0.0)]));
    let [rust, python, compiled, captured] = columns;
    json!({"rust_eager": rust, "python_eager": python, "python_compiled": compiled, "rust_captured": captured,
        "errors": {"python_eager": {"o": 1e-7, "dq": 3e-7, "dk": 0.0, "dv": 0.0}},
        "compile": (times[2] > 0.0).then(|| compile(2)), "software": software()})
}

fn model(size: &str, dtype: &str) -> Value {
    json!({"measure": "transformer", "size": size, "context_length": 64, "batch_size": 4, "dtype": dtype, "rounds": 2,
        "warmup": 1, "iterations": 3})
}

/// Rust eager, Python eager, compiled, captured, Rust eager again; zero was not run.
fn steps(times: [f64; 5]) -> Value {
    let columns = times.map(|t| column(["forward", "step"], &vec![t; if t > 0.0 { 2 } else { 0 }]));
    let [rust, python, compiled, captured, again] = columns;
    let errors = json!({"loss": 0.0, "gradients": 2e-6, "worst_gradient": 0.0, "worst_gradient_name": "x"});
    json!({"rust_eager": rust, "python_eager": python, "python_compiled": compiled, "rust_captured": captured,
        "rust_eager_again": again, "errors": {"python_eager": errors}, "captured_loss_error": null,
        "compile": null, "software": software()})
}

fn update(size: &str) -> Value {
    json!({"measure": "adamw", "size": size, "rounds": 2, "warmup": 1, "iterations": 3, "steps_in_a_row": 4})
}

/// A model of 100 parameters, whose 2,800 bytes a copy moves in one second.
fn updates(ours: f64, fused: f64) -> Value {
    let column = |t: f64| json!({"kind": "measured", "row": {"step": seconds(&[t])}});
    let out = json!({"kind": "out_of_memory", "requested_bytes": null, "message": "full"});
    let work = json!({"flops": 0.0, "bytes": 2800.0, "precision": "float32"});
    json!({"rust": column(ours), "python_fused": column(fused), "python_foreach": out,
        "copy": {"unit": "s", "samples": [1.0], "work": work}, "parameters": 100, "tensors": 1, "errors": {},
        "software": software()})
}

fn with_alone(records: Records, alone: Records) -> Records {
    Records { others: [(ALONE.to_string(), alone)].into(), ..records }
}

fn answered(made_up: MadeUp) -> Answer {
    answer(&with_alone(made_up.records(), Records::default()), Audience::Ours).unwrap()
}

fn gpu() -> MadeUp {
    MadeUp::gpu("torch_compile")
}

#[test]
fn attention_gains_are_of_the_lengths_at_which_every_pass_is_stable() {
    let stable = |times| {
        gpu().measured("a", &cell(4096, 64), &passes([4.0, 4.0, 2.0, 3.9])).measured(
            "a",
            &cell(256, 64),
            &passes(times),
        )
    };
    let all = answered(stable([1.0, 1.0, 0.8, 0.5]));
    let attention = printed(&all);
    assert_eq!((&attention["gain"], &attention["from"]), (&json!("1.25 to 2.00"), &json!("256")));
    assert_eq!(attention["eager"], "1.00 for attention");
    assert_eq!(attention["turns"], "2 turns of 3 passes, each after 1 untimed");
    assert_eq!(attention["errors"], "$3.0 \\times 10^{-7}$ in attention");
    assert_eq!(all.holds("attention-gains"), Some(true));
    assert_eq!(printed(&all)["software"], "Python 3.12, PyTorch 2.11, Triton none.");
    let table = all.tables()["attention"].markdown();
    assert!(table.contains("| backward | 256 | 1,000 / 800 |\n"), "{table}");
    assert!(all.tables()["ours-attention"].markdown().contains("| 64 | 256 | 1,000 | 500 | 1,000 | 500 |"));
    assert_eq!(answered(stable([1.0, 1.0, 1.0, 1.0])).holds("attention-gains"), Some(false), "a tie");
}

#[test]
fn unstable_passes_are_ranges_and_no_sentence_rests_on_them() {
    let mut short = passes([1.0; 4]);
    short["python_compiled"] = column(["forward", "backward"], &[1.0, 0.1]);
    let of = |made_up: MadeUp| answered(made_up.measured("a", &cell(256, 64), &short));
    let some = of(gpu().measured("a", &cell(4096, 64), &passes([4.0, 4.0, 2.0, 3.9])));
    let attention = printed(&some);
    assert_eq!((&attention["gain"], &attention["from"]), (&json!("2.00"), &json!("4,096")));
    let table = some.tables()["attention"].markdown();
    assert!(table.contains("| forward | 256 | 1,000 / 100–1,000 |"), "{table}");
    let none = of(gpu());
    assert_eq!((&printed(&none)["gain"], none.holds("attention-gains")), (&Value::Null, None));
}

#[test]
fn a_compiled_pass_that_is_slower_in_every_turn_is_counted_with_its_length() {
    let row = |eager: &[f64], compiled: &[f64]| {
        let mut row = passes([1.0; 4]);
        row["python_eager"] = column(["forward", "backward"], eager);
        row["python_compiled"] = column(["forward", "backward"], compiled);
        row
    };
    let of = |compiled: &[f64]| {
        let made_up = gpu().measured("a", &cell(256, 16), &row(&[1.0, 2.0], &[2.1, 3.0]));
        let made_up = made_up.measured("a", &cell(256, 64), &row(&[1.0, 2.0], compiled));
        // What did not run counts in neither number.
        let made_up = made_up.out_of_memory("a", &cell(256, 128));
        printed(&answered(made_up.measured("a", &cell(4096, 64), &passes([4.0, 4.0, 2.0, 3.9]))))["slower"].clone()
    };
    assert_eq!(of(&[1.9, 3.0]), json!({"lengths": "256", "cells": 1, "of": 2}), "the ranges of one overlap");
    assert_eq!(of(&[2.5, 3.0])["cells"], 2);
    let faster = answered(gpu().measured("a", &cell(256, 64), &passes([1.0, 1.0, 0.8, 0.5])));
    assert!(printed(&faster)["slower"].is_null());
}

#[test]
fn a_function_of_two_graphs_is_told() {
    let mut row = passes([1.0; 4]);
    assert_eq!(answered(gpu().measured("a", &cell(256, 16), &row)).holds("one-graph-per-function"), Some(true));
    row["compile"] = compile(3);
    let answer = answered(gpu().measured("a", &cell(256, 16), &row));
    assert_eq!(answer.holds("one-graph-per-function"), Some(false));
    let quoted = printed(&answer);
    assert_eq!((&quoted["first_calls"], &quoted["functions"]), (&json!("1.5 s for attention"), &json!(2)));
}

#[test]
fn model_gains_are_of_stable_passes_and_name_the_models_without() {
    let of = |small: [f64; 5], xl: [f64; 5]| {
        let small = gpu().measured("b", &model("small", "bfloat16"), &steps(small));
        small.measured("b", &model("xl", "float32"), &steps(xl))
    };
    let well = answered(of([2.0, 2.0, 1.6, 1.0, 2.0], [4.0, 4.0, 3.2, 3.75, 4.0]));
    let models = printed(&well);
    assert_eq!((&models["forward"], &models["step"]), (&json!("1.25"), &json!("1.25")));
    assert_eq!(models["dtypes"], "1.25 in float32 and 1.25 in bfloat16");
    assert_eq!(models["eager"], "1.00 for models");
    assert_eq!((&models["unstable"], well.holds("models-gain")), (&Value::Null, Some(true)));
    let errors = "$2.0 \\times 10^{-6}$ in models in float32 and $2.0 \\times 10^{-6}$ in models in bfloat16";
    assert_eq!(models["errors"], errors);
    assert_eq!(models["protocol"], "2 turns of 3 passes, each after 1 untimed (small and xl)");
    let table = well.tables()["models"].markdown();
    assert!(table.contains("| xl | float32 | 4,000 | 3,200 | 1.25 | 4,000 | 3,200 | 1.25 |"), "{table}");
    let ours = well.tables()["ours-models"].markdown();
    assert!(ours.contains("| small | bfloat16 | 2,000 | 2,000 | 1,000 | 2,000 | 2,000 | 1,000 |"), "{ours}");
    let ill = answered(of([2.2, 2.0, 2.5, 2.1, 2.2], [4.0; 5]));
    assert_eq!(ill.holds("models-gain"), Some(false));

    let mut humped = steps([2.0, 2.0, 1.0, 1.0, 2.0]);
    humped["python_eager"] = column(["forward", "step"], &[2.0, 3.0]);
    let one = answered(of([2.0; 5], [4.0; 5]).measured("b", &model("2.7B", "float32"), &humped));
    let expected = json!({"models": "2.7B in float32", "forward": "2.00 to 3.00", "step": "2.00 to 3.00"});
    assert_eq!(printed(&one)["unstable"], expected);
    assert_eq!(
        (&printed(&one)["forward"], &printed(&one)["dtypes"]),
        (&json!("1.00"), &json!("1.00 to 3.00 in float32 and 1.00 in bfloat16"))
    );
    let table = one.tables()["models"].markdown();
    let row = "| 2.7B | float32 | 2,000–3,000 | 1,000 | 2.00 to 3.00 | 2,000–3,000 | 1,000 | 2.00 to 3.00 |";
    assert!(table.contains(row), "{table}");
    assert_eq!(one.holds("models-gain"), Some(false), "the others gain nothing");
}

#[test]
fn a_forward_pass_that_is_stable_alone_is_quoted_beside_its_range() {
    let mut row = steps([1.0; 5]);
    row["rust_eager"] = column(["forward", "step"], &[1.0, 2.0]);
    let beside = |machine: &str, samples: &[f64], dtype: &str| {
        let params = json!({"measure": "timing", "size": "small", "dtype": dtype, "context_length": 64, "batch_size": 4,
            "attention": "naive", "execution": "eager"});
        let alone = MadeUp::gpu(ALONE).run("alone", Some(machine));
        let alone = alone.measured("timing", &params, &json!({"forward": seconds(samples)}));
        let records = gpu().measured("b", &model("small", "bfloat16"), &row).records();
        let answer = answer(&with_alone(records, alone.records()), Audience::Ours).unwrap();
        printed(&answer)["beside"].clone()
    };
    let here = beside("NVIDIA H200", &[0.5], "bfloat16");
    assert_eq!((&here["turns"], &here["alone"]["value"]), (&json!("1,000–2,000"), &json!(0.5)));
    assert_eq!((&here["model"], &here["how"]), (&json!("small in bfloat16"), &json!("alone")));
    assert_eq!(beside("NVIDIA H100", &[0.5], "bfloat16")["how"], "alone and on another machine");
    assert!(beside("NVIDIA H200", &[0.5, 0.8], "bfloat16").is_null(), "unstable alone too");
    assert!(beside("NVIDIA H200", &[0.5], "float32").is_null(), "another dtype");
}

#[test]
fn sizes_that_were_timed_otherwise_are_named() {
    let mut few = model("xl", "float32");
    few["iterations"] = json!(1);
    let row = steps([1.0; 5]);
    let made_up = gpu().measured("b", &model("small", "bfloat16"), &row).measured("c", &few, &row);
    let protocol = "2 turns of 3 passes, each after 1 untimed (small); 2 turns of 1 passes, each after 1 untimed (xl)";
    assert_eq!(printed(&answered(made_up))["protocol"], protocol);
}

#[test]
fn the_optimizer_is_told_by_its_share_of_a_copy() {
    let [small, xl] = [[1.0, 1.25], [1.25, 2.0]].map(|[ours, fused]| updates(ours, fused));
    let answer = answered(gpu().measured("c", &update("small"), &small).measured("c", &update("xl"), &xl));
    let adamw = &printed(&answer)["adamw"];
    assert_eq!((&adamw["ours"], &adamw["fused"]), (&json!("80% to 100%"), &json!("50% to 80%")));
    assert_eq!(printed(&answer)["bytes"], 28);
    let table = answer.tables()["updates"].markdown();
    assert!(table.contains("| small | 0.00 | 1,000 | 100% | 1,250 | 80% | OOM | 0 |"), "{table}");
}

#[test]
fn a_cpu_without_a_compiler_claims_nothing() {
    let made_up = || {
        MadeUp::cpu("torch_compile")
            .measured("a", &cell(256, 64), &passes([1.0, 1.0, 0.0, 0.0]))
            .measured("b", &model("tiny", "float32"), &steps([1.0, 1.0, 0.0, 0.0, 0.0]))
            .measured("c", &update("tiny"), &updates(1.0, 1.0))
    };
    let cpu = answered(made_up());
    assert!(cpu.claims().is_empty());
    assert_eq!(printed(&cpu)["why"], " (needs a\\_compiler, has none)");
    assert!(cpu.tables()["attention"].markdown().contains("| forward | 256 | 1,000 / not run |"));
    let appended = Records { cpu: Some(made_up().set()), ..gpu().failed("a", &cell(256, 64)).records() };
    let tables = answer(&with_alone(appended, Records::default()), Audience::Ours).unwrap();
    let cpu_tables = ["cpu-attention", "cpu-models"];
    assert_eq!(tables.tables().keys().filter(|id| id.starts_with("cpu")).collect::<Vec<_>>(), cpu_tables);
}

#[test]
fn cases_that_were_not_measured_show_how_they_ended() {
    let made_up =
        gpu().failed("a", &cell(256, 64)).not_run("b", &model("xl", "float32")).out_of_memory("c", &update("xl"));
    let none = answered(made_up);
    assert!(none.claims().is_empty());
    assert_eq!((&printed(&none)["software"], &printed(&none)["adamw"]), (&json!(""), &Value::Null));
    for (id, row) in [
        ("attention", "| forward | 256 | failed / failed |"),
        ("models", "| xl | float32 | not run | not run | – | not run | not run | – |"),
        ("updates", "| xl | – | OOM | – | OOM | – | OOM | – |"),
    ] {
        let table = none.tables()[id].markdown();
        assert!(table.contains(row), "{table}");
    }
    let error = format!("{:#}", answer(&Records::default(), Audience::Ours).unwrap_err());
    assert!(error.contains("cs336 measure"), "{error}");
}
