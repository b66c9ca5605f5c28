//! Measures one loop of additions: `sum += addend`, so many times.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;

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

/// How the addend is converted to the accumulator's type.
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

pub struct Accumulation;

impl Measure for Accumulation {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn validate(params: &Params) -> Result<()> {
        let x = params.addend_value;
        let largest = params.addend.format().largest;
        ensure!(x > 0.0 && x <= largest, "addend_value is {x}; choose a number above 0 and up to {largest:e}");
        ensure!(
            (1..=1_000_000).contains(&params.iterations),
            "iterations is {}; choose 1 to 1,000,000",
            params.iterations
        );
        let narrowing = params.addend == Dtype::Float32 && params.accumulator != Dtype::Float32;
        ensure!(!narrowing, "addend float32 with a narrower accumulator is not a loop of this problem");
        let same = params.addend == params.accumulator;
        ensure!(
            !(same && params.cast == Cast::Explicit),
            "cast explicit needs two types; both are {:?}",
            params.addend
        );
        Ok(())
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        let Row { sum, error, last_change } = *row;
        let (iterations, expected) = (params.iterations, sum - exact(params));
        ensure!(last_change <= iterations, "last_change is {last_change}, of {iterations} iterations");
        ensure!(error == expected, "error is {error}, but the sum {sum} less {} is {expected}", exact(params));
        Ok(())
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        accumulate(params, device_for(profile)?)
    }
}

/// How a loop is run. A parameter of the checks, so that tests can pass a wrong one.
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
    Ok(Row { sum: value, error: value - exact(params), last_change })
}

/// The sum without rounding.
fn exact(params: &Params) -> f64 {
    params.addend_value * f64::from(params.iterations)
}

/// The same loop with every operation rounded by [`crate::bench::dtype::Format`]; gives the sum after each iteration.
pub fn accumulate_in_software(params: &Params) -> impl Iterator<Item = f64> {
    let format = params.accumulator.format();
    let addend = params.addend.format().round(params.addend_value);
    (0..params.iterations).scan(0.0, move |sum, _| {
        *sum = format.round(*sum + addend);
        Some(*sum)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_contradicts_itself_or_its_case_is_refused_with_the_value() {
        let params = Params {
            accumulator: Dtype::Float16,
            addend: Dtype::Float16,
            cast: Cast::Implicit,
            addend_value: 0.01,
            iterations: 1000,
        };
        let row = accumulate(&params, Device::Cpu).unwrap();
        Accumulation::validate_row(&params, &row).unwrap();
        let said = |row: Row| Accumulation::validate_row(&params, &row).unwrap_err().to_string();
        assert_eq!(said(Row { last_change: 1001, ..row.clone() }), "last_change is 1001, of 1000 iterations");
        assert!(said(Row { error: -row.error, ..row.clone() }).starts_with("error is "));
        assert!(said(Row { sum: 10.0, ..row }).contains("but the sum 10 less 10 is 0"));
    }
}
