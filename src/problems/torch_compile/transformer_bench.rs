//! Our own side of part (b): a model's forward pass and training step, eager and captured as CUDA graphs.

use std::cell::RefCell;

use anyhow::{Context as _, Result};
use tch::Tensor;

use crate::bench::device::empty_cache;
use crate::bench::interleave::{Laps, Turns};
use crate::bench::model_bench::{Batch, ModelBench};
use crate::bench::timing::lap;
use crate::bench::training_step::captured::prove_replays;
use crate::model::optim::{Optimizer, zero_grad};
use crate::torch::autograd::backward;
use crate::torch::graph::{Captured, on_side_stream};

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

    /// Gives the loss, of a step the one before it. Leaves a step's gradients.
    pub fn run(self, bench: &ModelBench, batch: &Batch, optimizer: &mut dyn Optimizer) -> Result<Tensor> {
        let loss = bench.loss(batch)?;
        if self == Self::Forward {
            return Ok(loss);
        }
        backward(&loss).context("in the backward pass")?;
        optimizer.step(bench.parameters()).context("in the optimizer step")?;
        Ok(loss.f_detach()?)
    }
}

/// Passes on fresh tokens, after untimed ones, as the peer's turn. The release of the gradients is outside the clock.
pub fn eager_turn(bench: &ModelBench, pass: Pass, optimizer: &mut dyn Optimizer, turns: Turns) -> Result<Laps> {
    let mut seconds = Vec::new();
    let mut passes = || -> Result<()> {
        for _ in 0..turns.warmup + turns.iterations {
            let batch = bench.draw()?;
            seconds.push(lap(bench.device, || pass.run(bench, &batch, optimizer))?.1);
            zero_grad(bench.parameters())?;
        }
        Ok(())
    };
    let ended = passes();
    // Also where memory ran out, for the columns that follow.
    zero_grad(bench.parameters())?;
    empty_cache(bench.device)?;
    ended?;
    Ok([(pass.name().to_string(), seconds.split_off(turns.warmup))].into())
}

/// One kind of a bench's passes as a CUDA graph. Only one lives at a time, for its memory is as much as a pass needs.
pub struct CapturedTransformer<'a> {
    // Declared, and so dropped, before what its kernels read and write; the optimizer's state is the caller's.
    graph: Captured<Tensor>,
    pass: Pass,
    batch: Batch,
    bench: &'a ModelBench,
}

impl<'a> CapturedTransformer<'a> {
    /// A captured step trains with `optimizer`, which must outlive it.
    pub fn new(bench: &'a ModelBench, pass: Pass, optimizer: &'a RefCell<Box<dyn Optimizer>>) -> Result<Self> {
        let batch = bench.draw()?;
        let run = || -> Result<Tensor> {
            let loss = pass.run(bench, &batch, optimizer.borrow_mut().as_mut())?.f_detach()?;
            zero_grad(bench.parameters())?;
            Ok(loss)
        };
        on_side_stream(bench.device, || (0..3).try_for_each(|_| run().map(drop)))?;
        let graph = Captured::capture(bench.device, run).with_context(|| format!("capturing the {}", pass.name()))?;
        empty_cache(bench.device)?;
        Ok(Self { graph, pass, batch, bench })
    }

    /// One pass on the tokens of the last one; it returns before the device has finished.
    pub fn replay(&self) -> Result<()> {
        self.graph.replay()
    }

    /// [`prove_replays`] on one fresh batch.
    pub fn prove(&self, tolerance: f64) -> Result<f64> {
        self.batch.load(&self.bench.draw()?)?;
        let eager = || Ok(tch::no_grad(|| self.bench.loss(&self.batch))?.f_double_value(&[])?);
        let replay = || {
            self.graph.replay()?;
            Ok(self.graph.output().f_double_value(&[])?)
        };
        prove_replays(eager, replay, self.pass == Pass::Step, tolerance)
            .with_context(|| format!("comparing the captured {} with an eager one", self.pass.name()))
    }

    /// As [`eager_turn`], by replays.
    pub fn turn(&self, turns: Turns) -> Result<Laps> {
        let mut seconds = Vec::new();
        for _ in 0..turns.warmup + turns.iterations {
            self.batch.load(&self.bench.draw()?)?;
            seconds.push(lap(self.bench.device, || self.graph.replay())?.1);
        }
        empty_cache(self.bench.device)?;
        Ok([(self.pass.name().to_string(), seconds.split_off(turns.warmup))].into())
    }
}
