//! `minimal_ddp_flat_benchmarking`: what one call for all gradients saves against a call for each.

mod answer;

use crate::bench::ddp_step::{Compared, Steps};
use crate::checks::ddp_step as checks;
use crate::harness::problem::{Check, Measured, Problem};

pub const PROBLEM: Problem = Problem {
    name: "minimal_ddp_flat_benchmarking",
    answers: &[""],
    checks: &[Check { name: "one_call_a_step", part: "", run: || checks::sends_every_gradient_once("flat", |_| 1) }],
    measured: Some(Measured::of::<Steps<MinimalDdpFlat>>()),
    answer: answer::answer,
    // The probes of one link, for its fit.
    reads: &[
        "naive_ddp_benchmarking",
        "ddp_overlap_individual_parameters_benchmarking",
        "ddp_bucketed_benchmarking",
        "optimizer_state_sharding_accounting",
    ],
};

struct MinimalDdpFlat;

impl Compared for MinimalDdpFlat {
    const STRATEGIES: &'static [&'static str] = &["naive", "flat"];
}
