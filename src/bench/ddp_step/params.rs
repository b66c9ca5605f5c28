//! The parameters of a case of data-parallel training steps.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::attention::ImplementationName;
use crate::bench::training_step::{self, Execution, StepPass, handout, total_work};
use crate::collective::Backend;
use crate::collective::ranks::validate_world_size;
use crate::harness::samples::Work;
use crate::model::{Config, Precision, SizeName};

/// One setting. Defaults are the handout's.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub backend: Backend,
    pub world_size: usize,
    pub size: SizeName,
    pub context_length: i64,
    /// Sequences on each rank.
    pub batch_size: i64,
    #[serde(default = "handout::vocab_size")]
    pub vocab_size: i64,
    /// Parameters and gradients are float32 in both cases.
    #[serde(default = "handout::dtype")]
    pub dtype: Precision,
    /// The bucket size in units of 10^6 bytes, for our buckets and PyTorch's; `None` for PyTorch's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket_size_mb: Option<f64>,
    /// Whether the wheel's data parallelism and PyTorch's take turns too, in one Python process a rank.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wheel: bool,
    pub rounds: usize,
    /// Untimed steps at the start of every turn.
    pub warmup: usize,
    /// Timed steps of every turn.
    pub steps: usize,
}

impl Params {
    /// For checks: the smallest named model on two Gloo ranks, one step in each turn.
    pub fn smallest(bucket_size_mb: Option<f64>) -> Self {
        Self {
            backend: Backend::Gloo,
            world_size: 2,
            size: SizeName::Tiny,
            context_length: 16,
            batch_size: 1,
            vocab_size: 500,
            dtype: Precision::Float32,
            bucket_size_mb,
            wheel: false,
            rounds: 1,
            warmup: 1,
            steps: 1,
        }
    }

    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), self.vocab_size, self.context_length)
    }

    pub fn validate(&self) -> Result<()> {
        self.config().validate_with_batch(self.batch_size)?;
        let Self { world_size, rounds, warmup, steps, bucket_size_mb, .. } = *self;
        validate_world_size(world_size)?;
        for (key, value) in [("rounds", rounds), ("warmup", warmup), ("steps", steps)] {
            ensure!((1..=1000).contains(&value), "{key} is {value}: it must lie in 1..1000");
        }
        let mb = bucket_size_mb.unwrap_or(1.0);
        ensure!(mb.is_finite() && mb > 0.0, "bucket_size_mb is {mb}: it must be finite and above zero");
        Ok(())
    }

    /// For a problem that does not measure the wheel.
    pub fn validate_without_wheel(&self) -> Result<()> {
        ensure!(!self.wheel, "wheel must be left out: ddp_bucketed_benchmarking measures it");
        self.validate()
    }

    /// For a problem whose strategies have no buckets.
    pub fn validate_without_buckets(&self) -> Result<()> {
        ensure!(
            self.bucket_size_mb.is_none(),
            "bucket_size_mb must be left out: no strategy of this problem has buckets"
        );
        self.validate_without_wheel()
    }

    /// Bytes of all gradients in float32.
    pub fn gradient_bytes(&self) -> u64 {
        4 * self.config().num_parameters()
    }

    /// The least work of one rank's step.
    pub fn work(&self) -> Work {
        total_work(&training_step::Params {
            size: self.size,
            context_length: self.context_length,
            batch_size: self.batch_size,
            vocab_size: self.vocab_size,
            pass: StepPass::TrainingStep,
            dtype: self.dtype,
            attention: ImplementationName::Naive,
            execution: Execution::Eager,
            allow_tf32: false,
            warmup: self.warmup,
            steps: self.steps,
        })
    }
}
