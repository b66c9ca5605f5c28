//! `naive_ddp_benchmarking`: what a training step costs when each gradient is averaged by itself after the backward pass.

mod answer;

use crate::bench::ddp_step::{Compared, Steps};
use crate::checks::ddp_step as checks;
use crate::harness::problem::{Check, Measured, Problem};

pub const PROBLEM: Problem = Problem {
    name: "naive_ddp_benchmarking",
    answers: &[""],
    checks: &[
        Check {
            name: "one_call_a_parameter",
            part: "",
            run: || checks::sends_every_gradient_once("naive", |tensors| tensors),
        },
        Check { name: "diverging_replicas_are_refused", part: "", run: checks::diverging_replicas_are_refused },
        Check { name: "pytorch_takes_its_turns", part: "", run: checks::pytorch_takes_its_turns },
    ],
    measured: Some(Measured::of::<Steps<NaiveDdp>>()),
    answer: answer::answer,
    // The probes of one link, for its fit.
    reads: &[
        "minimal_ddp_flat_benchmarking",
        "ddp_overlap_individual_parameters_benchmarking",
        "ddp_bucketed_benchmarking",
        "optimizer_state_sharding_accounting",
    ],
};

struct NaiveDdp;

impl Compared for NaiveDdp {
    const STRATEGIES: &'static [&'static str] = &["naive"];
}
