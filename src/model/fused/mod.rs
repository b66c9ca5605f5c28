//! A training step written out: the Transformer's forward and backward pass and AdamW in a few kernels a layer, with
//! buffers that are allocated once, so that the whole step can be captured as one CUDA graph.
//!
//! It computes what [`Transformer::forward`], the loss, autograd and [`crate::model::FusedAdamW`] compute, on the same
//! parameters. In bfloat16 the products and attention read and write bfloat16 as under autocast, the residual stream, the
//! norms, the rotation and the loss are float32, and what lies between two products is rounded once.

use anyhow::{Context as _, Result, ensure};
use tch::{Kind, Tensor};

use self::buffers::{Buffers, Layer, Saved};
pub use self::exchange::Exchange;
use self::exchange::Then;
use self::kernels::{Kernels, Positions, Shape};
use self::packed::{LayerWeights, Packed, Weights};
pub use self::products::OwnChoice;
use self::products::Products;
pub use self::shard::{Piece, Shard};
use super::norm::EPS;
use super::optim::AdamWOptions;
use super::{Config, Precision, Transformer};
use crate::attention::Attention;
use crate::cuda::{Choice, Counters};
use crate::torch::autograd::changed_in_place;

mod backward;
mod buffers;
mod exchange;
pub mod kernels;
pub mod own_products;
pub mod packed;
mod products;
mod shard;

/// A model's training step on batches of one size.
pub struct FusedStep {
    config: Config,
    batch: i64,
    /// Layers whose gradients are kept at a time.
    kept: usize,
    attention: &'static dyn Attention,
    options: AdamWOptions,
    kernels: Kernels,
    products: Products,
    packed: Packed,
    weights: Weights,
    gradients: Weights,
    buffers: Buffers,
    counters: Counters,
    cosines: Tensor,
    sines: Tensor,
    /// AdamW's counter: the steps, and two factors that follow from them.
    progress: Tensor,
}

/// How long a step keeps its gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gradients {
    /// Until the next step.
    Kept,
    /// Until AdamW has used them, eight layers at a time: less memory.
    Passing,
}

impl Gradients {
    /// Layers at a time. AdamW evicts what the next kernels would read from the L2 cache, so that it should not run after every
    /// layer (the notebook of `kernels/packed_adamw.cu`).
    const PASSING: i64 = 8;

    fn layers_of(self, config: &Config) -> i64 {
        match self {
            Self::Kept => config.num_layers,
            Self::Passing => config.num_layers.min(Self::PASSING),
        }
    }
}

impl FusedStep {
    /// Moves the parameters of `model` into packed storage, whose views they become. The step trains batches of `batch` sequences as long
    /// as the model's context.
    ///
    /// Errors: sizes that the kernels do not take; an attention implementation without passes of its own; those of
    /// compiling, and of memory.
    pub fn new(
        model: &mut Transformer,
        batch: i64,
        precision: Precision,
        gradients: Gradients,
        options: AdamWOptions,
    ) -> Result<Self> {
        Self::with(model, batch, precision, gradients, options, Shard::ALL)
    }

    /// With every forward product that our kernels take by them, not only where a GPU is faster so.
    ///
    /// Errors: those of compiling them.
    pub fn with_own_products(self) -> Result<Self> {
        Ok(Self { products: self.products.always_own()?, ..self })
    }

    fn with(
        model: &mut Transformer,
        batch: i64,
        precision: Precision,
        gradients: Gradients,
        options: AdamWOptions,
        shard: Shard,
    ) -> Result<Self> {
        options.validate()?;
        let config = *model.config();
        config.validate_with_batch(batch)?;
        let kept = gradients.layers_of(&config);
        let device = model.parameters()[0].1.device();
        let implementation = model.attention().implementation()?;
        let attention = implementation.as_attention().with_context(|| {
            format!(
                "attention is {}: a fused step needs one that gives its logsumexp, such as flash",
                implementation.name
            )
        })?;
        let kernels = Kernels::load(device, Shape::of(&config, precision)?).context("preparing a fused step")?;
        let packed = Packed::of(model, precision, kept, shard, device)?;
        let (weights, gradients) = (packed.weights()?, packed.weight_gradients(kept)?);
        let buffers = Buffers::new(&config, batch, precision, kernels.norm_blocks(), device)?;
        let counters = Counters::new(device, Self::counters(&config))?;
        let [cosines, sines] = model.rope().tables().map(Tensor::shallow_clone);
        let progress = Tensor::f_zeros([2], (Kind::Int64, device))?;
        Ok(Self {
            config,
            batch,
            kept: usize::try_from(kept)?,
            attention,
            options,
            kernels,
            products: Products::on(device)?,
            packed,
            weights,
            gradients,
            buffers,
            counters,
            cosines,
            sines,
            progress,
        })
    }

    /// Of a layer's four products each way (backward two for each), and its attention; and of the head's three products.
    fn counters(config: &Config) -> usize {
        13 * config.num_layers as usize + 3
    }

    /// Bytes of the storage and the buffers of a step on an H200, beside which attention's own are small.
    pub fn predicted_bytes(config: &Config, batch: i64, precision: Precision) -> u64 {
        let kept = Gradients::Passing.layers_of(config);
        Packed::bytes(config, precision, kept) + Buffers::bytes(config, batch, precision, 2 * 132)
    }

    /// One whole step on `tokens` and `targets`, both (batch, context_length) int64. Returns the loss before it, float32
    /// without dimensions.
    ///
    /// It waits for nothing and copies nothing from the host, so that it can be captured after one such step. Tokens and
    /// targets must be below the vocabulary's size: a target that is not makes the loss NaN.
    ///
    /// Errors: the step is sharded.
    pub fn train(&self, model: &Transformer, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        ensure!(!self.packed.is_sharded(), "this step is sharded: train it by train_on_rank");
        self.train_then(model, tokens, targets, Then::Update)
    }

    fn train_then(&self, model: &Transformer, tokens: &Tensor, targets: &Tensor, then: Then) -> Result<Tensor> {
        let _no_graph = tch::no_grad_guard();
        self.check_batch(tokens, targets)?;
        self.kernels.advance(&self.progress, &self.options)?;
        let loss = self.pass(tokens, targets, then)?;
        model.parameters().iter().try_for_each(|(_, parameter)| changed_in_place(parameter))?;
        Ok(loss)
    }

    /// Forward and backward pass: the loss, and new [`Self::gradients`].
    pub fn differentiate(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let _no_graph = tch::no_grad_guard();
        self.require_kept()?;
        self.check_batch(tokens, targets)?;
        self.pass(tokens, targets, Then::Keep)
    }

    fn check_batch(&self, tokens: &Tensor, targets: &Tensor) -> Result<()> {
        let size = [self.batch, self.config.context_length];
        for (name, t) in [("tokens", tokens), ("targets", targets)] {
            let fits = t.size() == size && t.kind() == Kind::Int64 && t.is_contiguous();
            ensure!(fits, "{name} are {:?} {:?}: a fused step takes contiguous int64 of {size:?}", t.kind(), t.size());
        }
        Ok(())
    }

    /// Forward and backward pass, and what is done with the gradients.
    fn pass(&self, tokens: &Tensor, targets: &Tensor, then: Then) -> Result<Tensor> {
        let _clear = self.counters.clear()?;
        let [embedding, gains] = self.packed.embedding_and_gains()?;
        let lse = self.forward(tokens, &embedding, &gains).context("in the forward pass")?;
        let loss = self.head(targets)?;
        self.backward(tokens, &gains, lse, then).context("in the backward pass")?;
        Ok(loss)
    }

    /// A view of every parameter's gradient, in the model's order: of weights in the type of the products, of the embedding
    /// and the gains in float32.
    ///
    /// Errors: as [`Self::differentiate`], with gradients that are not kept.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        self.require_kept()?;
        self.packed.gradients()
    }

    fn require_kept(&self) -> Result<()> {
        let layers = self.weights.layers.len();
        ensure!(
            self.kept == layers,
            "this step keeps the gradients of {} of {layers} layers: make it with Gradients::Kept",
            self.kept
        );
        Ok(())
    }

    /// To be called after the model's parameters were changed by something else, such as [`Transformer::load`].
    pub fn refresh(&self) -> Result<()> {
        let _no_graph = tch::no_grad_guard();
        self.packed.refresh()
    }

    /// Forgets AdamW's moments and its count of steps.
    pub fn restart(&self) -> Result<()> {
        let _ = self.progress.shallow_clone().f_zero_()?;
        self.packed.forget_moments()
    }

    /// The algorithms that its products run on a GPU, once a step has run.
    pub fn product_choices(&self) -> Vec<Choice> {
        self.products.choices()
    }

    /// The products for which its own kernels were timed, once a step has run.
    pub fn own_product_choices(&self) -> Vec<OwnChoice> {
        self.products.own_choices()
    }

    fn positions(&self) -> Positions<'_> {
        let (seq, d_head) = (self.config.context_length, self.config.d_head());
        Positions { cosines: &self.cosines, sines: &self.sines, seq, d_head }
    }

    /// All layers and the last norm. Returns each layer's logsumexp.
    fn forward(&self, tokens: &Tensor, embedding: &Tensor, gains: &Tensor) -> Result<Vec<Tensor>> {
        let Buffers { layers, last, .. } = &self.buffers;
        let first = layers.first().map_or(&last.h, |layer| &layer.attention.h);
        let _ = embedding.f_index_select_out(first, 0, &tokens.f_view([-1])?).context("looking up the tokens")?;
        let mut lse = Vec::with_capacity(layers.len());
        for (i, (layer, weights)) in layers.iter().zip(&self.weights.layers).enumerate() {
            let gain = |which: i64| gains.f_get(2 * i as i64 + which);
            let before = i.checked_sub(1).map(|before| &layers[before].ffn.h);
            self.norm(before, &layer.attention, &gain(0)?)?;
            lse.push(self.attend(layer, weights).with_context(|| format!("in the attention of layer {i}"))?);
            self.norm(Some(&layer.attention.h), &layer.ffn, &gain(1)?)?;
            self.feed_forward(layer, weights).with_context(|| format!("in the feed-forward part of layer {i}"))?;
        }
        let before = layers.last().map(|layer| &layer.ffn.h);
        self.norm(before, last, &gains.f_get(2 * layers.len() as i64)?)?;
        Ok(lse)
    }

    /// `saved.h` = `before` plus what the last sublayer added, and its norm; without `before` the norm of `saved.h`.
    fn norm(&self, before: Option<&Tensor>, saved: &Saved, gain: &Tensor) -> Result<()> {
        let added = before.map(|_| &self.buffers.added);
        let from = before.unwrap_or(&saved.h);
        self.kernels.residual_norm([from, &saved.h, gain, &saved.y, &saved.inverse_rms], added, EPS)
    }

    fn attend(&self, layer: &Layer, weights: &LayerWeights) -> Result<Tensor> {
        self.products.forward(&layer.attention.y, &weights.qkv, &layer.qkv)?;
        self.kernels.rope_forward(&layer.qkv, &self.positions())?;
        let [q, k, v] = self.heads_of(&layer.qkv)?;
        let lse = self.attention.forward_into([&q, &k, &v], &self.heads(&layer.o)?, true)?;
        self.products.forward(&layer.o, &weights.output, &self.buffers.added)?;
        Ok(lse)
    }

    fn feed_forward(&self, layer: &Layer, weights: &LayerWeights) -> Result<()> {
        let Layer { gate_up, activated, ffn, .. } = layer;
        self.products.gated(&self.kernels, [&ffn.y, &weights.gate_up], [gate_up, activated])?;
        self.products.forward(activated, &weights.down, &self.buffers.added)
    }

    /// The logits, their loss, and in their place its gradient.
    fn head(&self, targets: &Tensor) -> Result<Tensor> {
        let Buffers { last, logits, losses, .. } = &self.buffers;
        self.products.forward(&last.y, &self.weights.head, logits).context("in lm_head")?;
        self.kernels.cross_entropy(logits, targets, losses)?;
        Ok(losses.f_mean(None::<Kind>)?)
    }

    /// Queries, keys and values of packed rows (tokens, 3 d) as (batch, heads, seq, d_head).
    fn heads_of(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let d = self.config.d_model;
        let [q, k, v] = [0, 1, 2].map(|part| self.heads(&qkv.f_narrow(1, part * d, d)?));
        Ok([q?, k?, v?])
    }

    /// Rows (tokens, d) as (batch, heads, seq, d_head).
    fn heads(&self, rows: &Tensor) -> Result<Tensor> {
        let Config { num_heads, context_length, .. } = self.config;
        let size = [self.batch, context_length, num_heads, self.config.d_head()];
        Ok(rows.f_view(size)?.f_transpose(1, 2)?)
    }
}

#[cfg(test)]
mod tests;
