//! Matrix products into tensors that are there, for a linear layer y = x Wᵀ both ways.

use anyhow::{Context as _, Result};
use tch::Tensor;

/// `out` (m, n) = `x` (m, k) times the transpose of `weight` (n, k).
pub fn forward(x: &Tensor, weight: &Tensor, out: &Tensor) -> Result<()> {
    multiply(x, &weight.f_tr()?, out)
}

/// `out` (m, k) = `dy` (m, n) times `weight` (n, k).
pub fn data_gradient(dy: &Tensor, weight: &Tensor, out: &Tensor) -> Result<()> {
    multiply(dy, weight, out)
}

/// `out` (n, k) = the transpose of `dy` (m, n) times `x` (m, k).
pub fn weight_gradient(dy: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
    multiply(&dy.f_tr()?, x, out)
}

fn multiply(a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    a.f_mm_out(out, b).map(drop).with_context(|| format!("multiplying {:?} by {:?}", a.size(), b.size()))
}
