//! Measures a cell of attention, a model, the optimizer's part of a step, a whole step, or a step by class of kernel, each
//! beside the Python peer; our fused step's losses beside autograd's; and
//! whole steps on several ranks.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::{adamw, attention, best, classes, curve, transformer};
use crate::bench::device::device_for;
use crate::bench::peer::{drop_kept, with_kept};
use crate::bench::steps_on_ranks;
use crate::bench::training_step::{self, Execution, require_parameters};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;

/// One case: a cell of part (a)'s grid, a model of part (b), the optimizer's part of a model's step, a whole step at its
/// best, whole steps by class of kernel, the losses of many, or whole steps on several ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Attention(attention::Params),
    Transformer(transformer::Params),
    Adamw(adamw::Params),
    Best(best::Params),
    Classes(classes::Params),
    Curve(curve::Params),
    Ranks(steps_on_ranks::Params),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Row {
    Attention(attention::Row),
    Transformer(transformer::Row),
    Adamw(adamw::Row),
    Best(Box<best::Row>),
    Classes(Box<classes::Row>),
    Curve(curve::Row),
    Ranks(steps_on_ranks::Row),
}

pub struct TorchCompile;

impl Measure for TorchCompile {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = training_step::KERNELS;

    /// Only whole steps have our attention and fused steps.
    fn kernels(params: &Params) -> &'static [&'static str] {
        match params {
            Params::Best(p) => training_step::kernels(p.execution, p.attention, p.dtype),
            Params::Ranks(p) => training_step::kernels(Execution::Fused, p.attention, p.dtype),
            Params::Classes(p) => training_step::all_kernels(p.dtype),
            Params::Curve(p) => training_step::all_kernels(p.dtype),
            _ => &["adamw.cu"],
        }
    }

    /// Profiles leave CUPTI in their process, and steps by class are timed without it.
    fn fresh_process(params: &Params) -> bool {
        matches!(params, Params::Classes(_))
    }

    fn validate(params: &Params) -> Result<()> {
        match params {
            Params::Attention(p) => p.validate(),
            Params::Transformer(p) => p.validate(),
            Params::Adamw(p) => p.validate(),
            Params::Best(p) => p.validate(),
            Params::Classes(p) => p.validate(),
            Params::Curve(p) => p.validate(),
            Params::Ranks(p) => p.validate(),
        }
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        match (params, row) {
            (Params::Adamw(p), Row::Adamw(row)) => require_parameters(row.parameters, &p.config()),
            (Params::Best(p), Row::Best(row)) => row.validate(p),
            (Params::Ranks(p), Row::Ranks(row)) => row.validate(p),
            (Params::Attention(_), Row::Attention(_))
            | (Params::Transformer(_), Row::Transformer(_))
            | (Params::Classes(_), Row::Classes(_))
            | (Params::Curve(_), Row::Curve(_)) => Ok(()),
            _ => bail!("the row is one of another measure"),
        }
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        match params {
            Params::Transformer(p) => Some(p.predicted_bytes(profile)),
            Params::Best(p) => Some(p.predicted_bytes(profile)),
            Params::Classes(p) => Some(p.predicted_bytes(profile)),
            Params::Curve(p) => Some(p.predicted_bytes(profile)),
            _ => None,
        }
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        match params {
            Params::Attention(p) => with_kept(device, |peer| attention::measure(p, device, peer)).map(Row::Attention),
            Params::Adamw(p) => with_kept(device, |peer| adamw::measure(p, device, peer)).map(Row::Adamw),
            Params::Transformer(p) => {
                // A model's peer is its own, so that it ends with the case and gives all its memory back.
                drop_kept();
                transformer::measure(p, device).map(Row::Transformer)
            }
            Params::Best(p) => {
                drop_kept();
                best::measure(p, device).map(|row| Row::Best(Box::new(row)))
            }
            Params::Classes(p) => {
                drop_kept();
                classes::measure(p, device).map(|row| Row::Classes(Box::new(row)))
            }
            Params::Curve(p) => {
                drop_kept();
                curve::measure(p, device).map(Row::Curve)
            }
            Params::Ranks(p) => {
                drop_kept();
                steps_on_ranks::measure(p).map(Row::Ranks)
            }
        }
    }
}
