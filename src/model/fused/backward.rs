//! The backward pass of a fused step.

use anyhow::{Context as _, Result};
use tch::Tensor;

use super::FusedStep;
use super::buffers::{Buffers, Layer, Saved};
use super::exchange::Then;
use super::kernels::NormSaved;
use super::packed::{LayerWeights, Part};

impl FusedStep {
    pub(super) fn backward(&self, tokens: &Tensor, gains: &Tensor, lse: Vec<Tensor>, then: Then) -> Result<()> {
        let mut gradients_of = then.parts(self);
        let Buffers { layers, last, logits, dy, residual, partial, .. } = &self.buffers;
        self.products.weight_gradient(logits, &last.y, &self.gradients.head)?;
        self.products.data_gradient(logits, &self.weights.head, dy)?;
        gradients_of.complete(Part::Head)?;
        self.norm_backward(last, gains, 2 * layers.len(), true)?;
        for (i, lse) in lse.into_iter().enumerate().rev() {
            let (layer, weights) = (&layers[i], &self.weights.layers[i]);
            let gradients = &self.gradients.layers[i % self.kept];
            self.feed_forward_backward(layer, weights, gradients)
                .with_context(|| format!("in the feed-forward part of layer {i}"))?;
            self.norm_backward(&layer.ffn, gains, 2 * i + 1, false)?;
            self.attend_backward(layer, weights, gradients, &lse)
                .with_context(|| format!("in the attention of layer {i}"))?;
            self.norm_backward(&layer.attention, gains, 2 * i, false)?;
            gradients_of.complete_layer(i)?;
        }
        let [d_embedding, d_gains] = self.packed.embedding_and_gain_gradients()?;
        self.kernels.embedding_gradient(tokens, &residual.wide, &d_embedding)?;
        self.kernels.gain_gradients(partial, &d_gains)?;
        gradients_of.complete(Part::EmbeddingAndGains)?;
        gradients_of.end()
    }

    pub(super) fn update(&self, part: Part) -> Result<()> {
        let stepped = self.packed.stepped(part)?;
        stepped.iter().try_for_each(|stepped| self.kernels.update(stepped, &self.progress, &self.options))
    }

    /// The backward pass of norm `index` from `dy` into the residual stream's gradient.
    fn norm_backward(&self, saved: &Saved, gains: &Tensor, index: usize, is_first: bool) -> Result<()> {
        let Buffers { dy, residual, partial, .. } = &self.buffers;
        let [gain, partial] = [gains, partial].map(|t| t.f_get(index as i64));
        let Saved { h, inverse_rms, .. } = saved;
        let saved = NormSaved { h, inverse_rms, gain: &gain?, partial: &partial? };
        self.kernels.norm_backward(&saved, dy, residual, is_first)
    }

    fn feed_forward_backward(&self, layer: &Layer, weights: &LayerWeights, gradients: &LayerWeights) -> Result<()> {
        let Buffers { d_activated, residual, dy, .. } = &self.buffers;
        let Layer { gate_up, activated, ffn, .. } = layer;
        self.products.data_gradient(&residual.low, &weights.down, d_activated)?;
        self.kernels.swiglu_backward(gate_up, d_activated)?;
        let d_gate_up = gate_up;
        self.products.weight_gradient(&residual.low, activated, &gradients.down)?;
        self.products.weight_gradient(d_gate_up, &ffn.y, &gradients.gate_up)?;
        self.products.data_gradient(d_gate_up, &weights.gate_up, dy)
    }

    fn attend_backward(
        &self,
        layer: &Layer,
        weights: &LayerWeights,
        gradients: &LayerWeights,
        lse: &Tensor,
    ) -> Result<()> {
        let Buffers { d_o, residual, dy, .. } = &self.buffers;
        self.products.data_gradient(&residual.low, &weights.output, d_o)?;
        self.products.weight_gradient(&residual.low, &layer.o, &gradients.output)?;
        let [q, k, v] = self.heads_of(&layer.qkv)?;
        let (o, d_o) = (self.heads(&layer.o)?, self.heads(d_o)?);
        let [dq, dk, dv] = self.attention.backward([&q, &k, &v, &o, lse, &d_o], true)?;
        let [dq, dk, dv] = [dq, dk, dv].map(|t| t.f_contiguous());
        let d_qkv = &layer.qkv;
        self.kernels.rope_backward([&dq?, &dk?, &dv?], d_qkv, &self.positions())?;
        self.products.weight_gradient(d_qkv, &layer.attention.y, &gradients.qkv)?;
        self.products.data_gradient(d_qkv, &weights.qkv, dy)
    }
}
