//! Root-mean-square normalisation, in float32 whatever the dtype of its input.

use anyhow::Result;
use tch::{Kind, Tensor};

/// The reference model's epsilon.
pub const EPS: f64 = 1e-5;

/// x / sqrt(mean(x²) + eps) * gain over the last dimension (Zhang and Sennrich 2019, as the reference writes it).
///
/// `x` is (..., d) of any floating dtype, `gain` (d) in float32; the result has the shape and dtype of `x`.
/// float64 input stays in float64.
pub fn rms_norm(x: &Tensor, gain: &Tensor, eps: f64) -> Result<Tensor> {
    let kind = x.f_kind()?;
    let x = if kind == Kind::Double { x.shallow_clone() } else { x.f_to_kind(Kind::Float)? };
    let mean_square = x.f_pow_tensor_scalar(2)?.f_mean_dim(-1, true, None)?;
    let normed = x.f_mul(&mean_square.f_add_scalar(eps)?.f_rsqrt()?)?;
    Ok(gain.f_mul(&normed)?.f_to_kind(kind)?)
}
