//! The activations that a fused step keeps for its backward pass, which writes some of their gradients in their place, and the
//! buffers that all layers share.

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
    /// Turned queries and keys, and values (tokens, 3 d); in the backward pass their gradient before they were turned.
    pub qkv: Tensor,
    /// Attention's output (tokens, d).
    pub o: Tensor,
    /// Of the norm before the feed-forward part.
    pub ffn: Saved,
    /// Both projections before SwiGLU (tokens, 2 d_ff); in the backward pass their gradient.
    pub gate_up: Tensor,
    /// (tokens, d_ff)
    pub activated: Tensor,
}

/// All of them.
pub struct Buffers {
    pub layers: Vec<Layer>,
    /// Of the last norm.
    pub last: Saved,
    /// What a sublayer adds to the residual stream (tokens, d).
    pub added: Tensor,
    /// (tokens, d_ff)
    pub d_activated: Tensor,
    /// The gradient of a norm (tokens, d).
    pub dy: Tensor,
    pub d_o: Tensor,
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
            Ok(Layer {
                attention: saved()?,
                qkv: rows(3 * d)?,
                o: rows(d)?,
                ffn: saved()?,
                gate_up: rows(2 * d_ff)?,
                activated: rows(d_ff)?,
            })
        };
        let wide = float(&[tokens, d])?;
        let low = if kind == Kind::Float { wide.shallow_clone() } else { rows(d)? };
        Ok(Self {
            layers: (0..num_layers).map(layer).collect::<Result<_>>().context("allocating the activations")?,
            last: saved()?,
            added: rows(d)?,
            d_activated: rows(d_ff)?,
            dy: rows(d)?,
            d_o: rows(d)?,
            residual: ResidualGradient { wide, low },
            logits: rows(vocab_size)?,
            losses: float(&[tokens])?,
            partial: float(&[2 * num_layers + 1, norm_blocks, d])?,
        })
    }

    /// The bytes that [`Self::new`] allocates.
    pub fn bytes(config: &Config, batch: i64, precision: Precision, norm_blocks: u64) -> u64 {
        let [d, d_ff, layers, vocabulary] =
            [config.d_model, config.d_ff, config.num_layers, config.vocab_size].map(|n| n as u64);
        let tokens = (batch * config.context_length) as u64;
        let low = product_kind(precision).elt_size_in_bytes() as u64;
        let saved = 4 * d + 4 + low * d;
        let layer = 2 * saved + low * (4 * d + 3 * d_ff);
        // added, dy and d_o; d_activated; the residual stream's gradient; logits and losses.
        let wide_copy = if low == 4 { 0 } else { low * d };
        let shared = low * (3 * d + d_ff) + 4 * d + wide_copy + low * vocabulary + 4;
        tokens * (layers * layer + saved + shared) + 4 * (2 * layers + 1) * norm_blocks * d
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_predicted_bytes_are_those_that_are_allocated() {
        let config = Config {
            vocab_size: 50,
            context_length: 7,
            d_model: 48,
            num_layers: 2,
            num_heads: 3,
            d_ff: 72,
            rope_theta: 10_000.0,
        };
        for precision in [Precision::Float32, Precision::Bfloat16] {
            let buffers = Buffers::new(&config, 3, precision, 5, Device::Cpu).unwrap();
            let saved = |saved: &Saved| [&saved.h, &saved.inverse_rms, &saved.y].map(bytes).iter().sum::<u64>();
            let layer = |layer: &Layer| {
                let Layer { attention, qkv, o, ffn, gate_up, activated } = layer;
                saved(attention) + saved(ffn) + [qkv, o, gate_up, activated].map(bytes).iter().sum::<u64>()
            };
            let Buffers { added, d_activated, dy, d_o, residual, logits, losses, partial, .. } = &buffers;
            let low = if precision == Precision::Float32 { 0 } else { bytes(&residual.low) };
            let shared = [added, d_activated, dy, d_o, &residual.wide, logits, losses, partial];
            let all = buffers.layers.iter().map(layer).sum::<u64>() + saved(&buffers.last) + low;
            let all = all + shared.into_iter().map(bytes).sum::<u64>();
            assert_eq!(Buffers::bytes(&config, 3, precision, 5), all, "{precision:?}");
        }
    }

    fn bytes(t: &Tensor) -> u64 {
        (t.numel() * t.kind().elt_size_in_bytes()) as u64
    }
}
