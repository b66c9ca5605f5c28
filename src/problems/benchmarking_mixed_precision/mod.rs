//! `benchmarking_mixed_precision`: which types autocast chooses, why layer norm is special, and what bfloat16 gains.

use self::measure::MixedPrecision;
use crate::bench::training_step;
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
pub mod checks;
pub mod dtypes;
pub mod layer_norm;
mod measure;

pub const PROBLEM: Problem = Problem {
    name: "benchmarking_mixed_precision",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "autocast_keeps_its_promises", part: "a", run: || checks::check_autocast(dtypes::observe) },
        Check { name: "autocast_dtypes_on_cuda", part: "a", run: || checks::check_autocast_on_cuda(dtypes::observe) },
        Check { name: "layer_norm_by_rounding", part: "b", run: || checks::check_layer_norm(layer_norm::normalise) },
        Check { name: "bfloat16_option", part: "c", run: || checks::check_option(training_step::loss) },
    ],
    measured: Some(Measured::of::<MixedPrecision>()),
    answer: answer::answer,
    reads: &[answer::OTHER],
};
