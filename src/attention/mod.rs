//! The choices of attention, until the attention module is merged.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tch::Tensor;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    Naive,
    Tiled,
    Sdpa,
}

impl Choice {
    pub const ALL: [Self; 2] = [Self::Naive, Self::Sdpa];

    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Tiled => "tiled",
            Self::Sdpa => "sdpa",
        }
    }
}

pub fn attention(choice: Choice, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    if choice != Choice::Naive {
        return Ok(Tensor::f_scaled_dot_product_attention(q, k, v, None::<&Tensor>, 0.0, is_causal, None, false)?);
    }
    let d = q.size().last().copied().unwrap_or(1) as f64;
    let scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_div_scalar(d.sqrt())?;
    let hidden = Tensor::f_ones_like(&scores.f_detach()?)?.f_triu(1)?.f_to_kind(tch::Kind::Bool)?;
    Ok(scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_softmax(-1, None)?.f_matmul(v)?)
}
