//! Memory of one training step of the largest model: peaks by phase, what they consist of, and timelines.

use self::measure::MemoryProfiling;
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
pub(super) mod checks;
mod components;
mod measure;
mod predicted;
mod steps;

pub const PROBLEM: Problem = Problem {
    name: "memory_profiling",
    answers: &["a", "b", "c", "d", "e"],
    checks: &[
        Check { name: "prediction_adds_up", part: "d", run: predicted::prediction_adds_up },
        Check {
            name: "components_are_what_they_are_called",
            part: "a",
            run: checks::components_are_what_they_are_called,
        },
    ],
    measured: Some(Measured::of::<MemoryProfiling>()),
    answer: answer::answer,
    reads: &[],
};
