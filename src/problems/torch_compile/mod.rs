//! What `torch.compile` gains, measured in a Python peer in turns with our own eager and captured figures.

use anyhow::Result;
use serde_json::{Value, json};

use self::measure::TorchCompile;
use crate::harness::problem::{Check, Measured, Problem};
use crate::model::Precision;

pub mod adamw;
pub mod attention;
pub mod checks;
pub mod measure;
mod scratch;
pub mod transformer;
pub mod transformer_bench;

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
    answer: crate::harness::problem::no_answer,
    reads: &[],
};

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
