//! What is profiled: a forward pass alone and a training step of one model, each part in a range of its own.

use std::time::Instant;

use anyhow::{Context as _, Result};
use tch::{Device, Kind};

use super::measure::{OptimizerName, Params, Pass};
use crate::attention::ImplementationName;
use crate::bench::training_step::loss;
use crate::model::optim::{AdamW, AdamWOptions, Optimizer, zero_grad};
use crate::model::{FusedAdamW, Transformer};
use crate::torch::Generator;
use crate::torch::autograd::backward;
use crate::torch::nvtx::range;
use crate::torch::profiler::with_nvtx;
use crate::torch::random::SEED;
use crate::torch::stream::synchronize;

/// Logits and loss under `no_grad`.
pub const INFERENCE: &str = "inference";
/// Logits and loss, recorded for autograd.
pub const FORWARD: &str = "forward";
pub const BACKWARD: &str = "backward";
pub const OPTIMIZER: &str = "optimizer";
/// Around steps that are run and not looked at.
pub const WARM_UP: &str = "warm-up";

/// A model, its optimizer, and what they are to do.
pub struct ProfiledBench<'a> {
    params: &'a Params,
    device: Device,
    model: Transformer,
    optimizer: Box<dyn Optimizer>,
    generator: Generator,
}

/// Seconds on the host of the passes of one step, the device synchronised after each.
#[derive(Debug, Clone, Copy)]
pub struct Seconds {
    pub inference: f64,
    /// Forward, backward and optimizer of the training step, where there is one.
    pub training: Option<[f64; 3]>,
}

impl<'a> ProfiledBench<'a> {
    pub fn new(params: &'a Params, device: Device) -> Result<Self> {
        let generator = Generator::new(device, SEED)?;
        let model = Transformer::new(&params.config(), ImplementationName::Naive, &generator)?;
        Ok(Self { params, device, model, optimizer: optimizer(params.optimizer, device)?, generator })
    }

    /// The steps before anything is looked at.
    pub fn warm_up(&mut self) -> Result<()> {
        range(WARM_UP, || (0..self.params.warmup).try_for_each(|_| self.step().map(drop))).context("in a warm-up step")
    }

    /// A forward pass alone, then (if asked for) a training step, on the same fresh random tokens.
    pub fn step(&mut self) -> Result<Seconds> {
        let Params { vocab_size, batch_size, context_length, dtype, pass, .. } = *self.params;
        let random = || self.generator.randint(0, vocab_size, &[batch_size, context_length], Kind::Int64);
        let (tokens, targets) = (random()?, random()?);
        synchronize(self.device)?;
        let loss = || loss(&self.model, &tokens, &targets, dtype);
        let (_, inference) = timed(INFERENCE, self.device, || tch::no_grad(loss))?;
        if pass == Pass::Inference {
            return Ok(Seconds { inference, training: None });
        }
        let (loss, forward) = timed(FORWARD, self.device, loss)?;
        let ((), backward) = timed(BACKWARD, self.device, || backward(&loss))?;
        let ((), optimizer) = timed(OPTIMIZER, self.device, || self.optimizer.step(self.model.parameters()))?;
        zero_grad(self.model.parameters())?;
        Ok(Seconds { inference, training: Some([forward, backward, optimizer]) })
    }
}

/// Runs the warm-up and one step with their ranges as NVTX ranges, for nsys to record.
pub fn step_with_nvtx(params: &Params, device: Device) -> Result<()> {
    with_nvtx(|| {
        let mut bench = ProfiledBench::new(params, device)?;
        bench.warm_up()?;
        bench.step().map(drop)
    })
}

/// Runs `body` and waits for the device, both inside the range `name`.
fn timed<T>(name: &'static str, device: Device, body: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    range(name, || {
        let start = Instant::now();
        let value = body().with_context(|| format!("in the {name} pass"))?;
        synchronize(device)?;
        Ok((value, start.elapsed().as_secs_f64()))
    })
}

fn optimizer(name: OptimizerName, device: Device) -> Result<Box<dyn Optimizer>> {
    Ok(match name {
        OptimizerName::Fused => Box::new(FusedAdamW::new(AdamWOptions::default(), device)?),
        OptimizerName::Plain => Box::new(AdamW::new(AdamWOptions::default())?),
    })
}
