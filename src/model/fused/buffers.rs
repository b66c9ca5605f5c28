//! The activations that a fused step keeps for its backward pass, and the buffers that all layers share.

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

use super::kernels::ResidualGradient;
use super::packed::product_kind;
use crate::model::{Config, Precision};

/// What a norm's backward pass needs, and the norm.
pub struct Saved {
    /// The residual stream (tokens, d), float32.
    pub h: Tensor,
    /// (tokens), float32.
    pub inverse_rms: Tensor,
    /// (tokens, d)
    pub y: Tensor,
}

/// One layer's activations; where nothing else is said in the type of the products.
pub struct Layer {
    /// Of the norm before attention.
    pub attention: Saved,
    /// Turned queries and keys, and values (tokens, 3 d).
    pub qkv: Tensor,
    /// Attention's output (tokens, d).
    pub o: Tensor,
    /// Of the norm before the feed-forward part.
    pub ffn: Saved,
    /// (tokens, 2 d_ff)
    pub gate_up: Tensor,
}

/// All of them.
pub struct Buffers {
    pub layers: Vec<Layer>,
    /// Of the last norm.
    pub last: Saved,
    /// What a sublayer adds to the residual stream (tokens, d).
    pub added: Tensor,
    /// (tokens, d_ff)
    pub activated: Tensor,
    pub d_activated: Tensor,
    /// (tokens, 2 d_ff)
    pub d_gate_up: Tensor,
    /// The gradient of a norm (tokens, d).
    pub dy: Tensor,
    pub d_o: Tensor,
    /// (tokens, 3 d)
    pub d_qkv: Tensor,
    pub residual: ResidualGradient,
    /// (tokens, vocabulary)
    pub logits: Tensor,
    /// (tokens), float32.
    pub losses: Tensor,
    /// The partial sums of all gains' gradients (norms, blocks, d), float32.
    pub partial: Tensor,
}

impl Buffers {
    pub fn new(config: &Config, batch: i64, precision: Precision, norm_blocks: i64, device: Device) -> Result<Self> {
        let Config { d_model: d, d_ff, num_layers, vocab_size, context_length, .. } = *config;
        let (tokens, kind) = (batch * context_length, product_kind(precision));
        let rows = |width: i64| Tensor::f_empty([tokens, width], (kind, device));
        let float = |size: &[i64]| Tensor::f_empty(size, (Kind::Float, device));
        let saved =
            || -> Result<_> { Ok(Saved { h: float(&[tokens, d])?, inverse_rms: float(&[tokens])?, y: rows(d)? }) };
        let layer = |_| -> Result<_> {
            Ok(Layer { attention: saved()?, qkv: rows(3 * d)?, o: rows(d)?, ffn: saved()?, gate_up: rows(2 * d_ff)? })
        };
        let wide = float(&[tokens, d])?;
        let low = if kind == Kind::Float { wide.shallow_clone() } else { rows(d)? };
        Ok(Self {
            layers: (0..num_layers).map(layer).collect::<Result<_>>().context("allocating the activations")?,
            last: saved()?,
            added: rows(d)?,
            activated: rows(d_ff)?,
            d_activated: rows(d_ff)?,
            d_gate_up: rows(2 * d_ff)?,
            dy: rows(d)?,
            d_o: rows(d)?,
            d_qkv: rows(3 * d)?,
            residual: ResidualGradient { wide, low },
            logits: rows(vocab_size)?,
            losses: float(&[tokens])?,
            partial: float(&[2 * num_layers + 1, norm_blocks, d])?,
        })
    }
}
