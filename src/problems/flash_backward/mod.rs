//! FlashAttention-2 backward by Eq. 13-19 with D, recomputing the probabilities from the saved logsumexp.

use anyhow::Result;
use serde::Serialize;

use self::checks::{
    RANDOM_CASES, STEP, TOLERANCE, adversarial_inputs, backward_matches_autograd, finite_differences,
    official_protocol, tiled_backward,
};
use self::measure::Attestation;
use crate::attention::flash::{hopper, textbook};
use crate::attention::flash_tolerance::Passes;
use crate::checks::attention::differentiable;
use crate::checks::attestation::{self, Attested};
use crate::checks::flash_kernels::{self, TextbookFacts};
use crate::harness::answer::{Answer, Audience, Records};
use crate::harness::problem::{Check, Measured, Problem};

pub mod checks;
mod measure;
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
    answer,
    reads: &[],
};

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    random_cases: u32,
    step: f64,
    tolerance: f64,
    textbook: TextbookFacts,
    /// Of a block of the fast kernel.
    keys: u32,
    attested: Attested,
}

fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let attested = Attested::of(records)?;
    let claim = attested.claim();
    let mut answer = Answer::new(&Quoted {
        random_cases: RANDOM_CASES,
        step: STEP,
        tolerance: TOLERANCE,
        textbook: TextbookFacts::of(textbook::TileConfig::backward),
        keys: hopper::tile_config::BackwardConfig::KEYS,
        attested,
    })?;
    answer.claim(claim)?;
    for set in records.sets() {
        answer.table(format!("trials-{}", set.profile()), attestation::table(set)?)?;
    }
    Ok(answer)
}
