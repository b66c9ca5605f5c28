//! ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1): optimizer state is sharded, gradients are reduce-scattered to the
//! ranks that use them, and updated parameters are all-gathered, so that a step moves what one all-reduce moves.
//!
//! Parameters and gradients live in flat buffers, bucket by bucket, each cut into as many equal shards as there are ranks,
//! wherever parameters begin and end. A bucket's reduce-scatter runs while backward goes on to the buckets before it; its
//! all-gather runs while the optimizer steps the next. With [`Stepping::InBackward`] the step and the all-gather run in the
//! backward pass too. A rank steps float32: where a bucket is narrower, the rank keeps a float32 copy of its shard, for a
//! bfloat16 weight would lose updates below 1/256 of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, ensure};
use tch::{Kind, Tensor};

use super::bucket::{Bucket, bounded, views_of};
use super::in_order::InOrder;
use super::{DataParallel, Options, broadcast_parameters, trained};
use crate::collective::{Op, Shared, Work};
use crate::model::optim::Optimizer;
use crate::torch::autograd::set_grad;
use crate::torch::stream::beside;

/// Data parallelism and optimizer in one, for optimizers that treat every element alike and apart, as SGD and AdamW do:
/// they get flat shards, not parameters.
pub struct Zero1 {
    in_order: InOrder,
    sharded: Arc<Mutex<Sharded>>,
    stepping: Stepping,
}

/// When a bucket's shard is stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepping {
    /// By [`Zero1::step`].
    OnCall,
    /// As soon as its gradient is reduced, on a stream of its own, while backward goes on to the buckets before it; the
    /// parameters are gathered there too, and [`Zero1::step`] has nothing left to do. What must be done with all
    /// gradients before any of them is used, as clipping, is not possible then, and gradients accumulate over passes
    /// under [`super::no_sync`] only. On the CPU the hook waits for the reduction.
    InBackward,
}

/// What is shared with the hooks.
struct Sharded {
    shards: Vec<Shard>,
    optimizer: Box<dyn Optimizer>,
    collective: Shared,
    /// Shards that have been stepped in a backward pass since the last call of [`Zero1::step`].
    ahead: usize,
}

/// What one bucket is on this rank.
struct Shard {
    /// (numel,), padded to a multiple of the world size: the bucket's parameters are views of it.
    parameters: Tensor,
    /// (numel / world_size,): this rank's part of `parameters`.
    mine: Tensor,
    /// (numel / world_size,): the mean over ranks of this rank's part of the gradients.
    gradient: Tensor,
    /// What the optimizer steps: `mine` itself, or its float32 copy.
    stepped: [(String, Tensor); 1],
}

impl Zero1 {
    /// Wraps a replica: every rank takes rank 0's parameters, which move into flat buffers and stay the same tensors.
    pub fn new(
        parameters: &[(String, Tensor)],
        optimizer: Box<dyn Optimizer>,
        collective: &Shared,
        options: &Options,
        stepping: Stepping,
    ) -> Result<Self> {
        broadcast_parameters(parameters, collective)?;
        let buckets = bounded(&trained(parameters), options, collective.world_size())?;
        let shard = |(number, bucket)| Shard::new(number, bucket, collective);
        let shards: Vec<Shard> = buckets.iter().enumerate().map(shard).collect::<Result<_>>()?;
        let units: Vec<_> = buckets.iter().map(Bucket::parameters).collect();
        let sharded = Sharded { shards, optimizer, collective: collective.clone(), ahead: 0 };
        let sharded = Arc::new(Mutex::new(sharded));
        let shared = sharded.clone();
        let launch = move |unit: usize| {
            let bucket: &Bucket = &buckets[unit];
            bucket.collect()?;
            match stepping {
                Stepping::OnCall => lock(&shared).reduce(unit, &bucket.flat),
                Stepping::InBackward => lock(&shared).step_ahead(unit, &bucket.flat),
            }
        };
        Ok(Self { in_order: InOrder::new(&units, Box::new(launch))?, sharded, stepping })
    }

    /// Steps this rank's shards and takes the others' from their ranks. Call it after
    /// [`DataParallel::finish_gradient_synchronization`].
    ///
    /// # Errors
    /// After one the ranks no longer agree and the run must end.
    pub fn step(&mut self) -> Result<()> {
        let mut sharded = lock(&self.sharded);
        let (stepped, shards) = (std::mem::take(&mut sharded.ahead), sharded.shards.len());
        if self.stepping == Stepping::InBackward {
            ensure!(stepped == shards, "{stepped} of {shards} shards have been stepped: has backward run?");
            return Ok(());
        }
        // All are under way before the first is waited for: the next shard is stepped while this one is gathered.
        let gathers = (0..shards).map(|unit| sharded.step(unit)).collect::<Result<Vec<_>>>()?;
        gathers.into_iter().try_for_each(|work| work.wait().context("gathering updated parameters"))
    }

    pub fn set_lr(&mut self, lr: f64) {
        lock(&self.sharded).optimizer.set_lr(lr);
    }

    /// Values that this rank keeps state for, with the padding of its shards.
    pub fn owned_numel(&self) -> usize {
        lock(&self.sharded).shards.iter().map(|shard| shard.mine.numel()).sum()
    }
}

/// Locks what a panic in a hook may have poisoned: the panic has been reported as the backward's error.
fn lock(sharded: &Mutex<Sharded>) -> MutexGuard<'_, Sharded> {
    sharded.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sharded {
    /// Starts to form the mean of this rank's part of `gradients`, a bucket's.
    fn reduce(&self, unit: usize, gradients: &Tensor) -> Result<Box<dyn Work>> {
        self.collective.reduce_scatter_async(&self.shards[unit].gradient, gradients, Op::Average)
    }

    /// Steps one shard and starts to gather what has become of its bucket.
    fn step(&mut self, unit: usize) -> Result<Box<dyn Work>> {
        let Self { shards, optimizer, collective, .. } = self;
        let shard = &shards[unit];
        shard.step(optimizer.as_mut())?;
        let gather = collective.all_gather_async(&shard.parameters, &shard.mine);
        gather.context("starting to gather updated parameters")
    }

    /// Reduces and steps, one behind the other, while this thread's own stream goes on. No work of this pass reads the
    /// bucket's parameters any more: a parameter's gradient is complete when the last operation that used it has been
    /// differentiated, and the reduction waits for what backward has launched until then.
    fn step_ahead(&mut self, unit: usize, gradients: &Tensor) -> Result<Box<dyn Work>> {
        ensure!(
            self.ahead < self.shards.len(),
            "this step's gradients have been used already: run all passes but the last one under no_sync, then call step"
        );
        self.ahead += 1;
        let reduced = self.reduce(unit, gradients)?;
        beside(self.collective.device(), || {
            reduced.wait().context("reducing gradients")?;
            self.step(unit)
        })
    }
}

/// Here the mean is formed where it is used: on each rank, for its shards. The gradients of the parameters themselves
/// stay the rank's own, and clipping by their norm would need another collective.
impl DataParallel for Zero1 {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        self.in_order.finish()
    }

    fn set_gradient_synchronization(&mut self, enabled: bool) {
        self.in_order.set_enabled(enabled);
    }
}

impl Shard {
    fn new(number: usize, bucket: &Bucket, collective: &Shared) -> Result<Self> {
        let parameters = bucket.flat.f_zeros_like()?;
        let members = bucket.parameters();
        let places = views_of(&parameters, members.iter().map(|(_, parameter)| parameter.size()))?;
        for ((_, parameter), mut place) in members.into_iter().zip(places) {
            place.f_copy_(&parameter.f_detach()?)?;
            parameter.shallow_clone().f_set_data(&place)?;
        }
        let numel = parameters.size()[0] / collective.world_size() as i64;
        let mine = parameters.f_narrow(0, collective.rank() as i64 * numel, numel)?.f_detach()?;
        let stepped = match mine.kind() {
            Kind::Half | Kind::BFloat16 => mine.f_to_kind(Kind::Float)?,
            _ => mine.shallow_clone(),
        };
        let gradient = mine.f_zeros_like()?;
        Ok(Self { parameters, mine, gradient, stepped: [(format!("shard of bucket {number}"), stepped)] })
    }

    fn step(&self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let (_, stepped) = &self.stepped[0];
        set_grad(stepped, &self.gradient.f_to_kind(stepped.kind())?)?;
        optimizer.step(&self.stepped)?;
        if stepped.kind() != self.mine.kind() {
            self.mine.shallow_clone().f_copy_(stepped)?;
        }
        Ok(())
    }
}
