//! The answer on made-up passes, steps and updates: each number and claim, and what was not measured.

use serde_json::{Value, json};

use super::*;
use crate::harness::answer::made_up::{MadeUp, seconds};

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

fn answered(made_up: MadeUp) -> Answer {
    answer(&made_up.records(), Audience::Ours).unwrap()
}

/// The claims that hold.
fn held(answer: &Answer) -> Vec<&str> {
    answer.claims().values().filter(|claim| claim.held).map(|claim| claim.id.as_str()).collect()
}

fn gpu() -> MadeUp {
    MadeUp::gpu("torch_compile")
}

#[test]
fn attention_gains_are_told_by_length() {
    let of = |short: [f64; 4], long: [f64; 4]| {
        answered(gpu().measured("a", &cell(256, 64), &passes(short)).measured("a", &cell(4096, 64), &passes(long)))
    };
    let well = of([1.0, 1.0, 2.0, 0.5], [4.0, 4.0, 2.0, 3.9]);
    assert_eq!((held(&well).len(), well.claims().len()), (5, 5));
    let quoted = well.quoted();
    assert_eq!((&quoted["gain"], &quoted["lengths"]), (&json!("2.00"), &json!("at $T \\ge 4,096$")));
    assert_eq!((&quoted["slower"], &quoted["functions"]), (&json!("2 of 2"), &json!(4)));
    assert_eq!(quoted["captured"], json!({"short": "2.00 times at $T = 256$", "long": "1.03"}));
    assert_eq!((&quoted["slowest"]["value"], &quoted["error"]["value"]), (&json!(1.0), &json!(3e-7)));
    assert_eq!((&quoted["compiling"], &quoted["tolerance"]), (&json!("1.5"), &json!(1e-4)));
    assert_eq!(quoted["software"], "Python 3.12, PyTorch 2.11, Triton none");
    assert!(well.figures().contains_key("attention-gain"));
    let table = well.tables()["attention-forward"].markdown();
    assert!(table.contains("| 64 | 256 | 1,000.000 | 1,000.000 | 2,000.000 | 500.000 |"), "{table}");
    assert!(table.contains("Forward pass of plain attention, in ms: medians of 6 passes a column"), "{table}");
    // Rust is slower, compiling loses at the long length alone, and capturing gains there.
    let ill = of([1.1, 1.0, 0.5, 1.0], [4.0, 4.0, 4.0, 2.0]);
    assert_eq!((held(&ill), ill.claims().len()), (vec!["one-graph-a-function"], 5));
    let decided = &ill.claims()["rust-attention-not-slower"].operands;
    assert_eq!(decided.last().unwrap().value, "the forward pass at T = 256, d = 64", "the first of two that tie");
}

#[test]
fn a_function_of_two_graphs_is_told() {
    let mut row = passes([1.0; 4]);
    row["compile"] = compile(3);
    let answer = answered(gpu().measured("a", &cell(256, 16), &row));
    assert_eq!(answer.holds("one-graph-a-function"), Some(false));
    // All lengths are short ones here, every time is the same, and the figure takes the width that there is.
    assert_eq!(answer.quoted()["lengths"], "at all lengths");
    assert_eq!((&answer.quoted()["slower"], &answer.quoted()["d"]), (&json!("0 of 2"), &json!(16)));
    assert_eq!(answer.holds("compiled-attention-gains"), Some(false), "a tie gains nothing");
}

#[test]
fn model_gains_are_told_with_the_model_that_gains_most() {
    let of = |small: [f64; 5], xl: [f64; 5]| {
        let small = gpu().measured("b", &model("small", "bfloat16"), &steps(small));
        answered(small.measured("b", &model("xl", "float32"), &steps(xl)))
    };
    let well = of([2.0, 2.0, 1.5, 1.0, 2.0], [4.0, 4.0, 3.8, 3.75, 4.0]);
    assert_eq!((held(&well).len(), well.claims().len()), (5, 5));
    let quoted = well.quoted();
    assert_eq!((&quoted["forward"], &quoted["step"]), (&json!("1.05 to 1.33"), &json!("1.05 to 1.33")));
    let graph = &quoted["graph"];
    assert_eq!((&graph["at"], &graph["most"]["value"]), (&json!("small in bfloat16"), &json!(2.0)));
    let times = ["captured", "alone", "beside", "compiled"].map(|key| graph[key]["value"].as_f64().unwrap());
    assert_eq!(times, [1.0, 2.0, 2.0, 1.5]);
    assert_eq!(quoted["covered"], "small in bfloat16, xl in float32");
    let errors = "$2.0 \\times 10^{-6}$ of its norm in float32 and $2.0 \\times 10^{-6}$ of its norm in bfloat16";
    assert_eq!(quoted["model_errors"], errors);
    let ill = of([2.2, 2.0, 2.5, 2.1, 2.2], [4.0, 4.0, 3.5, 4.0, 4.2]);
    assert_eq!((held(&ill).len(), ill.claims().len()), (0, 5));
    assert_eq!(ill.claims()["rust-model-not-slower"].operands[2].value, "the forward pass of small in bfloat16");
}

#[test]
fn steps_have_bars_where_each_arithmetic_has_several_models() {
    let mut made_up = gpu();
    for (size, dtype) in [("small", "bfloat16"), ("small", "float32"), ("xl", "bfloat16")] {
        made_up = made_up.measured("b", &model(size, dtype), &steps([1.0, 2.0, 1.0, 1.0, 1.0]));
    }
    let xl = model("xl", "float32");
    let all = answered(made_up.measured("b", &xl, &steps([1.0; 5])));
    assert_eq!(all.figures().keys().collect::<Vec<_>>(), ["step-gain-bfloat16", "step-gain-float32"]);
    assert_eq!(all.quoted()["bars"], true);
    let one = answered(gpu().out_of_memory("b", &xl).measured("b", &model("small", "float32"), &steps([1.0; 5])));
    assert_eq!((one.quoted()["bars"].as_bool(), one.figures().len()), (Some(false), 0));
    let table = one.tables()["model-step"].markdown();
    assert!(table.contains("| xl | float32 | OOM | OOM | OOM | OOM | OOM | – |"), "{table}");
    assert!(table.contains("| small | float32 | 1,000.00 ± 0.00 |"), "{table}");
}

#[test]
fn models_that_were_timed_otherwise_are_named_in_the_caption() {
    let mut few = model("xl", "float32");
    few["iterations"] = json!(1);
    let small = ["bfloat16", "float32"].map(|dtype| model("small", dtype));
    let row = steps([1.0; 5]);
    let made_up = gpu().measured("b", &small[0], &row).measured("b", &small[1], &row).measured("c", &few, &row);
    let table = answered(made_up).tables()["model-forward"].markdown();
    assert!(table.contains("6 passes a column, taken in 2 rounds of turns, each after 1 untimed (small); "), "{table}");
    assert!(table.contains("2 passes a column, taken in 2 rounds of turns, each after 1 untimed (xl); context"));
}

#[test]
fn the_optimizer_is_told_by_its_share_of_a_copy() {
    let of = |small: [f64; 2], xl: [f64; 2]| {
        let [small, xl] = [small, xl].map(|[ours, fused]| updates(ours, fused));
        answered(gpu().measured("c", &update("small"), &small).measured("c", &update("xl"), &xl))
    };
    let well = of([1.0, 1.25], [1.0625, 1.25]);
    assert_eq!(held(&well), ["adamw-faster", "adamw-near-copy"]);
    let adamw = &well.quoted()["adamw"];
    assert_eq!(
        (&adamw["at"], &adamw["most"]["value"], &well.quoted()["bytes"]),
        (&json!("xl"), &json!(1.0), &json!(28))
    );
    assert!(held(&of([1.25, 1.5], [1.0, 1.0])).is_empty(), "equal times are not faster");
    let table = well.tables()["updates"].markdown();
    assert!(table.contains("| small | 100 | 1,000.000 | 100% | 1,250.000 | 80% | OOM | – | 0 |"), "{table}");
    assert!(table.contains("medians of 6 means of 4 steps in a row a column, taken in 2 rounds"), "{table}");
}

#[test]
fn a_cpu_captures_nothing_and_its_optimizer_has_no_claim() {
    let made_up = || {
        MadeUp::cpu("torch_compile")
            .measured("a", &cell(256, 64), &passes([1.0, 1.0, 0.0, 0.0]))
            .measured("b", &model("tiny", "float32"), &steps([1.0, 1.0, 0.0, 0.0, 0.0]))
            .measured("c", &update("tiny"), &updates(1.0, 1.0))
    };
    let cpu = answered(made_up());
    assert_eq!(cpu.claims().keys().collect::<Vec<_>>(), ["rust-attention-not-slower", "rust-model-not-slower"]);
    assert_eq!(cpu.quoted()["not_compiled"], "needs a\\_compiler, has none");
    for key in ["gain", "captured", "forward", "graph", "adamw"] {
        assert_eq!(cpu.quoted()[key], Value::Null, "{key}");
    }
    let appended = Records { cpu: Some(made_up().set()), ..gpu().failed("a", &cell(256, 64)).records() };
    let tables = answer(&appended, Audience::Ours).unwrap();
    let cpu_tables = ["cpu-attention-backward", "cpu-attention-forward", "cpu-model-step"];
    assert_eq!(tables.tables().keys().filter(|id| id.starts_with("cpu")).collect::<Vec<_>>(), cpu_tables);
}

#[test]
fn cases_that_were_not_measured_show_how_they_ended() {
    let made_up =
        gpu().failed("a", &cell(256, 64)).not_run("b", &model("xl", "float32")).out_of_memory("c", &update("xl"));
    let none = answered(made_up);
    assert!(none.claims().is_empty() && none.figures().is_empty());
    assert_eq!(none.quoted()["software"], Value::Null);
    for (id, row) in [
        ("attention-forward", "| 64 | 256 | failed | failed | failed | failed |"),
        ("model-forward", "| xl | float32 | not run | not run | not run | not run | not run | – |"),
        ("updates", "| xl | – | OOM | – | OOM | – | OOM | – | – |"),
    ] {
        let table = none.tables()[id].markdown();
        assert!(table.contains(row), "{table}");
    }
    let error = format!("{:#}", answer(&Records::default(), Audience::Ours).unwrap_err());
    assert!(error.contains("cs336 measure"), "{error}");
}

#[test]
fn a_wide_deviation_is_told_and_one_sample_has_none() {
    let mut row = passes([1.0; 4]);
    let one = answered(gpu().measured("a", &cell(256, 64), &row)).tables()["attention-forward"].markdown();
    assert!(!one.contains("deviation"), "{one}");
    row["rust_eager"] = column(["forward", "backward"], &[1.0, 2.0]);
    let wide = answered(gpu().measured("a", &cell(256, 64), &row)).tables()["attention-forward"].markdown();
    assert!(
        wide.contains("At $T = 256$ the standard deviation of the eager columns reaches 47% of the median."),
        "{wide}"
    );
    let mut row = steps([1.0; 5]);
    row["rust_eager"] = column(["forward", "step"], &[1.0]);
    let table = answered(gpu().measured("b", &model("xl", "float32"), &row)).tables()["model-step"].markdown();
    assert!(table.contains("| 1,000.00 ± – | 1,000.00 ± 0.00 |"), "{table}");
}
