//! Errors of results relative to the norm of the expected values.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::dtype::Dtype;
use super::tolerance;

/// Relative errors of attention's output and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionErrors {
    pub o: f64,
    pub dq: f64,
    pub dk: f64,
    pub dv: f64,
}

impl AttentionErrors {
    /// Of o, dq, dk and dv.
    pub fn of(results: &[Tensor; 4], expected: &[Tensor; 4]) -> Result<Self> {
        let of = |i: usize| relative_error(&results[i], &expected[i]);
        Ok(Self { o: of(0)?, dq: of(1)?, dk: of(2)?, dv: of(3)? })
    }

    pub fn largest(&self) -> f64 {
        [self.o, self.dq, self.dk, self.dv].into_iter().fold(0.0, f64::max)
    }

    /// The errors of `name`, none beyond [`tolerance::attention`].
    pub fn within_tolerance(self, name: &str, dtype: Dtype) -> Result<Self> {
        let (largest, most) = (self.largest(), tolerance::attention(dtype));
        ensure!(
            largest <= most,
            "{name} disagrees with the definition: off by {largest:.1e} of the norm, more than {most:.0e}: {self:?}"
        );
        Ok(self)
    }
}

/// The norm of the difference over the norm of `expected`, in float64.
pub fn relative_error(ours: &Tensor, expected: &Tensor) -> Result<f64> {
    ensure!(ours.size() == expected.size(), "shape {:?}, expected {:?}", ours.size(), expected.size());
    let wide = |t: &Tensor| t.f_detach()?.f_to_kind(Kind::Double);
    let norm = |t: Tensor| t.f_norm()?.f_double_value(&[]);
    let expected = wide(expected)?;
    let error = norm(wide(ours)?.f_sub(&expected)?)? / norm(expected)?;
    ensure!(error.is_finite(), "the relative error is {error}");
    Ok(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_relative_error_is_a_ratio_of_norms_and_must_be_finite() {
        let t = |values: &[f32]| Tensor::from_slice(values);
        assert_eq!(relative_error(&t(&[3.0, 4.0]), &t(&[3.0, 4.0])).unwrap(), 0.0);
        assert_eq!(relative_error(&t(&[3.0, 9.0]), &t(&[3.0, 4.0])).unwrap(), 1.0);
        assert!(relative_error(&t(&[f32::NAN]), &t(&[1.0])).is_err());
    }
}
