//! Answers from made-up steps: every claim both ways, headline numbers, and cases that are missing or ended otherwise.

use super::*;
use crate::attention::ImplementationName::{self, Flash, Naive, Sdpa};
use crate::bench::training_step::{Capture, Execution, StepPass};
use crate::harness::answer::made_up::MadeUp;
use crate::harness::samples;
use crate::model::Precision::{self, Bfloat16, Float32};
use crate::model::SizeName::{Small, Xl};

const GPU: fn(&str) -> MadeUp = MadeUp::gpu;
const CPU: fn(&str) -> MadeUp = MadeUp::cpu;

fn params(size: SizeName, context_length: i64) -> Params {
    Params {
        size,
        context_length,
        batch_size: 4,
        vocab_size: 10_000,
        pass: StepPass::TrainingStep,
        dtype: Float32,
        attention: Naive,
        execution: Execution::Eager,
        allow_tf32: false,
        warmup: 5,
        steps: 3,
    }
}

fn seconds(samples: &[f64]) -> Samples {
    Samples { unit: samples::Unit::Seconds, samples: samples.to_vec(), work: None }
}

/// A row of these whole steps, and nothing else.
fn whole(total: &[f64]) -> Row {
    Row {
        parameters: 1,
        first_in_process: false,
        warmup: None,
        forward: None,
        forward_device: None,
        backward: None,
        backward_device: None,
        optimizer: None,
        optimizer_device: None,
        total: seconds(total),
        total_device: None,
        capture: None,
    }
}

/// Forward passes, backward passes `ratio` times as long, and as long a step of AdamW.
fn parts(forward: &[f64], ratio: f64) -> Row {
    let times = |factor: f64| seconds(&forward.iter().map(|t| factor * t).collect::<Vec<_>>());
    let total = times(2.0 + ratio).samples;
    Row { forward: Some(times(1.0)), backward: Some(times(ratio)), optimizer: Some(times(1.0)), ..whole(&total) }
}

/// Three forward passes around `t`, whose standard deviation is `share` of it.
fn around(t: f64, share: f64) -> Vec<f64> {
    vec![t * (1.0 - share), t, t * (1.0 + share)]
}

fn ask(made_up: MadeUp) -> Answer {
    answer(&made_up.records(), Audience::Ours).unwrap()
}

fn number(answer: &Answer, field: &str) -> f64 {
    answer
        .quoted()
        .pointer(field)
        .and_then(|number| number["value"].as_f64())
        .unwrap_or_else(|| panic!("{field}: {}", answer.quoted()))
}

fn near(answer: &Answer, field: &str, expected: f64) {
    let value = number(answer, field);
    assert!((value / expected - 1.0).abs() < 1e-9, "{field} is {value}, expected {expected}");
}

fn held(answer: &Answer, ids: [&str; 4]) -> [Option<bool>; 4] {
    ids.map(|id| answer.holds(id))
}

const PASSES: [&str; 4] =
    ["backward-is-about-twice", "spread-is-small", "some-cells-wait-for-the-host", "events-agree-with-the-host"];

/// Small at 128 with this deviation, as long at 256, and XL at 128; events show `events` of the host's times.
fn sweep(made_up: fn(&str) -> MadeUp, share: f64, ratio: f64, events: f64) -> Answer {
    let cells = [(Small, 128, 0.010, share), (Small, 256, 0.011, 0.005), (Xl, 128, 0.1, 0.001)];
    ask(cells.into_iter().fold(made_up("x"), |made_up, (size, context, t, share)| {
        let mut row = parts(&around(t, share), ratio);
        row.forward_device = Some(seconds(&around(events * t, share)));
        made_up.measured(SWEEP, &params(size, context), &row)
    }))
}

#[test]
fn claims_follow_the_passes() {
    for (made_up, share, ratio, events, expected) in [
        (GPU, 0.2, 2.0, 0.98, [true, false, true, true]),
        (GPU, 0.2, 2.5, 0.95, [false, false, true, false]),
        (GPU, 0.001, 1.5, 1.06, [false, true, false, false]),
        (CPU, 0.2, 2.0, 1.0, [true, false, false, true]),
    ] {
        assert_eq!(held(&sweep(made_up, share, ratio, events), PASSES), expected.map(Some), "{share} {ratio} {events}");
    }
}

#[test]
fn the_shortest_pass_is_of_a_steady_cell() {
    let answer = sweep(GPU, 0.2, 2.0, 0.98);
    let quoted = answer.quoted();
    for (field, expected) in [("low", 0.011), ("high", 0.1), ("worst", 0.2), ("steady_worst", 0.005), ("gap", 0.02)] {
        near(&answer, &format!("/{field}"), expected);
    }
    assert_eq!((&quoted["low_at"], &quoted["high_at"]), (&"small, context 256".into(), &"xl, context 128".into()));
    assert_eq!((&quoted["steady"], &quoted["cells"]), (&2.into(), &3.into()));
    assert_eq!(quoted["unsteady"], serde_json::json!(["small at 128"]));
    assert_eq!(quoted["waiting"], serde_json::json!(["small takes as long at 128 as at 256"]));
    assert_eq!(quoted["context"], 128, "where most sizes were measured");
    near(&sweep(GPU, 0.001, 2.0, 0.98), "/low", 0.010);
}

#[test]
fn one_sample_has_no_spread_and_what_was_not_measured_its_word() {
    let made_up = GPU("x").measured(SWEEP, &params(Small, 128), &parts(&[0.01], 2.0));
    let made_up = made_up.out_of_memory(SWEEP, &params(Xl, 1024)).failed(SWEEP, &params(Xl, 512));
    let answer = ask(made_up.not_run(SWEEP, &params(Xl, 256)));
    assert_eq!(held(&answer, PASSES), [Some(true), Some(false), Some(false), None]);
    assert!(answer.quoted()["worst"].is_null() && answer.quoted()["gap"].is_null());
    let table = answer.tables()["passes"].markdown();
    assert!(table.contains("| small | 128 | 10.00 ± – | 10.00 | 20.00 ± – | 20.00 | 10.00 ± – | 10.00 |"), "{table}");
    for row in ["| xl | 1,024 | OOM | OOM | OOM", "| xl | 512 | failed | failed", "| xl | 256 | not run | not run"] {
        assert!(table.contains(row), "{table}");
    }
}

#[test]
fn without_a_measured_case_there_are_tables_alone() {
    let answer = ask(GPU("x").failed(SWEEP, &params(Small, 128)).out_of_memory("warmup", &params(Small, 256)));
    assert!(answer.claims().is_empty() && answer.figures().is_empty());
    assert_eq!(answer.tables().keys().collect::<Vec<_>>(), ["passes", "sizes", "warm-up-gpu"]);
    assert_eq!((&answer.quoted()["measured"], &answer.quoted()["studied"]), (&false.into(), &false.into()));
    let error = super::answer(&Records::default(), Audience::Ours).unwrap_err().to_string();
    assert!(error.contains("cs336 measure"), "{error}");
}

#[test]
fn the_processor_has_tables_of_its_own_beside_those_of_a_gpu() {
    let one = |made_up: MadeUp| {
        let made_up = made_up.measured(SWEEP, &params(Small, 128), &parts(&[0.01, 0.01], 2.0));
        Some(made_up.failed("warmup", &Params { warmup: 0, ..params(Small, 128) }).set())
    };
    let both = Records { cpu: one(CPU("x")), gpu: one(GPU("x")), ..Records::default() };
    let both = answer(&both, Audience::Ours).unwrap();
    assert_eq!(both.tables_of("warm-up"), ["warm-up-gpu", "warm-up-cpu"]);
    let captions = ["passes", "cpu-passes"].map(|id| both.tables()[id].caption.clone().unwrap());
    assert!(captions[0].contains("fused AdamW. All times in ms. NVIDIA H200"), "{captions:?}");
    assert!(captions[1].contains("unfused AdamW. All times in ms. The cores are shared"), "{captions:?}");
}

#[test]
fn sizes_are_counted() {
    assert_eq!((BATCH_SIZE, VOCAB_SIZE), (4, 10_000), "the template's caption says so");
    let table = size_table().markdown();
    assert!(table.contains("| small | 768 | 3,072 | 12 | 12 | 128,625,408 | 0.534 |"), "{table}");
}

/// Steps of the small model in seconds: float32 eager and captured, bfloat16 eager and captured, and with TF32.
fn captured(made_up: MadeUp, times: [f64; 5], loss_error: f64) -> MadeUp {
    let grids =
        [(SWEEP, Float32), ("captured", Float32), ("bfloat16", Bfloat16), ("captured", Bfloat16), ("tf32", Float32)];
    grids.into_iter().zip(times).fold(made_up, |made_up, ((grid, dtype), time)| {
        let (params, mut row) = (way(grid, dtype), whole(&around(time, 0.02)));
        if grid == "captured" {
            row.capture = Some(Capture { nodes: 1866, time: seconds(&[0.2]), loss_error });
        }
        if time == 0.0 { made_up.out_of_memory(grid, &params) } else { made_up.measured(grid, &params, &row) }
    })
}

fn way(grid: &str, dtype: Precision) -> Params {
    let execution = if grid == "captured" { Execution::Captured } else { Execution::Eager };
    Params { dtype, execution, allow_tf32: grid == "tf32", ..params(Small, 512) }
}

const CAPTURED: [&str; 4] =
    ["replays-compute-the-same", "capture-speeds-up-steps", "captured-bfloat16-beats-tf32", "flash-shortens-the-step"];

#[test]
fn claims_follow_captured_steps_and_tf32() {
    for (times, error, expected) in [
        ([0.050, 0.050, 0.030, 0.016, 0.025], 0.0, [Some(true), Some(true), Some(true)]),
        // A slower replay; captured bfloat16 as fast as TF32.
        ([0.050, 0.060, 0.030, 0.025, 0.025], 1e-7, [Some(false), Some(false), Some(false)]),
        // TF32 beats no eager bfloat16 step; replays gain nothing.
        ([0.050, 0.050, 0.030, 0.030, 0.030], 0.0, [Some(true), Some(false), Some(false)]),
        // Captured bfloat16 and TF32 do not fit in memory.
        ([0.054, 0.050, 0.030, 0.0, 0.0], 0.0, [Some(true), Some(true), None]),
    ] {
        let answer = ask(captured(GPU("x"), times, error));
        let [same, pays, first] = expected;
        assert_eq!(held(&answer, CAPTURED), [same, pays, first, None], "{times:?}");
    }
}

#[test]
fn gains_are_named_and_missing_ways_are_dashes() {
    let answer = ask(captured(GPU("x"), [0.050, 0.050, 0.030, 0.015, 0.025], 0.0));
    let quoted = answer.quoted();
    assert!((quoted["gains"]["high"]["value"].as_f64().unwrap() - 2.0).abs() < 1e-9);
    assert_eq!((&quoted["least_at"], &quoted["most_at"]), (&"small in float32".into(), &"small in bfloat16".into()));
    assert_eq!(quoted["bfloat16"], serde_json::json!(["15.0 against 25.0 ms"]));
    assert_eq!(quoted["captured"], "context 512 and batch 4, over 3 steps after 5 warm-up steps");
    near(&answer, "/captured_std", 0.02);
    let row = |answer: &Answer| answer.tables()["captured"].markdown().lines().last().unwrap().to_string();
    assert_eq!(row(&answer), "| small | 50.0 ± 1.0 | 50.0 | 1.00 | 30.0 ± 0.6 | 15.0 | 2.00 | 25.0 ± 0.5 |");
    let full = ask(captured(GPU("x"), [0.050, 0.050, 0.030, 0.0, 0.0], 0.0));
    assert_eq!(row(&full), "| small | 50.0 ± 1.0 | 50.0 | 1.00 | 30.0 ± 0.6 | OOM | – | OOM |");
    assert!(ask(captured(GPU("x"), [0.050, 0.0, 0.030, 0.0, 0.025], 0.0)).tables().get("captured").is_none());
}

#[test]
fn steps_of_two_machines_have_no_ratio() {
    let (eager, mut replay) = (parts(&[0.05, 0.05], 2.0), whole(&[0.1]));
    replay.capture = Some(Capture { nodes: 1, time: seconds(&[0.2]), loss_error: 0.0 });
    let made_up = GPU("x").measured(SWEEP, &params(Small, 512), &eager).run("b", Some("NVIDIA H100"));
    let answer = ask(made_up.measured("captured", &way("captured", Float32), &replay));
    assert!(answer.quoted()["gains"].is_null() && answer.quoted()["captured_std"].is_null());
    assert_eq!(held(&answer, CAPTURED), [Some(true), Some(false), None, None]);
}

/// Steps of the small model with plain attention, PyTorch's and ours, the last of another run.
fn attention(plain: Option<f64>, ours: f64) -> Answer {
    let of = |attention: ImplementationName| Params { attention, dtype: Bfloat16, ..params(Small, 1024) };
    let made_up = GPU("x").measured("flash", &of(Sdpa), &whole(&[0.026]));
    let made_up = match plain {
        Some(time) => made_up.measured("flash", &of(Naive), &whole(&[time])),
        None => made_up.out_of_memory("flash", &of(Naive)),
    };
    ask(made_up.run("b", Some("NVIDIA H200")).measured("flash", &of(Flash), &whole(&[ours])))
}

#[test]
fn claims_follow_attention_in_the_model() {
    for (plain, expected) in [(Some(0.040), true), (Some(0.020), false), (Some(0.019), false), (None, false)] {
        assert_eq!(attention(plain, 0.020).holds("flash-shortens-the-step"), Some(expected), "{plain:?}");
    }
    let answer = attention(Some(0.040), 0.020);
    near(&answer, "/over_plain/low", 2.0);
    near(&answer, "/over_sdpa/high", 1.3);
    assert_eq!((&answer.quoted()["mixed_runs"], &answer.quoted()["attention"]), (&true.into(), &1024.into()));
    let full = attention(None, 0.020).tables()["attention"].markdown();
    assert!(full.contains("| small | OOM | 26.0 ± – | 20.0 ± – |"), "{full}");
}

/// Forward passes after no, one, two and five warm-up steps; backward takes as long twice over.
fn warm_up(forward: [&[f64]; 4], first_in_process: bool) -> Answer {
    let grids = [("warmup", 0), ("warmup", 1), ("warmup", 2), (SWEEP, 5)];
    ask(grids.into_iter().zip(forward).fold(GPU("x"), |made_up, ((grid, warmup), forward)| {
        let params = Params { warmup, ..params(Small, 128) };
        match forward {
            [] => made_up.failed(grid, &params),
            _ => made_up.measured(grid, &params, &Row { first_in_process, ..parts(forward, 2.0) }),
        }
    }))
}

const WARM: &[f64] = &[0.01, 0.01, 0.01];
const COLD: &[f64] = &[0.10, 0.02, 0.01];
const LATE: &[f64] = &[0.01, 0.02, 0.01];
const SLOW: &[f64] = &[0.02, 0.01, 0.01];
const FAILED: &[f64] = &[];
const ONCE: &[f64] = &[0.01];
const STUDY: [&str; 4] = ["cold-mean-is-higher", "warm-after-one-step", "first-step-is-slowest", "every-start-is-cold"];

#[test]
fn claims_follow_the_warm_up() {
    for (forward, own, expected) in [
        ([COLD, WARM, WARM, WARM], true, [true, true, true, true]),
        ([WARM, SLOW, WARM, WARM], false, [false, false, true, false]),
        ([LATE, WARM, WARM, SLOW], true, [false, false, false, true]),
    ] {
        assert_eq!(held(&warm_up(forward, own), STUDY), expected.map(Some), "{forward:?}");
    }
    let answer = warm_up([COLD, WARM, SLOW, WARM], false);
    for (field, expected) in [("first", 0.4), ("start", 5.0), ("second", 0.08), ("warm", 0.04), ("apart", 1.0)] {
        near(&answer, &format!("/{field}"), expected);
    }
    let quoted = answer.quoted();
    assert_eq!(quoted["parts"], serde_json::json!(["forward 100.0", "backward 200.0", "AdamW 100.0"]));
    assert_eq!(quoted["medians"], serde_json::json!(["40.0", "40.0"]));
    assert_eq!(quoted["shared"], serde_json::json!(["small with 0", "small with 1", "small with 2"]));
    let table = answer.tables()["warm-up-gpu"].markdown();
    assert!(table.contains("| small | 0 | 43.33 ± 49.33 | 20.00 | 400.0 | 80.0 |"), "{table}");
}

#[test]
fn a_study_with_a_hole_or_of_one_step_makes_no_claim() {
    for forward in [[WARM, FAILED, WARM, WARM], [ONCE, WARM, WARM, WARM], [WARM, WARM, WARM, FAILED]] {
        let answer = warm_up(forward, true);
        assert_eq!(answer.quoted()["studied"], false, "{forward:?}");
        assert_eq!(held(&answer, STUDY), [None; 4]);
        assert!(answer.tables().contains_key("warm-up-gpu"));
    }
}
