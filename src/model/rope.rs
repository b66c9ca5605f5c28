//! Rotary position embedding on interleaved pairs of features.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

/// Cosines and sines of position * theta^(-2i / d_head), each (context_length, d_head / 2) in float32.
#[derive(Debug)]
pub struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Fails for an odd `d_head`. The angles are formed in float64, so that a late position loses no accuracy.
    pub fn new(theta: f64, d_head: i64, context_length: i64, device: Device) -> Result<Self> {
        ensure!(d_head > 0 && d_head % 2 == 0, "d_head is {d_head}: rotary positions pair features");
        let options = (Kind::Double, device);
        let exponents = Tensor::f_arange_start_step(0, d_head, 2, options)?.f_div_scalar(-(d_head as f64))?;
        let frequencies = exponents.f_mul_scalar(theta.ln())?.f_exp()?;
        let angles = Tensor::f_arange(context_length, options)?.f_outer(&frequencies)?;
        Ok(Self { cos: angles.f_cos()?.f_to_kind(Kind::Float)?, sin: angles.f_sin()?.f_to_kind(Kind::Float)? })
    }

    /// The cosines and the sines.
    pub(super) fn tables(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }

    /// The rotation of sequences of `seq` tokens, at positions 0..seq. Fails where they exceed the context length.
    pub fn first(&self, seq: i64) -> Result<Self> {
        Ok(Self { cos: self.cos.f_narrow(0, 0, seq)?, sin: self.sin.f_narrow(0, 0, seq)? })
    }

    /// Rotates `x` (..., seq, d_head), where seq is the number of positions here: the pair (x[2i], x[2i+1]) by the
    /// angle of frequency i.
    ///
    /// The result is in the promoted dtype of `x` and float32.
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (even, odd) = (x.f_slice(-1, 0, None, 2)?, x.f_slice(-1, 1, None, 2)?);
        let rotated_even = self.cos.f_mul(&even)?.f_sub(&self.sin.f_mul(&odd)?)?;
        let rotated_odd = self.sin.f_mul(&even)?.f_add(&self.cos.f_mul(&odd)?)?;
        Tensor::f_stack(&[rotated_even, rotated_odd], -1)?.f_flatten(-2, -1).context("interleaving the rotated pairs")
    }
}
