//! Steps by class of kernel on made-up records: what adds up, what each way saves, and what was not measured.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::{ALONE, answer};
use crate::harness::answer::figure::{Drawing, PlotKind};
use crate::harness::answer::made_up::{MadeUp, printed, seconds};
use crate::harness::answer::{Answer, Audience, Records};
use crate::harness::suite::{self, Suite};

fn params() -> Value {
    json!({"measure": "classes", "size": "xl", "context_length": 512, "batch_size": 4, "dtype": "bfloat16",
        "attention": "flash", "mode": "reduce-overhead", "warmup": 1, "steps": 3, "profiled": 3})
}

/// Milliseconds of products, attention, elementwise, optimizer, copies and others in the profile of median time, and of the step.
fn step(classes: [f64; 6], step_ms: f64) -> Value {
    let profile = |factor: f64| {
        let names = ["products", "attention", "elementwise", "optimizer", "copies", "other"];
        let tally = |ms: f64| json!({"count": 10, "seconds": factor * ms / 1e3});
        let busy_s = factor * classes.iter().sum::<f64>() / 1e3;
        let classes: BTreeMap<_, _> = names.into_iter().zip(classes.map(tally)).collect();
        json!({"host_s": 0.1, "busy_s": busy_s, "classes": classes, "kernels": []})
    };
    let profiles = [profile(1.0), profile(1.2), profile(0.9)];
    json!({"kind": "measured", "row": {"step": seconds(&[step_ms / 1e3; 3]), "profiles": profiles}})
}

fn row(steps: Value) -> Value {
    let rate = |flops: f64, bytes: f64| json!({"unit": "s", "samples": [2.0, 1.0], "work": {"flops": flops, "bytes": bytes, "precision": "bfloat16"}});
    json!({"steps": steps, "product": rate(750e12, 0.0), "copy": rate(0.0, 4.2e12), "compiled": null,
        "software": {"protocol": 1, "python": "3.12", "torch": "2.11", "triton": null, "device": "cuda", "threads": 2,
            "tf32": false}})
}

fn measured() -> Value {
    row(json!({
        "plain": {"kind": "out_of_memory", "requested_bytes": null, "message": "full"},
        "eager": step([40.0, 5.0, 20.0, 14.0, 12.0, 0.0], 120.0),
        "captured": step([40.0, 5.0, 20.0, 14.0, 12.0, 0.0], 93.0),
        "compiled": step([36.0, 4.0, 8.0, 16.0, 6.5, 0.5], 78.0),
        "fused": step([34.0, 3.0, 5.0, 14.0, 0.0, 0.0], 55.0),
    }))
}

fn answered(made_up: MadeUp, suite: Option<Suite>) -> Answer {
    let others = BTreeMap::from([(ALONE.to_string(), Records::default())]);
    answer(&Records { others, suite, ..made_up.records() }, Audience::Ours).unwrap()
}

fn gpu() -> MadeUp {
    MadeUp::gpu("torch_compile")
}

#[test]
fn each_step_stands_beside_the_floor_by_the_profile_of_median_time() {
    let answer = answered(gpu().measured("classes", &params(), &measured()), None);
    let table = answer.tables()["classes"].markdown();
    let head = "| step | time (ms) | products | attention | elementwise | optimizer | casts and copies | other | gaps | kernels | floor / time |";
    assert!(table.starts_with(head), "{table}");
    let lines = [
        "| eager, plain attention | OOM | – | – | – | – | – | – | – | – | – |",
        "| eager, our attention | 120.0 | 40.0 | 5.0 | 20.0 | 14.0 | 12.0 | 0.0 | 29.0 | 60 | 39% |",
        "| torch.compile, reduce-overhead | 78.0 | 36.0 | 4.0 | 8.0 | 16.0 | 6.5 | 0.5 | 7.0 | 60 | 60% |",
        // Kernels may take longer under the profiler than the step without it.
        "| fused | 55.0 | 34.0 | 3.0 | 5.0 | 14.0 | 0.0 | 0.0 | −1.0 | 60 | 85% |",
        "| floor | 46.5 | 32.5 | 0.8 | – | 13.3 | – | – | – | – | – |",
    ];
    lines.iter().for_each(|line| assert!(table.contains(line), "{line}\n{table}"));
    let quoted = &printed(&answer)["classes"];
    assert_eq!(quoted["shares"], json!("85% of the fused step's time and 60% of torch.compile's time"));
    assert_eq!((&quoted["drawn"], &quoted["product"]["value"]), (&json!(true), &json!(750e12)));
}

#[test]
fn the_ladder_names_what_each_way_saves_over_the_measured_one_before() {
    let answer = answered(gpu().measured("classes", &params(), &measured()), None);
    let ladder = answer.tables()["classes-ladder"].markdown();
    let lines = [
        "| eager, our attention | captured, our attention | 27.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 27.0 |",
        "| captured, our attention | torch.compile, reduce-overhead | 15.0 | 4.0 | 1.0 | 12.0 | −2.0 | 5.5 | −0.5 | −5.0 |",
        "| torch.compile, reduce-overhead | fused | 23.0 | 2.0 | 1.0 | 3.0 | 2.0 | 6.5 | 0.5 | 8.0 |",
    ];
    lines.iter().for_each(|line| assert!(ladder.contains(line), "{line}\n{ladder}"));
    assert!(!ladder.contains("plain"), "{ladder}");
}

#[test]
fn the_figure_stacks_the_measured_steps_and_the_floor() {
    let answer = answered(gpu().measured("classes", &params(), &measured()), None);
    let Drawing::Plot(plot) = &answer.figures()["classes"].drawing else { panic!("no plot") };
    assert_eq!((plot.kind, plot.series.len(), plot.series[0].points.len()), (PlotKind::HorizontalBar, 7, 5));
    let gaps = &plot.series[6];
    assert_eq!((gaps.name.as_str(), gaps.points[3].1, gaps.points[4].1), ("gaps", Some(0.0), Some(0.0)));
}

#[test]
fn a_case_that_is_planned_and_not_recorded_is_a_table_of_dashes() {
    let root = crate::root::find().unwrap();
    let suite = suite::load(&root, &super::super::super::PROBLEM).unwrap();
    let other = json!({"measure": "attention", "batch": 8, "d_model": 16, "seq": 256, "rounds": 2, "warmup": 1,
        "iterations": 3});
    let answer = answered(gpu().failed("a", &other), suite);
    let table = answer.tables()["classes-planned-1"].markdown();
    assert!(table.contains("| fused | – |") && table.contains("not measured yet"), "{table}");
    assert!(printed(&answer)["classes"].is_null() && !answer.figures().contains_key("classes"));
    let failed = answered(gpu().failed("classes", &params()), None);
    assert!(failed.tables()["classes"].markdown().contains("| fused | failed |"));
    assert!(!failed.tables().contains_key("classes-ladder"));
}

#[test]
fn kernels_of_no_class_have_a_column_only_where_they_take_time() {
    let only = row(json!({"fused": step([34.0, 3.0, 5.0, 14.0, 0.0, 0.0], 60.0)}));
    let answer = answered(gpu().measured("classes", &params(), &only), None);
    assert!(!answer.tables()["classes"].markdown().contains("other"));
    assert_eq!(printed(&answer)["classes"]["drawn"], json!(false));
}
