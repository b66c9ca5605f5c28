//! Matrix products into tensors that are there, for a linear layer y = x Wᵀ both ways.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::kernels::Kernels;
use super::own_products::OwnProducts;
use crate::cuda::{Choice, MatrixProducts, least_seconds};

/// Calls of ours and of the library's in a run that is timed.
const CALLS: usize = 8;

/// Products on one device: by cuBLASLt on a GPU, by libtorch on the CPU; forward products of bfloat16 by our kernels on a GPU where
/// they are faster.
pub struct Products {
    device: Device,
    library: Option<MatrixProducts>,
    own: Option<Own>,
}

struct Own {
    products: OwnProducts,
    /// Whether every product that they take runs them, and not the faster only.
    always: bool,
    choices: Mutex<BTreeMap<Key, OwnChoice>>,
}

/// Whether it is gated; rows, columns of the weights' transpose, and the length of the sums.
type Key = (bool, [i64; 3]);

/// A forward product of our kernels beside the library's, for records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnChoice {
    /// Whether SwiGLU belongs to it.
    pub is_gated: bool,
    /// Rows and columns of the result, with gates of both projections; and the length of its sums.
    pub m: i64,
    pub n: i64,
    pub k: i64,
    /// Seconds of a call of ours, and of the library's with SwiGLU's kernel where that belongs to it. The faster one runs.
    pub own_s: f64,
    pub library_s: f64,
}

impl Products {
    /// Errors: those of [`MatrixProducts::new`] and of compiling our kernels.
    pub fn on(device: Device) -> Result<Self> {
        if device == Device::Cpu {
            return Ok(Self { device, library: None, own: None });
        }
        Ok(Self { device, library: Some(MatrixProducts::new(device)?), own: Own::on(device, false)? })
    }

    /// With every forward product that our kernels take by them, on the CPU in the emulator.
    ///
    /// Errors: those of compiling them.
    pub fn always_own(self) -> Result<Self> {
        Ok(Self { own: Own::on(self.device, true)?, ..self })
    }

    /// `out` (m, n) = `x` (m, k) times the transpose of `weight` (n, k).
    pub fn forward(&self, x: &Tensor, weight: &Tensor, out: &Tensor) -> Result<()> {
        let library = || self.multiply(x, &weight.f_tr()?, out);
        match self.own_for(x, weight, out) {
            Some(own) => self.faster(own, false, [x, weight], || own.products.forward(x, weight, out), library),
            None => library(),
        }
    }

    /// `gate_up` (m, 2 n) = `x` (m, k) times the transpose of `weight` (2 n, k), and `activated` (m, n), its SwiGLU.
    pub fn gated(
        &self,
        kernels: &Kernels,
        [x, weight]: [&Tensor; 2],
        [gate_up, activated]: [&Tensor; 2],
    ) -> Result<()> {
        let library = || {
            self.multiply(x, &weight.f_tr()?, gate_up)?;
            kernels.swiglu_forward(gate_up, activated)
        };
        match self.own_for(x, weight, gate_up).filter(|_| OwnProducts::takes(x, weight, activated)) {
            Some(own) => {
                let fused = || own.products.gated(x, weight, gate_up, activated);
                self.faster(own, true, [x, weight], fused, library)
            }
            None => library(),
        }
    }

    /// `out` (m, k) = `dy` (m, n) times `weight` (n, k).
    pub fn data_gradient(&self, dy: &Tensor, weight: &Tensor, out: &Tensor) -> Result<()> {
        self.multiply(dy, weight, out)
    }

    /// `out` (n, k) = the transpose of `dy` (m, n) times `x` (m, k).
    pub fn weight_gradient(&self, dy: &Tensor, x: &Tensor, out: &Tensor) -> Result<()> {
        self.multiply(&dy.f_tr()?, x, out)
    }

    /// The algorithms that a GPU's products by the library run.
    pub fn choices(&self) -> Vec<Choice> {
        self.library.as_ref().map(MatrixProducts::choices).unwrap_or_default()
    }

    /// The products that our kernels were timed for.
    pub fn own_choices(&self) -> Vec<OwnChoice> {
        self.own.as_ref().map_or_else(Vec::new, |own| own.choices().values().cloned().collect())
    }

    fn own_for(&self, x: &Tensor, weight: &Tensor, out: &Tensor) -> Option<&Own> {
        self.own.as_ref().filter(|_| OwnProducts::takes(x, weight, out))
    }

    /// Runs the faster of two that write the same; at a shape's first call it times both, which cannot be captured.
    fn faster(
        &self,
        own: &Own,
        is_gated: bool,
        [x, weight]: [&Tensor; 2],
        ours: impl Fn() -> Result<()>,
        library: impl Fn() -> Result<()>,
    ) -> Result<()> {
        if own.always {
            return ours();
        }
        let ((m, k), (n, _)) = (x.size2()?, weight.size2()?);
        let key = (is_gated, [m, n, k]);
        let known = own.choices().get(&key).cloned();
        let choice = match known {
            Some(choice) => choice,
            None => {
                let own_s = least_seconds(self.device, CALLS, &ours)?;
                let library_s = least_seconds(self.device, CALLS, &library)?;
                let choice = OwnChoice { is_gated, m, n, k, own_s, library_s };
                own.choices().insert(key, choice.clone());
                choice
            }
        };
        if choice.is_faster() { ours() } else { library() }
    }

    fn multiply(&self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        match &self.library {
            Some(products) => products.multiply(a, b, out),
            None => a.f_mm_out(out, b).map(drop).context("multiplying on the CPU"),
        }
    }
}

impl OwnChoice {
    /// Whether ours runs.
    pub fn is_faster(&self) -> bool {
        self.own_s < self.library_s
    }
}

impl Own {
    /// None on a GPU that they do not take.
    fn on(device: Device, always: bool) -> Result<Option<Self>> {
        let products = OwnProducts::on(device)?;
        Ok(products.map(|products| Self { products, always, choices: Mutex::default() }))
    }

    fn choices(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, OwnChoice>> {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
