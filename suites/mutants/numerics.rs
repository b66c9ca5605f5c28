//! Mutants of the accounting and of the low-precision arithmetic, each with one plausible mistake.

use anyhow::{Result, ensure};
use cs336::bench::dtype::Dtype;
use cs336::bench::training_step;
use cs336::harness::problem::Verdict;
use cs336::model::Precision;
use cs336::problems::benchmarking_mixed_precision::{self as mixed, dtypes, layer_norm};
use cs336::problems::communication_accounting as accounting;
use cs336::problems::communication_accounting::formulas::{
    ACCOUNTING, Accounting, Chip, Mesh, Model, Reading, StaticBytes, Times,
};
use cs336::problems::mixed_precision_accumulation as accumulation;
use cs336::problems::mixed_precision_accumulation::measure::{Accumulate, Cast, Params, Row, accumulate};
use cs336::units::{GB, GIB};
use libtest_mimic::Trial;
use tch::{Device, Kind, Tensor};

/// One test for each mutant, and the correct implementation of each family as a control.
pub fn trials() -> Vec<Trial> {
    let mut trials = accounting_trials();
    trials.extend(accumulation_trials());
    trials.extend(layer_norm_trials());
    trials.extend(autocast_trials());
    trials.extend(option_trials());
    trials
}

fn caught(
    name: &str,
    check: &'static str,
    words: &'static str,
    run: impl FnOnce() -> Result<Verdict> + Send + 'static,
) -> Trial {
    super::caught("numerics", name, check, words, run)
}

fn control(name: &str, run: impl FnOnce() -> Result<Verdict> + Send + 'static) -> Trial {
    super::control("numerics", name, run)
}

type AccountingCheck = fn(&Accounting) -> Result<Verdict>;

/// The checks of `communication_accounting` by name.
const ACCOUNTING_CHECKS: [(&str, AccountingCheck); 6] = [
    (MEMORY, accounting::checks::check_memory),
    (COUNTING, accounting::checks::check_memory_by_counting),
    (FSDP, accounting::checks::check_smallest_fsdp),
    (BATCH, accounting::checks::check_batch),
    (BALANCE, accounting::checks::check_balance),
    (SPLIT, accounting::checks::check_best_split),
];
const MEMORY: &str = "communication_accounting::memory_golden_values";
const COUNTING: &str = "communication_accounting::memory_counted_layer_by_layer";
const FSDP: &str = "communication_accounting::smallest_fsdp_by_search";
const BATCH: &str = "communication_accounting::batch_golden_values";
const BALANCE: &str = "communication_accounting::times_balance_at_the_threshold";
const SPLIT: &str = "communication_accounting::best_split_by_search";

/// A mutant: its name, the formulas, the check that must catch it, and a part of the message.
type WrongAccounting = (&'static str, Accounting, &'static str, &'static str);

fn accounting_trials() -> Vec<Trial> {
    let controls = ACCOUNTING_CHECKS.map(|(name, check)| control(name, move || check(&ACCOUNTING)));
    let mutants = wrong_bytes().into_iter().chain(wrong_devices()).chain(wrong_times());
    let mutants = mutants.map(|(name, accounting, check, words)| {
        let (_, run) = ACCOUNTING_CHECKS.into_iter().find(|(known, _)| *known == check).expect("a check of the table");
        caught(&format!("accounting_{name}"), check, words, move || run(&accounting))
    });
    controls.into_iter().chain(mutants).collect()
}

/// Mutants of the bytes of a model, its training state and a token.
fn wrong_bytes() -> Vec<WrongAccounting> {
    let per_token = |activation_bytes_per_token| Accounting { activation_bytes_per_token, ..ACCOUNTING };
    let fixed = |static_bytes| Accounting { static_bytes, ..ACCOUNTING };
    let half = Accounting { parameters: |m| m.d_model * m.d_ff * m.num_blocks, ..ACCOUNTING };
    vec![
        ("one_matrix_a_block", half, COUNTING, "has 219848638464 parameters"),
        ("one_adam_moment", fixed(one_moment), MEMORY, "optimizer state in GB is 879.39"),
        ("gradients_in_bfloat16", fixed(short_gradients), MEMORY, "gradients in GB is 439.69"),
        (
            "activations_in_float32",
            per_token(|m| 4 * (m.d_model + m.d_ff) * m.num_blocks),
            MEMORY,
            "a token's activations are 17,547,264 bytes, not 35094528",
        ),
        ("only_one_input_saved", per_token(|m| 2 * m.d_model * m.num_blocks), COUNTING, "saves 17547264 bytes a token"),
    ]
}

/// Mutants of the number of devices.
fn wrong_devices() -> Vec<WrongAccounting> {
    let devices = |devices| Accounting { devices, ..ACCOUNTING };
    let smallest = |smallest_fsdp| Accounting { smallest_fsdp, ..ACCOUNTING };
    let sharded = Accounting { bytes_per_device: |s, a, n| (s + a) as f64 / n as f64, ..ACCOUNTING };
    vec![
        (
            "gib_for_gb",
            devices(|bytes, capacity| (bytes as f64 / (capacity / GB * GIB)).ceil() as u64),
            MEMORY,
            "44 H100s of 80 GB or 41 of 80 GiB, not 41 and",
        ),
        (
            "devices_rounded_down",
            devices(|bytes, capacity| (bytes as f64 / capacity) as u64),
            MEMORY,
            "44 H100s of 80 GB or 41 of 80 GiB, not 43 and",
        ),
        ("all_activations_sharded", sharded, FSDP, "memory per device is"),
        (
            "limit_reached_is_below_it",
            smallest(rounded_down),
            FSDP,
            "0 tokens: the formula says Some(37), the search Some(38)",
        ),
        (
            "no_limit_for_activations",
            smallest(|s, _, c| Some((s as f64 / c) as u64 + 1)),
            FSDP,
            "1000 tokens: the formula says Some(38), the search",
        ),
    ]
}

/// Mutants of the times of computation and communication, and of their balance.
fn wrong_times() -> Vec<WrongAccounting> {
    let threshold = |threshold| Accounting { threshold, ..ACCOUNTING };
    let times = Accounting { times: |m, c, x, b| half_math((ACCOUNTING.times)(m, c, x, b)), ..ACCOUNTING };
    let optimum = Accounting { optimum: |m, c, x, y| (ACCOUNTING.optimum)(m, c, x, y) / 4.0, ..ACCOUNTING };
    let added = "tokens per chip, communications added is";
    vec![
        ("math_of_one_matrix", times, BALANCE, "math over communication at Mesh"),
        ("axes_swapped", threshold(swapped), BATCH, added),
        (
            "one_mesh_axis",
            threshold(|m, c, x, r| (ACCOUNTING.threshold)(m, c, &Mesh { m_x: 1, ..*x }, r)),
            BATCH,
            added,
        ),
        (
            "readings_confused",
            threshold(|m, c, x, _| (ACCOUNTING.threshold)(m, c, x, Reading::Overlapped)),
            BATCH,
            "tokens per chip, communications added is 319.4",
        ),
        ("tensor_axis_always_fits", threshold(always), BALANCE, "math over communication at Mesh"),
        ("optimum_without_its_four", optimum, SPLIT, "tokens per chip at the best real X is 61.3"),
    ]
}

fn one_moment(parameters: u64) -> StaticBytes {
    let p = 4 * parameters;
    StaticBytes { weights: p, gradients: p, optimizer: p, total: 3 * p }
}

fn short_gradients(parameters: u64) -> StaticBytes {
    let p = parameters;
    StaticBytes { weights: 4 * p, gradients: 2 * p, optimizer: 8 * p, total: 14 * p }
}

fn rounded_down(static_bytes: u64, activations: u64, capacity: f64) -> Option<u64> {
    (ACCOUNTING.smallest_fsdp)(static_bytes, activations, capacity).map(|n| n - 1)
}

fn half_math(times: Times) -> Times {
    Times { math: times.math / 2.0, ..times }
}

fn swapped(model: &Model, chip: &Chip, mesh: &Mesh, reading: Reading) -> Option<f64> {
    let other = Mesh { x: mesh.y, y: mesh.x, m_x: mesh.m_y, m_y: mesh.m_x };
    (ACCOUNTING.threshold)(model, chip, &other, reading)
}

fn always(model: &Model, chip: &Chip, mesh: &Mesh, reading: Reading) -> Option<f64> {
    (ACCOUNTING.threshold)(model, chip, mesh, reading).or(Some(1.0))
}

const SUMS: &str = "mixed_precision_accumulation::golden_sums";
const ROUNDING: &str = "mixed_precision_accumulation::every_rounding_in_software";
const PROMOTION: &str = "mixed_precision_accumulation::promotion_equals_conversion";

fn accumulation_trials() -> Vec<Trial> {
    let golden = |name: &str, words, accumulate: Accumulate| {
        caught(&format!("accumulation_{name}"), SUMS, words, move || accumulation::checks::check_golden(accumulate))
    };
    vec![
        control(SUMS, || accumulation::checks::check_golden(accumulate)),
        control(ROUNDING, || accumulation::checks::check_against_software(accumulate)),
        control(PROMOTION, || accumulation::checks::check_promotion(accumulate)),
        golden("in_float64", "gives 10, the published sum is 10.000133514404297", |p, _| in_kind(p, Kind::Double)),
        golden("in_float32_throughout", "gives 10, the published sum is 9.953125", |p, _| in_kind(p, Kind::Float)),
        golden("one_iteration_short", "gives 9.99", |p, device| {
            accumulate(&Params { iterations: p.iterations - 1, ..p.clone() }, device)
        }),
        golden("addend_not_rounded", "the published sum is 10.00213623046875", |p, device| {
            accumulate(&Params { addend: p.accumulator, cast: Cast::Implicit, ..p.clone() }, device)
        }),
        golden("half_types_confused", "gives 4, the published sum is 9.953125", |p, device| {
            let swap = |d| match d {
                Dtype::Float16 => Dtype::Bfloat16,
                Dtype::Bfloat16 => Dtype::Float16,
                Dtype::Float32 => d,
            };
            accumulate(&Params { accumulator: swap(p.accumulator), addend: swap(p.addend), ..p.clone() }, device)
        }),
        golden("product_for_sum", "gives 10, the published sum is 10.000133514404297", |p, _| {
            let sum = p.accumulator.format().round(p.addend_value * f64::from(p.iterations));
            Ok(Row { sum, error: 0.0, last_change: p.iterations })
        }),
        caught("accumulation_stall_not_seen", ROUNDING, "rounding in software Row", || {
            accumulation::checks::check_against_software(|p, device| {
                Ok(Row { last_change: p.iterations, ..accumulate(p, device)? })
            })
        }),
        caught("accumulation_promotion_in_float64", PROMOTION, "promoted Row", || {
            accumulation::checks::check_promotion(|p, device| match p.cast {
                Cast::Implicit => accumulate(p, device),
                Cast::Explicit => in_kind(p, Kind::Double),
            })
        }),
    ]
}

/// Adds in `kind` and rounds once at the end.
fn in_kind(p: &Params, kind: Kind) -> Result<Row> {
    let addend = Tensor::f_full([0_i64; 0], p.addend_value, (p.addend.kind(), Device::Cpu))?.f_to_kind(kind)?;
    let mut sum = Tensor::f_zeros([0_i64; 0], (kind, Device::Cpu))?;
    for _ in 0..p.iterations {
        let _ = sum.f_add_(&addend)?;
    }
    let sum = p.accumulator.format().round(sum.f_double_value(&[])?);
    let error = sum - p.addend_value * f64::from(p.iterations);
    Ok(Row { sum, error, last_change: p.iterations })
}

fn layer_norm_trials() -> Vec<Trial> {
    const CHECK: &str = "benchmarking_mixed_precision::layer_norm_by_rounding";
    let mutant = |name: &str, words, normalise: layer_norm::Normalise| {
        caught(&format!("layer_norm_{name}"), CHECK, words, move || mixed::checks::check_layer_norm(normalise))
    };
    vec![
        control(CHECK, || mixed::checks::check_layer_norm(layer_norm::normalise)),
        mutant("statistics_never_widened", "away from libtorch", |x, f, _| {
            layer_norm::normalise(x, f, layer_norm::Scheme::Everything)
        }),
        mutant("low_precision_ignored", "its squares overflow", |x, f, _| {
            layer_norm::normalise(x, f, layer_norm::Scheme::StatisticsInFloat32)
        }),
        mutant("mean_not_subtracted", "Float16, ordinary: 0.00195", |x, f, scheme| {
            let mut y = layer_norm::normalise(x, f, scheme);
            let scale = 1.0 / (y.variance + layer_norm::EPS).sqrt();
            y.output = x.iter().map(|x| f.round(x * scale)).collect();
            y
        }),
        mutant("variance_over_n_minus_8", "away from libtorch", |x, f, scheme| {
            let mut y = layer_norm::normalise(x, f, scheme);
            let n = x.len() as f64;
            y.output.iter_mut().for_each(|y| *y *= ((n - 8.0) / n).sqrt());
            y
        }),
    ]
}

fn autocast_trials() -> Vec<Trial> {
    const CHECK: &str = "benchmarking_mixed_precision::autocast_keeps_its_promises";
    const ON_CUDA: &str = "benchmarking_mixed_precision::autocast_dtypes_on_cuda";
    let mutant = |name: &str, words, observe: dtypes::Observe| {
        caught(&format!("autocast_{name}"), CHECK, words, move || mixed::checks::check_autocast(observe))
    };
    vec![
        control(CHECK, || mixed::checks::check_autocast(dtypes::observe)),
        mutant("types_confused", "fc1's output is bfloat16, not float16", |dtype, device| match dtype {
            Dtype::Float16 => dtypes::observe(Dtype::Bfloat16, device),
            _ => dtypes::observe(Dtype::Float16, device),
        }),
        mutant("not_switched_on", "fc1's output is float32, not float16", |dtype, device| {
            let seen = dtypes::observe(dtype, device)?;
            let full = seen.parameters.clone();
            Ok(dtypes::Observed { fc1_output: full.clone(), logits: full, ..seen })
        }),
        mutant("left_switched_on", "fc1's output outside the region is float16, not float32", |dtype, device| {
            let seen = dtypes::observe(dtype, device)?;
            Ok(dtypes::Observed { fc1_output_outside: dtype.name().into(), ..seen })
        }),
        mutant("model_converted_instead", "parameters is float16, not float32", |dtype, device| {
            let seen = dtypes::observe(dtype, device)?;
            let low = dtype.name().to_string();
            Ok(dtypes::Observed { parameters: low.clone(), gradients: low, ..seen })
        }),
        control(ON_CUDA, || {
            let verdict = mixed::checks::check_autocast_on_cuda(dtypes::observe)?;
            ensure!(tch::Cuda::is_available() || matches!(verdict, Verdict::Skipped { .. }), "it ran without a GPU");
            Ok(verdict)
        }),
    ]
}

fn option_trials() -> Vec<Trial> {
    const CHECK: &str = "benchmarking_mixed_precision::bfloat16_option";
    let mutant = |name: &str, words, loss: mixed::checks::Loss| {
        caught(&format!("option_{name}"), CHECK, words, move || mixed::checks::check_option(loss))
    };
    vec![
        control(CHECK, || mixed::checks::check_option(training_step::loss)),
        mutant("ignored", "was bfloat16 used?", |model, x, y, _| training_step::loss(model, x, y, Precision::Float32)),
        mutant("always_on", "was bfloat16 used?", |model, x, y, _| {
            training_step::loss(model, x, y, Precision::Bfloat16)
        }),
        mutant("scales_the_loss", "of their norm, more than 0.05", |model, x, y, dtype| {
            let loss = training_step::loss(model, x, y, dtype)?;
            Ok(if dtype == Precision::Bfloat16 { loss.f_mul_scalar(1.1)? } else { loss })
        }),
    ]
}
