//! Matrix products into tensors that are there, for a linear layer y = x Wᵀ both ways.

use anyhow::{Context as _, Result};
use tch::{Device, Tensor};

use crate::cuda::{Choice, MatrixProducts};

/// Products on one device: by cuBLASLt on a GPU, by libtorch on the CPU.
pub struct Products(Option<MatrixProducts>);

impl Products {
    /// Errors: those of [`MatrixProducts::new`].
    pub fn on(device: Device) -> Result<Self> {
        Ok(Self(device.is_cuda().then(|| MatrixProducts::new(device)).transpose()?))
    }

    /// `out` (m, n) = `x` (m, k) times the transpose of `weight` (n, k).
    pub fn forward(&self, x: &Tensor, weight: &Tensor, out: &Tensor) -> Result<()> {
        self.multiply(x, &weight.f_tr()?, out)
    }

    /// `out` (m, k) = `dy` (m, n) times `weight` (n, k).
    pub fn data_gradient(&self, dy: &Tensor, weight: &Tensor, out: &Tensor) -> Result<()> {
        self.multiply(dy, weight, out)
    }

    /// `out` (n, k) = the transpose of `dy` (m, n) times `x` (m, k).
    pub fn weight_gradient(&self, dy: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        self.multiply(&dy.f_tr()?, x, out)
    }

    /// The algorithms that a GPU's products run.
    pub fn choices(&self) -> Vec<Choice> {
        self.0.as_ref().map(MatrixProducts::choices).unwrap_or_default()
    }

    fn multiply(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        match &self.0 {
            Some(products) => products.multiply(a, b, out),
            None => a.f_mm_out(out, b).map(drop).context("multiplying on the CPU"),
        }
    }
}
