//! `mixed_precision_accumulation`: adding a small number many times in several precisions, down to the last bit.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::harness::problem::{Check, Measure, Measured, Problem, Verdict};
use crate::harness::record::Profile;

pub mod format;

use format::Dtype;

pub const PROBLEM: Problem = Problem {
    name: "mixed_precision_accumulation",
    answers: &[""],
    checks: &[
        Check { name: "golden_sums", part: "", run: || check_golden(accumulate) },
        Check { name: "every_rounding_in_software", part: "", run: || check_against_software(accumulate) },
        Check { name: "promotion_equals_conversion", part: "", run: || check_promotion(accumulate) },
    ],
    measured: Some(Measured::of::<Accumulation>()),
    facts,
};

/// One loop: `sum += addend`, so many times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub accumulator: Dtype,
    pub addend: Dtype,
    pub cast: Cast,
    /// Before it is rounded to the addend's type.
    pub addend_value: f64,
    pub iterations: u32,
}

/// Who converts the addend to the accumulator's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cast {
    /// libtorch, by type promotion.
    Implicit,
    /// The loop, before it adds.
    Explicit,
}

/// Plain numbers: each is the same on every machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub sum: f64,
    /// `sum` less the product of `addend_value` and `iterations`.
    pub error: f64,
    /// The iteration, counted from 1, after which the sum no longer changed; 0 if it never did.
    pub last_change: u32,
}

struct Accumulation;

impl Measure for Accumulation {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn validate(params: &Params) -> Result<()> {
        let x = params.addend_value;
        ensure!(x.is_finite() && x > 0.0, "addend_value is {x}; it must be a finite number above zero");
        ensure!(
            (1..=1_000_000).contains(&params.iterations),
            "iterations is {}; choose 1 to 1,000,000",
            params.iterations
        );
        let narrowing = params.addend == Dtype::Float32 && params.accumulator != Dtype::Float32;
        ensure!(!narrowing, "addend float32 with a narrower accumulator is no loop of this problem");
        let same = params.addend == params.accumulator;
        ensure!(
            !(same && params.cast == Cast::Explicit),
            "cast explicit needs two types; both are {:?}",
            params.addend
        );
        Ok(())
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        accumulate(params, super::device_for(profile)?)
    }
}

/// How a loop is run; a parameter of the checks, so that tests can hand them a wrong one.
pub type Accumulate = fn(&Params, Device) -> Result<Row>;

/// Runs one loop with zero-dimensional tensors, as the handout writes it.
pub fn accumulate(params: &Params, device: Device) -> Result<Row> {
    let mut sum = Tensor::f_zeros([0_i64; 0], (params.accumulator.kind(), device))?;
    let addend = Tensor::f_full([0_i64; 0], params.addend_value, (params.addend.kind(), device))?;
    let (mut value, mut last_change) = (0.0, 0);
    for i in 1..=params.iterations {
        let term = match params.cast {
            Cast::Implicit => addend.shallow_clone(),
            Cast::Explicit => addend.f_to_kind(params.accumulator.kind())?,
        };
        let _ = sum.f_add_(&term)?;
        let now = sum.f_double_value(&[])?;
        if now != value {
            (value, last_change) = (now, i);
        }
    }
    let exact = params.addend_value * f64::from(params.iterations);
    Ok(Row { sum: value, error: value - exact, last_change })
}

/// The same loop with every operation rounded by [`format::Format`]; gives the sum after each iteration.
fn accumulate_in_software(params: &Params) -> impl Iterator<Item = f64> {
    let format = params.accumulator.format();
    let addend = params.addend.format().round(params.addend_value);
    (0..params.iterations).scan(0.0, move |sum, _| {
        *sum = format.round(*sum + addend);
        Some(*sum)
    })
}

/// What rounding alone explains: where each type stops counting, and how float16 steps from binade to binade.
fn facts() -> Result<Value> {
    let value = 0.01;
    let by_dtype = |dtype: Dtype| {
        let format = dtype.format();
        let addend = format.round(value);
        let stagnates_at = format.stagnates_at(addend);
        json!({
            "dtype": dtype.name(),
            "significand_bits": format.significand_bits,
            "addend": addend,
            "addend_relative_error": addend / value - 1.0,
            "stagnates_at": stagnates_at,
            "ulp_there": format.ulp(stagnates_at),
            "half_ulp_there": format.ulp(stagnates_at) / 2.0,
        })
    };
    Ok(json!({
        "addend_value": value,
        "float32": by_dtype(Dtype::Float32),
        "float16": by_dtype(Dtype::Float16),
        "bfloat16": by_dtype(Dtype::Bfloat16),
        "binades": binades(Dtype::Float16, value),
        "traces": [trace(Dtype::Float16, Dtype::Float16, value), trace(Dtype::Float32, Dtype::Float16, value),
                   trace(Dtype::Float32, Dtype::Float32, value)],
    }))
}

/// How far one addition really moves the sum in each range between powers of two, up to where it moves no more.
fn binades(dtype: Dtype, value: f64) -> Vec<Value> {
    let format = dtype.format();
    let addend = format.round(value);
    let end = format.stagnates_at(addend);
    let mut rows = Vec::new();
    let mut from = 1.0;
    while from <= end {
        let step = format.round(from + addend) - from;
        let row = json!({"from": from, "to": 2.0 * from, "ulp": format.ulp(from), "step": step,
                         "relative": step / value - 1.0});
        rows.push(row);
        from *= 2.0;
    }
    rows
}

/// The size of the running sum's error over a thousand additions, at every 50th; none where it is zero, which a
/// logarithmic axis cannot show.
fn trace(accumulator: Dtype, addend: Dtype, value: f64) -> Value {
    let params = Params { accumulator, addend, cast: Cast::Implicit, addend_value: value, iterations: 1000 };
    let every = 50;
    let sums = accumulate_in_software(&params).enumerate().map(|(i, sum)| (i + 1, sum)).filter(|(i, _)| i % every == 0);
    let size = |i: usize, sum: f64| Some((sum - i as f64 * value).abs()).filter(|e| *e > 0.0);
    let (x, y): (Vec<usize>, Vec<Option<f64>>) = sums.map(|(i, sum)| (i, size(i, sum))).unzip();
    json!({"name": format!("{} sum, {} addend", accumulator.name(), addend.name()), "x": x, "y": y})
}

/// The published sums, bit for bit: 1,000 times 0.01 and 10,000 times 0.001.
pub fn check_golden(accumulate: Accumulate) -> Result<Verdict> {
    use Dtype::{Bfloat16, Float16, Float32};
    let golden = [
        (Float32, Float32, 10.000133514404297, 10.000411033630371),
        (Float16, Float16, 9.953125, 4.0),
        (Float32, Float16, 10.00213623046875, 10.004043579101562),
        (Bfloat16, Bfloat16, 4.0, 0.5),
        (Float32, Bfloat16, 10.009765625, 9.9945068359375),
    ];
    for (accumulator, addend, hundredths, thousandths) in golden {
        for (addend_value, iterations, expected) in [(0.01, 1000, hundredths), (0.001, 10_000, thousandths)] {
            let params = Params { accumulator, addend, cast: Cast::Implicit, addend_value, iterations };
            let sum = accumulate(&params, Device::Cpu)?.sum;
            ensure!(sum == expected, "{params:?} gives {sum}, the published sum is {expected}");
        }
    }
    Verdict::passed("10 sums equal the published ones in every bit")
}

/// Sums, errors and last changes against rounding done without any tensor.
pub fn check_against_software(accumulate: Accumulate) -> Result<Verdict> {
    use Dtype::{Bfloat16, Float16, Float32};
    let pairs = [(Float32, Float32), (Float16, Float16), (Bfloat16, Bfloat16), (Float32, Float16), (Float32, Bfloat16)];
    let mut loops = 0;
    for (accumulator, addend) in pairs {
        for (addend_value, iterations) in
            [(0.01, 1), (0.01, 1000), (0.01, 5000), (0.1, 777), (3e-6, 2000), (37.0, 3000)]
        {
            let params = Params { accumulator, addend, cast: Cast::Implicit, addend_value, iterations };
            let sums: Vec<f64> = accumulate_in_software(&params).collect();
            let sum = sums.last().copied().unwrap_or(0.0);
            let last_change = sums.len() - sums.iter().rev().take_while(|s| **s == sum).count() + 1;
            let error = sum - addend_value * f64::from(iterations);
            let row = accumulate(&params, Device::Cpu)?;
            let expected = Row { sum, error, last_change: last_change as u32 };
            ensure!(row == expected, "{params:?} gives {row:?}, rounding in software {expected:?}");
            loops += 1;
        }
    }
    Verdict::passed(format!("{loops} loops agree with software rounding in every bit"))
}

/// Promotion by libtorch and conversion by hand must be the same arithmetic.
pub fn check_promotion(accumulate: Accumulate) -> Result<Verdict> {
    // Below 16,384 additions every partial sum of an 11-bit addend is exact in float32, and no arithmetic differs.
    for (addend, iterations) in [(Dtype::Float16, 1000), (Dtype::Bfloat16, 1000), (Dtype::Float16, 40_000)] {
        let of = |cast| {
            let params = Params { accumulator: Dtype::Float32, addend, cast, addend_value: 0.01, iterations };
            accumulate(&params, Device::Cpu)
        };
        let (implicit, explicit) = (of(Cast::Implicit)?, of(Cast::Explicit)?);
        ensure!(implicit == explicit, "{addend:?}: promoted {implicit:?}, converted {explicit:?}");
    }
    Verdict::passed("equal for float16 and bfloat16 addends")
}
