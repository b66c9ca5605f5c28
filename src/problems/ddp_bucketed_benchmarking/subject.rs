//! A subject's overlap of buckets, in turns with ours.

use anyhow::{Result, ensure};

use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::beside::{Beside, BesideOurs, answer};
use crate::harness::answer::Style;
use crate::harness::answer::format::print;
use crate::harness::problem::{Measured, Problem};
use crate::model::optim::AdamWOptions;
use crate::parallel::{overlap_bucketed, overlap_coalesced};
use crate::subject::rank::Adapter;

pub const PROBLEM: Problem = Problem {
    name: "ddp_bucketed_benchmarking",
    answers: &["a"],
    checks: &[],
    measured: Some(Measured::of::<Beside<Bucketed>>()),
    answer: |records, _| answer::answer(records, label),
    reads: &[],
};

pub struct Bucketed;

impl BesideOurs for Bucketed {
    const STRATEGIES: &'static [&'static str] = &[overlap_bucketed::STRATEGY.name, overlap_coalesced::STRATEGY.name];

    fn adapter(params: &Params) -> Adapter {
        let bucket_size_mb = params.bucket_size_mb.unwrap_or(1.0);
        Adapter::Bucketed { lr: AdamWOptions::default().lr, bucket_size_mb }
    }

    fn validate(params: &Params) -> Result<()> {
        ensure!(params.bucket_size_mb.is_some(), "bucket_size_mb is missing: give the size of a bucket");
        params.validate()
    }
}

fn label(params: &Params) -> String {
    let mb = params.bucket_size_mb.unwrap_or(0.0);
    format!("{} MB, {}", print(mb, Style::Fixed, if mb < 1.0 { 1 } else { 0 }), params.dtype.name())
}
