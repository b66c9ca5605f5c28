//! `ddp_overlap_bucketed`: averaging buckets of gradients while backward runs ends where a single process ends.

use anyhow::Result;
use serde_json::{Value, json};
use tch::Device;

use crate::checks::data_parallel::{
    self, BUCKET_SIZES_MB, accumulation, at_the_edges, golden_cases, official, random_networks, verdict,
};
use crate::harness::problem::{Check, Problem};
use crate::model::toy::{Blueprint, Toy};
use crate::parallel::bucket::{ALIGNMENT, bounded};
use crate::parallel::{Options, overlap_bucketed, overlap_coalesced, trained};
use crate::torch::Generator;
use crate::torch::random::SEED;

const CHECKS: &[Check] = &[
    Check { name: "toy_model", part: "", run: || verdict(official(TRAINER, &Blueprint::toy(), &BUCKET_SIZES_MB)?) },
    Check { name: "tied_weights", part: "", run: || verdict(official(TRAINER, &Blueprint::tied(), &BUCKET_SIZES_MB)?) },
    Check { name: "gradient_accumulation", part: "", run: || verdict(accumulation(TRAINER, &BUCKET_SIZES_MB)?) },
    Check { name: "random_networks", part: "", run: || random_networks(TRAINER) },
    Check { name: "edges", part: "", run: || verdict(at_the_edges(TRAINER)?) },
    Check { name: "golden_cases", part: "", run: || golden_cases(TRAINER) },
    Check {
        name: "coalesced_toy_model",
        part: "",
        run: || verdict(official(COALESCED, &Blueprint::toy(), &BUCKET_SIZES_MB)?),
    },
    Check {
        name: "coalesced_tied_weights",
        part: "",
        run: || verdict(official(COALESCED, &Blueprint::tied(), &BUCKET_SIZES_MB)?),
    },
    Check {
        name: "coalesced_gradient_accumulation",
        part: "",
        run: || verdict(accumulation(COALESCED, &BUCKET_SIZES_MB)?),
    },
    Check { name: "coalesced_random_networks", part: "", run: || random_networks(COALESCED) },
    Check { name: "coalesced_edges", part: "", run: || verdict(at_the_edges(COALESCED)?) },
    Check { name: "coalesced_golden_cases", part: "", run: || golden_cases(COALESCED) },
];

pub const PROBLEM: Problem = Problem {
    name: "ddp_overlap_bucketed",
    answers: &[""],
    checks: CHECKS,
    measured: None,
    facts,
    answer: crate::harness::problem::no_answer,
    reads: &[],
};

const TRAINER: &str = overlap_bucketed::STRATEGY.name;
/// The same buckets without the copies.
const COALESCED: &str = overlap_coalesced::STRATEGY.name;

fn facts() -> Result<Value> {
    let mut facts = data_parallel::facts()?;
    facts["checks"] = json!(CHECKS.iter().map(|check| check.name).collect::<Vec<_>>());
    facts["alignment_bytes"] = json!(ALIGNMENT);
    facts["buckets"] = BUCKET_SIZES_MB.iter().map(|&size| buckets_of(size)).collect::<Result<Vec<_>>>()?.into();
    Ok(facts)
}

/// What one bucket size makes of the two official models.
fn buckets_of(bucket_size_mb: f64) -> Result<Value> {
    let mut row = json!({ "bucket_size_mb": bucket_size_mb });
    for blueprint in [Blueprint::toy(), Blueprint::tied()] {
        let network = Toy::new(&blueprint, &Generator::new(Device::Cpu, SEED)?)?;
        let buckets = bounded(&trained(network.named_parameters()), &Options { bucket_size_mb })?;
        let members: Vec<Vec<String>> =
            buckets.iter().map(|bucket| bucket.parameters().into_iter().map(|(name, _)| name).collect()).collect();
        row[&blueprint.name] = json!(members);
    }
    Ok(row)
}
