//! `distributed_communication_single_node`: what an all-reduce of one tensor costs, by back end, size and number of processes.

use self::measure::AllReduce;
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
mod checks;
mod measure;
pub(super) mod ranks;

pub const PROBLEM: Problem = Problem {
    name: "distributed_communication_single_node",
    answers: &[""],
    checks: &[
        Check { name: "sums_are_exact_on_every_rank", part: "", run: checks::sums_are_exact_on_every_rank },
        Check { name: "wrong_sums_are_seen", part: "", run: checks::wrong_sums_are_seen },
        Check { name: "c10d_takes_its_turns", part: "", run: checks::c10d_takes_its_turns },
    ],
    measured: Some(Measured::of::<AllReduce>()),
    answer: answer::answer,
    reads: &[],
};
