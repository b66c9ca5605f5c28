//! `optimizer_state_sharding_accounting`: what sharding the optimizer's state saves in memory and costs in time, beside ZeRO
//! stage 1.

use self::measure::Sharding;
use crate::bench::ddp_step::trainer;
use crate::harness::problem::{Check, Measured, Problem};
use crate::parallel::overlap_bucketed;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

mod answer;
mod checks;
mod measure;
pub(super) mod memory;
pub mod subject;

/// The strategy of data parallelism beside the sharded optimizer, and here with an optimizer on every rank.
const BESIDE_SHARDED: &str = trainer::BESIDE_SHARDED.name;

pub const PROBLEM: Problem = Problem {
    name: "optimizer_state_sharding_accounting",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "state_is_that_of_what_is_owned", part: "a", run: checks::state_is_that_of_what_is_owned },
        Check {
            name: "volumes_are_what_each_scheme_sends",
            part: "c",
            run: checks::volumes_are_what_each_scheme_sends,
        },
    ],
    measured: Some(Measured::of::<Sharding>()),
    answer: answer::answer,
    // The probes of one link, for its fit.
    reads: &[
        "naive_ddp_benchmarking",
        "minimal_ddp_flat_benchmarking",
        "ddp_overlap_individual_parameters_benchmarking",
        "ddp_bucketed_benchmarking",
    ],
};

/// Every rank's own optimizer, the handout's shared one, and ZeRO's first stage: whose memory is counted.
const SCHEMES: [&str; 3] = [BESIDE_SHARDED, SHARDED_OPTIMIZER, ZERO1];

/// What is timed: also ZeRO-1 that steps in the backward pass, which keeps the same state but not until the step, and
/// plain data parallelism with ZeRO-1's buckets.
const TIMED: [&str; 5] = [BESIDE_SHARDED, overlap_bucketed::STRATEGY.name, SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD];
