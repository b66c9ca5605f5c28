//! What `torch.compile` gains, measured in a Python peer in turns with our own eager and captured figures.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::device_for;
use crate::harness::problem::{Check, Measure, Measured, Problem};
use crate::harness::record::Profile;
use crate::model::Precision;

pub mod adamw;
pub mod attention;
pub mod bench;
pub mod checks;
pub mod columns;
pub mod peer;
mod scratch;
pub mod transformer;

use peer::{drop_kept, with_kept};

pub const PROBLEM: Problem = Problem {
    name: "torch_compile",
    answers: &["a", "b"],
    checks: &[
        Check { name: "peer_speaks_our_protocol", part: "a", run: checks::peer_speaks_our_protocol },
        Check { name: "attention_is_the_same_in_python", part: "a", run: checks::attention_is_the_same_in_python },
        Check { name: "model_is_the_same_in_python", part: "b", run: checks::model_is_the_same_in_python },
        Check { name: "adamw_is_the_same_in_python", part: "b", run: checks::adamw_is_the_same_in_python },
    ],
    measured: Some(Measured::of::<TorchCompile>()),
    facts,
};

/// One case: a cell of part (a)'s grid, a model of part (b), or the optimizer's part of a model's step.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Attention(attention::Params),
    Transformer(transformer::Params),
    Adamw(adamw::Params),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Row {
    Attention(attention::Row),
    Transformer(transformer::Row),
    Adamw(adamw::Row),
}

struct TorchCompile;

impl Measure for TorchCompile {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = &["adamw.cu"];

    fn validate(params: &Params) -> Result<()> {
        match params {
            Params::Attention(p) => p.validate(),
            Params::Transformer(p) => p.validate(),
            Params::Adamw(p) => p.validate(),
        }
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        match params {
            Params::Transformer(p) => Some(p.predicted_bytes(profile)),
            _ => None,
        }
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        match params {
            Params::Attention(p) => with_kept(device, |peer| attention::measure(p, device, peer)).map(Row::Attention),
            Params::Adamw(p) => with_kept(device, |peer| adamw::measure(p, device, peer)).map(Row::Adamw),
            Params::Transformer(p) => {
                // A model's peer is its own, so that it ends with the case and gives all its memory back.
                drop_kept();
                transformer::measure(p, device).map(Row::Transformer)
            }
        }
    }
}

/// The tolerances that equality was held to, for the report.
fn facts() -> Result<Value> {
    let of = |dtype| {
        let transformer::Tolerance { loss, logits, gradients, worst_gradient } = transformer::tolerance(dtype);
        json!({ "loss": loss, "logits": logits, "gradients": gradients, "worst_gradient": worst_gradient })
    };
    Ok(json!({
        "tolerance": {
            "attention": attention::TOLERANCE,
            "adamw": adamw::TOLERANCE,
            "float32": of(Precision::Float32),
            "bfloat16": of(Precision::Bfloat16),
        },
        "bytes_per_parameter": adamw::BYTES_PER_PARAMETER,
    }))
}
