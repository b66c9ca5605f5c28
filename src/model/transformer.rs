//! The reference language model: a pre-norm decoder with RMSNorm, interleaved RoPE and SwiGLU, without biases.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use tch::{Device, Kind, Tensor};

use super::norm::{EPS, rms_norm};
use super::rope::Rope;
use super::sizes::Config;
use crate::attention::{self, ImplementationName, naive};
use crate::torch::Generator;
use crate::torch::nvtx::range;

/// Parameters in float32 that require gradients, and the way attention is computed.
pub struct Transformer {
    config: Config,
    attention: ImplementationName,
    positions: Positions,
    parameters: Vec<(String, Tensor)>,
}

/// The position tables that all layers share.
struct Positions {
    rope: Rope,
    /// The causal mask (seq, seq), true where a key is hidden; the naive attention alone reads one.
    mask: Option<Tensor>,
}

impl Positions {
    fn new(config: &Config, device: Device, attention: ImplementationName) -> Result<Self> {
        let rope = Rope::new(config.rope_theta, config.d_head(), config.context_length, device)?;
        let all = 0..config.context_length;
        let mask = (attention == ImplementationName::Naive)
            .then(|| attention::hidden(all.clone(), all, device))
            .transpose()?;
        Ok(Self { rope, mask })
    }

    /// Those of the first `seq` tokens.
    fn first(&self, seq: i64) -> Result<Self> {
        let corner = |mask: &Tensor| mask.f_narrow(0, 0, seq)?.f_narrow(1, 0, seq);
        Ok(Self { rope: self.rope.first(seq)?, mask: self.mask.as_ref().map(corner).transpose()? })
    }
}

impl Transformer {
    /// A freshly initialised model (assignment 1's scheme): linear weights truncated normal of standard deviation
    /// sqrt(2 / (d_in + d_out)), the embedding of standard deviation 1, both cut at three of them; gains 1.
    ///
    /// On the generator's device; [`ImplementationName::default_on`] that device is the default attention. Fails for an
    /// invalid configuration, and where memory runs out.
    pub fn new(config: &Config, attention: ImplementationName, generator: &Generator) -> Result<Self> {
        config.validate()?;
        let device = generator.device();
        let positions = Positions::new(config, device, attention)?;
        let parameters = config
            .parameter_shapes()
            .map(|(name, shape)| {
                let value = initial_value(&name, &shape, generator).with_context(|| format!("initialising {name}"))?;
                Ok((name, value))
            })
            .collect::<Result<_>>()?;
        Ok(Self { config: *config, attention, positions, parameters })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How attention is computed.
    pub fn attention(&self) -> ImplementationName {
        self.attention
    }

    /// The rotation of all positions of the context.
    pub(super) fn rope(&self) -> &Rope {
        &self.positions.rope
    }

    /// Replaces every parameter by what `place` gives for its number, name and present value.
    pub(super) fn place_parameters(
        &mut self,
        mut place: impl FnMut(usize, &str, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        for (i, (name, parameter)) in self.parameters.iter_mut().enumerate() {
            *parameter = place(i, name, parameter)?;
        }
        Ok(())
    }

    /// Names and tensors in the order of the reference's `named_parameters()`.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.parameters
    }

    /// Copies in a value for every parameter. Fails, naming each, where one is missing, unknown or of another shape,
    /// and then changes nothing.
    pub fn load(&mut self, values: &BTreeMap<String, Tensor>) -> Result<()> {
        check_parameters(&self.config, values)?;
        let _no_grad = tch::no_grad_guard();
        for (name, parameter) in &mut self.parameters {
            parameter.f_copy_(&values[name.as_str()]).with_context(|| format!("loading {name}"))?;
        }
        Ok(())
    }

    /// Logits (batch, seq, vocab_size) for `tokens` (batch, seq) int64, each below vocab_size.
    ///
    /// Fails for another dtype or rank, for an empty sequence and for one longer than the context length. Only
    /// libtorch's embedding checks the token values: a check here would wait for the device.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = self.positions.first(self.check_tokens(tokens)?)?;
        let weight = |i: usize| &self.parameters[i].1;
        let mut h = Tensor::f_embedding(weight(0), tokens, -1, false, false).context("looking up the tokens")?;
        for i in 0..self.config.num_layers as usize {
            let layer = Layer::of(&self.parameters[1 + 9 * i..10 + 9 * i]);
            h = self.block(&layer, &positions, h).with_context(|| format!("in layer {i}"))?;
        }
        let last = self.parameters.len() - 2;
        let y = rms_norm(&h, weight(last), EPS)?;
        range("lm_head", || linear(&y, weight(last + 1))).context("in lm_head")
    }

    /// h + attention(rmsnorm1(h)), then h + ffn(rmsnorm2(h)).
    fn block(&self, layer: &Layer, positions: &Positions, h: Tensor) -> Result<Tensor> {
        let normed = rms_norm(&h, layer.ln1, EPS)?;
        let attended = range("attn", || self.self_attention(layer, positions, &normed)).context("in attn")?;
        drop(normed);
        let h = h.f_add(&attended)?;
        drop(attended);
        let normed = rms_norm(&h, layer.ln2, EPS)?;
        let transformed = range("ffn", || swiglu(&normed, layer)).context("in ffn")?;
        drop(normed);
        Ok(h.f_add(&transformed)?)
    }

    /// Causal multi-head self-attention with rotary positions on queries and keys; `x` is (batch, seq, d_model).
    fn self_attention(&self, layer: &Layer, positions: &Positions, x: &Tensor) -> Result<Tensor> {
        let (batch, seq, d_model) = x.size3()?;
        let heads = |x: Tensor| -> Result<Tensor> {
            Ok(x.f_view([batch, seq, self.config.num_heads, self.config.d_head()])?.f_transpose(1, 2)?)
        };
        let q = positions.rope.rotate(&heads(linear(x, layer.q_proj)?)?)?;
        let k = positions.rope.rotate(&heads(linear(x, layer.k_proj)?)?)?;
        let v = heads(linear(x, layer.v_proj)?)?;
        // Under autocast the rotation leaves q and k in float32 and v in bfloat16; every implementation casts them
        // itself.
        let o = match &positions.mask {
            Some(mask) => naive::masked_attention(&q, &k, &v, Some(mask))?,
            None => attention::attention(self.attention, &q, &k, &v, true)?,
        };
        drop((q, k, v));
        linear(&o.f_transpose(1, 2)?.f_reshape([batch, seq, d_model])?, layer.output_proj)
    }

    /// Gives the length of the sequences.
    fn check_tokens(&self, tokens: &Tensor) -> Result<i64> {
        ensure!(tokens.f_kind()? == Kind::Int64, "tokens are {:?}: they must be int64", tokens.kind());
        let [_, seq] = tokens.size()[..] else {
            bail!("tokens have shape {:?}: it must be (batch, seq)", tokens.size())
        };
        let context_length = self.config.context_length;
        ensure!(seq > 0, "the sequence is empty");
        ensure!(seq <= context_length, "the sequence has {seq} tokens, more than the context length {context_length}");
        Ok(seq)
    }
}

/// One layer's weights, in the order of [`Config::parameter_shapes`].
struct Layer<'a> {
    q_proj: &'a Tensor,
    k_proj: &'a Tensor,
    v_proj: &'a Tensor,
    output_proj: &'a Tensor,
    w1: &'a Tensor,
    w2: &'a Tensor,
    w3: &'a Tensor,
    ln1: &'a Tensor,
    ln2: &'a Tensor,
}

impl<'a> Layer<'a> {
    fn of(parameters: &'a [(String, Tensor)]) -> Self {
        let [q_proj, k_proj, v_proj, output_proj, w1, w2, w3, ln1, ln2] = std::array::from_fn(|i| &parameters[i].1);
        Self { q_proj, k_proj, v_proj, output_proj, w1, w2, w3, ln1, ln2 }
    }
}

/// Whether `values` are the parameters of `config`; the error names up to eight that are not.
pub fn check_parameters(config: &Config, values: &BTreeMap<String, Tensor>) -> Result<()> {
    const NAMED: usize = 8;
    let misfit = |(name, shape): (String, Vec<i64>)| match values.get(&name) {
        None => Some(format!("{name} is missing")),
        Some(value) if value.size() != shape => Some(format!("{name} has shape {:?}, not {shape:?}", value.size())),
        Some(value) if !value.is_floating_point() => {
            Some(format!("{name} is {:?}, not of a floating dtype", value.kind()))
        }
        Some(_) => None,
    };
    // Lazily: a config may ask for any number of layers.
    let mut wrong: Vec<_> = config.parameter_shapes().filter_map(misfit).take(NAMED).collect();
    if wrong.len() < NAMED {
        let known: BTreeSet<_> = config.parameter_shapes().map(|(name, _)| name).collect();
        let unknown = values.keys().filter(|name| !known.contains(name.as_str())).take(NAMED - wrong.len());
        wrong.extend(unknown.map(|name| format!("{name:?} is no parameter of the model")));
    }
    ensure!(wrong.is_empty(), "these parameters do not fit the model (and there may be more): {}", wrong.join("; "));
    Ok(())
}

/// x Wᵀ, for a weight (d_out, d_in).
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(x.f_linear(weight, None::<&Tensor>)?)
}

/// W2 (silu(W1 x) * W3 x), with silu(x) = x * sigmoid(x) in two operations as in the reference, which decides what
/// autograd saves.
fn swiglu(x: &Tensor, layer: &Layer) -> Result<Tensor> {
    let gate = linear(x, layer.w1)?;
    let activated = gate.f_mul(&gate.f_sigmoid()?)?;
    drop(gate);
    linear(&activated.f_mul(&linear(x, layer.w3)?)?, layer.w2)
}

fn initial_value(name: &str, shape: &[i64], generator: &Generator) -> Result<Tensor> {
    let mut value = match *shape {
        [d_out, d_in] => {
            let std = if name.starts_with("token_embeddings.") { 1.0 } else { (2.0 / (d_in + d_out) as f64).sqrt() };
            truncated_normal(shape, std, generator)?
        }
        _ => Tensor::f_ones(shape, (Kind::Float, generator.device()))?,
    };
    Ok(value.f_requires_grad_(true)?)
}

/// A normal distribution of mean 0 cut at three standard deviations, by inverting its cumulative distribution
/// (the method of `torch.nn.init.trunc_normal_`).
fn truncated_normal(shape: &[i64], std: f64, generator: &Generator) -> Result<Tensor> {
    /// erf(3 / sqrt 2), the probability of lying within three standard deviations.
    const WITHIN_THREE: f64 = 0.997_300_203_936_739_8;
    let mut value = generator.uniform(-WITHIN_THREE, WITHIN_THREE, shape, Kind::Float)?;
    let _ = value.f_erfinv_()?.f_mul_scalar_(std * 2f64.sqrt())?;
    Ok(value.f_clamp_(-3.0 * std, 3.0 * std)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::random::SEED;

    const CONFIG: Config = Config {
        vocab_size: 50,
        context_length: 16,
        d_model: 32,
        num_layers: 2,
        num_heads: 4,
        d_ff: 64,
        rope_theta: 10_000.0,
    };

    fn seeded(seed: i64) -> Transformer {
        Transformer::new(&CONFIG, ImplementationName::Naive, &Generator::new(Device::Cpu, seed).unwrap()).unwrap()
    }

    fn model() -> Transformer {
        seeded(SEED)
    }

    fn values(model: &Transformer) -> BTreeMap<String, Tensor> {
        model.parameters().iter().map(|(name, value)| (name.clone(), value.detach().copy())).collect()
    }

    #[test]
    fn parameters_have_the_names_and_order_of_the_reference() {
        let model = model();
        let names: Vec<_> = model.parameters().iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), 21);
        assert_eq!(names[0], "token_embeddings.weight");
        let layer = [
            "attn.q_proj",
            "attn.k_proj",
            "attn.v_proj",
            "attn.output_proj",
            "ffn.w1",
            "ffn.w2",
            "ffn.w3",
            "ln1",
            "ln2",
        ];
        for (i, part) in layer.iter().enumerate() {
            assert_eq!(names[1 + i], format!("layers.0.{part}.weight"));
            assert_eq!(names[10 + i], format!("layers.1.{part}.weight"));
        }
        assert_eq!(names[19..], ["ln_final.weight", "lm_head.weight"]);
        let numel: usize = model.parameters().iter().map(|(_, value)| value.numel()).sum();
        assert_eq!(numel as u64, CONFIG.num_parameters());
    }

    #[test]
    fn initial_weights_are_cut_at_three_standard_deviations() {
        let value = truncated_normal(&[400, 500], 0.02, &Generator::new(Device::Cpu, SEED).unwrap()).unwrap();
        let (largest, std) = (value.abs().max().double_value(&[]), value.std(true).double_value(&[]));
        assert!(largest <= 0.06 + 1e-9 && largest > 0.055, "largest {largest}");
        // The variance of the cut distribution is 1 - 2 * 3 phi(3) / erf(3 / sqrt 2) of the whole one's.
        assert!((std / 0.02 - 0.9866).abs() < 0.005, "std {std}");
        assert!(value.mean(Kind::Float).double_value(&[]).abs() < 3e-4);
        assert_ne!(model().parameters()[1].1, model().parameters()[2].1);
    }

    #[test]
    fn the_same_seed_gives_the_same_model_and_another_seed_another_one() {
        let values =
            |seed| seeded(seed).parameters().iter().map(|(_, value)| value.shallow_clone()).collect::<Vec<_>>();
        assert_eq!(values(7), values(7));
        assert_ne!(values(7), values(8));
    }

    #[test]
    fn loading_names_parameters_that_are_missing_unknown_or_of_another_shape() {
        let mut model = model();
        let mut wrong = values(&model);
        wrong.remove("layers.1.ffn.w2.weight");
        wrong.insert("layers.2.ln1.weight".into(), Tensor::ones([32], (Kind::Float, Device::Cpu)));
        wrong.insert("ln_final.weight".into(), Tensor::ones([31], (Kind::Float, Device::Cpu)));
        let message = model.load(&wrong).unwrap_err().to_string();
        assert!(message.contains("layers.1.ffn.w2.weight is missing"), "{message}");
        assert!(message.contains("\"layers.2.ln1.weight\" is no parameter"), "{message}");
        assert!(message.contains("ln_final.weight has shape [31], not [32]"), "{message}");
        let fine = values(&seeded(SEED + 1));
        model.load(&fine).unwrap();
        assert_eq!(model.parameters()[0].1, fine["token_embeddings.weight"]);
        assert!(model.parameters()[0].1.requires_grad());
    }

    #[test]
    fn tokens_of_another_dtype_rank_or_length_are_refused() {
        let model = model();
        let message = |tokens: Tensor| format!("{:#}", model.forward(&tokens).unwrap_err());
        assert!(message(Tensor::zeros([1, 4], (Kind::Float, Device::Cpu))).contains("int64"));
        assert!(message(Tensor::zeros([4], (Kind::Int64, Device::Cpu))).contains("(batch, seq)"));
        assert!(message(Tensor::zeros([1, 17], (Kind::Int64, Device::Cpu))).contains("context length 16"));
        assert!(message(Tensor::zeros([1, 0], (Kind::Int64, Device::Cpu))).contains("empty"));
        assert!(message(Tensor::full([1, 4], 50, (Kind::Int64, Device::Cpu))).contains("looking up the tokens"));
        let logits = model.forward(&Tensor::zeros([3, 16], (Kind::Int64, Device::Cpu))).unwrap();
        assert_eq!(logits.size(), [3, 16, 50]);
    }
}
