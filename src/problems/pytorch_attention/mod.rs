//! What attention by its definition costs: time, and the memory that its backward pass keeps waiting.

use self::measure::PytorchAttention;
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
mod checks;
mod measure;

pub const PROBLEM: Problem = Problem {
    name: "pytorch_attention",
    answers: &["a"],
    checks: &[
        Check { name: "naive_matches_pytorch", part: "a", run: checks::naive_matches_pytorch },
        Check { name: "memory_follows_the_formula", part: "a", run: checks::memory_follows_the_formula },
        Check { name: "what_cannot_fit_is_refused", part: "a", run: checks::what_cannot_fit_is_refused },
    ],
    measured: Some(Measured::of::<PytorchAttention>()),
    answer: answer::answer,
    reads: &[],
};
