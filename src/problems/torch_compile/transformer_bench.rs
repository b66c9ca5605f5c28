//! Our own side of part (b): a model's forward pass and training step, eager and captured as CUDA graphs.

use std::cell::RefCell;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::attention::ImplementationName;
use crate::bench::device::empty_cache;
use crate::bench::interleave::{Laps, lap};
use crate::bench::training_step::loss;
use crate::model::optim::{Optimizer, zero_grad};
use crate::model::{Config, Precision, Transformer};
use crate::torch::Generator;
use crate::torch::autocast;
use crate::torch::autograd::backward;
use crate::torch::graph::{Captured, on_side_stream};
use crate::torch::random::SEED;

/// Tokens and targets, both (batch, seq) int64.
pub struct Batch {
    pub tokens: Tensor,
    pub targets: Tensor,
}

/// A model, and what it is to do.
pub struct TransformerBench {
    pub model: Transformer,
    pub device: Device,
    dtype: Precision,
    batch_size: i64,
    generator: Generator,
}

impl TransformerBench {
    pub fn new(config: &Config, batch_size: i64, dtype: Precision, device: Device) -> Result<Self> {
        let generator = Generator::new(device, SEED)?;
        Ok(Self {
            model: Transformer::new(config, ImplementationName::Naive, &generator)?,
            device,
            dtype,
            batch_size,
            generator,
        })
    }

    pub fn draw(&self) -> Result<Batch> {
        let config = self.model.config();
        let size = [self.batch_size, config.context_length];
        let random = || self.generator.randint(0, config.vocab_size, &size, Kind::Int64);
        Ok(Batch { tokens: random()?, targets: random()? })
    }

    /// Positions of one batch.
    pub fn positions(&self) -> i64 {
        self.batch_size * self.model.config().context_length
    }

    /// (batch, seq, vocab_size), not recorded, in the dtype that the model's precision gives.
    pub fn logits(&self, batch: &Batch) -> Result<Tensor> {
        let forward = || self.model.forward(&batch.tokens);
        tch::no_grad(|| match self.dtype {
            Precision::Float32 => forward(),
            Precision::Bfloat16 => autocast(self.device, Kind::BFloat16, forward),
        })
    }

    /// The loss, not recorded.
    pub fn forward(&self, batch: &Batch) -> Result<Tensor> {
        tch::no_grad(|| self.recorded(batch))
    }

    /// The loss, recorded for a backward pass.
    pub fn recorded(&self, batch: &Batch) -> Result<Tensor> {
        loss(&self.model, &batch.tokens, &batch.targets, self.dtype).context("in the forward pass")
    }

    /// Forward, backward and optimizer; gives the loss before it, and leaves the gradients.
    fn step(&self, batch: &Batch, optimizer: &mut dyn Optimizer) -> Result<Tensor> {
        let loss = self.recorded(batch)?;
        backward(&loss).context("in the backward pass")?;
        optimizer.step(self.model.parameters()).context("in the optimizer step")?;
        Ok(loss.f_detach()?)
    }

    /// Recorded forward passes and then training steps, each on fresh tokens and after untimed ones, as the peer's turn.
    pub fn turn(&self, optimizer: &mut dyn Optimizer, warmup: usize, iterations: usize) -> Result<Laps> {
        let mut laps = self.turn_of(Pass::Forward, optimizer, warmup, iterations)?;
        laps.extend(self.turn_of(Pass::Step, optimizer, warmup, iterations)?);
        Ok(laps)
    }

    /// One kind of them alone. The release of the gradients is outside the clock.
    pub fn turn_of(&self, pass: Pass, optimizer: &mut dyn Optimizer, warmup: usize, iterations: usize) -> Result<Laps> {
        let mut seconds = Vec::new();
        let mut passes = || -> Result<()> {
            for _ in 0..warmup + iterations {
                let batch = self.draw()?;
                seconds.push(match pass {
                    Pass::Forward => lap(self.device, || self.recorded(&batch))?.1,
                    Pass::Step => lap(self.device, || self.step(&batch, optimizer))?.1,
                });
                zero_grad(self.model.parameters())?;
            }
            Ok(())
        };
        let ended = passes();
        // Also where memory ran out, for the columns that follow.
        zero_grad(self.model.parameters())?;
        empty_cache(self.device)?;
        ended?;
        Ok([(pass.name().to_string(), seconds.split_off(warmup))].into())
    }
}

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The forward pass with its loss, recorded as a step's is.
    Forward,
    /// Forward, backward and optimizer.
    Step,
}

impl Pass {
    pub const ALL: [Self; 2] = [Self::Forward, Self::Step];

    /// Of its laps.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Step => "step",
        }
    }
}

/// One kind of a bench's passes as a CUDA graph. Only one lives at a time, for its memory is as much as a pass needs.
pub struct CapturedTransformer<'a> {
    // Declared, and so dropped, before what its kernels read and write; the optimizer's state is the caller's.
    graph: Captured<Tensor>,
    pass: Pass,
    batch: Batch,
    bench: &'a TransformerBench,
}

impl<'a> CapturedTransformer<'a> {
    /// A captured step trains with `optimizer`, which must outlive it.
    pub fn new(bench: &'a TransformerBench, pass: Pass, optimizer: &'a RefCell<Box<dyn Optimizer>>) -> Result<Self> {
        let batch = bench.draw()?;
        let run = || -> Result<Tensor> {
            match pass {
                Pass::Forward => Ok(bench.recorded(&batch)?.f_detach()?),
                Pass::Step => {
                    let loss = bench.step(&batch, optimizer.borrow_mut().as_mut())?;
                    zero_grad(bench.model.parameters())?;
                    Ok(loss)
                }
            }
        };
        on_side_stream(bench.device, || (0..3).try_for_each(|_| run().map(drop)))?;
        let graph = Captured::capture(bench.device, run).with_context(|| format!("capturing the {}", pass.name()))?;
        empty_cache(bench.device)?;
        Ok(Self { graph, pass, batch, bench })
    }

    fn load(&self, batch: &Batch) -> Result<()> {
        self.batch.tokens.shallow_clone().f_copy_(&batch.tokens)?;
        self.batch.targets.shallow_clone().f_copy_(&batch.targets)?;
        Ok(())
    }

    /// Replays twice on one fresh batch and holds each loss to that of an eager forward pass in the same state: the
    /// graph must compute the same, and a step must train the very parameters that the model reads.
    ///
    /// Gives the largest relative difference.
    pub fn prove(&self, tolerance: f64) -> Result<f64> {
        let batch = self.bench.draw()?;
        self.load(&batch)?;
        let (mut largest, mut losses) = (0.0f64, Vec::new());
        for _ in 0..2 {
            let eager = self.bench.forward(&batch)?.f_double_value(&[])?;
            self.graph.replay()?;
            let replayed = self.graph.output().f_double_value(&[])?;
            let error = (replayed / eager - 1.0).abs();
            let pass = self.pass.name();
            // Written so that a loss that is not a number fails.
            ensure!(error <= tolerance, "the loss is {replayed} in a replayed {pass} and {eager} in an eager one");
            largest = largest.max(error);
            losses.push(eager);
        }
        let trains = self.pass == Pass::Step;
        ensure!(
            !trains || losses[0] != losses[1],
            "a replayed step left the loss at {}: nothing was trained",
            losses[0]
        );
        Ok(largest)
    }

    /// As [`TransformerBench::turn_of`], by replays.
    pub fn turn(&self, warmup: usize, iterations: usize) -> Result<Laps> {
        let mut seconds = Vec::new();
        for _ in 0..warmup + iterations {
            self.load(&self.bench.draw()?)?;
            seconds.push(lap(self.bench.device, || self.graph.replay())?.1);
        }
        empty_cache(self.bench.device)?;
        Ok([(self.pass.name().to_string(), seconds.split_off(warmup))].into())
    }
}
