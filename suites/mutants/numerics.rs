//! Mutants of the accounting and of the low-precision arithmetic: each is one plausible mistake, and must be caught.

use anyhow::{Result, ensure};
use cs336::bench::dtype::Dtype;
use cs336::bench::training_step;
use cs336::harness::problem::Verdict;
use cs336::model::Precision;
use cs336::problems::benchmarking_mixed_precision::{self as mixed, dtypes, layer_norm};
use cs336::problems::communication_accounting as accounting;
use cs336::problems::communication_accounting::formulas::{ACCOUNTING, Accounting, Mesh, Reading, StaticBytes, Times};
use cs336::problems::mixed_precision_accumulation as accumulation;
use cs336::units::{GB, GIB};
use libtest_mimic::{Failed, Trial};
use tch::{Device, Kind, Tensor};

/// One test a mutant, and the sound implementation beside each family as its control.
pub fn trials() -> Vec<Trial> {
    let mut trials = accounting_trials();
    trials.extend(accumulation_trials());
    trials.extend(layer_norm_trials());
    trials.extend(autocast_trials());
    trials
}

/// Passes where `check` fails, and prints what it said.
fn caught(name: &str, check: impl FnOnce() -> Result<Verdict> + Send + 'static) -> Trial {
    Trial::test(format!("mutants::numerics::{name}"), move || match check() {
        Err(error) => {
            println!("caught: {error:#}");
            Ok(())
        }
        Ok(verdict) => Err(Failed::from(format!("the check let it pass: {verdict:?}"))),
    })
}

/// Passes where every check does: a check that rejects everything would catch every mutant.
fn control(name: &str, checks: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    let run = move || checks().map_err(|error| Failed::from(format!("{error:#}")));
    Trial::test(format!("mutants::numerics::{name}"), run)
}

/// Runs every check of `communication_accounting`; the first failure is the catch.
fn account(mutant: Accounting) -> Result<Verdict> {
    accounting::checks::check_memory(&mutant)?;
    accounting::checks::check_memory_by_counting(&mutant)?;
    accounting::checks::check_smallest_fsdp(&mutant)?;
    accounting::checks::check_batch(&mutant)?;
    accounting::checks::check_balance(&mutant)?;
    accounting::checks::check_best_split(&mutant)
}

fn accounting_trials() -> Vec<Trial> {
    let mutant =
        |name: &str, accounting: Accounting| caught(&format!("accounting_{name}"), move || account(accounting));
    vec![
        control("accounting_control", || account(ACCOUNTING).map(drop)),
        mutant("one_matrix_a_block", Accounting { parameters: |m| m.d_model * m.d_ff * m.num_blocks, ..ACCOUNTING }),
        mutant("one_adam_moment", Accounting { static_bytes: one_moment, ..ACCOUNTING }),
        mutant("gradients_in_bfloat16", Accounting { static_bytes: short_gradients, ..ACCOUNTING }),
        mutant(
            "gib_for_gb",
            Accounting { devices: |b, capacity| (b as f64 / (capacity / GB * GIB)).ceil() as u64, ..ACCOUNTING },
        ),
        mutant(
            "devices_rounded_down",
            Accounting { devices: |b, capacity| (b as f64 / capacity) as u64, ..ACCOUNTING },
        ),
        mutant(
            "activations_in_float32",
            Accounting { activation_bytes_per_token: |m| 4 * (m.d_model + m.d_ff) * m.num_blocks, ..ACCOUNTING },
        ),
        mutant(
            "only_one_input_saved",
            Accounting { activation_bytes_per_token: |m| 2 * m.d_model * m.num_blocks, ..ACCOUNTING },
        ),
        mutant(
            "all_activations_sharded",
            Accounting { bytes_per_device: |s, a, n| (s + a) as f64 / n as f64, ..ACCOUNTING },
        ),
        mutant("limit_reached_is_below_it", Accounting { smallest_fsdp: rounded_down, ..ACCOUNTING }),
        mutant(
            "no_limit_for_activations",
            Accounting { smallest_fsdp: |s, _, c| Some((s as f64 / c) as u64 + 1), ..ACCOUNTING },
        ),
        mutant(
            "math_of_one_matrix",
            Accounting { times: |m, c, x, b| half_math((ACCOUNTING.times)(m, c, x, b)), ..ACCOUNTING },
        ),
        mutant(
            "axes_swapped",
            Accounting {
                threshold: |m, c, x, r| {
                    (ACCOUNTING.threshold)(m, c, &Mesh { x: x.y, y: x.x, m_x: x.m_y, m_y: x.m_x }, r)
                },
                ..ACCOUNTING
            },
        ),
        mutant(
            "one_mesh_axis",
            Accounting {
                threshold: |m, c, x, r| (ACCOUNTING.threshold)(m, c, &Mesh { m_x: 1, ..*x }, r),
                ..ACCOUNTING
            },
        ),
        mutant(
            "readings_confused",
            Accounting { threshold: |m, c, x, _| (ACCOUNTING.threshold)(m, c, x, Reading::Overlapped), ..ACCOUNTING },
        ),
        mutant("tensor_axis_always_fits", Accounting { threshold: always, ..ACCOUNTING }),
        mutant(
            "optimum_without_its_four",
            Accounting { optimum: |m, c, x, y| (ACCOUNTING.optimum)(m, c, x, y) / 4.0, ..ACCOUNTING },
        ),
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

fn always(
    model: &accounting::formulas::Model,
    chip: &accounting::formulas::Chip,
    mesh: &Mesh,
    reading: Reading,
) -> Option<f64> {
    (ACCOUNTING.threshold)(model, chip, mesh, reading).or(Some(1.0))
}

fn accumulate_checks(accumulate: accumulation::measure::Accumulate) -> Result<Verdict> {
    accumulation::checks::check_golden(accumulate)?;
    accumulation::checks::check_against_software(accumulate)?;
    accumulation::checks::check_promotion(accumulate)
}

fn accumulation_trials() -> Vec<Trial> {
    let mutant = |name: &str, accumulate: accumulation::measure::Accumulate| {
        caught(&format!("accumulation_{name}"), move || accumulate_checks(accumulate))
    };
    vec![
        control("accumulation_control", || accumulate_checks(accumulation::measure::accumulate).map(drop)),
        mutant("in_float64", |p, _| in_kind(p, Kind::Double)),
        mutant("in_float32_throughout", |p, _| in_kind(p, Kind::Float)),
        mutant("one_iteration_short", |p, device| {
            let shorter = accumulation::measure::Params { iterations: p.iterations - 1, ..p.clone() };
            accumulation::measure::accumulate(&shorter, device)
        }),
        mutant("addend_not_rounded", |p, device| {
            let wide = accumulation::measure::Params {
                addend: p.accumulator,
                cast: accumulation::measure::Cast::Implicit,
                ..p.clone()
            };
            accumulation::measure::accumulate(&wide, device)
        }),
        mutant("half_types_confused", |p, device| {
            let swap = |d| match d {
                Dtype::Float16 => Dtype::Bfloat16,
                Dtype::Bfloat16 => Dtype::Float16,
                Dtype::Float32 => d,
            };
            let other =
                accumulation::measure::Params { accumulator: swap(p.accumulator), addend: swap(p.addend), ..p.clone() };
            accumulation::measure::accumulate(&other, device)
        }),
        mutant("product_for_sum", |p, _| {
            let sum = p.accumulator.format().round(p.addend_value * f64::from(p.iterations));
            Ok(accumulation::measure::Row { sum, error: 0.0, last_change: p.iterations })
        }),
        caught("accumulation_promotion_in_float64", || {
            accumulation::checks::check_promotion(|p, device| match p.cast {
                accumulation::measure::Cast::Implicit => accumulation::measure::accumulate(p, device),
                accumulation::measure::Cast::Explicit => in_kind(p, Kind::Double),
            })
        }),
    ]
}

/// Adds in `kind` and rounds once at the end.
fn in_kind(p: &accumulation::measure::Params, kind: Kind) -> Result<accumulation::measure::Row> {
    let addend = Tensor::f_full([0_i64; 0], p.addend_value, (p.addend.kind(), Device::Cpu))?.f_to_kind(kind)?;
    let mut sum = Tensor::f_zeros([0_i64; 0], (kind, Device::Cpu))?;
    for _ in 0..p.iterations {
        let _ = sum.f_add_(&addend)?;
    }
    let sum = p.accumulator.format().round(sum.f_double_value(&[])?);
    let error = sum - p.addend_value * f64::from(p.iterations);
    Ok(accumulation::measure::Row { sum, error, last_change: p.iterations })
}

fn layer_norm_trials() -> Vec<Trial> {
    let mutant = |name: &str, normalise: layer_norm::Normalise| {
        caught(&format!("layer_norm_{name}"), move || layer_norm::check(normalise))
    };
    vec![
        control("layer_norm_control", || layer_norm::check(layer_norm::normalise).map(drop)),
        mutant("statistics_never_widened", |x, f, _| layer_norm::normalise(x, f, layer_norm::Scheme::Everything)),
        mutant("low_precision_ignored", |x, f, _| layer_norm::normalise(x, f, layer_norm::Scheme::StatisticsInFloat32)),
        mutant("mean_not_subtracted", |x, f, scheme| {
            let mut y = layer_norm::normalise(x, f, scheme);
            let scale = 1.0 / (y.variance + layer_norm::EPS).sqrt();
            y.output = x.iter().map(|x| f.round(x * scale)).collect();
            y
        }),
        mutant("variance_over_n_minus_8", |x, f, scheme| {
            let mut y = layer_norm::normalise(x, f, scheme);
            let n = x.len() as f64;
            y.output.iter_mut().for_each(|y| *y *= ((n - 8.0) / n).sqrt());
            y
        }),
    ]
}

fn autocast_trials() -> Vec<Trial> {
    let mutant = |name: &str, observe: dtypes::Observe| {
        caught(&format!("autocast_{name}"), move || dtypes::check_promises(observe))
    };
    vec![
        control("autocast_control", || dtypes::check_promises(dtypes::observe).map(drop)),
        mutant("types_confused", |dtype, device| match dtype {
            Dtype::Float16 => dtypes::observe(Dtype::Bfloat16, device),
            _ => dtypes::observe(Dtype::Float16, device),
        }),
        mutant("not_switched_on", |dtype, device| {
            let seen = dtypes::observe(dtype, device)?;
            let full = seen.parameters.clone();
            Ok(dtypes::Observed { fc1_output: full.clone(), logits: full, ..seen })
        }),
        mutant("left_switched_on", |dtype, device| {
            let seen = dtypes::observe(dtype, device)?;
            Ok(dtypes::Observed { fc1_output_outside: dtype.name().into(), ..seen })
        }),
        mutant("model_converted_instead", |dtype, device| {
            let seen = dtypes::observe(dtype, device)?;
            let low = dtype.name().to_string();
            Ok(dtypes::Observed { parameters: low.clone(), gradients: low, ..seen })
        }),
        control("option_control", || mixed::checks::check_option(training_step::loss).map(drop)),
        caught("option_ignored", || {
            mixed::checks::check_option(|model, x, y, _| training_step::loss(model, x, y, Precision::Float32))
        }),
        caught("option_always_on", || {
            mixed::checks::check_option(|model, x, y, _| training_step::loss(model, x, y, Precision::Bfloat16))
        }),
        caught("option_scales_the_loss", || {
            mixed::checks::check_option(|model, x, y, dtype| {
                let loss = training_step::loss(model, x, y, dtype)?;
                Ok(if dtype == Precision::Bfloat16 { loss.f_mul_scalar(1.1)? } else { loss })
            })
        }),
        control("autocast_cuda_check_needs_a_gpu_or_passes", || {
            let verdict = dtypes::check_cuda(dtypes::observe)?;
            ensure!(tch::Cuda::is_available() || matches!(verdict, Verdict::Skipped { .. }), "it ran without a GPU");
            Ok(())
        }),
    ]
}
