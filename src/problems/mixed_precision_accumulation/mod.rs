//! `mixed_precision_accumulation`: adding a small number many times in several precisions, down to the last bit.

use anyhow::Result;
use serde_json::{Value, json};

use self::checks::{check_against_software, check_golden, check_promotion};
use self::measure::{Accumulation, Cast, Params, accumulate, accumulate_in_software};
use crate::bench::dtype::Dtype;
use crate::harness::problem::{Check, Measured, Problem};

pub mod checks;
pub mod measure;

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
