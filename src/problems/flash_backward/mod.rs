//! FlashAttention-2 backward by Eq. 13-19 with D, recomputing the probabilities from the saved logsumexp.

use anyhow::Result;
use serde_json::{Value, json};

use self::checks::{
    RANDOM_CASES, STEP, TOLERANCE, adversarial_inputs, backward_matches_autograd, finite_differences,
    official_protocol, tiled_backward,
};
use self::measure::Attestation;
use crate::attention::flash::{hopper, textbook};
use crate::attention::flash_tolerance::Passes;
use crate::checks::attention::differentiable;
use crate::checks::flash_kernels::{self, textbook_facts};
use crate::harness::problem::{Check, Measured, Problem};

pub mod checks;
pub mod measure;
mod sanitizer;

pub const PROBLEM: Problem = Problem {
    name: "flash_backward",
    answers: &[""],
    checks: &[
        Check { name: "backward_matches_autograd", part: "", run: || backward_matches_autograd(&tiled_backward) },
        Check { name: "adversarial_inputs", part: "", run: || adversarial_inputs(&tiled_backward) },
        Check { name: "finite_differences", part: "", run: || finite_differences(&tiled_backward) },
        Check { name: "official_protocol", part: "", run: || official_protocol(&differentiable) },
        Check { name: "textbook_kernels", part: "", run: || flash_kernels::textbook(Passes::Both) },
        Check { name: "hopper_kernels", part: "", run: || flash_kernels::hopper(Passes::Both) },
        Check { name: "portable_kernels", part: "", run: || flash_kernels::portable(Passes::Both) },
    ],
    measured: Some(Measured::of::<Attestation>()),
    facts,
    answer: crate::harness::problem::no_answer,
    reads: &[],
};

/// What the template says about the checks and the kernels, so that it stays true when they change.
fn facts() -> Result<Value> {
    Ok(json!({
        "random_cases": RANDOM_CASES,
        "step": STEP,
        "tolerance": TOLERANCE,
        "textbook": textbook_facts(textbook::TileConfig::backward),
        "flash": { "keys": hopper::tile_config::BackwardConfig::KEYS },
    }))
}
