//! `ddp_bucketed_benchmarking`: overlap in buckets of several sizes, and a model of what the size should do.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ddp_step::{self, Columns, Params, checks, link::Best};
use crate::harness::problem::{Check, Measure, Measured, Problem, Verdict};
use crate::harness::record::Profile;
use crate::model::Config;
use crate::model::sizes::{TABLE_1, VOCAB_SIZE};
use crate::parallel::{overlap_bucketed, overlap_coalesced};

pub const PROBLEM: Problem = Problem {
    name: "ddp_bucketed_benchmarking",
    answers: &["a", "b"],
    checks: &[Check { name: "fewer_calls_in_larger_buckets", part: "a", run: fewer_calls_in_larger_buckets }],
    measured: Some(Measured::of::<Bucketed>()),
    facts,
};

const STRATEGY: &str = overlap_bucketed::STRATEGY.name;
/// The same buckets without the copies.
const COALESCED: &str = overlap_coalesced::STRATEGY.name;

/// One bucket size, with and without copies, beside naive steps, the same step without communication, and PyTorch's DDP
/// with buckets of that size.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub steps: ddp_step::Row,
    /// The handout's model, with o and w as this case's ranks measured them just before.
    pub model: Model,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// s / (n w) + n o for the n calls that were counted.
    pub predicted_overhead_s: f64,
    /// None where a call costs nothing that could be measured.
    pub best: Option<Best>,
}

struct Bucketed;

impl Measure for Bucketed {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = ddp_step::KERNELS;

    fn validate(params: &Params) -> Result<()> {
        ensure!(params.bucket_size_mb.is_some(), "bucket_size_mb is missing: it is what this problem varies");
        params.validate()
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let steps =
            ddp_step::measure(params, &Columns { strategies: &["naive", STRATEGY, COALESCED], pytorch_ddp: true })?;
        let column = steps.strategies.get(STRATEGY).context("the buckets were not measured")?;
        let model = Model {
            predicted_overhead_s: steps.link.overhead(column.bytes, column.calls),
            best: steps.link.best(column.bytes),
        };
        Ok(Row { steps, model })
    }
}

/// From a call for nearly every parameter to one for all, the same bytes each time.
fn fewer_calls_in_larger_buckets() -> Result<Verdict> {
    let mut seen = Vec::new();
    for mb in [0.001, 4.0, 1000.0] {
        let column = &checks::small_columns(&[STRATEGY], Some(mb))?[STRATEGY];
        let bytes = checks::small(None).gradient_bytes();
        ensure!(column.bytes == bytes, "{} bytes sent of {bytes}", column.bytes);
        seen.push(column.calls);
    }
    let falling = seen.windows(2).all(|pair| pair[0] > pair[1]);
    ensure!(falling && seen.last() == Some(&1), "calls at growing bucket sizes: {seen:?}");
    Verdict::passed(format!("{seen:?} calls at growing bucket sizes"))
}

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
