//! `ddp_bucketed_benchmarking`: overlap in buckets of several sizes, and a model of what the size should do.

use self::measure::Bucketed;
use crate::harness::problem::{Check, Measured, Problem};
use crate::parallel::{overlap_bucketed, overlap_coalesced};

mod answer;
mod checks;
mod measure;
pub mod subject;

pub const PROBLEM: Problem = Problem {
    name: "ddp_bucketed_benchmarking",
    answers: &["a", "b"],
    checks: &[
        Check { name: "fewer_calls_in_larger_buckets", part: "a", run: checks::fewer_calls_in_larger_buckets },
        Check { name: "fused_ranks_train_as_one_process", part: "a", run: checks::fused_ranks_train_as_one_process },
    ],
    measured: Some(Measured::of::<Bucketed>()),
    answer: answer::answer,
    reads: answer::READS,
};

const STRATEGY: &str = overlap_bucketed::STRATEGY.name;
/// The same buckets without the copies.
const COALESCED: &str = overlap_coalesced::STRATEGY.name;
