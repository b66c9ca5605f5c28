//! Timing the forward pass, the backward pass and the optimizer step of Transformers of the handout's sizes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::attention::Choice;
use crate::harness::problem::{Check, Measure, Measured, Problem};
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::model::memory::Memory;
use crate::model::optim::{AdamW, AdamWOptions, Optimizer as _, zero_grad};
use crate::model::sizes::{BATCH_SIZE, TABLE_1, TINY, VOCAB_SIZE};
use crate::model::{Config, Precision, SizeName, Transformer, loss::cross_entropy};
use crate::problems::device_for;
use crate::torch::autocast::autocast;
use crate::torch::autograd::backward;
use crate::torch::stream::synchronize;

pub mod checks;

pub const PROBLEM: Problem = Problem {
    name: "benchmarking_script",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "parameter_counts", part: "a", run: checks::parameter_counts },
        Check { name: "parameter_names_and_order", part: "a", run: checks::parameter_names_and_order },
        Check { name: "logits_loss_and_gradients", part: "a", run: checks::logits_loss_and_gradients },
        Check { name: "norm_and_rotary_positions", part: "a", run: checks::norm_and_rotary_positions },
        Check { name: "adamw_over_many_steps", part: "a", run: checks::adamw_over_many_steps },
        Check { name: "attention_choices_agree", part: "a", run: checks::attention_choices_agree },
        Check {
            name: "later_tokens_change_nothing_before",
            part: "a",
            run: checks::later_tokens_change_nothing_before,
        },
        Check { name: "loss_falls_on_one_batch", part: "a", run: checks::loss_falls_on_one_batch },
        Check { name: "every_pass_is_timed", part: "a", run: checks::every_pass_is_timed },
    ],
    measured: Some(Measured::of::<BenchmarkingScript>()),
    facts,
};

/// How much of a training step is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Logits and loss, under `no_grad`.
    Forward,
    /// Logits and loss, recorded for autograd, and the backward pass.
    ForwardBackward,
    /// The same, and a step of AdamW.
    TrainingStep,
}

/// One configuration; what is left out is the handout's setting.
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
    pub pass: Pass,
    #[serde(default = "handout::dtype")]
    pub dtype: Precision,
    #[serde(default = "handout::attention")]
    pub attention: Choice,
    #[serde(default = "handout::warmup")]
    pub warmup: usize,
    #[serde(default = "handout::steps")]
    pub steps: usize,
}

/// The settings of sections 1.1.2 and 1.1.3.
mod handout {
    use super::*;

    pub fn batch_size() -> i64 {
        BATCH_SIZE
    }
    pub fn vocab_size() -> i64 {
        VOCAB_SIZE
    }
    pub fn pass() -> Pass {
        Pass::TrainingStep
    }
    pub fn dtype() -> Precision {
        Precision::Float32
    }
    pub fn attention() -> Choice {
        Choice::Naive
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
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub parameters: u64,
    /// Whether no case was measured in this process before: without warm-up steps, only then is the start a cold one.
    pub first_in_process: bool,
    /// The whole of each warm-up step, in order; kept to be looked at, and in no statistic.
    pub warmup: Option<Samples>,
    /// Logits and loss.
    pub forward: Samples,
    pub backward: Option<Samples>,
    pub optimizer: Option<Samples>,
    /// From the start of the forward pass to the end of the last one that is run.
    pub total: Samples,
}

pub struct BenchmarkingScript;

impl Measure for BenchmarkingScript {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    /// Fewer warm-up steps than the handout's five are the study of what warm-up is for.
    fn fresh_process(params: &Params) -> bool {
        params.warmup < 5
    }

    fn validate(params: &Params) -> Result<()> {
        params.config().validate()?;
        ensure!(
            (1..=1 << 20).contains(&params.batch_size),
            "batch_size is {}: it must lie in 1..2^20",
            params.batch_size
        );
        ensure!((1..=100_000).contains(&params.steps), "steps is {}: it must lie in 1..100000", params.steps);
        ensure!(params.warmup <= 100_000, "warmup is {}: it must not exceed 100000", params.warmup);
        Ok(())
    }

    fn predicted_bytes(params: &Params) -> Option<u64> {
        let Params { batch_size: batch, context_length: seq, dtype: precision, attention, .. } = *params;
        let memory = Memory { config: params.config(), batch, seq, precision, attention };
        Some(match params.pass {
            Pass::Forward => memory.forward_peak(),
            Pass::ForwardBackward => memory.backward_peak(),
            Pass::TrainingStep => memory.step_peak(true),
        })
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        static USED: AtomicBool = AtomicBool::new(false);
        // Asked only of the cases that must be: for the others it depends on what was measured before.
        let first_in_process = !USED.swap(true, Ordering::Relaxed) && Self::fresh_process(params);
        measure_on(params, device_for(profile)?, first_in_process)
    }
}

/// Runs the warm-up and the timed steps of one configuration on `device`.
pub fn measure_on(params: &Params, device: Device, first_in_process: bool) -> Result<Row> {
    let mut bench = Bench::new(params, device)?;
    let warmup = (0..params.warmup).map(|_| bench.step()).collect::<Result<Vec<_>>>().context("in a warm-up step")?;
    let steps = (0..params.steps).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
    let seconds =
        |steps: &[Step], time: fn(&Step) -> f64, work| Samples::seconds(steps.iter().map(time).collect(), work);
    let [forward, backward, optimizer] = work_of(params);
    let runs_backward = params.pass != Pass::Forward;
    let runs_optimizer = params.pass == Pass::TrainingStep;
    let total = match params.pass {
        Pass::Forward => forward.clone(),
        Pass::ForwardBackward => sum(&[&forward, &backward]),
        Pass::TrainingStep => sum(&[&forward, &backward, &optimizer]),
    };
    Ok(Row {
        parameters: params.config().num_parameters(),
        first_in_process,
        warmup: (!warmup.is_empty()).then(|| seconds(&warmup, |s| s.total, total.clone())).transpose()?,
        forward: seconds(&steps, |s| s.forward, forward)?,
        backward: runs_backward.then(|| seconds(&steps, |s| s.backward, backward)).transpose()?,
        optimizer: runs_optimizer.then(|| seconds(&steps, |s| s.optimizer, optimizer)).transpose()?,
        total: seconds(&steps, |s| s.total, total)?,
    })
}

/// Seconds of the parts of one step; a part that is not run takes zero.
#[derive(Debug, Clone, Copy)]
struct Step {
    forward: f64,
    backward: f64,
    optimizer: f64,
    total: f64,
}

/// A model, its optimizer, and what they are to do.
struct Bench<'a> {
    params: &'a Params,
    device: Device,
    model: Transformer,
    optimizer: AdamW,
}

impl<'a> Bench<'a> {
    fn new(params: &'a Params, device: Device) -> Result<Self> {
        let model = Transformer::new(&params.config(), device, 0, params.attention)?;
        Ok(Self { params, device, model, optimizer: AdamW::new(AdamWOptions::default())? })
    }

    /// One step on fresh random tokens, the device synchronised after each part of it.
    fn step(&mut self) -> Result<Step> {
        let size = [self.params.batch_size, self.params.context_length];
        let random = || Tensor::f_randint_low(0, self.params.vocab_size, size, (Kind::Int64, self.device));
        let (tokens, targets) = (random()?, random()?);
        synchronize(self.device)?;

        let start = Instant::now();
        let since_start = |device| -> Result<f64> {
            synchronize(device)?;
            Ok(start.elapsed().as_secs_f64())
        };
        let loss = self.forward(&tokens, &targets).context("in the forward pass")?;
        let forward = since_start(self.device)?;
        let backward_end = if self.params.pass == Pass::Forward {
            forward
        } else {
            backward(&loss).context("in the backward pass")?;
            since_start(self.device)?
        };
        let end = if self.params.pass == Pass::TrainingStep {
            self.optimizer.step(self.model.parameters()).context("in the optimizer step")?;
            since_start(self.device)?
        } else {
            backward_end
        };
        // Outside the timing; it frees memory and computes nothing.
        zero_grad(self.model.parameters())?;
        Ok(Step { forward, backward: backward_end - forward, optimizer: end - backward_end, total: end })
    }

    fn forward(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let cast = || loss(&self.model, tokens, targets, self.params.dtype);
        if self.params.pass == Pass::Forward { tch::no_grad(cast) } else { cast() }
    }
}

/// The mean cross-entropy: in float32 throughout, or under bfloat16 autocast with parameters left in float32.
pub fn loss(model: &Transformer, tokens: &Tensor, targets: &Tensor, dtype: Precision) -> Result<Tensor> {
    let run = || cross_entropy(&model.forward(tokens)?, targets);
    match dtype {
        Precision::Float32 => run(),
        Precision::Bfloat16 => autocast(tokens.device(), Kind::BFloat16, run),
    }
}

/// The least work of forward, backward and optimizer: the operations of the matrix products, and the traffic of the
/// parameters that every step must touch (read; read and gradients written; gradients and state read, all written).
fn work_of(params: &Params) -> [Work; 3] {
    let config = params.config();
    let flops = match params.attention {
        Choice::Naive => config.forward_flops(params.batch_size, params.context_length),
        // These may skip what the causal mask hides.
        _ => config.causal_forward_flops(params.batch_size, params.context_length),
    };
    let (all, multiplied) = (config.num_parameters() as f64, config.num_matmul_parameters() as f64);
    let work = |flops, bytes, precision: Precision| Work { flops, bytes, precision: precision.name().into() };
    [
        work(flops, 4.0 * multiplied, params.dtype),
        work(2.0 * flops, 8.0 * multiplied, params.dtype),
        work(12.0 * all, 28.0 * all, Precision::Float32),
    ]
}

/// The work of parts that follow one another, held to the peak of the first.
fn sum(parts: &[&Work]) -> Work {
    Work {
        flops: parts.iter().map(|w| w.flops).sum(),
        bytes: parts.iter().map(|w| w.bytes).sum(),
        precision: parts[0].precision.clone(),
    }
}

fn facts() -> Result<Value> {
    let sizes = TABLE_1.iter().chain([&TINY]).map(|size| {
        let config = Config::of_size(size, VOCAB_SIZE, 128);
        let flops = |seq| config.forward_flops(BATCH_SIZE, seq);
        json!({
            "size": size,
            "parameters": config.num_parameters(),
            "tensors": config.num_tensors(),
            "forward_flops": { "128": flops(128), "256": flops(256), "512": flops(512), "1024": flops(1024) },
        })
    });
    Ok(json!({ "sizes": sizes.collect::<Vec<_>>(), "batch_size": BATCH_SIZE, "vocab_size": VOCAB_SIZE }))
}
