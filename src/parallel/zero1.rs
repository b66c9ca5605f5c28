//! ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1): optimizer state is sharded, gradients are reduce-scattered to
//! the ranks that use them, and updated parameters are all-gathered. A step sends as many bytes as one all-reduce.
//!
//! Parameters are taken bucket by bucket. A parameter that divides into equal and aligned shards, one for each rank, is
//! sharded in place, and so is its gradient: nothing is copied, and a bucket is still one call. The other parameters of
//! a bucket live in a flat buffer, whose shards may begin and end inside a parameter. A bucket's reduce-scatter runs
//! while backward goes on to the buckets before it; its all-gather runs while the optimizer steps the next. With
//! [`Stepping::InBackward`] the step and the all-gather run in the backward pass too. A rank steps in float32. For a
//! narrower bucket it keeps a float32 copy of its shards, because a bfloat16 weight would lose updates below 1/256 of
//! it.

use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, ensure};
use tch::{Kind, Tensor};

use super::bucket::{Bucket, alignment_of, planned, views_of};
use super::ordered_launch::OrderedLaunch;
use super::{DataParallel, Replica, broadcast_parameters, gradient_of, trained};
use crate::collective::{Op, Shared, Work};
use crate::model::optim::Optimizer;
use crate::torch::autograd::{copy_all, set_grad};
use crate::torch::lock;
use crate::torch::stream::on_side_stream;

/// Data parallelism and optimizer in one, for elementwise optimizers such as SGD and AdamW: they get shards, not
/// parameters.
pub struct Zero1 {
    ordered: OrderedLaunch,
    sharded: Arc<Mutex<Sharded>>,
    stepping: Stepping,
}

/// When a bucket's shard is stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepping {
    /// By [`Zero1::step`].
    OnCall,
    /// As soon as its gradient is reduced, on a side stream, while backward goes on to the buckets before it. The
    /// parameters are gathered there too, and [`Zero1::step`] has nothing left to do. Gradient clipping is then
    /// impossible: it needs all gradients before the first is used. Gradients accumulate over passes only under
    /// [`super::no_sync`]. On the CPU the hook waits for the reduction.
    InBackward,
}

/// What is shared with the hooks.
struct Sharded {
    shards: Vec<Shard>,
    optimizer: Box<dyn Optimizer>,
    collective: Shared,
    /// Shards that have been stepped in a backward pass since the last call of [`Zero1::step`].
    stepped_in_backward: usize,
}

/// A bucket's parameters, by how they are sharded.
struct Members {
    /// Sharded in place.
    whole: Vec<(String, Tensor)>,
    /// Sharded in a flat buffer: those that do not divide into equal and aligned shards.
    rest: Option<Bucket>,
}

/// One bucket on this rank. The lists have an element for each of [`Members::whole`], and one for the rest.
struct Shard {
    members: Members,
    /// (world_size * n,) each: parameters.
    wholes: Vec<Tensor>,
    /// (n,) each: this rank's parts of them.
    mine: Vec<Tensor>,
    /// (n,) each: the mean over ranks of this rank's parts of the gradients, views of `gradient`.
    gradients: Vec<Tensor>,
    gradient: Tensor,
    /// What the optimizer steps: `mine` themselves, or float32 copies.
    stepped: Vec<(String, Tensor)>,
    /// The gradients of `stepped`: `gradient`, or a float32 copy.
    stepped_by: Tensor,
}

impl Zero1 {
    /// Wraps a replica: every rank takes rank 0's parameters. Those that cannot be sharded in place move into flat
    /// buffers; all stay the same tensors.
    pub fn new(replica: Replica, optimizer: Box<dyn Optimizer>, stepping: Stepping) -> Result<Self> {
        let Replica { parameters, collective, options } = replica;
        broadcast_parameters(parameters, collective)?;
        let units = planned(&trained(parameters), options.bucket_bytes()?);
        let shard = |(number, unit): (usize, &Vec<_>)| Shard::new(number, unit, collective);
        let shards = units.iter().enumerate().map(shard).collect::<Result<_>>()?;
        let sharded = Sharded { shards, optimizer, collective: collective.clone(), stepped_in_backward: 0 };
        let sharded = Arc::new(Mutex::new(sharded));
        let shared = sharded.clone();
        let launch = move |unit: usize, _: &Vec<_>| match stepping {
            Stepping::OnCall => lock(&shared).reduce(unit),
            Stepping::InBackward => lock(&shared).step_in_backward(unit),
        };
        Ok(Self { ordered: OrderedLaunch::new(units, launch)?, sharded, stepping })
    }

    /// Steps this rank's shards and gathers those of the other ranks. Call it after
    /// [`DataParallel::finish_gradient_synchronization`].
    ///
    /// # Errors
    /// After one the ranks no longer agree and the run must end.
    pub fn step(&mut self) -> Result<()> {
        let mut sharded = lock(&self.sharded);
        let (stepped, shards) = (std::mem::take(&mut sharded.stepped_in_backward), sharded.shards.len());
        if self.stepping == Stepping::InBackward {
            ensure!(stepped == shards, "{stepped} of {shards} shards have been stepped: has backward run?");
            return Ok(());
        }
        // All gathers start before the first wait: the next shard is stepped while this one is gathered.
        let gathers = (0..shards).map(|unit| sharded.step(unit)).collect::<Result<Vec<_>>>()?;
        gathers.into_iter().try_for_each(|work| work.wait().context("gathering updated parameters"))
    }

    /// Values that this rank keeps state for, with the padding of its shards.
    pub fn owned_numel(&self) -> usize {
        lock(&self.sharded).shards.iter().flat_map(|shard| &shard.mine).map(Tensor::numel).sum()
    }
}

impl Sharded {
    /// Starts averaging this rank's shard of a bucket's gradients.
    fn reduce(&self, unit: usize) -> Result<Box<dyn Work>> {
        let shard = &self.shards[unit];
        self.collective.reduce_scatter_coalesced_async(&shard.gradients, &shard.members.gradients()?, Op::Average)
    }

    /// Steps one shard and starts gathering its bucket's updated parameters.
    fn step(&mut self, unit: usize) -> Result<Box<dyn Work>> {
        let Self { shards, optimizer, collective, .. } = self;
        let shard = &shards[unit];
        shard.step(optimizer.as_mut())?;
        let gather = collective.all_gather_coalesced_async(&shard.wholes, &shard.mine);
        gather.context("starting to gather updated parameters")
    }

    /// Reduces and then steps on the side stream, while this thread's own stream goes on. No later work of this pass
    /// reads the bucket's parameters: a parameter's gradient is complete when the last operation that used it has been
    /// differentiated, and the reduction waits for what backward has launched until then.
    fn step_in_backward(&mut self, unit: usize) -> Result<Box<dyn Work>> {
        ensure!(
            self.stepped_in_backward < self.shards.len(),
            "this step's gradients have been used already: run all passes but the last one under no_sync, then call step"
        );
        self.stepped_in_backward += 1;
        let reduced = self.reduce(unit)?;
        on_side_stream(self.collective.device(), || {
            reduced.wait().context("reducing gradients")?;
            self.step(unit)
        })
    }
}

/// Each rank averages only the gradients of its shards. The parameters' own gradients stay local, so clipping by their
/// norm would need another collective.
impl DataParallel for Zero1 {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        self.ordered.finish_gradient_synchronization()
    }

    fn set_gradient_synchronization(&mut self, enabled: bool) {
        self.ordered.set_gradient_synchronization(enabled);
    }
}

impl Members {
    fn new(unit: &[(String, Tensor)], world_size: usize) -> Result<Self> {
        let cuts = |(_, parameter): &(String, Tensor)| {
            parameter.is_contiguous() && parameter.numel() % (world_size * alignment_of(parameter.kind())) == 0
        };
        let (whole, rest): (Vec<_>, Vec<_>) = trained(unit).into_iter().partition(cuts);
        let rest = (!rest.is_empty()).then(|| Bucket::new(rest, world_size)).transpose()?;
        Ok(Self { whole, rest })
    }

    /// (world_size * n,) each: the gradients that backward left, where they lie.
    fn gradients(&self) -> Result<Vec<Tensor>> {
        let flat = |(name, parameter): &(String, Tensor)| {
            gradient_of(name, parameter)?.f_view([-1]).with_context(|| format!("the gradient of {name}"))
        };
        let mut gradients = self.whole.iter().map(flat).collect::<Result<Vec<_>>>()?;
        if let Some(rest) = &self.rest {
            rest.collect()?;
            gradients.push(rest.flat.shallow_clone());
        }
        Ok(gradients)
    }

    /// (world_size * n,) each, named: the parameters, of which those of the rest move into a flat buffer.
    fn parameters(&self, number: usize) -> Result<Vec<(String, Tensor)>> {
        let flat = |(name, parameter): &(String, Tensor)| Ok((name.clone(), parameter.f_detach()?.f_view([-1])?));
        let mut parameters = self.whole.iter().map(flat).collect::<Result<Vec<_>>>()?;
        if let Some(rest) = &self.rest {
            let flat = rest.flat.f_zeros_like()?;
            let places = views_of(&flat, rest.parameters.iter().map(|(_, parameter)| parameter.size()))?;
            for ((_, parameter), mut place) in rest.parameters.iter().zip(places) {
                place.f_copy_(&parameter.f_detach()?)?;
                parameter.shallow_clone().f_set_data(&place)?;
            }
            parameters.push((format!("the rest of bucket {number}"), flat));
        }
        Ok(parameters)
    }
}

impl Shard {
    fn new(number: usize, unit: &[(String, Tensor)], collective: &Shared) -> Result<Self> {
        let members = Members::new(unit, collective.world_size())?;
        let (names, wholes): (Vec<_>, Vec<_>) = members.parameters(number)?.into_iter().unzip();
        let mine = wholes.iter().map(|whole| {
            let numel = whole.size()[0] / collective.world_size() as i64;
            Ok(whole.f_narrow(0, collective.rank() as i64 * numel, numel)?.f_detach()?)
        });
        let mine: Vec<Tensor> = mine.collect::<Result<_>>()?;
        let kind = mine[0].kind();
        let stepped_kind = if matches!(kind, Kind::Half | Kind::BFloat16) { Kind::Float } else { kind };
        let gradient =
            Tensor::f_zeros([mine.iter().map(Tensor::numel).sum::<usize>() as i64], (kind, mine[0].device()))?;
        // Without a copy where the kind is the same.
        let stepped_by = gradient.f_to_kind(stepped_kind)?;
        let gradients = views_of(&gradient, mine.iter().map(Tensor::size))?;
        let mut stepped = Vec::with_capacity(mine.len());
        for ((name, mine), gradient) in
            names.iter().zip(&mine).zip(views_of(&stepped_by, mine.iter().map(Tensor::size))?)
        {
            let own = mine.f_to_kind(stepped_kind)?;
            set_grad(&own, &gradient)?;
            stepped.push((format!("shard of {name}"), own));
        }
        Ok(Self { members, wholes, mine, gradients, gradient, stepped, stepped_by })
    }

    fn step(&self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let is_narrow = self.stepped_by.kind() != self.gradient.kind();
        if is_narrow {
            self.stepped_by.shallow_clone().f_copy_(&self.gradient)?;
        }
        optimizer.step(&self.stepped)?;
        if is_narrow {
            copy_all(self.mine.iter().zip(self.stepped.iter().map(|(_, stepped)| stepped)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::torch::autograd::backward;

    #[test]
    fn evenly_divisible_parameters_are_sharded_in_place_and_others_in_a_buffer() {
        let leaf = |name: &str, tensor: Tensor| (name.to_string(), tensor.set_requires_grad(true));
        let ones = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
        let unit = [
            leaf("even", ones(&[4, 6])),
            leaf("odd", ones(&[5])),
            leaf("short", ones(&[4])),
            leaf("turned", ones(&[8, 3]).transpose(0, 1)),
        ];
        let members = Members::new(&unit, 2).unwrap();
        let names =
            |parameters: &[(String, Tensor)]| parameters.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let rest = &members.rest.as_ref().unwrap().parameters;
        assert_eq!(
            (names(&members.whole), names(rest)),
            (vec!["even".into()], ["odd", "short", "turned"].map(String::from).to_vec())
        );

        let parameters = members.parameters(7).unwrap();
        assert_eq!(names(&parameters), ["even", "the rest of bucket 7"]);
        assert_eq!(parameters[0].1.data_ptr(), unit[0].1.data_ptr());
        backward(&unit.iter().map(|(_, parameter)| (parameter * 3.0).sum(Kind::Float)).sum()).unwrap();
        let gradients = members.gradients().unwrap();
        assert_eq!(gradients[0].data_ptr(), unit[0].1.grad().data_ptr());
        let sizes: Vec<_> = gradients.iter().map(Tensor::size).collect();
        // Eight, four and twenty-four, aligned.
        assert_eq!(sizes, [[24], [40]]);
        assert_eq!(parameters.iter().map(|(_, whole)| whole.size()).collect::<Vec<_>>(), sizes);
        assert_eq!(gradients[1].sum(Kind::Float).double_value(&[]), 3.0 * (5.0 + 4.0 + 24.0));
    }
}
