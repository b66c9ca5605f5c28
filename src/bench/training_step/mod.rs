//! Timing the forward pass, the backward pass and the optimizer step of one Transformer on one device.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::device::{device_for, update_for};
use crate::attention::ImplementationName;
use crate::cuda::Choice;
use crate::error::Fault;
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::model::fused::OwnChoice;
use crate::model::memory::Memory;
use crate::model::sizes::{BATCH_SIZE, VOCAB_SIZE};
use crate::model::{Config, FusedStep, Precision, SizeName, Transformer, loss::cross_entropy};
use crate::torch::autocast::autocast;
use crate::torch::{allow_tf32, allowing_tf32};

pub mod captured;
pub mod eager;

/// The part of a training step that is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPass {
    /// Logits and loss, under `no_grad`.
    Forward,
    /// Logits and loss with an autograd graph, and the backward pass.
    ForwardBackward,
    /// Forward and backward passes and a step of AdamW.
    TrainingStep,
}

/// How the operations of a step are launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Execution {
    /// The host launches each operation.
    Eager,
    /// A whole training step, captured once as a CUDA graph and replayed. Its parts cannot be timed separately.
    Captured,
    /// As `captured`, of a step written out in kernels of its own ([`crate::model::FusedStep`]).
    Fused,
}

impl Execution {
    /// Whether a whole step is one CUDA graph.
    pub fn is_graph(self) -> bool {
        self != Self::Eager
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Captured => "captured",
            Self::Fused => "fused",
        }
    }
}

/// The files of `kernels/` that some step runs.
pub const KERNELS: &[&str] = &[
    "adamw.cu",
    "flash_forward.cu",
    "flash_backward.cu",
    "portable_forward.cu",
    "portable_backward.cu",
    "rms_norm.cu",
    "rope.cu",
    "swiglu.cu",
    "cross_entropy.cu",
    "embedding_gradient.cu",
    "packed_adamw.cu",
    "product.cu",
];

/// Those of all kinds of steps in one precision. Float32 has no product kernel.
pub fn all_kernels(dtype: Precision) -> &'static [&'static str] {
    match dtype {
        Precision::Bfloat16 => KERNELS,
        Precision::Float32 => &KERNELS[..KERNELS.len() - 1],
    }
}

/// Those of one step. Hopper's attention kernels have no float32; in bfloat16, another GPU than Hopper and short sequences use
/// the portable ones.
pub fn kernels(execution: Execution, attention: ImplementationName, dtype: Precision) -> &'static [&'static str] {
    let all = all_kernels(dtype);
    match (execution, attention.runs_own_kernels(), dtype) {
        (Execution::Fused, true, Precision::Bfloat16) => &all[1..],
        (Execution::Fused, true, Precision::Float32) => &all[3..],
        (Execution::Fused, false, _) => &all[5..],
        (_, true, Precision::Bfloat16) => &all[..5],
        (_, true, Precision::Float32) => &["adamw.cu", "portable_forward.cu", "portable_backward.cu"],
        (_, false, _) => &all[..1],
    }
}

/// One configuration. Defaults are the handout's settings, except for the attention.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub context_length: i64,
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    #[serde(default = "handout::vocab_size")]
    pub vocab_size: i64,
    #[serde(default = "handout::pass")]
    pub pass: StepPass,
    #[serde(default = "handout::dtype")]
    pub dtype: Precision,
    /// Default: [`super::device::attention_for`] the profile.
    pub attention: ImplementationName,
    #[serde(default = "handout::execution")]
    pub execution: Execution,
    /// Whether float32 matrix products may be rounded to TF32.
    #[serde(default)]
    pub allow_tf32: bool,
    #[serde(default = "handout::warmup")]
    pub warmup: usize,
    #[serde(default = "handout::steps")]
    pub steps: usize,
}

/// The settings of sections 1.1.2 and 1.1.3.
pub mod handout {
    use super::*;

    pub fn batch_size() -> i64 {
        BATCH_SIZE
    }
    pub fn vocab_size() -> i64 {
        VOCAB_SIZE
    }
    pub fn pass() -> StepPass {
        StepPass::TrainingStep
    }
    pub fn dtype() -> Precision {
        Precision::Float32
    }
    pub fn execution() -> Execution {
        Execution::Eager
    }
    pub fn warmup() -> usize {
        5
    }
    pub fn steps() -> usize {
        10
    }
}

impl Params {
    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), self.vocab_size, self.context_length)
    }

    /// Cases with fewer warm-up steps than the handout's five study the effect of warm-up, so they need a fresh process. A
    /// captured step does not.
    pub fn needs_fresh_process(&self) -> bool {
        self.warmup < 5 && !self.execution.is_graph()
    }

    /// Errors: names the first invalid value and what it must be.
    pub fn validate(&self) -> Result<()> {
        self.config().validate_with_batch(self.batch_size)?;
        ensure!((1..=100_000).contains(&self.steps), "steps is {}: it must lie in 1..100000", self.steps);
        ensure!(self.warmup <= 100_000, "warmup is {}: it must not exceed 100000", self.warmup);
        let execution = self.execution.name();
        if self.execution.is_graph() {
            ensure!(self.pass == StepPass::TrainingStep, "execution is {execution}: pass must be training_step");
            ensure!(self.warmup > 0, "execution is {execution}: warmup must be at least 1, or first uses are captured");
        }
        ensure!(
            !self.allow_tf32 || self.dtype == Precision::Float32,
            "allow_tf32 is true: dtype must be float32, whose products it rounds"
        );
        Ok(())
    }

    /// Peak bytes of the pass by [`Memory`].
    pub fn predicted_bytes(&self, profile: Profile) -> u64 {
        let Params { batch_size: batch, context_length: seq, dtype: precision, attention, .. } = *self;
        let memory = Memory { config: self.config(), batch, seq, precision, attention };
        match self.pass {
            _ if self.execution == Execution::Fused => FusedStep::predicted_bytes(&self.config(), batch, precision),
            StepPass::Forward => memory.forward_peak(),
            StepPass::ForwardBackward => memory.backward_peak(),
            StepPass::TrainingStep => memory.step_peak(update_for(profile), true),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub parameters: u64,
    /// Whether this was the first case in its process. Without warm-up steps, only the first case has a cold start.
    pub first_in_process: bool,
    /// Times of the whole warm-up steps, in order. No statistic includes them.
    pub warmup: Option<Samples>,
    /// Logits and loss by the host's clock; `None` for a captured step. The other parts likewise.
    pub forward: Option<Samples>,
    /// Logits and loss between CUDA events; `None` on the CPU. The other parts likewise.
    pub forward_device: Option<Samples>,
    pub backward: Option<Samples>,
    pub backward_device: Option<Samples>,
    pub optimizer: Option<Samples>,
    pub optimizer_device: Option<Samples>,
    /// The sum of the parts, or one replay of a captured step.
    pub total: Samples,
    pub total_device: Option<Samples>,
    pub capture: Option<Capture>,
}

impl Row {
    /// Errors: the row is of another model than `params`; a step is not as long as its parts.
    pub fn validate(&self, params: &Params) -> Result<()> {
        let parts: Vec<&Samples> = [&self.forward, &self.backward, &self.optimizer].into_iter().flatten().collect();
        for (k, &total) in self.total.samples.iter().enumerate().filter(|_| !parts.is_empty()) {
            let sum: f64 = parts.iter().filter_map(|part| part.samples.get(k)).sum();
            ensure!((total - sum).abs() <= 1e-8, "a step takes {total:e} s, and its parts {sum:e} s");
        }
        require_parameters(self.parameters, &params.config())
    }
}

/// Errors: `parameters` are not those of a model of `config`.
pub fn require_parameters(parameters: u64, config: &Config) -> Result<()> {
    let expected = config.num_parameters();
    ensure!(parameters == expected, "the row is of {parameters} parameters, and the model of its case has {expected}");
    Ok(())
}

/// The captured graph, and its error against eager steps.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capture {
    /// Number of kernels, copies and fills in one step.
    pub nodes: u64,
    /// From the first operation until the graph can be launched.
    pub time: Samples,
    /// The largest relative difference between the losses of replays and of eager forward passes in the same state.
    pub loss_error: f64,
    /// The algorithms of a fused step's products.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<Choice>,
    /// Its forward products by our kernels beside cuBLASLt's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own_products: Vec<OwnChoice>,
}

/// Measures one configuration on the device of `profile`.
pub fn measure(params: &Params, profile: Profile) -> Result<Row> {
    static USED: AtomicBool = AtomicBool::new(false);
    // Recorded only for cases that need a fresh process. For others it depends on the cases measured before.
    let first_in_process = !USED.swap(true, Ordering::Relaxed) && params.needs_fresh_process();
    measure_on(params, device_for(profile)?, first_in_process)
}

/// Runs the warm-up and the timed steps of one configuration on `device`.
///
/// Errors: [`Fault::NotAvailable`] for TF32 or a captured step without a GPU, and the errors of the steps.
pub fn measure_on(params: &Params, device: Device, first_in_process: bool) -> Result<Row> {
    if params.allow_tf32 && device == Device::Cpu {
        let (needs, has) = ("a CUDA GPU (for TF32)".to_string(), format!("{device:?}"));
        return Err(Fault::NotAvailable { needs, has }.into());
    }
    let measure = || {
        let allowed = allow_tf32()?;
        ensure!(
            allowed == params.allow_tf32,
            "TF32 is {} in matrix products, unlike the case: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
            if allowed { "on" } else { "off" }
        );
        match params.execution {
            Execution::Eager => eager::measure(params, device, first_in_process),
            Execution::Captured | Execution::Fused => captured::measure(params, device),
        }
    };
    if params.allow_tf32 { allowing_tf32(measure) } else { measure() }
}

/// The mean cross-entropy: in float32 throughout, or under bfloat16 autocast with parameters left in float32.
pub fn loss(model: &Transformer, tokens: &Tensor, targets: &Tensor, dtype: Precision) -> Result<Tensor> {
    in_precision(dtype, tokens.device(), || cross_entropy(&model.forward(tokens)?, targets))
}

/// Runs `body` in float32, or under bfloat16 autocast.
pub fn in_precision<T>(dtype: Precision, device: Device, body: impl FnOnce() -> Result<T>) -> Result<T> {
    match dtype {
        Precision::Float32 => body(),
        Precision::Bfloat16 => autocast(device, Kind::BFloat16, body),
    }
}

/// [`work_of_passes`] of a case.
pub fn part_works(params: &Params) -> [Work; 3] {
    let config = params.config();
    let flops = match params.attention {
        ImplementationName::Naive => config.forward_flops(params.batch_size, params.context_length),
        // These may skip masked scores.
        _ => config.causal_forward_flops(params.batch_size, params.context_length),
    };
    work_of_passes(&config, flops, if params.allow_tf32 { "tf32" } else { params.dtype.name() })
}

/// The least work of forward, backward and optimizer: the operations of the matrix products in `precision`, and the memory
/// traffic of the parameters. Forward reads them. Backward reads them and writes gradients. The optimizer reads parameters,
/// gradients and state, and writes all but the gradients.
pub fn work_of_passes(config: &Config, forward_flops: f64, precision: &str) -> [Work; 3] {
    let (all, multiplied) = (config.num_parameters() as f64, config.num_matmul_parameters() as f64);
    let work = |flops, bytes, precision: &str| Work { flops, bytes, precision: precision.into() };
    [
        work(forward_flops, 4.0 * multiplied, precision),
        work(2.0 * forward_flops, 8.0 * multiplied, precision),
        work(12.0 * all, 28.0 * all, Precision::Float32.name()),
    ]
}

/// The work of all parts of the pass.
pub fn total_work(params: &Params) -> Work {
    let [forward, backward, optimizer] = part_works(params);
    match params.pass {
        StepPass::Forward => forward,
        StepPass::ForwardBackward => sum(&[&forward, &backward]),
        StepPass::TrainingStep => sum(&[&forward, &backward, &optimizer]),
    }
}

/// The sum of the work of several parts, with the precision of the first.
fn sum(parts: &[&Work]) -> Work {
    Work {
        flops: parts.iter().map(|w| w.flops).sum(),
        bytes: parts.iter().map(|w| w.bytes).sum(),
        precision: parts[0].precision.clone(),
    }
}
