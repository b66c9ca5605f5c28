//! What `torch.compile` gains, measured in a Python peer in turns with our own eager and captured figures.

use self::measure::TorchCompile;
use crate::harness::problem::{Check, Measured, Problem};

mod adamw;
mod answer;
mod attention;
mod best;
mod checks;
mod classes;
mod curve;
mod measure;
mod scratch;
mod transformer;
mod transformer_bench;

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
    answer: answer::answer,
    reads: &[answer::ALONE],
};
