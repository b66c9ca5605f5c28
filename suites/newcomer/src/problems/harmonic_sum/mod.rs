//! `harmonic_sum`: how the sum 1 + 1/2 + ... + 1/n in float32 depends on the order of the additions.

use self::checks::check_ten_terms;
use self::measure::{HarmonicSum, sum};
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
pub mod checks;
pub mod measure;

pub const PROBLEM: Problem = Problem {
    name: "harmonic_sum",
    answers: &[""],
    checks: &[Check { name: "ten_terms", part: "", run: || check_ten_terms(sum) }],
    measured: Some(Measured::of::<HarmonicSum>()),
    answer: answer::answer,
    reads: &[],
};
