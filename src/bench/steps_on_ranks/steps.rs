//! One rank's fused steps and their columns: alone, with buckets, with one call for all gradients, and sharded in buckets.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::Params;
use crate::collective::Shared;
use crate::collective::consistency_check::require_equal_parameters;
use crate::model::optim::AdamWOptions;
use crate::model::sizes::VOCAB_SIZE;
use crate::model::{Exchange, FusedStep, Shard, Transformer};
use crate::parallel::fused::{FusedBuckets, FusedFlat, broadcast_to_step};
use crate::torch::clock::Stopwatch;
use crate::torch::graph::{Captured, on_side_stream};
use crate::torch::stream::synchronize;
use crate::torch::{Generator, allow_tf32};

/// Models and their steps, which the columns train.
pub struct RankBench<'a> {
    p: &'a Params,
    collective: &'a Shared,
    device: Device,
    replicated: Replica,
    sharded: Replica,
    /// What the captured steps read.
    batch: [Tensor; 2],
    generator: Generator,
    stopwatch: Stopwatch,
}

struct Replica {
    model: Transformer,
    step: FusedStep,
}

/// A way to train; on a GPU it is captured at its first turn.
pub struct Column<'a> {
    replica: &'a Replica,
    exchange: Option<Box<dyn Exchange>>,
    graph: Option<Captured<Tensor>>,
}

impl<'a> RankBench<'a> {
    /// Every rank draws another model and other tokens.
    pub fn new(p: &'a Params, collective: &'a Shared) -> Result<Self> {
        ensure!(!allow_tf32()?, "TF32 is on: is TORCH_ALLOW_TF32_CUBLAS_OVERRIDE set?");
        let (device, seed) = (collective.device(), collective.rank() as i64);
        let replica = |shard| -> Result<_> {
            let mut model = Transformer::new(&p.config(), p.attention, &Generator::new(device, seed)?)?;
            let step = FusedStep::sharded(&mut model, p.batch_size, p.dtype, shard, AdamWOptions::default())?;
            Ok(Replica { model, step })
        };
        let [rank, ranks] = [collective.rank(), collective.world_size()].map(|n| n as i64);
        let (replicated, sharded) = (replica(Shard::ALL)?, replica(Shard { rank, ranks })?);
        let generator = Generator::new(device, seed)?;
        let batch = draw(p, &generator)?;
        Ok(Self { p, collective, device, replicated, sharded, batch, generator, stopwatch: Stopwatch::new(device)? })
    }

    /// The weights' gradients of this rank's batch, in the type of the products.
    pub fn gradients(&self) -> Result<Vec<Tensor>> {
        let [tokens, targets] = &self.batch;
        let step = &self.replicated.step;
        let differentiate = || step.differentiate(tokens, targets).map(drop);
        if self.device.is_cuda() {
            on_side_stream(self.device, differentiate)?
        } else {
            differentiate()?
        }
        Ok(step.gradients()?.into_iter().map(|(_, gradient)| gradient).collect())
    }

    /// Without communication, in buckets, in one call, and sharded in buckets.
    pub fn columns(&self) -> Result<[Column<'_>; 4]> {
        let (p, config) = (self.p, self.p.config());
        let buckets = || FusedBuckets::new(self.collective, &config, p.dtype, &p.options());
        let column = |replica, exchange| Column { replica, exchange, graph: None };
        let Self { replicated, sharded, .. } = self;
        Ok([
            column(replicated, None),
            column(replicated, Some(Box::new(buckets()?))),
            column(replicated, Some(Box::new(FusedFlat::new(self.collective, &config)?))),
            column(sharded, Some(Box::new(buckets()?))),
        ])
    }

    /// Seconds of the timed steps of one turn, from rank 0's parameters and a new state of the optimizer.
    ///
    /// Errors: the ranks' parameters are not bitwise equal afterwards, where the column averages gradients.
    pub fn turn(&self, column: &mut Column) -> Result<Vec<f64>> {
        if self.device.is_cuda() && column.graph.is_none() {
            on_side_stream(self.device, || self.train(column).map(drop))?;
            column.graph = Some(Captured::capture(self.device, || self.train(column))?);
        }
        let Replica { model, step } = column.replica;
        broadcast_to_step(model, step, self.collective)?;
        step.restart()?;
        let mut seconds = Vec::new();
        for _ in 0..self.p.warmup + self.p.iterations {
            for (input, new) in self.batch.iter().zip(draw(self.p, &self.generator)?) {
                input.shallow_clone().f_copy_(&new)?;
            }
            synchronize(self.device)?;
            self.collective.barrier()?;
            seconds.push(self.stopwatch.lap(|| self.run(column))?.1.host_s);
        }
        if let Some(exchange) = &column.exchange {
            step.gather_parameters(exchange.as_ref())?;
            require_equal_parameters(self.collective.as_ref(), model.parameters())?;
        }
        Ok(seconds.split_off(self.p.warmup))
    }

    fn run(&self, column: &Column) -> Result<()> {
        let Some(graph) = &column.graph else { return self.train(column).map(drop) };
        graph.replay()?;
        if column.exchange.is_some() { self.collective.watch_replay() } else { Ok(()) }
    }

    fn train(&self, column: &Column) -> Result<Tensor> {
        let ([tokens, targets], Replica { model, step }) = (&self.batch, column.replica);
        match &column.exchange {
            None => step.train(model, tokens, targets),
            Some(exchange) => step.train_on_rank(model, tokens, targets, exchange.as_ref()),
        }
        .context("in a fused step")
    }
}

fn draw(p: &Params, generator: &Generator) -> Result<[Tensor; 2]> {
    let tokens = || generator.randint(0, VOCAB_SIZE, &[p.batch_size, p.context_length], Kind::Int64);
    Ok([tokens()?, tokens()?])
}
