//! ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1): optimizer state is sharded, gradients are reduce-scattered to the
//! ranks that use them, and updated parameters are all-gathered, so that a step moves what one all-reduce moves.
//!
//! Parameters and gradients live in flat buffers, bucket by bucket, each cut into as many equal shards as there are ranks,
//! wherever parameters begin and end. A bucket's reduce-scatter runs while backward goes on to the buckets before it; its
//! all-gather runs while the optimizer steps the next. A rank steps float32: where a bucket is narrower, the rank keeps a
//! float32 copy of its shard, for a bfloat16 weight would lose updates below 1/256 of it.

use anyhow::{Context as _, Result};
use tch::{Kind, Tensor};

use super::bucket::{Bucket, bounded, views_of};
use super::in_order::InOrder;
use super::{DataParallel, Options, broadcast_parameters, trained};
use crate::collective::{Op, Shared, Work};
use crate::model::optim::Optimizer;
use crate::torch::autograd::set_grad;

/// Data parallelism and optimizer in one, for optimizers that treat every element alike and apart, as SGD and AdamW do:
/// they get flat shards, not parameters.
pub struct Zero1 {
    in_order: InOrder,
    shards: Vec<Shard>,
    optimizer: Box<dyn Optimizer>,
    collective: Shared,
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
    ) -> Result<Self> {
        broadcast_parameters(parameters, collective)?;
        let buckets = bounded(&trained(parameters), options, collective.world_size())?;
        let shard = |(number, bucket)| Shard::new(number, bucket, collective);
        let shards: Vec<Shard> = buckets.iter().enumerate().map(shard).collect::<Result<_>>()?;
        let units: Vec<_> = buckets.iter().map(Bucket::parameters).collect();
        let reduced: Vec<Tensor> = shards.iter().map(|shard| shard.gradient.shallow_clone()).collect();
        let group = collective.clone();
        let launch = move |unit: usize| {
            let bucket: &Bucket = &buckets[unit];
            bucket.collect()?;
            group.reduce_scatter_async(&reduced[unit], &bucket.flat, Op::Average)
        };
        let in_order = InOrder::new(&units, Box::new(launch))?;
        Ok(Self { in_order, shards, optimizer, collective: collective.clone() })
    }

    /// Steps this rank's shards and takes the others' from their ranks. Call it after
    /// [`DataParallel::finish_gradient_synchronization`].
    ///
    /// # Errors
    /// After one the ranks no longer agree and the run must end.
    pub fn step(&mut self) -> Result<()> {
        let gathers = self.start_step()?;
        gathers.into_iter().try_for_each(|work| work.wait().context("gathering updated parameters"))
    }

    /// As [`Zero1::step`], but leaves the all-gathers under way: wait for them before anything reads a parameter. They come
    /// in the order of the buckets, the model's last parameters first.
    pub fn start_step(&mut self) -> Result<Vec<Box<dyn Work>>> {
        let mut gathers = Vec::new();
        for shard in &self.shards {
            shard.step(self.optimizer.as_mut())?;
            let gather = self.collective.all_gather_async(&shard.parameters, &shard.mine);
            gathers.push(gather.context("starting to gather updated parameters")?);
        }
        Ok(gathers)
    }

    pub fn set_lr(&mut self, lr: f64) {
        self.optimizer.set_lr(lr);
    }

    /// Values that this rank keeps state for, with the padding of its shards.
    pub fn owned_numel(&self) -> usize {
        self.shards.iter().map(|shard| shard.mine.numel()).sum()
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
