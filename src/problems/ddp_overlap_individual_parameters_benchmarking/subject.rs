//! A subject's overlap of single gradients, in turns with ours.

use anyhow::Result;

use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::beside::{Beside, BesideOurs, answer};
use crate::harness::problem::{Measured, Problem};
use crate::model::optim::AdamWOptions;
use crate::parallel::overlap_individual_parameters;
use crate::subject::rank::Adapter;

pub const PROBLEM: Problem = Problem {
    name: "ddp_overlap_individual_parameters_benchmarking",
    answers: &["a"],
    checks: &[],
    measured: Some(Measured::of::<Beside<Individual>>()),
    answer: |records, _| answer::answer(records, |params| params.dtype.name().into()),
    reads: &[],
};

pub struct Individual;

impl BesideOurs for Individual {
    const STRATEGIES: &'static [&'static str] = &[overlap_individual_parameters::STRATEGY.name];

    fn adapter(_: &Params) -> Adapter {
        Adapter::Individual { lr: AdamWOptions::default().lr }
    }

    fn validate(params: &Params) -> Result<()> {
        params.validate_without_buckets()
    }
}
