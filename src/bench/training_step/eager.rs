//! One training step on random tokens, with each part timed by the host's clock and by the device's.

use anyhow::{Context as _, Result, bail};
use tch::{Device, Tensor};

use super::{Execution, Params, Row, StepPass, part_works, total_work};
use crate::bench::model_bench::{Batch, ModelBench};
use crate::cuda::Choice;
use crate::harness::samples::{Samples, Work};
use crate::model::fused::OwnChoice;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::{AdamWOptions, Optimizer, zero_grad};
use crate::model::{FusedStep, Gradients};
use crate::torch::autograd::backward;
use crate::torch::clock::{Lap, Stopwatch};

/// Times the parts of eager steps.
pub fn measure(params: &Params, device: Device, first_in_process: bool) -> Result<Row> {
    let mut bench = StepBench::new(params, device)?;
    let warmup = bench.steps(params.warmup).context("in a warm-up step")?;
    let steps = bench.steps(params.steps)?;
    let [forward, backward, optimizer] = part_works(params);
    let (forward, forward_device) = samples(steps.iter().map(|s| Some(s.forward)), forward)?;
    let (backward, backward_device) = samples(steps.iter().map(|s| s.backward), backward)?;
    let (optimizer, optimizer_device) = samples(steps.iter().map(|s| s.optimizer), optimizer)?;
    let (total, total_device) = samples(steps.iter().map(|s| Some(s.total())), total_work(params))?;
    Ok(Row {
        parameters: params.config().num_parameters(),
        first_in_process,
        warmup: samples(warmup.iter().map(|s| Some(s.total())), total_work(params))?.0,
        forward,
        forward_device,
        backward,
        backward_device,
        optimizer,
        optimizer_device,
        total: total.context("no step was timed")?,
        total_device,
        capture: None,
    })
}

/// The host's and the device's seconds of one part of the steps; `None` if the part was not run, or without a device
/// clock.
pub fn samples(laps: impl Iterator<Item = Option<Lap>>, work: Work) -> Result<(Option<Samples>, Option<Samples>)> {
    let laps: Vec<Lap> = laps.flatten().collect();
    let samples =
        |seconds: Vec<f64>| (!seconds.is_empty()).then(|| Samples::seconds(seconds, work.clone())).transpose();
    Ok((
        samples(laps.iter().map(|lap| lap.host_s).collect())?,
        samples(laps.iter().filter_map(|lap| lap.device_s).collect())?,
    ))
}

/// Times of the parts of one step.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub forward: Lap,
    pub backward: Option<Lap>,
    pub optimizer: Option<Lap>,
}

impl Step {
    /// The sum of the parts.
    pub fn total(&self) -> Lap {
        let others = [self.backward, self.optimizer].into_iter().flatten();
        others.fold(self.forward, |sum, part| Lap {
            host_s: sum.host_s + part.host_s,
            device_s: sum.device_s.zip(part.device_s).map(|(a, b)| a + b),
        })
    }
}

/// A model, its optimizer, and the parameters of the case.
pub struct StepBench {
    pub(super) params: Params,
    pub model: ModelBench,
    pub(super) stopwatch: Stopwatch,
    trainer: Trainer,
}

/// What a step runs.
enum Trainer {
    /// Autograd, then this optimizer.
    Autograd(Box<dyn Optimizer>),
    Fused(Box<FusedStep>),
}

impl StepBench {
    pub fn new(params: &Params, device: Device) -> Result<Self> {
        let Params { attention, batch_size, dtype, .. } = *params;
        let mut model = ModelBench::new(&params.config(), attention, batch_size, dtype, device)?;
        let options = AdamWOptions::default();
        let trainer = match params.execution {
            Execution::Fused => {
                let step = FusedStep::new(&mut model.model, batch_size, dtype, Gradients::Passing, options)?;
                Trainer::Fused(Box::new(step))
            }
            Execution::Eager | Execution::Captured => Trainer::Autograd(adamw_for(device, options)?),
        };
        Ok(Self { params: params.clone(), model, stopwatch: Stopwatch::new(device)?, trainer })
    }

    /// `count` timed steps, each on fresh random tokens.
    pub fn steps(&mut self, count: usize) -> Result<Vec<Step>> {
        (0..count).map(|_| self.step(&self.model.draw()?)).collect()
    }

    /// One timed step, the device synchronised after each part of it.
    fn step(&mut self, batch: &Batch) -> Result<Step> {
        let pass = self.params.pass;
        let (loss, forward) = self.stopwatch.lap(|| self.forward(batch, pass == StepPass::Forward))?;
        let backward = match pass {
            StepPass::Forward => None,
            _ => Some(self.stopwatch.lap(|| backward(&loss).context("in the backward pass"))?.1),
        };
        let parameters = self.model.parameters();
        let Trainer::Autograd(optimizer) = &mut self.trainer else { bail!("a fused step has no parts to be timed") };
        let optimizer = match pass {
            StepPass::TrainingStep => {
                Some(self.stopwatch.lap(|| optimizer.step(parameters).context("in the optimizer step"))?.1)
            }
            _ => None,
        };
        // Not timed: it frees memory and computes nothing.
        zero_grad(parameters)?;
        Ok(Step { forward, backward, optimizer })
    }

    /// `count` whole training steps, each on fresh random tokens and timed as one lap.
    pub fn whole_steps(&mut self, count: usize) -> Result<Vec<Lap>> {
        let Self { model, stopwatch, trainer, .. } = self;
        (0..count)
            .map(|_| model.draw().and_then(|batch| Ok(stopwatch.lap(|| trainer.train(model, &batch))?.1)))
            .collect()
    }

    /// One whole training step, not timed. Returns the loss before it.
    pub fn train(&mut self, batch: &Batch) -> Result<Tensor> {
        self.trainer.train(&self.model, batch)
    }

    /// The algorithms of a fused step's products, and those for which our kernels were timed.
    pub fn product_choices(&self) -> (Vec<Choice>, Vec<OwnChoice>) {
        match &self.trainer {
            Trainer::Fused(step) => (step.product_choices(), step.own_product_choices()),
            Trainer::Autograd(_) => Default::default(),
        }
    }

    pub fn forward(&self, batch: &Batch, no_grad: bool) -> Result<Tensor> {
        if no_grad { tch::no_grad(|| self.model.loss(batch)) } else { self.model.loss(batch) }
    }
}

impl Trainer {
    fn train(&mut self, model: &ModelBench, batch: &Batch) -> Result<Tensor> {
        let optimizer = match self {
            Self::Fused(step) => return step.train(&model.model, &batch.tokens, &batch.targets),
            Self::Autograd(optimizer) => optimizer,
        };
        let loss = model.loss(batch)?;
        backward(&loss).context("in the backward pass")?;
        optimizer.step(model.parameters()).context("in the optimizer step")?;
        zero_grad(model.parameters())?;
        Ok(loss.f_detach()?)
    }
}
