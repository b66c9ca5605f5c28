//! `benchmarking_mixed_precision`: which types autocast chooses, why layer norm is special, and what bfloat16 gains.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::mixed_precision_accumulation::format::Dtype;
use crate::harness::problem::{Check, Measure, Measured, Problem};
use crate::harness::record::Profile;

pub mod dtypes;
pub mod layer_norm;

pub const PROBLEM: Problem = Problem {
    name: "benchmarking_mixed_precision",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "autocast_keeps_its_promises", part: "a", run: || dtypes::check_promises(dtypes::observe) },
        Check { name: "autocast_dtypes_on_cuda", part: "a", run: || dtypes::check_cuda(dtypes::observe) },
        Check { name: "layer_norm_by_rounding", part: "b", run: || layer_norm::check(layer_norm::normalise) },
    ],
    measured: Some(Measured::of::<MixedPrecision>()),
    facts,
};

/// One case: the toy model of part (a), or a timed model of part (c).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Dtypes { autocast: Dtype },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Row {
    Dtypes(dtypes::Observed),
}

struct MixedPrecision;

impl Measure for MixedPrecision {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let device = super::device_for(profile)?;
        match params {
            Params::Dtypes { autocast } => Ok(Row::Dtypes(dtypes::observe(*autocast, device)?)),
        }
    }
}

/// The worked layer norms of part (b), and for part (a) what CUDA is known to give.
fn facts() -> Result<Value> {
    Ok(json!({
        "layer_norm": layer_norm::facts(),
        "on_cuda": {"float16": dtypes::on_cuda(Dtype::Float16), "bfloat16": dtypes::on_cuda(Dtype::Bfloat16)},
        "formats": Dtype::ALL.map(|d| json!({"name": d.name(), "significand_bits": d.format().significand_bits,
                                             "largest": d.format().largest})),
    }))
}
