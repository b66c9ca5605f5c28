//! A Transformer on one device, and random batches for it: what several problems take apart and measure.

use anyhow::{Context as _, Result};
use tch::{Device, Kind, Tensor};

use super::training_step::{in_precision, loss};
use crate::attention::ImplementationName;
use crate::model::{Config, Precision, Transformer};
use crate::torch::Generator;
use crate::torch::random::SEED;

/// Tokens and targets of one step, both (batch, seq) int64.
pub struct Batch {
    pub tokens: Tensor,
    pub targets: Tensor,
}

impl Batch {
    /// Random ones of `size` (batch, seq).
    pub fn draw(size: [i64; 2], vocab_size: i64, generator: &Generator) -> Result<Self> {
        let random = || generator.randint(0, vocab_size, &size, Kind::Int64);
        Ok(Self { tokens: random()?, targets: random()? })
    }

    /// Copies the values of `other` into these tensors, which a graph reads.
    pub fn load(&self, other: &Self) -> Result<()> {
        self.tokens.shallow_clone().f_copy_(&other.tokens)?;
        self.targets.shallow_clone().f_copy_(&other.targets)?;
        Ok(())
    }
}

/// A model, and how it is run.
pub struct ModelBench {
    pub model: Transformer,
    pub device: Device,
    pub dtype: Precision,
    pub batch_size: i64,
    generator: Generator,
}

impl ModelBench {
    pub fn new(
        config: &Config,
        attention: ImplementationName,
        batch_size: i64,
        dtype: Precision,
        device: Device,
    ) -> Result<Self> {
        let generator = Generator::new(device, SEED)?;
        Ok(Self { model: Transformer::new(config, attention, &generator)?, device, dtype, batch_size, generator })
    }

    pub fn parameters(&self) -> &[(String, Tensor)] {
        self.model.parameters()
    }

    /// Fresh random tokens and targets.
    pub fn draw(&self) -> Result<Batch> {
        let config = self.model.config();
        Batch::draw([self.batch_size, config.context_length], config.vocab_size, &self.generator)
    }

    /// The loss, recorded for a backward pass.
    pub fn loss(&self, batch: &Batch) -> Result<Tensor> {
        loss(&self.model, &batch.tokens, &batch.targets, self.dtype).context("in the forward pass")
    }

    /// Runs `body` as the model's passes run: under autocast for bfloat16.
    pub fn in_precision<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        in_precision(self.dtype, self.device, body)
    }
}
