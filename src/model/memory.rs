//! The predicted memory of one training step: parameters, gradients, optimizer state, and what autograd saves by tensor.
//!
//! Everything is counted from the operations of [`super::transformer`] and [`super::loss`] in their order, with libtorch's
//! rule of what each saves for its backward. The allocator's rounding, workspaces and fragmentation are not counted.
//! Letters: B batch, T sequence length, V vocabulary, d d_model, f d_ff, H heads.

use super::sizes::{Config, Precision};
use crate::attention::ImplementationName;

/// One kind of tensor that the forward pass saves for the backward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedTensor {
    pub name: &'static str,
    pub shape: &'static str,
    pub bytes_each: u64,
    /// How many of it the whole model saves.
    pub count: u64,
}

impl SavedTensor {
    fn new(name: &'static str, shape: &'static str, bytes_each: u64, count: u64) -> Self {
        Self { name, shape, bytes_each, count }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes_each * self.count
    }
}

/// The memory of a model that is trained on (batch, seq) tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Memory {
    pub config: Config,
    pub batch: i64,
    pub seq: i64,
    pub precision: Precision,
    pub attention: ImplementationName,
}

/// How AdamW updates the parameters, which decides its temporary memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// Operator by operator ([`super::optim::AdamW`]): holds a denominator and an update of one parameter at a time.
    ByOperators,
    /// In one kernel, without temporary tensors.
    Fused,
}

/// Bytes of one element.
const FLOAT32: u64 = 4;
const INT64: u64 = 8;
const BOOL: u64 = 1;

impl Memory {
    /// The model's parameters in float32, which they keep under autocast.
    pub fn parameters(&self) -> u64 {
        FLOAT32 * self.config.num_parameters()
    }

    /// One gradient a parameter, in the parameter's dtype.
    pub fn gradients(&self) -> u64 {
        self.parameters()
    }

    /// AdamW's two moments of each parameter.
    pub fn optimizer_state(&self) -> u64 {
        2 * self.parameters()
    }

    /// Parameters, gradients and both moments: 4 P values.
    pub fn fixed(&self) -> u64 {
        self.parameters() + self.gradients() + self.optimizer_state()
    }

    /// The bfloat16 copies that autocast makes of the weights of matrix products, and keeps until it ends (or, where
    /// autograd saved them, until the backward pass has used them).
    pub fn weight_copies(&self) -> u64 {
        match self.precision {
            Precision::Float32 => 0,
            Precision::Bfloat16 => 2 * self.config.num_matmul_parameters(),
        }
    }

    /// One residual-stream activation, (B, T, d) in float32 under both precisions.
    pub fn residual(&self) -> u64 {
        FLOAT32 * self.tokens() * self.config.d_model as u64
    }

    /// One attention score tensor, (B, H, T, T) in float32.
    pub fn scores(&self) -> u64 {
        FLOAT32 * self.rows() * self.seq as u64
    }

    /// One hidden activation of the feed-forward network, (B, T, f) in float32.
    pub fn hidden(&self) -> u64 {
        FLOAT32 * self.tokens() * self.config.d_ff as u64
    }

    /// The logits, (B, T, V) in float32.
    pub fn logits(&self) -> u64 {
        FLOAT32 * self.tokens() * self.config.vocab_size as u64
    }

    /// All tensors that the forward pass and the loss save, without parameters and [`Self::weight_copies`].
    pub fn saved(&self) -> Vec<SavedTensor> {
        let (norms, attention) = (self.saved_by_norms(), self.saved_by_attention());
        let ends = self.inputs_and_tables_by_tensor().into_iter().chain(self.saved_by_loss());
        norms.into_iter().chain(attention).chain(self.saved_by_ffn()).chain(ends).collect()
    }

    /// The sum of [`Self::saved`].
    pub fn saved_bytes(&self) -> u64 {
        self.saved().iter().map(SavedTensor::bytes).sum()
    }

    /// The tokens of a batch, and the tables that layers share; a recorded pass saves them, so that [`Self::saved`] has
    /// them too.
    pub fn inputs_and_tables(&self) -> u64 {
        self.inputs_and_tables_by_tensor().iter().map(SavedTensor::bytes).sum()
    }

    /// Peak of a forward pass with the loss under `no_grad`: the parameters (and their copies under autocast, which
    /// caches them even then), inputs, and the working tensors of the largest moment.
    pub fn forward_peak(&self) -> u64 {
        self.parameters() + self.weight_copies() + self.inputs_and_tables() + self.working_forward()
    }

    /// Peak of a forward pass with the loss that autograd records: everything saved, and what the loss works with.
    pub fn recorded_forward_peak(&self) -> u64 {
        self.parameters() + self.weight_copies() + self.saved_bytes() + self.working_at_loss()
    }

    /// Peak of a recorded forward pass and its backward without an optimizer.
    pub fn backward_peak(&self) -> u64 {
        self.recorded_forward_peak().max(self.parameters() + self.gradients())
    }

    /// Peak of forward, backward and the step of AdamW. Gradients are released before each forward pass.
    ///
    /// In the very first step AdamW has no state while activations exist (`with_state` false). During backward,
    /// activations are freed and gradients appear, both linearly in the layers, so the peak is at its start or at its
    /// end.
    pub fn step_peak(&self, update: Update, with_state: bool) -> u64 {
        let state = if with_state { self.optimizer_state() } else { 0 };
        let before_backward = self.recorded_forward_peak() + state;
        let largest_parameter = self.config.parameter_shapes().map(|(_, s)| s.iter().product::<i64>()).max();
        let held = match update {
            Update::ByOperators => 2 * FLOAT32 * largest_parameter.unwrap_or(0) as u64,
            Update::Fused => 0,
        };
        before_backward.max(self.fixed() + self.inputs_and_tables() + held)
    }

    fn saved_by_norms(&self) -> [SavedTensor; 4] {
        let (layers, norms, residual) = (self.layers(), 2 * self.layers() + 1, self.residual());
        // In float32 all linear layers share the output; autocast casts it for each of them.
        let (output, outputs) = match self.precision {
            Precision::Float32 => (residual, norms),
            Precision::Bfloat16 => (residual / 2, 5 * layers + 1),
        };
        [
            // For the square and the scaling, by rsqrt, for the product with the gain, and by the linear layers.
            SavedTensor::new("residual stream", "(B, T, d)", residual, norms),
            SavedTensor::new("inverse root mean square", "(B, T, 1)", FLOAT32 * self.tokens(), norms),
            SavedTensor::new("normalised input", "(B, T, d)", residual, norms),
            SavedTensor::new("output of the norm", "(B, T, d)", output, outputs),
        ]
    }

    fn saved_by_attention(&self) -> Vec<SavedTensor> {
        let heads = self.narrow(self.residual());
        let saved = |name, shape, bytes| SavedTensor::new(name, shape, bytes, self.layers());
        // For the scores, the product with the probabilities, and the output projection.
        let mut all = vec![
            saved("rotated queries", "(B, H, T, d/H)", heads),
            saved("rotated keys", "(B, H, T, d/H)", heads),
            saved("values", "(B, H, T, d/H)", heads),
            saved("attention output, heads joined", "(B, T, d)", heads),
        ];
        if self.attention != ImplementationName::Naive {
            all.push(saved("attention output by head", "(B, H, T, d/H)", heads));
            all.push(saved("logsumexp", "(B, H, T)", FLOAT32 * self.rows()));
            return all;
        }
        // By the softmax, and for the product with the values.
        all.push(saved("attention probabilities", "(B, H, T, T)", self.scores()));
        if self.precision == Precision::Bfloat16 {
            all.push(saved("probabilities in bfloat16", "(B, H, T, T)", self.scores() / 2));
        }
        all
    }

    /// For the products, by sigmoid, and by the linear layer W2.
    fn saved_by_ffn(&self) -> [SavedTensor; 5] {
        ["gate W1 y", "sigmoid of the gate", "silu of the gate", "W3 y", "gated hidden"]
            .map(|name| SavedTensor::new(name, "(B, T, f)", self.narrow(self.hidden()), self.layers()))
    }

    /// By exp, for the loss's gather, by the maximum, and by log.
    fn saved_by_loss(&self) -> [SavedTensor; 4] {
        [
            SavedTensor::new("exponentials of the logits", "(B, T, V)", self.logits(), 1),
            SavedTensor::new("log-probabilities", "(B, T, V)", self.logits(), 1),
            SavedTensor::new("places of the row maxima", "(B, T, 1)", INT64 * self.tokens(), 1),
            SavedTensor::new("sums of the exponentials", "(B, T, 1)", FLOAT32 * self.tokens(), 1),
        ]
    }

    /// For the embedding, the loss's gather, the rotations, and the masking of naive attention.
    fn inputs_and_tables_by_tensor(&self) -> Vec<SavedTensor> {
        let context = self.config.context_length as u64;
        let mut tensors = vec![
            SavedTensor::new("tokens", "(B, T)", INT64 * self.tokens(), 1),
            SavedTensor::new("targets", "(B, T)", INT64 * self.tokens(), 1),
            SavedTensor::new(
                "cosines and sines",
                "2 (context, d/2H)",
                FLOAT32 * context * self.config.d_head() as u64,
                1,
            ),
        ];
        if self.attention == ImplementationName::Naive {
            tensors.push(SavedTensor::new("causal mask", "(context, context)", BOOL * context * context, 1));
        }
        tensors
    }

    /// The most that is alive beside the parameters under `no_grad`: in a layer's attention, in its feed-forward
    /// network, or at the loss.
    fn working_forward(&self) -> u64 {
        let (residual, narrow) = (self.residual(), self.narrow(self.residual()));
        // The residual stream, the norm's output, the rotated q and k, which the cosines keep in float32, and v.
        let in_attention = 4 * residual + narrow;
        let at_scores = if self.attention == ImplementationName::Naive { self.working_at_scores() } else { 0 };
        // The residual stream before and after attention, the norm's output, the silu, W3 y, their product, W2's output.
        let in_ffn = 3 * residual + 3 * self.narrow(self.hidden()) + narrow;
        // The logits, the logits less their maximum, and the exponentials, whose argument autocast widens.
        let at_loss = 3 * self.logits();
        (in_attention + at_scores).max(in_ffn).max(at_loss)
    }

    /// Beside q, k and v, at the larger of two moments of naive attention.
    fn working_at_scores(&self) -> u64 {
        let (scores, narrow) = (self.scores(), self.narrow(self.scores()));
        let cast = |bytes: u64| if self.precision == Precision::Bfloat16 { bytes } else { 0 };
        // The masked scores, the argument that autocast widens, and the probabilities.
        let at_softmax = narrow + cast(scores) + scores;
        // The masked scores, the probabilities and their copy in bfloat16, a contiguous copy of v, and the output.
        let at_product = narrow + scores + cast(narrow) + 2 * self.narrow(self.residual());
        at_softmax.max(at_product)
    }

    /// Beside the exponentials and the log-probabilities: the logits, and the logits less their maximum.
    fn working_at_loss(&self) -> u64 {
        2 * self.narrow(self.logits())
    }

    /// Float32 bytes in the dtype that matrix products give.
    fn narrow(&self, bytes: u64) -> u64 {
        match self.precision {
            Precision::Float32 => bytes,
            Precision::Bfloat16 => bytes / 2,
        }
    }

    fn layers(&self) -> u64 {
        self.config.num_layers as u64
    }

    fn tokens(&self) -> u64 {
        (self.batch * self.seq) as u64
    }

    /// Rows of the score tensor, B H T.
    fn rows(&self) -> u64 {
        self.tokens() * self.config.num_heads as u64
    }
}

#[cfg(test)]
mod tests;
