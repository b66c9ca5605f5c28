//! Broken strategies that communicate while backward runs.
//!
//! A race would fail only sometimes. Each mutant therefore waits immediately for what it starts too early, so that it
//! always loses the race.

use anyhow::Result;
use tch::Tensor;

use crate::collective::{Op, Work};
use crate::parallel::bucket::{Bucket, buckets, views_of};
use crate::parallel::ordered_launch::OrderedLaunch;
use crate::parallel::{DataParallel, Replica, broadcast_parameters, overlap_bucketed, shared, trained};
use crate::torch::autograd::{release_grad, set_grad};

/// What [`OrderedLaunch::new`] takes: whose hooks start each bucket.
type Units = Vec<Vec<(String, Tensor)>>;

/// Correct buckets with gradient views, averaged when the hooks of `units_of` have fired.
fn with_units(replica: Replica, units_of: fn(&[Bucket]) -> Units) -> Result<Box<dyn DataParallel>> {
    let Replica { parameters, collective, options } = replica;
    broadcast_parameters(parameters, collective)?;
    let buckets = buckets(&trained(parameters), options.bucket_bytes()?)?;
    for bucket in &buckets {
        let members = &bucket.parameters;
        let views = views_of(&bucket.flat, members.iter().map(|(_, parameter)| parameter.size()))?;
        members.iter().zip(&views).try_for_each(|((_, parameter), view)| set_grad(parameter, view))?;
    }
    let (units, collective) = (units_of(&buckets), collective.clone());
    let launch = move |unit: usize, _: &Vec<_>| {
        collective.all_reduce(&buckets[unit].flat, Op::Average)?;
        Ok(Box::new(()) as Box<dyn Work>)
    };
    Ok(Box::new(OrderedLaunch::new(units, launch)?))
}

pub fn early(replica: Replica) -> Result<Box<dyn DataParallel>> {
    with_units(replica, |buckets| buckets.iter().map(|bucket| shared(&bucket.parameters[..1])).collect())
}

pub fn wrong_hook(replica: Replica) -> Result<Box<dyn DataParallel>> {
    with_units(replica, |buckets| {
        let hooked = (0..buckets.len()).map(|unit| unit.saturating_sub(1));
        hooked.map(|unit| shared(&buckets[unit].parameters)).collect()
    })
}

pub fn stale_view(replica: Replica) -> Result<Box<dyn DataParallel>> {
    with_units(replica, |buckets| buckets.iter().map(|bucket| shared(&bucket.parameters)).collect())
}

struct FirstStepOnly {
    sound: Option<Box<dyn DataParallel>>,
}

pub fn first_step_only(replica: Replica) -> Result<Box<dyn DataParallel>> {
    let sound = (overlap_bucketed::STRATEGY.construct)(replica)?;
    Ok(Box::new(FirstStepOnly { sound: Some(sound) }))
}

impl DataParallel for FirstStepOnly {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        self.sound.take().map_or(Ok(()), |mut sound| sound.finish_gradient_synchronization())
    }
}

struct ForgetsPasses {
    sound: Box<dyn DataParallel>,
    trained: Vec<(String, Tensor)>,
}

pub fn forgets_passes(replica: Replica) -> Result<Box<dyn DataParallel>> {
    let sound = (overlap_bucketed::STRATEGY.construct)(replica)?;
    Ok(Box::new(ForgetsPasses { sound, trained: trained(replica.parameters) }))
}

impl DataParallel for ForgetsPasses {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        self.sound.finish_gradient_synchronization()
    }

    fn set_gradient_synchronization(&mut self, enabled: bool) {
        if enabled {
            self.trained.iter().for_each(|(_, parameter)| release_grad(parameter).expect("releasing a gradient"));
        }
        self.sound.set_gradient_synchronization(enabled);
    }
}
