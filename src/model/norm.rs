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
    if matches!(kind, Kind::Float | Kind::Double) {
        return normalised(x, gain, eps);
    }
    Ok(normalised(&x.f_to_kind(Kind::Float)?, gain, eps)?.f_to_kind(kind)?)
}

fn normalised(x: &Tensor, gain: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.f_square()?.f_mean_dim(-1, true, None)?;
    let normed = x.f_mul(&mean_square.f_add_scalar(eps)?.f_rsqrt()?)?;
    Ok(gain.f_mul(&normed)?)
}
