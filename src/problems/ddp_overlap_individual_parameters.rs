//! `ddp_overlap_individual_parameters`: averaging each gradient while backward runs ends where a single process ends.

use anyhow::Result;

use crate::checks::data_parallel::{
    GOLDEN_CASES, ProtocolFacts, accumulation, at_the_edges, golden_cases, official, passes, random_networks,
};
use crate::checks::subject::{data_parallel, golden_training};
use crate::harness::answer::{Answer, Audience, Records};
use crate::harness::problem::{Check, Problem, Verdict};
use crate::harness::subject::{Subject, SubjectCheck};
use crate::model::toy::Blueprint;
use crate::subject::rank::Adapter;

const CHECKS: &[Check] = &[
    Check { name: "toy_model", part: "", run: || passes(official(TRAINER, &Blueprint::toy(), &NO_BUCKETS)) },
    Check { name: "tied_weights", part: "", run: || passes(official(TRAINER, &Blueprint::tied(), &NO_BUCKETS)) },
    Check { name: "gradient_accumulation", part: "", run: || passes(accumulation(TRAINER, &NO_BUCKETS)) },
    Check { name: "random_networks", part: "", run: || random_networks(TRAINER) },
    Check { name: "edges", part: "", run: || at_the_edges(TRAINER) },
    Check { name: "golden_cases", part: "", run: || golden_cases(TRAINER) },
];

pub const PROBLEM: Problem = Problem {
    name: "ddp_overlap_individual_parameters",
    answers: &[""],
    checks: CHECKS,
    measured: None,
    answer,
    reads: &[],
};

/// What a subject's module is put to.
pub const SUBJECT: &[SubjectCheck] = &[
    subject("toy_model", |s| data_parallel(s, &Blueprint::toy(), None)),
    subject("tied_weights", |s| data_parallel(s, &Blueprint::tied(), None)),
    subject("golden_cases", |s| golden_training(&GOLDEN_CASES, s, |a| matches!(a, Adapter::Individual { .. }))),
];

const fn subject(name: &'static str, run: fn(&Subject) -> Result<Verdict>) -> SubjectCheck {
    SubjectCheck {
        problem: "ddp_overlap_individual_parameters",
        part: "",
        name,
        adapter: "get_ddp_individual_parameters",
        run,
    }
}

const TRAINER: &str = "overlap_individual_parameters";
/// It has no buckets; this size is never read.
const NO_BUCKETS: [f64; 1] = [1.0];

fn answer(_records: &Records, _audience: Audience) -> Result<Answer> {
    Answer::new(&ProtocolFacts::of(CHECKS))
}
