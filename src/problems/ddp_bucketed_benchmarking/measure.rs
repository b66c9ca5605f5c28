//! Measures steps with buckets of one size, and predicts their overhead from the interconnect.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{COALESCED, STRATEGY};
use crate::bench::ddp_step::{self, Columns, Params};
use crate::bench::interconnect::Best;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;

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

pub struct Bucketed;

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
