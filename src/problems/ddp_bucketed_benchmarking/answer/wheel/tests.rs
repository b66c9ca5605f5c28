//! Made-up steps from Python: the claim both ways and not at all, and every line of the table.

use serde_json::{Value, json};

use super::super::tests::answer_of;
use super::*;
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::made_up::{params, row, timing};
use crate::harness::answer::made_up::{MadeUp, printed};
use crate::harness::answer::mark;
use crate::model::Precision;

fn case() -> Params {
    Params { wheel: true, rounds: 2, ..params(Precision::Float32, Some(25.0)) }
}

/// Seconds of a step in two rounds; the sharded one takes half a second more.
fn library(seconds: [f64; 2]) -> Value {
    json!({"version": "9.9", "buckets": timing(&seconds), "sharded": timing(&seconds.map(|s| s + 0.5))})
}

fn measured(made_up: MadeUp, wheel: &Value) -> MadeUp {
    measured_as(made_up, wheel, &case())
}

fn measured_as(made_up: MadeUp, wheel: &Value, case: &Params) -> MadeUp {
    let mut steps = row(&[("naive", 2.0, 0.5, 0.5), (STRATEGY, 1.25, 0.5, 0.1)], None);
    let single = timing(&[1.0, 1.0]);
    steps["from_python"] = json!({"single": single, "pytorch": library([1.5, 1.5]), "wheel": wheel, "off": 0.0});
    made_up.measured("wheel", case, &json!({"steps": steps, "model": {"predicted_overhead_s": 1.0, "best": null}}))
}

fn of_wheel(seconds: [f64; 2]) -> Value {
    json!({"kind": "measured", "row": library(seconds)})
}

#[test]
fn the_wheel_is_faster_only_if_every_round_is() {
    for (seconds, held) in [([1.4, 1.45], true), ([1.4, 1.5], false), ([1.6, 1.6], false)] {
        let answer = answer_of(measured(MadeUp::gpu("x"), &of_wheel(seconds)));
        assert_eq!(answer.holds(CLAIM), Some(held), "{seconds:?}");
    }
    let answer = answer_of(measured(MadeUp::gpu("x"), &of_wheel([1.2, 1.2])));
    let wheel = &printed(&answer)["wheel"];
    let ratio = |of: &str| mark::plain(wheel["ratios"][of].as_str().unwrap());
    assert_eq!((ratio("buckets"), ratio("sharded")), ("0.80 in float32".into(), "0.85 in float32".into()));
    assert_eq!(wheel["mb"], json!(25.0));
}

#[test]
fn the_sentence_has_the_ratio_of_each_dtype_and_the_claim_needs_all() {
    let bfloat16 = Params { dtype: Precision::Bfloat16, ..case() };
    let first = || measured(MadeUp::gpu("x"), &of_wheel([1.2, 1.2]));
    for (seconds, ratio, held) in [([1.35, 1.35], "0.90", true), ([1.65, 1.65], "1.10", false)] {
        let answer = answer_of(measured_as(first(), &of_wheel(seconds), &bfloat16));
        let said = mark::plain(printed(&answer)["wheel"]["ratios"]["buckets"].as_str().unwrap());
        assert_eq!((said, answer.holds(CLAIM)), (format!("0.80 in float32 and {ratio} in bfloat16"), Some(held)));
    }
}

#[test]
fn the_table_has_a_line_for_each_column_of_either_language() {
    let answer = answer_of(measured(MadeUp::gpu("x"), &of_wheel([1.2, 1.32])));
    let table = answer.tables()["wheel-gpu"].markdown();
    for line in [
        "| float32 | no communication | 1,000.0 | 1,000.0 | – | – |  |",
        "| float32 | PyTorch DDP | 1,500.0 | 1,500.0 | 500.0 | – | 9.9 |",
        "| float32 | the wheel | 1,200 to 1,320 | 1,200.0 | 200 to 320 | 0.80 to 0.88 | 9.9 |",
        "| float32 | PyTorch DDP, ZeroRedundancyOptimizer | 2,000.0 | 2,000.0 | 1,000.0 | – | 9.9 |",
        "| float32 | the wheel, ShardedOptimizer | 1,700 to 1,820 | 1,700.0 | 700 to 820 | 0.85 to 0.91 | 9.9 |",
        "| float32 | ours, from Rust | 1,250.0 | 1,250.0 | 250.0 | – |  |",
        "the tiny model on 2 ranks over Gloo, 1 sequence of 16 tokens per rank, buckets of 25 MB, NVIDIA H200; medians of 2 steps",
    ] {
        assert!(table.contains(line), "{line}\n{table}");
    }
}

#[test]
fn without_a_wheel_its_lines_say_so_and_the_sentence_has_the_reason() {
    let missing = json!({"kind": "not_run", "reason": "cs336 is not installed: run make wheel"});
    let answer = answer_of(measured(MadeUp::gpu("x"), &missing));
    assert_eq!(answer.holds(CLAIM), None);
    let wheel = &printed(&answer)["wheel"];
    assert_eq!((&wheel["ratios"], &wheel["untimed"]), (&Value::Null, &json!("cs336 is not installed: run make wheel")));
    let table = answer.tables()["wheel-gpu"].markdown();
    assert!(table.contains("| float32 | the wheel | not run | – | – | – |  |"), "{table}");
    let failed = answer_of(MadeUp::gpu("x").failed("wheel", &case()));
    assert!(printed(&failed)["wheel"].is_null());
    let table = failed.tables()["wheel-gpu"].markdown();
    assert!(table.contains("| float32 | – | failed | – |"), "{table}");
    let none = answer_of(MadeUp::gpu("x").failed("steps", &params(Precision::Float32, Some(1.0))));
    assert!(!none.tables().contains_key("wheel-gpu"));
}
