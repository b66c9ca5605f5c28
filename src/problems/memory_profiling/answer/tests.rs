//! The answer on made-up records: every claim both ways, the numbers, and what is missing.

use serde_json::json;

use super::super::components::{Allocation, Components, Stretch, Timeline};
use super::super::measure::Usage;
use super::super::predicted::memory;
use super::super::steps::Phase;
use super::*;
use crate::attention::ImplementationName;
use crate::harness::answer::made_up::MadeUp;
use crate::harness::answer::mark;
use crate::model::SizeName;

const PARAMETERS: u64 = 1000;

/// The longest context has timelines.
fn params(dtype: Precision, context_length: i64) -> Params {
    let (size, attention) = (SizeName::Billions2_7, ImplementationName::Naive);
    let timeline_points = if context_length == 512 { 2 } else { 0 };
    Params { size, context_length, batch_size: 4, vocab_size: 10_000, dtype, attention, timeline_points }
}

/// 10 bytes of rounding, and 5 of workspaces; the prediction is exact.
fn run(phases: &[(&str, u64)], saved_bytes: u64) -> Run {
    let usage = |n: u64| Usage {
        requested_bytes: n,
        allocated_bytes: n + 10,
        active_bytes: n + 10,
        reserved_bytes: Some(n + 50),
    };
    let top = phases.iter().map(|phase| phase.1).max().unwrap();
    Run {
        phases: phases.iter().map(|(name, n)| Phase { name: name.to_string(), peak: usage(*n) }).collect(),
        peak: usage(top),
        repeated: true,
        at_peak: Components { parameters: PARAMETERS, working: 200, other: 8, ..Components::default() },
        peak_range: "forward/attn/final matmul".into(),
        peak_operators: "aten::matmul/aten::bmm".into(),
        saved_bytes,
        predicted_bytes: top - 5,
        largest: vec![],
        timeline: None,
    }
}

fn timeline() -> Timeline {
    let curve = || vec![PARAMETERS, 2 * PARAMETERS];
    let forward = Stretch { name: "forward".into(), start_s: 0.0, end_s: 0.5 };
    Timeline {
        phases: vec![forward],
        time_s: vec![0.0, 0.5],
        parameters: curve(),
        optimizer_state: curve(),
        gradients: curve(),
        saved: curve(),
        working: curve(),
        weight_copies: Vec::new(),
        other: Vec::new(),
    }
}

/// Under autocast 500 bytes of copies, and activations of 400 bytes in place of 600.
fn row(params: &Params) -> Row {
    let copies = if params.dtype == Precision::Bfloat16 { 500 } else { 0 };
    let saved = if copies > 0 { 400 + copies } else { 600 };
    let drawn = || (params.timeline_points > 0).then(timeline);
    let allocation = |bytes_each, range: &str, operators: &str| {
        let (range, operators) = (range.into(), operators.into());
        Allocation { bytes_each, count: 32, range, operators }
    };
    let scores = params.memory().scores();
    let largest = vec![
        allocation(scores, "forward/attn/scores", "aten::div/aten::div"),
        allocation(scores, "forward/attn/scores", "aten::matmul/aten::bmm"),
        allocation(scores, "forward/attn/scores", "aten::div/aten::empty"),
        allocation(scores, "forward/softmax", "aten::softmax/aten::_softmax"),
        allocation(8, "forward", "aten::exp"),
    ];
    let steps = |forward| [("forward", forward), ("backward", 4700 + copies / 10), ("optimizer", 4000)];
    Row {
        parameters_bytes: PARAMETERS,
        optimizer_state_bytes: 2 * PARAMETERS,
        weight_copies_bytes: copies,
        other_bytes: 5,
        inputs_and_tables_bytes: 3,
        forward: Run { largest, timeline: drawn(), ..run(&[("forward", 1200 + copies)], 0) },
        recorded_forward: run(&[("forward", 1600 + copies)], saved),
        first_step: run(&[("forward", 1600), ("optimizer", 4000)], saved),
        training_step: Run { timeline: drawn(), ..run(&steps(4600), saved) },
    }
}

/// Both precisions at 128, and at 512 after `edit` of the row in float32 and of that under autocast.
fn made_up(made_up: MadeUp, edit: impl Fn(&mut Row, &mut Row)) -> MadeUp {
    let [full, mixed] = [Precision::Float32, Precision::Bfloat16].map(|dtype| params(dtype, 512));
    let (mut in_full, mut in_mixed) = (row(&full), row(&mixed));
    edit(&mut in_full, &mut in_mixed);
    short(made_up).measured("timeline", &mixed, &in_mixed).measured("timeline", &full, &in_full)
}

fn short(made_up: MadeUp) -> MadeUp {
    let [full, mixed] = [Precision::Float32, Precision::Bfloat16].map(|dtype| params(dtype, 128));
    made_up.measured("peaks", &full, &row(&full)).measured("peaks", &mixed, &row(&mixed))
}

fn of(records: &Records) -> Answer {
    answer(records, Audience::Ours).unwrap()
}

fn edited(edit: impl Fn(&mut Row, &mut Row)) -> Answer {
    of(&made_up(MadeUp::gpu("x"), edit).records())
}

fn claims(answer: &Answer) -> Vec<&str> {
    answer.claims().keys().map(String::as_str).collect()
}

/// A quoted number, at a path such as "error/share".
fn number(answer: &Answer, path: &str) -> f64 {
    answer.quoted().pointer(&format!("/{path}/value")).and_then(|value| value.as_f64()).expect(path)
}

#[test]
fn every_claim_follows_the_records() {
    // Ties do not hold.
    type Edit = fn(&mut Row, &mut Row);
    let edits: [(&str, Edit); 4] = [
        ("autocast-changes-a-step-little", |_, mixed| mixed.training_step.peak.allocated_bytes /= 2),
        ("largest-are-scores", |full, _| full.forward.largest[0].bytes_each += 1),
        ("runs-repeat-their-peak", |full, _| full.first_step.repeated = false),
        ("stages-differ", |full, _| full.training_step.phases[0].peak.requested_bytes = 4200),
    ];
    let well = edited(|_, _| {});
    assert_eq!(claims(&well), edits.map(|(id, _)| id));
    for (id, edit) in edits {
        assert_eq!((well.holds(id), edited(edit).holds(id)), (Some(true), Some(false)), "{id}");
    }
}

#[test]
fn the_sentences_quote_the_longest_context() {
    let answer = edited(|_, mixed| {
        mixed.recorded_forward.predicted_bytes += 40;
        mixed.recorded_forward.peak_operators = "aten::exp".into();
    });
    for (path, expected) in [("step_change", 50.0 / 4710.0), ("error/share", 40.0 / 2110.0)] {
        assert!((number(&answer, path) - expected).abs() < 1e-9, "{path}: {}", number(&answer, path));
    }
    let quoted = answer.quoted();
    let words = json!(["backward", 512, 16, true, 1]);
    assert_eq!(json!(["phase", "longest", "runs", "gpu", "teeth"].map(|key| &quoted[key])), words);
    let words = ["contexts", "largest"].map(|field| mark::plain(quoted[field].as_str().unwrap()));
    assert_eq!(words, ["128 and 512", "128 MiB"]);
    let places = "`aten::div`, `aten::matmul` in the range *forward/attn/scores*, and from `aten::softmax` in the range *forward/softmax*";
    assert_eq!(quoted["places"], places);
    assert_eq!(quoted["error"]["at"], "a recorded forward pass in bfloat16 at context 512");
}

#[test]
fn sizes_have_three_digits_and_a_unit() {
    let sizes = [61.35, 2.125, 0.5, 0.125].map(|gib| size(gib * GIB));
    assert_eq!(sizes, ["61.4 GiB", "2.12 GiB", "512 MiB", "128 MiB"]);
    let peaks = Float32Peaks::of(&[]);
    assert_eq!((peaks.forwards.as_str(), peaks.steps.as_str()), ("", ""));
}

#[test]
fn one_layer_lies_between_two_lowest_points_of_equal_memory() {
    let of = |working: &[u64]| {
        let time_s = (0..working.len()).map(|at| at as f64).collect();
        Timeline { time_s, working: working.to_vec(), ..timeline() }
    };
    assert_eq!(timeline::one_layer(&of(&[20; 5]), 4), None, "one point in each layer");
    let teeth = of(&[20, 60, 40, 20, 90, 50, 20, 80, 40, 20, 70, 30, 0]);
    assert_eq!(timeline::one_layer(&teeth, 4), Some(6..=9));
    let falls = of(&[20, 60, 40, 20, 90, 50, 20, 80, 40, 10, 70, 30, 0]);
    assert_eq!(timeline::one_layer(&falls, 4), Some(3..=6), "the next one does not return");
    assert_eq!(timeline::one_layer(&of(&[20, 60, 40, 30, 90, 50, 20, 80, 40, 10, 70, 30, 0]), 4), None, "none returns");
}

#[test]
fn the_layer_with_the_most_recorded_moments_is_enlarged() {
    let of = |times: [u32; 13], working: [u64; 13]| {
        timeline::one_layer(
            &Timeline { time_s: times.map(f64::from).to_vec(), working: working.to_vec(), ..timeline() },
            4,
        )
    };
    let working = [20, 60, 40, 20, 90, 50, 80, 30, 20, 80, 40, 20, 0];
    assert_eq!(
        of([0, 10, 20, 30, 35, 40, 45, 50, 60, 70, 80, 90, 120], working),
        Some(3..=8),
        "the next one has fewer"
    );
    let two = [0, 10, 20, 30, 35, 40, 45, 50, 65, 70, 85, 90, 120];
    let falls_late = [20, 60, 40, 20, 90, 50, 80, 30, 40, 80, 20, 20, 0];
    assert_eq!(of(two, falls_late), None, "the lowest points enclose most of two layers, or next to nothing");
}

#[test]
fn of_equal_peaks_the_first_phase_is_named() {
    let tie = edited(|full, _| full.training_step.phases[0].peak.requested_bytes = 4700);
    assert_eq!(tie.quoted()["phase"], "forward");
}

#[test]
fn tables_print_what_was_measured_and_figures_what_was_drawn() {
    let answer = edited(|_, _| {});
    let table = |id: &str| answer.tables()[id].markdown();
    assert_eq!(table("largest").lines().nth(2), Some("| 128.0 | 32 | attn/scores | `aten::div` | `aten::div` |"));
    assert!(table("largest").contains("| 0.0 | 32 | – | `aten::exp` | `aten::exp` |\n"));
    let contexts = |id: &str| -> Vec<String> {
        table(id).lines().skip(2).take(4).map(|line| line.split(" | ").take(2).collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(contexts("components"), ["| float32 128", "| float32 512", "| bfloat16 128", "| bfloat16 512"]);
    assert!(table("predictions").contains("| float32 | 512 | full step | 0.00 | 0.0 | 0.0 | 0.0 |"));
    assert_eq!(answer.figures().keys().collect::<Vec<_>>(), ["forward", "step"]);
}

#[test]
fn a_gpu_that_is_too_small_leaves_the_sentences_to_the_cpu() {
    let gpu = short(MadeUp::gpu("x")).out_of_memory("timeline", &params(Precision::Float32, 512));
    let alone = gpu.records();
    let answer = of(&alone);
    assert_eq!([&answer.quoted()["gpu"], &answer.quoted()["drawn"]], [&json!(true), &json!(false)]);
    assert_eq!(answer.quoted()["longest"], 128, "the precisions are compared at 128");
    assert_eq!(claims(&answer), ["autocast-changes-a-step-little", "runs-repeat-their-peak"]);
    assert!(answer.tables()["peaks"].markdown().contains("| float32 | 512 | OOM | OOM | OOM | OOM | OOM |\n"));
    assert!(answer.figures().is_empty());

    let cpu = || made_up(MadeUp::cpu("x"), |_, mixed| mixed.training_step.predicted_bytes -= 200).set();
    let full = params(Precision::Float32, 512);
    let half = short(MadeUp::gpu("x")).measured("timeline", &full, &row(&full));
    let half = half.failed("timeline", &params(Precision::Bfloat16, 512)).records();
    let half = of(&Records { cpu: Some(cpu()), ..half });
    assert_eq!([&half.quoted()["gpu"], &half.quoted()["drawn"]], [&json!(true), &json!(true)], "one step is enough");
    let both = of(&Records { cpu: Some(cpu()), ..alone });
    assert_eq!(both.quoted()["gpu"], false);
    assert_eq!(number(&both, "error/share"), 0.0, "a CPU's autocast is not predicted");
    assert!(both.tables()["other-peaks"].markdown().contains("| float32 | 512 | OOM |"));
    assert!(!both.tables()["peaks"].markdown().contains("reserved"));
}

#[test]
fn one_context_and_two_machines_are_not_compared() {
    let [full, mixed] = [Precision::Float32, Precision::Bfloat16].map(|dtype| params(dtype, 512));
    let one = MadeUp::gpu("x").measured("timeline", &full, &row(&full));
    let two = |gpu| {
        let other = MadeUp::gpu("x").measured("timeline", &full, &row(&full)).run("b", Some(gpu));
        of(&other.measured("timeline", &mixed, &row(&mixed)).records())
    };
    assert_eq!(of(&one.records()).quoted()["paired"], false);
    assert_eq!(two("NVIDIA H200").quoted()["paired"], true);
    assert_eq!(two("NVIDIA H100").quoted()["paired"], false);
}

#[test]
fn without_a_measured_case_the_tables_say_how_each_ended() {
    let failed = MadeUp::cpu("x").failed("peaks", &params(Precision::Float32, 128));
    let answer = of(&failed.not_run("timeline", &params(Precision::Float32, 512)).records());
    assert!(answer.claims().is_empty() && answer.figures().is_empty());
    assert_eq!(answer.tables().keys().collect::<Vec<_>>(), ["peaks", "saved"]);
    let table = answer.tables()["peaks"].markdown();
    assert!(table.contains("| 128 | failed |") && table.contains("| 512 | not run |"), "{table}");
    let none = super::answer(&Records::default(), Audience::Ours);
    assert!(format!("{:#}", none.unwrap_err()).contains("cs336 measure"));
}

#[test]
fn what_is_counted_adds_up() {
    let answer = edited(|_, _| {});
    // The formula of part (d).
    assert_eq!(number(&answer, "residual"), 4.0 * 4.0 * 512.0 * 2560.0);
    assert_eq!(answer.quoted()["residuals"], "5 MiB at 128, 10 MiB at 256, 20 MiB at 512");
    let [wide, narrow] = [Precision::Float32, Precision::Bfloat16].map(|dtype| memory(512, dtype).saved());
    assert!(wide.iter().all(|tensor| narrow.iter().any(|narrow| narrow.name == tensor.name)), "the table lacks one");
    let together = answer.tables()["saved"].rows.iter().filter_map(|row| match row.last() {
        Some(Cell::Number(bytes, _)) => Some(bytes.value()),
        _ => None,
    });
    assert_eq!(together.sum::<f64>(), number(&answer, "all_bfloat16"));
}
