//! What is profiled: a forward pass alone and a training step of one model, each part in a range of its own.

use std::time::Instant;

use anyhow::{Context as _, Result};
use tch::Device;

use super::measure::{OptimizerName, Params, Pass};
use super::summary::Passes;
use crate::attention::ImplementationName;
use crate::bench::model_bench::ModelBench;
use crate::model::FusedAdamW;
use crate::model::optim::{AdamW, AdamWOptions, Optimizer, zero_grad};
use crate::torch::autograd::backward;
use crate::torch::nvtx::range;
use crate::torch::profiler::with_nvtx;
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
    bench: ModelBench,
    optimizer: Box<dyn Optimizer>,
}

impl<'a> ProfiledBench<'a> {
    pub fn new(params: &'a Params, device: Device) -> Result<Self> {
        let Params { batch_size, dtype, .. } = *params;
        let bench = ModelBench::new(&params.config(), ImplementationName::Naive, batch_size, dtype, device)?;
        let optimizer: Box<dyn Optimizer> = match params.optimizer {
            OptimizerName::Fused => Box::new(FusedAdamW::new(AdamWOptions::default(), device)?),
            OptimizerName::Plain => Box::new(AdamW::new(AdamWOptions::default())?),
        };
        Ok(Self { params, bench, optimizer })
    }

    /// The steps before anything is looked at.
    pub fn warm_up(&mut self) -> Result<()> {
        range(WARM_UP, || (0..self.params.warmup).try_for_each(|_| self.step().map(drop))).context("in a warm-up step")
    }

    /// A forward pass alone, then (if asked for) a training step, on the same fresh random tokens.
    ///
    /// Seconds on the host, the device synchronised after each pass.
    pub fn step(&mut self) -> Result<Passes<f64>> {
        let Self { params, bench, optimizer } = self;
        let (device, parameters) = (bench.device, bench.parameters());
        let batch = bench.draw()?;
        synchronize(device)?;
        let (_, inference) = timed(INFERENCE, device, || tch::no_grad(|| bench.loss(&batch)))?;
        if params.pass == Pass::Inference {
            return Ok(Passes { inference, forward: None, backward: None, optimizer: None });
        }
        let (loss, forward) = timed(FORWARD, device, || bench.loss(&batch))?;
        let ((), backward) = timed(BACKWARD, device, || backward(&loss))?;
        let ((), optimizer) = timed(OPTIMIZER, device, || optimizer.step(parameters))?;
        zero_grad(parameters)?;
        Ok(Passes { inference, forward: Some(forward), backward: Some(backward), optimizer: Some(optimizer) })
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
