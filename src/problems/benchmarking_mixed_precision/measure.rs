//! Measures which types autocast chooses in the toy model, and training steps with and without bfloat16.

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::dtypes;
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::bench::training_step;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;

/// One case: the toy model of part (a), or a timed model of part (c).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Dtypes { autocast: Dtype },
    Timing(training_step::Params),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Row {
    Dtypes(dtypes::Observed),
    Timing(Box<training_step::Row>),
}

pub struct MixedPrecision;

impl Measure for MixedPrecision {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;

    fn validate(params: &Params) -> Result<()> {
        match params {
            Params::Dtypes { autocast } => {
                ensure!(*autocast != Dtype::Float32, "autocast is float32; it must be float16 or bfloat16");
                Ok(())
            }
            Params::Timing(params) => params.validate(),
        }
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        match (params, row) {
            (Params::Timing(params), Row::Timing(row)) => row.validate(params),
            (Params::Dtypes { .. }, Row::Dtypes(_)) => Ok(()),
            _ => bail!("the row is one of another measure"),
        }
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        match params {
            Params::Dtypes { .. } => None,
            Params::Timing(params) => Some(params.predicted_bytes(profile)),
        }
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        match params {
            Params::Dtypes { autocast } => {
                let device = device_for(profile)?;
                Ok(Row::Dtypes(dtypes::observe(*autocast, device)?))
            }
            Params::Timing(params) => Ok(Row::Timing(Box::new(training_step::measure(params, profile)?))),
        }
    }
}
