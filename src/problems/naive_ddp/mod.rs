//! `naive_ddp`: training on several ranks with one all-reduce a gradient ends where a single process ends.

use self::measure::FaultTests;
use crate::checks::data_parallel::{at_the_edges, golden_cases, official, passes, random_networks};
use crate::harness::problem::{Check, Measured, Problem};
use crate::model::toy::Blueprint;

mod answer;
mod measure;

const CHECKS: &[Check] = &[
    Check { name: "toy_model", part: "", run: || passes(official(NAIVE, &Blueprint::toy(), &NO_BUCKETS)) },
    Check { name: "tied_weights", part: "", run: || passes(official(NAIVE, &Blueprint::tied(), &NO_BUCKETS)) },
    Check { name: "random_networks", part: "", run: || random_networks(NAIVE) },
    Check { name: "edges", part: "", run: || at_the_edges(NAIVE) },
    Check { name: "golden_cases", part: "", run: || golden_cases(NAIVE) },
    Check { name: "flat_toy_model", part: "", run: || passes(official(FLAT, &Blueprint::toy(), &NO_BUCKETS)) },
    Check { name: "flat_tied_weights", part: "", run: || passes(official(FLAT, &Blueprint::tied(), &NO_BUCKETS)) },
    Check { name: "flat_random_networks", part: "", run: || random_networks(FLAT) },
    Check { name: "flat_edges", part: "", run: || at_the_edges(FLAT) },
];

pub const PROBLEM: Problem = Problem {
    name: "naive_ddp",
    answers: &[""],
    checks: CHECKS,
    measured: Some(Measured::of::<FaultTests>()),
    answer: answer::answer,
    reads: &[],
};

const NAIVE: &str = "naive";
/// The other strategy that communicates after backward; its own problem only times it.
const FLAT: &str = "flat";
/// Neither has a bucket size; this one is never read.
const NO_BUCKETS: [f64; 1] = [1.0];
