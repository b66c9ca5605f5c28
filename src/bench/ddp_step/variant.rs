//! One rank's model, and turns of training steps on it: alone, or under a strategy with its communication recorded.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::Params;
use super::on_rank::StepOutput;
use super::timeline::Timeline;
use super::trainer::{MakeTrainer, make_trainer};
use crate::attention::ImplementationName;
use crate::bench::device::empty_cache;
use crate::bench::interconnect::{adds, bus_bytes};
use crate::bench::training_step::loss;
use crate::collective::consistency_check::require_equal_parameters;
use crate::collective::timeline::busy_seconds;
use crate::collective::{Operation, Shared};
use crate::model::Transformer;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::{AdamWOptions, zero_grad};
use crate::parallel::naive;
use crate::torch::Generator;
use crate::torch::allow_tf32;
use crate::torch::autograd::backward;
use crate::torch::clock::Stopwatch;
use crate::torch::stream::synchronize;

/// A rank's model and its random tokens.
pub struct ReplicaBench<'a> {
    params: &'a Params,
    collective: &'a Shared,
    device: Device,
    pub model: Transformer,
    /// Draws the tokens.
    generator: Generator,
    stopwatch: Stopwatch,
}

impl<'a> ReplicaBench<'a> {
    /// Every rank draws a different model and different tokens, so that a missing broadcast would be detected.
    pub fn new(params: &'a Params, collective: &'a Shared) -> Result<Self> {
        ensure!(!allow_tf32()?, "TF32 is on: is TORCH_ALLOW_TF32_CUBLAS_OVERRIDE set?");
        let (device, seed) = (collective.device(), collective.rank() as i64);
        let model = Transformer::new(&params.config(), ImplementationName::Naive, &Generator::new(device, seed)?)?;
        let generator = Generator::new(device, seed)?;
        Ok(Self { params, collective, device, model, generator, stopwatch: Stopwatch::new(device)? })
    }

    /// Seconds of the timed steps of one turn without communication. Afterwards the ranks' models differ.
    pub fn single(&self) -> Result<Vec<f64>> {
        let mut optimizer = adamw_for(self.device, AdamWOptions::default())?;
        let mut seconds = Vec::new();
        for _ in 0..self.params.warmup + self.params.steps {
            let batch = self.draw()?;
            self.start_together()?;
            let step = || -> Result<()> {
                backward(&loss(&self.model, &batch.0, &batch.1, self.params.dtype)?)?;
                optimizer.step(self.model.parameters())
            };
            seconds.push(self.stopwatch.lap(step).context("in a step without communication")?.1.host_s);
            zero_grad(self.model.parameters())?;
        }
        drop(optimizer);
        empty_cache(self.device)?;
        Ok(seconds.split_off(self.params.warmup))
    }

    /// One turn under `strategy`, with new optimizer state and rank 0's parameters. Adds its measurements to `output`.
    ///
    /// Errors: the ranks' parameters are not bitwise equal afterwards.
    pub fn under(&self, strategy: &str, make_trainer: MakeTrainer, output: &mut StepOutput) -> Result<()> {
        let Params { bucket_size_mb, warmup, steps, .. } = *self.params;
        let mut trainer = make_trainer(strategy, self.model.parameters(), self.collective, bucket_size_mb)?;
        let timeline = self.collective.timeline();
        for k in 0..warmup + steps {
            let (tokens, targets) = self.draw()?;
            self.start_together()?;
            timeline.start()?;
            let (marks, lap) = self.stopwatch.lap(|| {
                let begin = timeline.mark()?;
                let loss = loss(&self.model, &tokens, &targets, self.params.dtype)?;
                let forward = timeline.mark()?;
                backward(&loss)?;
                let backward = timeline.mark()?;
                trainer.parallel().finish_gradient_synchronization()?;
                let ready = timeline.mark()?;
                trainer.step()?;
                Ok([begin, forward, backward, ready, timeline.mark()?])
            })?;
            let mut entries = timeline.take()?;
            entries.retain(|entry| entry.operation != Operation::Barrier);
            zero_grad(self.model.parameters())?;
            if k < warmup {
                continue;
            }
            let timeline = Timeline::of(&marks, &entries)?;
            output.step.push(lap.host_s);
            output.communication.push(busy_seconds(&entries).max(TICK));
            output.tail.push(timeline.tail_s().max(TICK));
            output.bytes = entries.iter().map(|entry| entry.bytes).sum();
            output.calls = entries.len() as u64;
            let ranks = self.collective.world_size();
            output.bus_bytes = bus_bytes(&entries, ranks);
            output.summed_bus_bytes = bus_bytes(entries.iter().filter(|entry| adds(entry)), ranks);
            output.timeline = timeline;
        }
        require_equal_parameters(self.collective.as_ref(), self.model.parameters())?;
        drop(trainer);
        empty_cache(self.device)
    }

    /// Trains on these batches as the definition says, untimed: every gradient averaged by itself. `sample` is called before the
    /// first step, with rank 0's parameters, and after the last.
    pub fn follow<T>(
        &self,
        batches: &[(Tensor, Tensor)],
        sample: impl Fn(&[(String, Tensor)]) -> Result<T>,
    ) -> Result<[T; 2]> {
        let parameters = self.model.parameters();
        let mut trainer = make_trainer(naive::STRATEGY.name, parameters, self.collective, None)?;
        let before = sample(parameters)?;
        for (tokens, targets) in batches {
            backward(&loss(&self.model, tokens, targets, self.params.dtype)?)?;
            trainer.parallel().finish_gradient_synchronization()?;
            trainer.step()?;
            zero_grad(parameters)?;
        }
        let after = sample(parameters)?;
        drop(trainer);
        empty_cache(self.device)?;
        Ok([before, after])
    }

    pub fn draw(&self) -> Result<(Tensor, Tensor)> {
        let size = [self.params.batch_size, self.params.context_length];
        let random = || self.generator.randint(0, self.params.vocab_size, &size, Kind::Int64);
        Ok((random()?, random()?))
    }

    /// Synchronises the device and waits for all ranks before a step.
    pub fn start_together(&self) -> Result<()> {
        synchronize(self.device)?;
        self.collective.barrier()
    }
}

/// Replaces a duration of zero, because two clock readings may be equal.
const TICK: f64 = 1e-9;
