//! `ddp_overlap_bucketed`: averaging buckets of gradients while backward runs ends where a single process ends.

use anyhow::Result;
use serde::Serialize;
use tch::Device;

use crate::checks::data_parallel::{
    BUCKET_SIZES_MB, GOLDEN_CASES, ProtocolFacts, accumulation, at_the_edges, golden_cases, official, passes,
    random_networks,
};
use crate::checks::subject::{data_parallel, golden_training};
use crate::harness::answer::{Answer, Audience, Cell, Column, Records, Table};
use crate::harness::problem::{Check, Problem, Verdict};
use crate::harness::subject::{Subject, SubjectCheck};
use crate::model::toy::{Blueprint, Toy};
use crate::parallel::bucket::{ALIGNMENT, buckets};
use crate::parallel::{Options, overlap_bucketed, overlap_coalesced, trained};
use crate::subject::rank::Adapter;
use crate::torch::Generator;
use crate::torch::random::SEED;

const CHECKS: &[Check] = &[
    Check { name: "toy_model", part: "", run: || passes(official(TRAINER, &Blueprint::toy(), &BUCKET_SIZES_MB)) },
    Check { name: "tied_weights", part: "", run: || passes(official(TRAINER, &Blueprint::tied(), &BUCKET_SIZES_MB)) },
    Check { name: "gradient_accumulation", part: "", run: || passes(accumulation(TRAINER, &BUCKET_SIZES_MB)) },
    Check { name: "random_networks", part: "", run: || random_networks(TRAINER) },
    Check { name: "edges", part: "", run: || at_the_edges(TRAINER) },
    Check { name: "golden_cases", part: "", run: || golden_cases(TRAINER) },
    Check {
        name: "coalesced_toy_model",
        part: "",
        run: || passes(official(COALESCED, &Blueprint::toy(), &BUCKET_SIZES_MB)),
    },
    Check {
        name: "coalesced_tied_weights",
        part: "",
        run: || passes(official(COALESCED, &Blueprint::tied(), &BUCKET_SIZES_MB)),
    },
    Check {
        name: "coalesced_gradient_accumulation",
        part: "",
        run: || passes(accumulation(COALESCED, &BUCKET_SIZES_MB)),
    },
    Check { name: "coalesced_random_networks", part: "", run: || random_networks(COALESCED) },
    Check { name: "coalesced_edges", part: "", run: || at_the_edges(COALESCED) },
    Check { name: "coalesced_golden_cases", part: "", run: || golden_cases(COALESCED) },
];

pub const PROBLEM: Problem =
    Problem { name: "ddp_overlap_bucketed", answers: &[""], checks: CHECKS, measured: None, answer, reads: &[] };

/// What a subject's module is put to.
pub const SUBJECT: &[SubjectCheck] = &[
    subject("toy_model", |s| data_parallel(s, &Blueprint::toy(), Some(&BUCKET_SIZES_MB))),
    subject("tied_weights", |s| data_parallel(s, &Blueprint::tied(), Some(&BUCKET_SIZES_MB))),
    subject("golden_cases", |s| golden_training(&GOLDEN_CASES, s, |a| matches!(a, Adapter::Bucketed { .. }))),
];

const fn subject(name: &'static str, run: fn(&Subject) -> Result<Verdict>) -> SubjectCheck {
    SubjectCheck { problem: "ddp_overlap_bucketed", part: "", name, adapter: "get_ddp_bucketed", run }
}

const TRAINER: &str = overlap_bucketed::STRATEGY.name;
/// The same buckets without the copies.
const COALESCED: &str = overlap_coalesced::STRATEGY.name;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    #[serde(flatten)]
    protocol: ProtocolFacts,
    alignment_bytes: usize,
}

fn answer(_records: &Records, _audience: Audience) -> Result<Answer> {
    let quoted = Quoted { protocol: ProtocolFacts::of(CHECKS), alignment_bytes: ALIGNMENT };
    let mut answer = Answer::new(&quoted)?;
    answer.table("buckets", bucket_table()?)?;
    Ok(answer)
}

/// What each bucket size makes of the two official models, in the order of launch.
fn bucket_table() -> Result<Table> {
    let mut table = Table::new(vec![
        Column::right("`bucket_size_mb`"),
        Column::text("Buckets of the toy model"),
        Column::text("Buckets of the tied model"),
    ]);
    for bucket_size_mb in BUCKET_SIZES_MB {
        let buckets = |blueprint| Ok::<_, anyhow::Error>(Cell::text(buckets_of(&blueprint, bucket_size_mb)?));
        let [toy, tied] = [buckets(Blueprint::toy())?, buckets(Blueprint::tied())?];
        table.row(vec![Cell::text(format!("{bucket_size_mb:?}")), toy, tied]);
    }
    Ok(table)
}

/// "a + b; c": each bucket's parameters.
fn buckets_of(blueprint: &Blueprint, bucket_size_mb: f64) -> Result<String> {
    let network = Toy::new(blueprint, &Generator::new(Device::Cpu, SEED)?)?;
    let buckets = buckets(&trained(network.named_parameters()), Options { bucket_size_mb }.bucket_bytes()?)?;
    let members = buckets.iter().map(|bucket| {
        let names: Vec<String> = bucket.parameters.iter().map(|(name, _)| name.clone()).collect();
        names.join(" + ")
    });
    Ok(members.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_buckets_are_fewer_and_every_parameter_is_in_one() {
        let count = |size| buckets_of(&Blueprint::toy(), size).unwrap().split("; ").count();
        assert!(count(BUCKET_SIZES_MB[0]) >= count(1e6) && count(1e6) == 1);
        let names = |size| buckets_of(&Blueprint::toy(), size).unwrap().split(['+', ';']).count();
        assert_eq!(names(BUCKET_SIZES_MB[0]), names(1e6));
    }
}
