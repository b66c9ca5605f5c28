//! Model sizes: the handout's Table 1, one configuration, and what follows from it by counting.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// One row of a size table; lengths are counts of features, layers and heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Size {
    pub name: &'static str,
    pub d_model: i64,
    pub d_ff: i64,
    pub num_layers: i64,
    pub num_heads: i64,
}

/// Table 1 of the handout (section 1.1.2).
pub const TABLE_1: [Size; 5] = [
    Size { name: "small", d_model: 768, d_ff: 3072, num_layers: 12, num_heads: 12 },
    Size { name: "medium", d_model: 1024, d_ff: 4096, num_layers: 24, num_heads: 16 },
    Size { name: "large", d_model: 1280, d_ff: 5120, num_layers: 36, num_heads: 20 },
    Size { name: "xl", d_model: 1600, d_ff: 6400, num_layers: 48, num_heads: 25 },
    Size { name: "2.7B", d_model: 2560, d_ff: 10240, num_layers: 32, num_heads: 32 },
];

/// Ours, not the handout's: a size whose training step takes tens of milliseconds on two cores.
pub const TINY: Size = Size { name: "tiny", d_model: 256, d_ff: 1024, num_layers: 4, num_heads: 4 };

/// The handout's vocabulary size and batch size (section 1.1.2), and the base of its rotary positions.
pub const VOCAB_SIZE: i64 = 10_000;
pub const BATCH_SIZE: i64 = 4;
pub const ROPE_THETA: f64 = 10_000.0;

/// A size as suites and command lines write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SizeName {
    Tiny,
    Small,
    Medium,
    Large,
    Xl,
    #[serde(rename = "2.7B")]
    Billions2_7,
}

impl SizeName {
    pub fn size(self) -> &'static Size {
        match self {
            Self::Tiny => &TINY,
            Self::Small => &TABLE_1[0],
            Self::Medium => &TABLE_1[1],
            Self::Large => &TABLE_1[2],
            Self::Xl => &TABLE_1[3],
            Self::Billions2_7 => &TABLE_1[4],
        }
    }
}

/// The arithmetic of a training run: everything in float32, or float32 parameters under bfloat16 autocast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    Float32,
    Bfloat16,
}

impl Precision {
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }
}

/// Everything that fixes a model's shape; the names are the reference constructor's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub vocab_size: i64,
    pub context_length: i64,
    pub d_model: i64,
    pub num_layers: i64,
    pub num_heads: i64,
    pub d_ff: i64,
    pub rope_theta: f64,
}

impl Config {
    pub fn of_size(size: &Size, vocab_size: i64, context_length: i64) -> Self {
        let Size { d_model, d_ff, num_layers, num_heads, .. } = *size;
        Self { vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta: ROPE_THETA }
    }

    /// Rejects shapes that no model can have; the message names the field.
    pub fn validate(&self) -> Result<()> {
        let counts = [
            ("vocab_size", self.vocab_size),
            ("context_length", self.context_length),
            ("d_model", self.d_model),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("d_ff", self.d_ff),
        ];
        for (name, value) in counts {
            ensure!((1..=1 << 20).contains(&value), "{name} is {value}: it must lie between 1 and 2^20");
        }
        let (d_model, num_heads) = (self.d_model, self.num_heads);
        ensure!(d_model % num_heads == 0, "d_model {d_model} is no multiple of num_heads {num_heads}");
        ensure!(self.d_head() % 2 == 0, "d_model / num_heads is {}: rotary positions pair features", self.d_head());
        let theta = self.rope_theta;
        ensure!(theta.is_finite() && theta > 0.0, "rope_theta is {theta}: it must be positive and finite");
        Ok(())
    }

    /// Rejects what [`Self::validate`] does, and a batch whose predicted memory no 64 bits can count.
    pub fn validate_with_batch(&self, batch_size: i64) -> Result<()> {
        self.validate()?;
        ensure!((1..=1 << 20).contains(&batch_size), "batch_size is {batch_size}: it must lie in 1..2^20");
        let tokens = batch_size * self.context_length;
        ensure!(tokens <= 1 << 28, "batch_size times context_length is {tokens}: it must be at most 2^28");
        Ok(())
    }

    pub fn d_head(&self) -> i64 {
        self.d_model / self.num_heads
    }

    /// Names and shapes of the parameters, in the order of the reference's `named_parameters()`.
    pub fn parameter_shapes(&self) -> impl Iterator<Item = (String, Vec<i64>)> + use<> {
        let (d, d_ff, vocab) = (self.d_model, self.d_ff, self.vocab_size);
        let embedding = ("token_embeddings.weight".to_string(), vec![vocab, d]);
        let layer = move |i: i64| {
            let parts = [
                ("attn.q_proj", vec![d, d]),
                ("attn.k_proj", vec![d, d]),
                ("attn.v_proj", vec![d, d]),
                ("attn.output_proj", vec![d, d]),
                ("ffn.w1", vec![d_ff, d]),
                ("ffn.w2", vec![d, d_ff]),
                ("ffn.w3", vec![d_ff, d]),
                ("ln1", vec![d]),
                ("ln2", vec![d]),
            ];
            parts.map(|(part, shape)| (format!("layers.{i}.{part}.weight"), shape))
        };
        let last = [("ln_final.weight".to_string(), vec![d]), ("lm_head.weight".to_string(), vec![vocab, d])];
        std::iter::once(embedding).chain((0..self.num_layers).flat_map(layer)).chain(last)
    }

    /// Number of parameter tensors, 9 L + 3.
    pub fn num_tensors(&self) -> u64 {
        9 * self.num_layers as u64 + 3
    }

    /// Number of parameters, 2 V d + L (4 d² + 3 d d_ff + 2 d) + d.
    pub fn num_parameters(&self) -> u64 {
        let [vocab, d, layers, _] = self.counts();
        2 * vocab * d + layers * (self.num_layer_weights() + 2 * d) + d
    }

    /// Parameters that a matrix product multiplies by: all but the embedding and the gains of the norms.
    pub fn num_matmul_parameters(&self) -> u64 {
        let [vocab, d, layers, _] = self.counts();
        layers * self.num_layer_weights() + vocab * d
    }

    /// Floating-point operations of the matrix products of one forward pass over (batch, seq) tokens:
    /// 2 B T (L (4 d² + 3 d d_ff) + V d) + 4 L B T² d, the causal square computed whole. Backward takes twice that.
    pub fn forward_flops(&self, batch: i64, seq: i64) -> f64 {
        self.flops(batch, seq, seq as f64)
    }

    /// [`Self::forward_flops`] with only the lower triangle of each causal square: the least that attention needs.
    pub fn causal_forward_flops(&self, batch: i64, seq: i64) -> f64 {
        self.flops(batch, seq, (seq + 1) as f64 / 2.0)
    }

    /// With this many keys for the mean query.
    fn flops(&self, batch: i64, seq: i64, keys: f64) -> f64 {
        let (tokens, width) = ((batch * seq) as f64, (self.num_layers * self.d_model) as f64);
        2.0 * tokens * self.num_matmul_parameters() as f64 + 4.0 * tokens * keys * width
    }

    /// Parameters of a layer that products multiply by, 4 d² + 3 d d_ff.
    pub fn num_layer_weights(&self) -> u64 {
        let [_, d, _, d_ff] = self.counts();
        4 * d * d + 3 * d * d_ff
    }

    fn counts(&self) -> [u64; 4] {
        [self.vocab_size as u64, self.d_model as u64, self.num_layers as u64, self.d_ff as u64]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handout(size: &Size) -> Config {
        Config::of_size(size, VOCAB_SIZE, 512)
    }

    #[test]
    fn the_formula_gives_the_published_totals() {
        let totals = [128_625_408, 423_183_360, 969_411_840, 1_998_235_200, 3_406_809_600];
        let tensors = [111, 219, 327, 435, 291];
        for (i, size) in TABLE_1.iter().enumerate() {
            assert_eq!(handout(size).num_parameters(), totals[i], "{}", size.name);
            assert_eq!(handout(size).num_tensors(), tensors[i], "{}", size.name);
        }
    }

    #[test]
    fn the_parameters_add_up_to_the_formula() {
        for size in TABLE_1.iter().chain([&TINY]) {
            let config = handout(size);
            let listed: i64 = config.parameter_shapes().map(|(_, shape)| shape.iter().product::<i64>()).sum();
            assert_eq!(listed as u64, config.num_parameters(), "{}", size.name);
            assert_eq!(config.parameter_shapes().count() as u64, config.num_tensors(), "{}", size.name);
        }
    }

    #[test]
    fn forward_flops_are_those_of_the_operation_count() {
        let small = handout(&TABLE_1[0]);
        assert!((small.forward_flops(4, 128) / 1e12 - 0.126).abs() < 5e-4);
        assert!((small.forward_flops(4, 1024) / 1e12 - 1.145).abs() < 5e-4);
        let largest = handout(&TABLE_1[4]);
        assert!((largest.forward_flops(4, 512) / 1e12 - 14.192).abs() < 5e-4);
        assert!(largest.causal_forward_flops(4, 512) < largest.forward_flops(4, 512));
    }

    #[test]
    fn an_invalid_config_is_refused_by_field() {
        let fine = handout(&TINY);
        assert!(fine.validate().is_ok());
        let message = |config: Config| config.validate().unwrap_err().to_string();
        assert!(message(Config { num_heads: 3, ..fine }).contains("num_heads"));
        assert!(message(Config { d_model: 12, num_heads: 4, ..fine }).contains("rotary"));
        assert!(message(Config { vocab_size: 0, ..fine }).contains("vocab_size"));
        assert!(message(Config { rope_theta: f64::NAN, ..fine }).contains("rope_theta"));
    }

    #[test]
    fn sizes_are_written_as_the_handout_names_them() {
        for name in ["tiny", "small", "medium", "large", "xl", "2.7B"] {
            let parsed: SizeName = serde_json::from_value(name.into()).unwrap();
            assert_eq!(parsed.size().name, name);
        }
    }
}
