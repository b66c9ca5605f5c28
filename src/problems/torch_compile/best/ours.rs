//! Our side of a whole step at its best: one column for each execution of the model.

use std::cell::RefCell;

use anyhow::Result;

use super::super::transformer_bench::{CapturedTransformer, Pass, eager_turn};
use super::Params;
use crate::bench::interleave::{Laps, Turns};
use crate::bench::model_bench::{Batch, ModelBench};
use crate::bench::tolerance;
use crate::bench::training_step::Execution;
use crate::bench::training_step::captured::CapturedStep;
use crate::model::optim::{Optimizer, zero_grad};
use crate::torch::memory;

/// A training step that is ready to be timed.
pub trait OurStep {
    /// The laps of whole steps on fresh tokens under the name "step", after untimed ones.
    fn turn(&self, turns: Turns) -> Result<Laps>;

    /// A step on the tokens at hand, which need not have finished when this returns.
    fn launch(&self) -> Result<()>;

    /// The largest relative error of its losses against eager passes; `None` of the eager step itself.
    fn loss_error(&self) -> Option<f64> {
        None
    }

    /// The bytes that it holds all the time; `None` of a step whose memory comes and goes, as the allocator's peak shows.
    fn held_bytes(&self) -> Option<f64> {
        None
    }
}

/// The step of `bench`, proved against eager passes, which trains with `optimizer`; a fused one has a model and an optimizer
/// of its own.
///
/// Errors: [`crate::error::Fault::NotAvailable`] for an execution that the device lacks.
pub fn prepare<'a>(
    p: &Params,
    bench: &'a ModelBench,
    optimizer: &'a RefCell<Box<dyn Optimizer>>,
) -> Result<Box<dyn OurStep + 'a>> {
    Ok(match p.execution {
        Execution::Eager => Box::new(Eager { bench, optimizer, batch: bench.draw()? }),
        Execution::Captured => {
            let graph = CapturedTransformer::new(bench, Pass::Step, optimizer)?;
            let loss_error = graph.prove(tolerance::replayed_loss(bench.dtype))?;
            Box::new(Captured { graph, loss_error })
        }
        Execution::Fused => {
            let allocated = || Ok::<_, anyhow::Error>(memory::stats(bench.device)?.allocated_bytes.current as f64);
            let before = allocated()?;
            let (mut step, _) = CapturedStep::warmed_up(&p.training_step(), bench.device)?;
            let loss_error = step.prove()?;
            Box::new(Fused { step, loss_error, held_bytes: allocated()? - before })
        }
    })
}

struct Eager<'a> {
    bench: &'a ModelBench,
    optimizer: &'a RefCell<Box<dyn Optimizer>>,
    batch: Batch,
}

impl OurStep for Eager<'_> {
    fn turn(&self, turns: Turns) -> Result<Laps> {
        eager_turn(self.bench, Pass::Step, self.optimizer.borrow_mut().as_mut(), turns)
    }

    fn launch(&self) -> Result<()> {
        Pass::Step.run(self.bench, &self.batch, self.optimizer.borrow_mut().as_mut()).map(drop)?;
        zero_grad(self.bench.parameters())
    }
}

struct Captured<'a> {
    graph: CapturedTransformer<'a>,
    loss_error: f64,
}

impl OurStep for Captured<'_> {
    fn turn(&self, turns: Turns) -> Result<Laps> {
        self.graph.turn(turns)
    }

    fn launch(&self) -> Result<()> {
        self.graph.replay()
    }

    fn loss_error(&self) -> Option<f64> {
        Some(self.loss_error)
    }
}

struct Fused {
    step: CapturedStep,
    loss_error: f64,
    held_bytes: f64,
}

impl OurStep for Fused {
    fn turn(&self, turns: Turns) -> Result<Laps> {
        let laps = (0..turns.warmup + turns.iterations).map(|_| Ok(self.step.timed_replay()?.host_s));
        let mut seconds = laps.collect::<Result<Vec<_>>>()?;
        Ok([(Pass::Step.name().to_string(), seconds.split_off(turns.warmup))].into())
    }

    fn launch(&self) -> Result<()> {
        self.step.replay()
    }

    fn loss_error(&self) -> Option<f64> {
        Some(self.loss_error)
    }

    fn held_bytes(&self) -> Option<f64> {
        Some(self.held_bytes)
    }
}
