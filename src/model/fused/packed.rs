//! The storage of a fused step: all parameters in one array, their copies for the products, gradients and AdamW's moments.
//!
//! Weights that multiply the same input lie behind each other, so that one product takes them all: q, k and v as (3 d, d),
//! W1 and W3 as (2 d_ff, d). The parameters of the model become views; their names, order and shapes stay.

use std::ops::Range;

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

use super::kernels::Packed as Stepped;
use super::shard::{Piece, Shard};
use crate::model::{Config, Precision, Transformer};

/// Parameters that products multiply by come first, then those whose gradients are float32: the embedding and the gains.
pub struct Packed {
    config: Config,
    shard: Shard,
    masters: Tensor,
    /// The masters themselves where the products are float32.
    low: Tensor,
    /// Of as many layers as are kept at a time, then of the head.
    weight_gradients: Tensor,
    float_gradients: Tensor,
    /// Of this rank's shares, unit by unit, as `v`.
    m: Tensor,
    v: Tensor,
}

/// A part of the parameters that AdamW changes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The weights of layers that follow each other.
    Layers {
        first: usize,
        end: usize,
    },
    Head,
    EmbeddingAndGains,
}

/// What lies in the storage for each parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    Masters,
    /// As the products read them; of the embedding and the gains the masters.
    Products,
    Gradients,
}

/// A range of parameters that are stepped together.
struct Unit {
    /// The first one in the masters, and how many follow.
    start: i64,
    elements: i64,
    /// Of these, this rank's.
    share: Range<i64>,
    gradients_start: i64,
    moments_start: i64,
}

/// One layer's packed weights, or their gradients.
pub struct LayerWeights {
    /// (3 d, d)
    pub qkv: Tensor,
    /// (d, d)
    pub output: Tensor,
    /// (2 d_ff, d)
    pub gate_up: Tensor,
    /// (d, d_ff)
    pub down: Tensor,
}

/// All that products multiply by.
pub struct Weights {
    pub layers: Vec<LayerWeights>,
    /// (vocabulary, d)
    pub head: Tensor,
}

/// The kind of products in `precision`.
pub fn product_kind(precision: Precision) -> Kind {
    match precision {
        Precision::Float32 => Kind::Float,
        Precision::Bfloat16 => Kind::BFloat16,
    }
}

impl Packed {
    /// Moves the model's parameters into one array, with their values. Gradients have room for `kept` layers at a time.
    ///
    /// Errors: libtorch's, such as too little memory.
    pub fn of(model: &mut Transformer, precision: Precision, kept: i64, shard: Shard, device: Device) -> Result<Self> {
        let config = *model.config();
        let (all, weights) = (config.num_parameters() as i64, config.num_matmul_parameters() as i64);
        let float = |elements: i64| Tensor::f_zeros([elements], (Kind::Float, device));
        let kind = product_kind(precision);
        let masters = float(all).context("allocating the packed parameters")?;
        let places = places(&config);
        model.place_parameters(|i, name, value| {
            let (at, shape) = (places[i], value.size());
            let mut view = view(&masters, at, &shape)?;
            view.f_copy_(&value.f_detach()?).with_context(|| format!("moving {name}"))?;
            Ok(view.f_detach()?.f_requires_grad_(true)?)
        })?;
        let low = masters.f_narrow(0, 0, weights)?;
        let low = if kind == Kind::Float { low } else { low.f_to_kind(kind)? };
        let layers = config.num_layers * shard.len(config.num_layer_weights() as i64);
        let moments = layers + shard.len(head(&config)) + shard.len(all - weights);
        Ok(Self {
            config,
            shard,
            masters,
            low,
            weight_gradients: Tensor::f_zeros([kept_weights(&config, kept) as i64], (kind, device))?,
            float_gradients: float(all - weights)?,
            m: float(moments)?,
            v: float(moments)?,
        })
    }

    /// The weights as the products read them.
    pub fn weights(&self) -> Result<Weights> {
        weights(&self.config, self.config.num_layers, &self.low)
    }

    /// Where the products write the gradients of [`Self::weights`]: of the layers that are kept at a time.
    pub fn weight_gradients(&self, kept: i64) -> Result<Weights> {
        weights(&self.config, kept, &self.weight_gradients)
    }

    /// The embedding (vocabulary, d) and the gains (2 layers + 1, d) with the last norm's at the end, in float32.
    pub fn embedding_and_gains(&self) -> Result<[Tensor; 2]> {
        let weights = self.config.num_matmul_parameters() as i64;
        embedding_and_gains(&self.config, &self.masters.f_narrow(0, weights, self.float_gradients.numel() as i64)?)
    }

    /// Their gradients.
    pub fn embedding_and_gain_gradients(&self) -> Result<[Tensor; 2]> {
        embedding_and_gains(&self.config, &self.float_gradients)
    }

    /// A view of every parameter's gradient, in the model's order, where all are kept.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        let weights = self.config.num_matmul_parameters() as i64;
        let of = |(at, (name, shape)): (i64, (String, Vec<i64>))| {
            let (from, at) =
                if at < weights { (&self.weight_gradients, at) } else { (&self.float_gradients, at - weights) };
            Ok((name, view(from, at, &shape)?))
        };
        places(&self.config).into_iter().zip(self.config.parameter_shapes()).map(of).collect()
    }

    /// Copies the masters for the products again, after something else than [`super::FusedStep`] changed them.
    pub fn refresh(&self) -> Result<()> {
        self.low.shallow_clone().f_copy_(&self.masters.f_narrow(0, 0, self.low.numel() as i64)?)?;
        Ok(())
    }

    /// Sets AdamW's moments to zero.
    pub fn forget_moments(&self) -> Result<()> {
        [&self.m, &self.v].into_iter().try_for_each(|moment| Ok(moment.shallow_clone().f_zero_().map(drop)?))
    }

    /// What AdamW changes of `part` on this rank.
    pub fn stepped(&self, part: Part) -> Result<Vec<Stepped>> {
        let of = |unit: Unit| {
            let share = |of| Ok::<_, anyhow::Error>(self.piece(&unit, of)?.share);
            let count = unit.share.end - unit.share.start;
            let moment = |of: &Tensor| of.f_narrow(0, unit.moments_start, count);
            let has_copy = self.has_copies() && part != Part::EmbeddingAndGains;
            let low = has_copy.then(|| share(Values::Products)).transpose()?;
            let (p, g) = (share(Values::Masters)?, share(Values::Gradients)?);
            Ok(Stepped { p, g, m: moment(&self.m)?, v: moment(&self.v)?, low })
        };
        self.units(part).into_iter().map(of).collect()
    }

    /// Those values of `part`.
    pub fn pieces(&self, part: Part, of: Values) -> Result<Vec<Piece>> {
        self.units(part).iter().map(|unit| self.piece(unit, of)).collect()
    }

    /// Whether a rank steps only some of the parameters.
    pub fn is_sharded(&self) -> bool {
        self.m.numel() < self.masters.numel()
    }

    /// Whether the products read copies of the masters.
    pub fn has_copies(&self) -> bool {
        self.low.kind() != Kind::Float
    }

    fn piece(&self, unit: &Unit, of: Values) -> Result<Piece> {
        let is_weight = unit.start < self.low.numel() as i64;
        let (values, start) = match of {
            Values::Gradients if is_weight => (&self.weight_gradients, unit.gradients_start),
            Values::Gradients => (&self.float_gradients, unit.gradients_start),
            Values::Products if is_weight => (&self.low, unit.start),
            Values::Products | Values::Masters => (&self.masters, unit.start),
        };
        Piece::of(values, start, unit.elements, &unit.share)
    }

    /// The ranges of `part`: each layer for itself where the ranks share it.
    fn units(&self, part: Part) -> Vec<Unit> {
        let (shard, layer, head) = (self.shard, self.config.num_layer_weights() as i64, head(&self.config));
        let (layers, weights) = (layer * self.config.num_layers, self.low.numel() as i64);
        let slots = self.weight_gradients.numel() as i64 - head;
        let layer_moments = shard.len(layer);
        let head_moments = layer_moments * self.config.num_layers;
        let unit = |start, elements, gradients_start, moments_start| Unit {
            start,
            elements,
            share: shard.of(elements),
            gradients_start,
            moments_start,
        };
        match part {
            Part::Layers { first, end } => {
                let [first, end] = [first, end].map(|i| i as i64);
                let start = layer * first;
                if layer_moments == layer {
                    // Several layers may divide into shares where one does not.
                    let elements = layer * (end - first);
                    return vec![Unit { share: 0..elements, ..unit(start, elements, start % slots, start) }];
                }
                (first..end).map(|i| unit(layer * i, layer, layer * i % slots, layer_moments * i)).collect()
            }
            Part::Head => vec![unit(layers, head, slots, head_moments)],
            Part::EmbeddingAndGains => {
                let others = self.float_gradients.numel() as i64;
                vec![unit(weights, others, 0, head_moments + shard.len(head))]
            }
        }
    }

    /// Bytes of this storage for a model whose gradients are kept for `kept` layers at a time: float32 parameters and two moments
    /// each, bfloat16 copies where the products are bfloat16, and the gradients.
    pub fn bytes(config: &Config, precision: Precision, kept: i64) -> u64 {
        let (all, weights) = (config.num_parameters(), config.num_matmul_parameters());
        let (copy, gradient) = match precision {
            Precision::Float32 => (0, 4),
            Precision::Bfloat16 => (2, 2),
        };
        12 * all + copy * weights + gradient * kept_weights(config, kept) + 4 * (all - weights)
    }
}

/// Parameters of the head.
fn head(config: &Config) -> i64 {
    config.vocab_size * config.d_model
}

/// Parameters of `kept` layers and of the head.
fn kept_weights(config: &Config, kept: i64) -> u64 {
    let others = (config.num_layers - kept) as u64;
    config.num_matmul_parameters() - others * config.num_layer_weights()
}

/// The first element of each parameter, in the order of [`Config::parameter_shapes`].
fn places(config: &Config) -> Vec<i64> {
    let Config { d_model: d, d_ff, num_layers, vocab_size, .. } = *config;
    let (square, wide) = (d * d, d * d_ff);
    let layer = 4 * square + 3 * wide;
    let head = num_layers * layer;
    let embedding = head + vocab_size * d;
    let gains = embedding + vocab_size * d;
    let of_layer = |i: i64| {
        let at = i * layer;
        let w1 = at + 4 * square;
        let gain = gains + 2 * i * d;
        // q, k, v, output, w1, w2, w3, ln1, ln2: W3 lies right behind W1.
        [at, at + square, at + 2 * square, at + 3 * square, w1, w1 + 2 * wide, w1 + wide, gain, gain + d]
    };
    let last = [gains + 2 * num_layers * d, head];
    std::iter::once(embedding).chain((0..num_layers).flat_map(of_layer)).chain(last).collect()
}

fn view(flat: &Tensor, at: i64, shape: &[i64]) -> Result<Tensor> {
    Ok(flat.f_narrow(0, at, shape.iter().product())?.f_view(shape)?)
}

fn weights(config: &Config, layers: i64, flat: &Tensor) -> Result<Weights> {
    let Config { d_model: d, d_ff, vocab_size, .. } = *config;
    let mut at = 0;
    let mut next = |shape: [i64; 2]| {
        let tensor = view(flat, at, &shape);
        at += shape[0] * shape[1];
        tensor
    };
    let layers = (0..layers).map(|_| {
        Ok(LayerWeights {
            qkv: next([3 * d, d])?,
            output: next([d, d])?,
            gate_up: next([2 * d_ff, d])?,
            down: next([d, d_ff])?,
        })
    });
    Ok(Weights { layers: layers.collect::<Result<_>>()?, head: next([vocab_size, d])? })
}

fn embedding_and_gains(config: &Config, flat: &Tensor) -> Result<[Tensor; 2]> {
    let Config { d_model: d, num_layers, vocab_size, .. } = *config;
    Ok([view(flat, 0, &[vocab_size, d])?, view(flat, vocab_size * d, &[2 * num_layers + 1, d])?])
}
