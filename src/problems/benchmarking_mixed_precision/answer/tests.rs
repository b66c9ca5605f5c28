//! The answer over made-up records: headline numbers, every claim both ways, and cases that did not run.

use serde_json::Value;

use super::*;
use crate::attention::ImplementationName;
use crate::bench::training_step::{self, Execution, StepPass};
use crate::harness::answer::made_up::{MadeUp, printed};
use crate::harness::samples::Samples;
use crate::model::{Precision, SizeName};

fn timing(size: SizeName, dtype: Precision) -> Params {
    Params::Timing(training_step::Params {
        size,
        context_length: 512,
        batch_size: 4,
        vocab_size: 10_000,
        pass: StepPass::ForwardBackward,
        dtype,
        attention: ImplementationName::Naive,
        execution: Execution::Eager,
        allow_tf32: false,
        warmup: 5,
        steps: 2,
    })
}

fn row(forward: &[f64], backward: &[f64]) -> Row {
    let samples = |seconds: &[f64]| Samples::seconds_unbounded(seconds.to_vec()).unwrap();
    Row::Timing(Box::new(training_step::Row {
        parameters: 1,
        first_in_process: false,
        warmup: None,
        forward: Some(samples(forward)),
        forward_device: None,
        backward: Some(samples(backward)),
        backward_device: None,
        optimizer: None,
        optimizer_device: None,
        total: samples(&[1.0]),
        total_device: None,
        capture: None,
    }))
}

/// The toy model's types, as observed.
fn typed(made_up: MadeUp, half: Observed, brain: Observed) -> MadeUp {
    made_up.measured("dtypes", &Params::Dtypes { autocast: Dtype::Float16 }, &Row::Dtypes(half)).measured(
        "dtypes",
        &Params::Dtypes { autocast: Dtype::Bfloat16 },
        &Row::Dtypes(brain),
    )
}

fn documented(made_up: MadeUp) -> MadeUp {
    typed(made_up, on_cuda(Dtype::Float16), on_cuda(Dtype::Bfloat16))
}

const SIZES: [SizeName; 3] = [SizeName::Small, SizeName::Medium, SizeName::Large];

/// Each size with a bfloat16 step of 1 s a pass and a float32 step of as many seconds as its ratios say.
fn sized(made_up: MadeUp, ratios: &[(f64, f64)]) -> MadeUp {
    SIZES.into_iter().zip(ratios).fold(documented(made_up), |made_up, (size, (forward, backward))| {
        made_up.measured("timing", &timing(size, Precision::Float32), &row(&[*forward; 2], &[*backward; 2])).measured(
            "timing",
            &timing(size, Precision::Bfloat16),
            &row(&[1.0; 2], &[1.0; 2]),
        )
    })
}

fn gpu() -> MadeUp {
    MadeUp::gpu("benchmarking_mixed_precision")
}

fn cpu() -> MadeUp {
    MadeUp::cpu("benchmarking_mixed_precision")
}

fn answered(made_up: MadeUp) -> Answer {
    answer(&beside(made_up.records(), Records::default()), Audience::Ours).unwrap()
}

fn beside(records: Records, other: Records) -> Records {
    Records { others: [(OTHER.to_string(), other)].into(), ..records }
}

#[test]
fn observed_types_are_compared_with_the_documented_ones() {
    let answer = answered(documented(gpu()));
    assert_eq!((answer.holds("cuda-as-documented"), &answer.quoted()["observed"]), (Some(true), &true.into()));
    let table = answer.tables()["dtypes-gpu"].markdown();
    assert!(table.contains("| Output of fc1 | float16 | bfloat16 |\n"), "{table}");
    let other = Observed { relu_output: "float32".into(), ..on_cuda(Dtype::Bfloat16) };
    let other = answered(typed(gpu(), on_cuda(Dtype::Float16), other));
    assert_eq!(other.holds("cuda-as-documented"), Some(false));
    assert_eq!(other.claims()["cuda-as-documented"].operands[0].value, "13 of 14");
}

#[test]
fn a_cpus_layer_norm_is_told_from_cudas_and_nothing_is_said_of_what_was_not_observed() {
    let low = || Observed { ln_output: "float16".into(), ..on_cuda(Dtype::Float16) };
    for (half, differs) in [(low(), true), (on_cuda(Dtype::Float16), false)] {
        let answer = answered(typed(cpu(), half, on_cuda(Dtype::Bfloat16)));
        assert_eq!(answer.holds("cpu-layer-norm-differs"), Some(differs));
        assert_eq!((answer.holds("cuda-as-documented"), &answer.quoted()["observed"]), (None, &false.into()));
        assert_eq!(answer.quoted()["cpu_layer_norm"], if differs { "float16" } else { "float32" });
    }
    let failed = answered(cpu().failed("dtypes", &Params::Dtypes { autocast: Dtype::Float16 }));
    assert_eq!((failed.holds("cpu-layer-norm-differs"), &failed.quoted()["cpu_layer_norm"]), (None, &Value::Null));
}

#[test]
fn layer_norm_keeps_its_digits_with_float32_inside_alone() {
    let answer = answered(documented(gpu()));
    let quoted = answer.quoted();
    assert_eq!((&quoted["largest"], &quoted["digits"], &quoted["stuck"]), (&65504.0.into(), &8.into(), &32.0.into()));
    let table = answer.tables()["layer-norm"].markdown();
    let line = "| 99 to 101 | float16 | float16 | 99.999 | overflow | overflow | not a number |";
    assert!(table.contains(line), "{table}");
    assert!(table.contains("| −500 to 500 | bfloat16 | float32 | −0.488 | −0.488 | 1.00 | 0.0039 |"), "{table}");
    // The template says that bfloat16 inside gives no vector right, and that float32 inside costs one rounding.
    let [wide, narrow] = ["wide", "narrow"].map(|key| quoted[key].as_f64().unwrap());
    assert!(wide < 0.005 && narrow > 0.1, "{wide}, {narrow}");
    assert_eq!(quoted["near"], 100.0);
}

#[test]
fn claims_on_the_ratio_follow_the_sizes() {
    let rising = [(2.0, 1.5), (3.0, 2.0), (4.0, 3.0)];
    // Ratios of forward and backward by size; faster everywhere, rises.
    for (ratios, faster, rises) in [
        (rising, true, true),
        ([(2.0, 1.5), (5.0, 2.0), (4.0, 3.0)], true, false),
        ([(2.0, 1.5), (2.0, 1.5), (4.0, 3.0)], true, true),
        ([(4.0, 3.0), (3.0, 2.0), (2.0, 4.0)], true, false),
        ([(2.0, 1.5), (2.0, 1.5), (2.0, 1.5)], true, false),
        ([(1.0, 1.5), (3.0, 2.0), (4.0, 3.0)], false, true),
    ] {
        for made_up in [gpu(), cpu()] {
            let answer = answered(sized(made_up, &ratios));
            let claims = ["bfloat16-faster-everywhere", "ratio-rises-with-size"].map(|id| answer.holds(id));
            assert_eq!(claims, [Some(faster), Some(rises)], "{ratios:?}");
            assert_eq!(answer.quoted()["explained"], rises && answer.quoted()["gpu"] == true);
        }
    }
    let answer = answered(sized(gpu(), &rising));
    let quoted = printed(&answer);
    let ends = "from 2.00 (forward) and 1.50 (backward) for small to 4.00 and 3.00 for large";
    assert_eq!((&quoted["gain"]["ends"], &quoted["gain"]["sizes"]), (&ends.into(), &"every size".into()));
    let float32 = timing(SIZES[2], Precision::Float32);
    let two = answered(sized(gpu(), &rising[..2]).out_of_memory("timing", &float32));
    assert_eq!(two.quoted()["gain"]["sizes"], "small and medium");
    assert_eq!((&quoted["batch"], &quoted["context"], &quoted["steps"]), (&4.into(), &512.into(), &2.into()));
    assert_eq!(quoted["runs"], "one run");
    let one = answered(sized(gpu(), &rising[..1]));
    assert_eq!((one.holds("ratio-rises-with-size"), &one.quoted()["gain"]), (None, &Value::Null));
}

#[test]
fn unstable_steps_are_a_range_without_a_ratio_and_no_claim_rests_on_them() {
    let pair = |full: &[f64], low: &[f64]| {
        let [float32, bfloat16] = [Precision::Float32, Precision::Bfloat16].map(|dtype| timing(SizeName::Small, dtype));
        let made_up = gpu().measured("timing", &float32, &row(full, &[2.0; 2]));
        answered(made_up.measured("timing", &bfloat16, &row(low, &[1.0; 2])))
    };
    let unstable = pair(&[1.0, 3.0], &[1.0, 1.0]);
    let table = unstable.tables()["timings"].markdown();
    assert!(table.contains("| small | 1,000–3,000 | 1,000 | – | 2,000 | 1,000 | 2.00 |"), "{table}");
    assert_eq!(unstable.holds("bfloat16-faster-everywhere"), None);
    let stable = pair(&[3.0], &[1.0]);
    assert!(stable.tables()["timings"].markdown().contains("| small | 3,000 | 1,000 | 3.00 | 2,000 | 1,000 | 2.00 |"));
}

#[test]
fn types_of_two_machines_are_not_compared() {
    let [float32, bfloat16] = [Precision::Float32, Precision::Bfloat16].map(|dtype| timing(SizeName::Small, dtype));
    let made_up = gpu().measured("timing", &float32, &row(&[2.0; 2], &[2.0; 2])).run("another", Some("NVIDIA H100"));
    let made_up = made_up.measured("timing", &bfloat16, &row(&[1.0; 2], &[1.0; 2]));
    let error = answer(&beside(made_up.records(), Records::default()), Audience::Ours).unwrap_err();
    assert!(format!("{error:#}").contains("not of one machine"), "{error:#}");
}

#[test]
fn a_size_that_did_not_run_in_both_types_has_no_ratio() {
    let [small, medium, large] = SIZES.map(|size| move |dtype| timing(size, dtype));
    let answer = answered(
        sized(gpu(), &[(2.0, 2.0)])
            .measured("timing", &medium(Precision::Float32), &row(&[1.0; 2], &[1.0; 2]))
            .failed("timing", &medium(Precision::Bfloat16))
            .out_of_memory("timing", &large(Precision::Float32)),
    );
    let table = answer.tables()["timings"].markdown();
    assert!(table.contains("| medium | 1,000 | failed | – | 1,000 | failed | – |"), "{table}");
    assert!(table.contains("| large | OOM | – | – | OOM | – | – |"), "{table}");
    assert_eq!((answer.holds("bfloat16-faster-everywhere"), &answer.quoted()["gain"]), (None, &Value::Null));
    let none = answered(gpu().failed("timing", &small(Precision::Float32)));
    assert!(none.tables()["timings"].markdown().contains("| small | failed |"));
}

#[test]
fn a_cpus_small_cases_stand_below_a_gpus_and_no_record_is_an_error() {
    let both = Records { cpu: Some(sized(cpu(), &[(1.5, 1.5)]).set()), ..sized(gpu(), &[(2.0, 2.0)]).records() };
    let both = answer(&beside(both, Records::default()), Audience::Ours).unwrap();
    assert!(both.tables()["timings-cpu"].markdown().contains("| small | 1,500 | 1,000 | 1.50 |"));
    assert_eq!(both.quoted()["small"]["batch"], 4);
    let alone = answered(sized(cpu(), &[(1.5, 1.5)]));
    assert!(!alone.tables().contains_key("timings-cpu") && alone.quoted()["small"].is_null());
    let error = answer(&Records::default(), Audience::Ours).unwrap_err();
    assert!(format!("{error:#}").contains("cs336 measure"));
}

#[test]
fn sizes_that_are_slower_in_every_step_of_another_run_are_named() {
    let with = |small: &[f64], medium: &[f64]| {
        let rows = [(SizeName::Small, small), (SizeName::Medium, medium)];
        let other =
            rows.into_iter().fold(MadeUp::gpu(OTHER).run("other", Some("NVIDIA H200")), |made_up, (size, forward)| {
                let (Params::Timing(params), Row::Timing(row)) =
                    (timing(size, Precision::Bfloat16), row(forward, &[1.0; 2]))
                else {
                    unreachable!("both are timings")
                };
                made_up.measured("captured", &params, &row)
            });
        let here = sized(gpu(), &[(2.0, 2.0), (3.0, 3.0)]).records();
        printed(&answer(&beside(here, other.records()), Audience::Ours).unwrap())["slower"].clone()
    };
    let both = with(&[1.1, 1.5], &[1.2, 1.2]);
    assert_eq!((&both["sizes"], &both["first"]), (&"small and medium".into(), &"small".into()));
    assert_eq!((&both["here"], &both["there"]), (&"1,000".into(), &"1,100–1,500".into()));
    assert_eq!(with(&[1.0, 1.5], &[1.2, 1.2])["sizes"], "medium", "a step of small is as fast");
    assert!(with(&[1.0; 2], &[0.9, 1.5]).is_null());
}
