//! Attention by its definition (Eq. 4-6) and its gradient by the chain rule (Eq. 7-11), with the whole score matrix in memory.

use anyhow::Result;
use tch::{Device, Kind, Tensor};

use super::{
    Attention, Shape, accumulation_kind, group_size, hidden, repeat_heads, sum_heads, supports_floating_point,
};
use crate::torch::nvtx::range;

/// The ranges of [`attention`]: Q Kᵀ with its scale and mask, then the softmax, then the product with V.
pub const SCORES: &str = "attention scores";
pub const SOFTMAX: &str = "softmax";
pub const FINAL_MATMUL: &str = "final matmul";

/// `o` by Eq. 4-6 in the inputs' own kind, as plain tensor operations that libtorch (and autocast) may record.
///
/// This is the implementation that the handout times. libtorch keeps the probabilities P, one
/// (..., n_queries, n_keys) tensor, for the backward pass.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    let mask = causal_mask(q, k, is_causal)?;
    masked_attention(q, k, v, mask.as_ref())
}

/// As [`attention`], without the keys where `mask` (n_queries, n_keys) is true; a model makes its mask once for all layers.
pub fn masked_attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let group_size = group_size(q, k);
    let (k, v) = (&repeat_heads(k, group_size)?, &repeat_heads(v, group_size)?);
    let scores = range(SCORES, || masked_scores(q, k, mask))?;
    let probabilities = range(SOFTMAX, || scores.f_softmax(-1, None))?;
    Ok(range(FINAL_MATMUL, || probabilities.f_matmul(v))?)
}

/// Eq. 4, with minus infinity where the causal mask hides a key.
pub(super) fn scores(q: &Tensor, k: &Tensor, is_causal: bool) -> Result<Tensor> {
    masked_scores(q, k, causal_mask(q, k, is_causal)?.as_ref())
}

fn masked_scores(q: &Tensor, k: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let d = q.size().last().copied().unwrap_or(1) as f64;
    // Scalars are passed as tensors without dimensions: with plain numbers tch panics when memory runs out.
    let scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_div(&Tensor::from(d.sqrt()))?;
    Ok(match mask {
        Some(mask) => scores.f_masked_fill_tensor(mask, &Tensor::from(f64::NEG_INFINITY))?,
        None => scores,
    })
}

fn causal_mask(q: &Tensor, k: &Tensor, is_causal: bool) -> Result<Option<Tensor>> {
    let length = |t: &Tensor| t.size().iter().rev().nth(1).copied().unwrap_or(1);
    is_causal.then(|| hidden(0..length(q), 0..length(k), q.device())).transpose()
}

/// The definition in the accumulation kind: the inputs are widened first, so that only `o` is rounded to theirs.
pub struct Naive;

impl Attention for Naive {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn supports(&self, kind: Kind, _device: Device, _head_dim: i64) -> Result<(), String> {
        supports_floating_point(kind)
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        let _no_graph = tch::no_grad_guard();
        let shape = Shape::of(q, k, v)?;
        let wide = accumulation_kind(q.kind());
        let [k, v] = [k, v].map(|t| repeat_heads(&t.f_to_kind(wide)?, shape.group_size));
        let scores = scores(&q.f_to_kind(wide)?, &k?, is_causal)?;
        let lse = scores.f_logsumexp([-1_i64], false)?;
        let o = scores.f_softmax(-1, None)?.f_matmul(&v?)?;
        Ok((o.f_to_kind(q.kind())?, lse))
    }

    /// Eq. 7-11; the probabilities come from q and k again, so `o` and `lse` are not used.
    fn backward(&self, [q, k, v, _, _, d_o]: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
        let _no_graph = tch::no_grad_guard();
        let shape = Shape::of(q, k, v)?;
        let (narrow, wide) = (q.kind(), accumulation_kind(q.kind()));
        let [q, k, v, d_o] = [q.f_to_kind(wide)?, k.f_to_kind(wide)?, v.f_to_kind(wide)?, d_o.f_to_kind(wide)?];
        let (k, v) = (repeat_heads(&k, shape.group_size)?, repeat_heads(&v, shape.group_size)?);
        let p = scores(&q, &k, is_causal)?.f_softmax(-1, None)?;
        let dv = p.f_transpose(-2, -1)?.f_matmul(&d_o)?;
        let dp = d_o.f_matmul(&v.f_transpose(-2, -1)?)?;
        let row_sum = p.f_mul(&dp)?.f_sum_dim_intlist([-1_i64].as_slice(), true, None)?;
        let ds = p.f_mul(&dp.f_sub(&row_sum)?)?.f_mul_scalar(shape.scale())?;
        let dq = ds.f_matmul(&k)?;
        let dk = ds.f_transpose(-2, -1)?.f_matmul(&q)?;
        let (dk, dv) = (sum_heads(&dk, shape.group_size)?, sum_heads(&dv, shape.group_size)?);
        Ok([dq.f_to_kind(narrow)?, dk.f_to_kind(narrow)?, dv.f_to_kind(narrow)?])
    }
}
