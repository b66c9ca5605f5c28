//! `ddp_bucketed_benchmarking`: overlap in buckets of several sizes, and a model of what the size should do.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use self::measure::Bucketed;
use crate::harness::problem::{Check, Measured, Problem};
use crate::model::Config;
use crate::model::sizes::{TABLE_1, VOCAB_SIZE};
use crate::parallel::{overlap_bucketed, overlap_coalesced};

mod checks;
pub mod measure;

pub const PROBLEM: Problem = Problem {
    name: "ddp_bucketed_benchmarking",
    answers: &["a", "b"],
    checks: &[Check { name: "fewer_calls_in_larger_buckets", part: "a", run: checks::fewer_calls_in_larger_buckets }],
    measured: Some(Measured::of::<Bucketed>()),
    facts,
    answer: crate::harness::problem::no_answer,
    reads: &[],
};

const STRATEGY: &str = overlap_bucketed::STRATEGY.name;
/// The same buckets without the copies.
const COALESCED: &str = overlap_coalesced::STRATEGY.name;

/// What limits the choice whatever the link: tensors cannot be cut, and the embedding's gradient comes last.
fn facts() -> Result<Value> {
    let xl = Config::of_size(&TABLE_1[3], VOCAB_SIZE, 512);
    let bytes = |shape: &[i64]| 4 * shape.iter().product::<i64>();
    let (first, shape) = xl.parameter_shapes().next().context("a model has parameters")?;
    Ok(json!({
        "xl": {
            "parameters": xl.num_parameters(),
            "gradient_bytes": 4 * xl.num_parameters(),
            "tensors": xl.num_tensors(),
            "largest_bytes": xl.parameter_shapes().map(|(_, shape)| bytes(&shape)).max(),
            "last_ready": first,
            "last_ready_bytes": bytes(&shape),
        },
    }))
}
