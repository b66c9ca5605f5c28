//! `mixed_precision_accumulation`: adding a small number many times in several precisions, down to the last bit.

use self::checks::{check_against_software, check_golden, check_promotion};
use self::measure::{Accumulation, accumulate};
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
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
    answer: answer::answer,
    reads: &[],
};
