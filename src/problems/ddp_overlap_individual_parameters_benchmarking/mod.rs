//! `ddp_overlap_individual_parameters_benchmarking`: what is left of the communication when it runs beside the backward pass.

mod answer;
pub mod subject;

use crate::bench::ddp_step::{Compared, Steps};
use crate::checks::ddp_step as checks;
use crate::harness::problem::{Check, Measured, Problem};

pub const PROBLEM: Problem = Problem {
    name: "ddp_overlap_individual_parameters_benchmarking",
    answers: &["a", "b"],
    checks: &[
        Check {
            name: "one_call_a_parameter",
            part: "a",
            run: || checks::sends_every_gradient_once("overlap_individual_parameters", |tensors| tensors),
        },
        Check { name: "lanes_tell_overlap", part: "b", run: checks::lanes_tell_overlap },
    ],
    measured: Some(Measured::of::<Steps<Overlap>>()),
    answer: answer::answer,
    reads: &[],
};

struct Overlap;

impl Compared for Overlap {
    const STRATEGIES: &'static [&'static str] = &["naive", "flat", "overlap_individual_parameters"];
}
