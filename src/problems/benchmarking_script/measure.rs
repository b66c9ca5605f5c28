//! Measures a training step with the attention of the profile where the suite names none.

use anyhow::Result;
use serde_json::{Value, json};

use crate::bench::device::attention_for;
use crate::bench::training_step::{self, Params, Row};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;

pub struct BenchmarkingScript;

impl Measure for BenchmarkingScript {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = training_step::KERNELS;

    fn kernels(params: &Params) -> &'static [&'static str] {
        training_step::kernels(params.execution, params.attention, params.dtype)
    }

    fn defaults(profile: Profile) -> Vec<(&'static str, Value)> {
        vec![("attention", json!(attention_for(profile)))]
    }

    fn fresh_process(params: &Params) -> bool {
        params.needs_fresh_process()
    }

    fn validate(params: &Params) -> Result<()> {
        params.validate()
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        row.validate(params)
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        Some(params.predicted_bytes(profile))
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        training_step::measure(params, profile)
    }
}
