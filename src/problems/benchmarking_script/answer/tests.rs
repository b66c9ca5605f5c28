//! Answers from made-up steps: every claim both ways, headline numbers, and cases that are missing or ended otherwise.

use super::*;
use crate::attention::ImplementationName::{self, Flash, Naive, Sdpa};
use crate::bench::training_step::{Capture, Execution, StepPass};
use crate::harness::answer::made_up::{MadeUp, printed};
use crate::harness::answer::mark;
use crate::harness::samples;
use crate::model::Precision::{self, Bfloat16, Float32};
use crate::model::SizeName::{Small, Xl};

pub(super) const GPU: fn(&str) -> MadeUp = MadeUp::gpu;
const CPU: fn(&str) -> MadeUp = MadeUp::cpu;

pub(super) fn params(size: SizeName, context_length: i64) -> Params {
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

pub(super) fn seconds(samples: &[f64]) -> Samples {
    Samples { unit: samples::Unit::Seconds, samples: samples.to_vec(), work: None }
}

/// A row of these whole steps, and nothing else.
pub(super) fn whole(total: &[f64]) -> Row {
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
pub(super) fn around(t: f64, share: f64) -> Vec<f64> {
    vec![t * (1.0 - share), t, t * (1.0 + share)]
}

pub(super) fn ask(made_up: MadeUp) -> Answer {
    answer(&made_up.records(), Audience::Ours).unwrap()
}

fn number(answer: &Answer, field: &str) -> f64 {
    answer
        .quoted()
        .pointer(field)
        .and_then(|number| number["value"].as_f64())
        .unwrap_or_else(|| panic!("{field}: {}", answer.quoted()))
}

pub(super) fn near(answer: &Answer, field: &str, expected: f64) {
    let value = number(answer, field);
    assert!((value / expected - 1.0).abs() < 1e-9, "{field} is {value}, expected {expected}");
}

/// Small at 128 with this deviation, small at 256, and XL at 128; events show `events` of the host's times.
fn sweep(made_up: fn(&str) -> MadeUp, share: f64, at_256: f64, events: f64) -> Answer {
    let cells = [(Small, 128, 0.010, share), (Small, 256, at_256, 0.005), (Xl, 128, 0.1, 0.001)];
    ask(cells.into_iter().fold(made_up("x"), |made_up, (size, context, t, share)| {
        let mut row = parts(&around(t, share), 2.0);
        row.forward_device = Some(seconds(&around(events * t, share)));
        made_up.measured(SWEEP, &params(size, context), &row)
    }))
}

#[test]
fn the_sentences_quote_a_time_for_each_size_and_the_spread_of_stable_cells() {
    let answer = sweep(GPU, 0.01, 0.020, 0.98);
    let quoted = answer.quoted();
    for (field, expected) in
        [("context", "128"), ("sizes", "small and xl"), ("forward", "10.0 and 100"), ("backward", "20.0 and 200")]
    {
        assert_eq!(mark::plain(quoted[field].as_str().unwrap()), expected, "{field}");
    }
    assert_eq!((&quoted["stable"], &quoted["cells"], &quoted["unstable"]), (&3.into(), &3.into(), &"".into()));
    for (field, expected) in [("deviation", 0.01), ("ratio/low", 2.0), ("ratio/high", 2.0), ("gap", 0.02)] {
        near(&answer, &format!("/{field}"), expected);
    }
    let at_512 = |context| params(Small, context);
    let three = [128, 512, 1024]
        .into_iter()
        .fold(GPU("x"), |made_up, context| made_up.measured(SWEEP, &at_512(context), &parts(&around(0.01, 0.01), 2.0)));
    assert_eq!(ask(three).quoted()["context"], "512", "the handout's context where it was measured like others");
}

#[test]
fn no_sentence_uses_the_median_of_an_unstable_cell() {
    let answer = sweep(GPU, 0.2, 0.0115, 0.5);
    let quoted = answer.quoted();
    let words = ["forward", "unstable"].map(|field| mark::plain(quoted[field].as_str().unwrap()));
    assert_eq!(words, ["8.0–12 and 100", "small at 128"]);
    near(&answer, "/worst", 1.5);
    near(&answer, "/deviation", 0.005);
    assert_eq!((&quoted["stable"], &quoted["cells"]), (&2.into(), &3.into()));
    let half = GPU("x").measured(SWEEP, &params(Small, 128), &parts(&around(0.01, 0.2), 2.0));
    let half = ask(half.measured(SWEEP, &params(Small, 256), &parts(&around(0.01, 0.01), 2.0)));
    assert_eq!([&answer, &half].map(|of| of.holds("spread-is-small")), [Some(true), Some(false)]);
    let table = answer.tables()["passes"].markdown();
    assert!(table.contains("| forward | small | 10.0 ± 2.00 † | 11.5 ± 0.06 |"), "{table}");
}

#[test]
fn a_gpu_waits_for_launches_where_twice_the_context_takes_as_long() {
    let waiting = |made_up, at_256| sweep(made_up, 0.2, at_256, 1.0).quoted()["waiting"].clone();
    assert_eq!(waiting(GPU, 0.0115), "small takes as long at 128 as at 256");
    assert_eq!((waiting(GPU, 0.020), waiting(CPU, 0.0115)), ("".into(), "".into()));
}

#[test]
fn one_sample_has_no_spread_and_what_was_not_measured_its_word() {
    let made_up = GPU("x").measured(SWEEP, &params(Small, 128), &parts(&[0.01], 2.0));
    let made_up = made_up.out_of_memory(SWEEP, &params(Xl, 1024)).failed(SWEEP, &params(Xl, 512));
    let answer = ask(made_up.not_run(SWEEP, &params(Xl, 256)));
    assert!(answer.quoted()["deviation"].is_null() && answer.quoted()["gap"].is_null());
    let table = answer.tables()["passes"].markdown();
    for row in ["| forward | small | 10.0 ± – | – | – | – |", "| backward | xl | – | not run | failed | OOM |"]
    {
        assert!(table.contains(row), "{table}");
    }
}

#[test]
fn without_a_measured_case_there_are_tables_alone() {
    let answer = ask(GPU("x").failed(SWEEP, &params(Small, 128)).out_of_memory("warmup", &params(Small, 256)));
    assert!(answer.claims().is_empty() && answer.figures().is_empty());
    assert_eq!(answer.tables().keys().collect::<Vec<_>>(), ["cold", "optimizer", "passes", "sizes", "warm-up"]);
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
    assert_eq!(both.tables_of("cpu-"), ["cpu-passes", "cpu-optimizer", "cpu-warm-up", "cpu-cold"]);
    let captions = ["optimizer", "cpu-optimizer"].map(|id| both.tables()[id].caption.clone().unwrap());
    assert!(captions[0].starts_with("A step of fused AdamW") && captions[0].contains("NVIDIA H200"), "{captions:?}");
    assert!(
        captions[1].starts_with("A step of unfused AdamW") && captions[1].contains("made up, 2 cores"),
        "{captions:?}"
    );
}

#[test]
fn sizes_are_counted() {
    assert_eq!((BATCH_SIZE, VOCAB_SIZE), (4, 10_000), "the template's caption says so");
    let table = size_table().markdown();
    assert!(table.contains("| small | 768 | 3,072 | 12 | 12 | 128,625,408 | 0.534 |"), "{table}");
}

/// Steps of the small model in seconds: float32 eager and captured, bfloat16 eager and captured, and with TF32.
pub(super) fn captured(made_up: MadeUp, times: [f64; 5], loss_error: f64) -> MadeUp {
    let grids =
        [(SWEEP, Float32), ("captured", Float32), ("bfloat16", Bfloat16), ("captured", Bfloat16), ("tf32", Float32)];
    grids.into_iter().zip(times).fold(made_up, |made_up, ((grid, dtype), time)| {
        let (params, mut row) = (way(grid, dtype), whole(&around(time, 0.02)));
        if grid == "captured" {
            row.capture = Some(Capture {
                nodes: 1866,
                time: seconds(&[0.2]),
                loss_error,
                products: Vec::new(),
                own_products: Vec::new(),
            });
        }
        if time == 0.0 { made_up.out_of_memory(grid, &params) } else { made_up.measured(grid, &params, &row) }
    })
}

fn way(grid: &str, dtype: Precision) -> Params {
    let execution = if grid == "captured" { Execution::Captured } else { Execution::Eager };
    Params { dtype, execution, allow_tf32: grid == "tf32", ..params(Small, 512) }
}

#[test]
fn replays_are_compared_with_eager_steps_bit_by_bit() {
    for (error, expected) in [(0.0, true), (1e-7, false)] {
        let answer = ask(captured(GPU("x"), [0.050, 0.050, 0.030, 0.016, 0.025], error));
        assert_eq!(answer.holds("replays-compute-the-same"), Some(expected));
    }
}

#[test]
fn gains_are_of_stable_steps_and_missing_ways_are_dashes() {
    let times = [0.050, 0.050, 0.030, 0.015, 0.025];
    let answer = ask(captured(GPU("x"), times, 0.0));
    near(&answer, "/gains/low", 1.0);
    near(&answer, "/gains/high", 2.0);
    near(&answer, "/tf32/low", 2.0);
    let row = |answer: &Answer| answer.tables()["captured"].markdown().lines().nth(2).unwrap().to_string();
    let expected = "| small | 50.0 ± 1.00 | 50.0 ± 1.00 | 1.00 | 30.0 ± 0.60 | 15.0 ± 0.30 | 2.00 | 25.0 ± 0.50 |";
    assert_eq!(row(&answer), expected);
    let full = ask(captured(GPU("x"), [0.050, 0.050, 0.030, 0.0, 0.0], 0.0));
    assert!(row(&full).ends_with("| 1.00 | 30.0 ± 0.60 | OOM | – | OOM |"), "{}", row(&full));
    assert!(ask(captured(GPU("x"), [0.050, 0.0, 0.030, 0.0, 0.025], 0.0)).tables().get("captured").is_none());
    let unstable = captured(GPU("x"), [0.0, 0.050, 0.0, 0.015, 0.0], 0.0);
    let answer = ask(unstable.measured("bfloat16", &way("bfloat16", Bfloat16), &whole(&[0.026, 0.030, 0.034])));
    assert!(answer.quoted()["gains"].is_null());
    assert!(row(&answer).contains("| 26–34 | 15.0 ± 0.30 | – |"), "{}", row(&answer));
}

#[test]
fn steps_of_two_runs_have_no_ratio() {
    let (eager, mut replay) = (parts(&[0.05, 0.05], 2.0), whole(&[0.1]));
    replay.capture = Some(Capture {
        nodes: 1,
        time: seconds(&[0.2]),
        loss_error: 0.0,
        products: Vec::new(),
        own_products: Vec::new(),
    });
    let made_up = GPU("x").measured(SWEEP, &params(Small, 512), &eager).run("b", Some("NVIDIA H200"));
    assert!(ask(made_up.measured("captured", &way("captured", Float32), &replay)).quoted()["gains"].is_null());
}

/// Steps of the small model with PyTorch's attention, plain attention, and ours of another run.
fn attention(plain: Option<f64>) -> Answer {
    let of = |attention: ImplementationName| Params { attention, dtype: Bfloat16, ..params(Small, 1024) };
    let made_up = GPU("x").measured("flash", &of(Sdpa), &whole(&[0.020]));
    let made_up = match plain {
        Some(time) => made_up.measured("flash", &of(Naive), &whole(&[time])),
        None => made_up.out_of_memory("flash", &of(Naive)),
    };
    ask(made_up.run("b", Some("NVIDIA H200")).measured("flash", &of(Flash), &whole(&[0.010])))
}

#[test]
fn attentions_are_compared_within_one_run_alone() {
    let answer = attention(Some(0.040));
    near(&answer, "/over_sdpa/low", 2.0);
    assert!(answer.quoted()["over_flash"].is_null(), "ours is of another run");
    let table = answer.tables()["attention"].markdown();
    assert!(
        table.contains("| small | 40.0 ± – | 20.0 ± – | 10.0 ± – |") && table.ends_with("more than one run.\n"),
        "{table}"
    );
    let full = attention(None);
    assert!(full.quoted()["over_sdpa"].is_null());
    assert!(full.tables()["attention"].markdown().contains("| small | OOM |"));
}

/// Forward passes of some sizes after no, one, two and five warm-up steps; backward takes as long twice over.
fn warm_up(sizes: &[SizeName], forward: [&[f64]; 4], first_in_process: bool) -> MadeUp {
    let grids = [("warmup", 0), ("warmup", 1), ("warmup", 2), (SWEEP, 5)];
    let cases = sizes.iter().flat_map(|size| grids.into_iter().zip(forward).map(|case| (*size, case)));
    cases.fold(GPU("x"), |made_up, (size, ((grid, warmup), forward))| {
        let params = Params { warmup, ..params(size, 128) };
        match forward {
            [] => made_up.failed(grid, &params),
            _ => made_up.measured(grid, &params, &Row { first_in_process, ..parts(forward, 2.0) }),
        }
    })
}

const WARM: &[f64] = &[0.01, 0.01, 0.01];
const COLD: &[f64] = &[0.10, 0.01, 0.01];
const SLOW: &[f64] = &[0.02, 0.01, 0.01];
const NOISY: &[f64] = &[0.01, 0.02, 0.01];

#[test]
fn the_study_names_every_size_that_has_all_its_cases() {
    let answer = ask(warm_up(&[Small], [COLD, WARM, WARM, WARM], true));
    assert_eq!((&printed(&answer)["studied_sizes"], &printed(&answer)["starts"]), (&"small".into(), &"10.0".into()));
    near(&answer, "/mean_over_median/low", 4.0);
    assert_eq!((number(&answer, "/apart"), number(&answer, "/from_warm")), (0.0, 0.0));
    let both = ask(warm_up(&[Small, Xl], [COLD, WARM, WARM, WARM], true));
    assert_eq!(
        (&printed(&both)["studied_sizes"], &printed(&both)["starts"]),
        (&"small and xl".into(), &"10.0 and 10.0".into())
    );
    let table = both.tables()["warm-up"].markdown();
    let row = "| xl | 40.0 ± 52.0 | 10.0 ± 0.00 | 10.0 ± 0.00 | 10.0 ± 0.00 | 10.00 | 1.00 | 1.00 |";
    assert!(table.contains(row) && table.ends_with("NVIDIA H200.\n"), "{table}");
    let cold = both.tables()["cold"].markdown();
    assert!(cold.contains("| small | 100 | 200 | 100 | 400 | 40.0 | 40.0 |"), "{cold}");
}

#[test]
fn sizes_of_a_later_run_stand_beside_those_of_an_earlier_one() {
    let made_up = warm_up(&[Small], [COLD, WARM, WARM, WARM], true);
    let made_up = made_up.measured(SWEEP, &params(Xl, 128), &parts(WARM, 2.0)).run("b", Some("NVIDIA H200"));
    let later = [(0, COLD), (1, WARM), (2, WARM)].into_iter().fold(made_up, |made_up, (warmup, forward)| {
        let row = Row { first_in_process: true, ..parts(forward, 2.0) };
        made_up.measured("warmup", &Params { warmup, ..params(Xl, 128) }, &row)
    });
    let answer = ask(later);
    assert_eq!(answer.quoted()["studied_sizes"], "small and xl");
    near(&answer, "/mean_over_median/high", 4.0);
    assert_eq!(number(&answer, "/from_warm"), 0.0, "one kind of machine");
    assert!(answer.tables()["warm-up"].markdown().ends_with("The cells come from more than one run.\n"));
}

#[test]
fn a_first_step_that_is_slow_after_warm_up_is_said() {
    for (forward, expected) in [([COLD, WARM, WARM, WARM], true), ([COLD, WARM, SLOW, WARM], false)] {
        assert_eq!(ask(warm_up(&[Small], forward, true)).holds("warm-after-one-step"), Some(expected));
    }
    near(&ask(warm_up(&[Small], [COLD, WARM, SLOW, WARM], true)), "/apart", 1.0);
}

#[test]
fn a_study_with_a_hole_an_unstable_run_or_a_shared_process_makes_no_claim() {
    let holes: [([&[f64]; 4], bool); 5] = [
        ([WARM, &[], WARM, WARM], true),
        ([&[0.01], WARM, WARM, WARM], true),
        ([WARM, WARM, WARM, &[]], true),
        ([COLD, NOISY, WARM, WARM], true),
        ([COLD, WARM, WARM, WARM], false),
    ];
    for (forward, own) in holes {
        let answer = ask(warm_up(&[Small], forward, own));
        assert_eq!(
            (&answer.quoted()["studied"], answer.holds("warm-after-one-step")),
            (&false.into(), None),
            "{forward:?}"
        );
        assert!(answer.tables().contains_key("warm-up"));
    }
}
