//! Broken strategies that communicate after the backward pass: the naive one with a mistake.

use anyhow::Result;
use tch::Tensor;

use super::{CollectiveFault, with_fault};
use crate::parallel::{DataParallel, Replica, broadcast_parameters, gradient_of, naive, trained};

fn sound(replica: Replica) -> Result<Box<dyn DataParallel>> {
    (naive::STRATEGY.construct)(replica)
}

/// With a faulty collective.
pub fn with(fault: CollectiveFault, replica: Replica) -> Result<Box<dyn DataParallel>> {
    sound(Replica { collective: &with_fault(fault, replica.collective), ..replica })
}

pub fn frozen_apart(replica: Replica) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(&trained(replica.parameters), replica.collective)?;
    with(CollectiveFault::NoBroadcast, replica)
}

pub fn only_first(replica: Replica) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(replica.parameters, replica.collective)?;
    sound(Replica { parameters: &trained(replica.parameters)[..1], ..replica })
}

struct TiedTwice {
    sound: Box<dyn DataParallel>,
    /// Only the official tied model has a parameter with this name: the shared weight.
    shared: Option<(String, Tensor)>,
    world_size: f64,
}

pub fn tied_twice(replica: Replica) -> Result<Box<dyn DataParallel>> {
    let shared = trained(replica.parameters).into_iter().find(|(name, _)| name == "fc2.weight");
    let world_size = replica.collective.world_size() as f64;
    Ok(Box::new(TiedTwice { sound: sound(replica)?, shared, world_size }))
}

impl DataParallel for TiedTwice {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        self.sound.finish_gradient_synchronization()?;
        if let Some((name, parameter)) = &self.shared {
            let _ = gradient_of(name, parameter)?.f_div_scalar_(self.world_size)?;
        }
        Ok(())
    }
}

struct Stale {
    sound: Box<dyn DataParallel>,
    trained: Vec<(String, Tensor)>,
    previous: Vec<Tensor>,
}

pub fn stale(replica: Replica) -> Result<Box<dyn DataParallel>> {
    let (sound, trained) = (sound(replica)?, trained(replica.parameters));
    let previous = trained.iter().map(|(_, parameter)| parameter.f_zeros_like()).collect::<Result<_, _>>()?;
    Ok(Box::new(Stale { sound, trained, previous }))
}

impl DataParallel for Stale {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        for ((name, parameter), previous) in self.trained.iter().zip(&mut self.previous) {
            let mut gradient = gradient_of(name, parameter)?;
            let current = gradient.f_detach()?.copy();
            gradient.f_copy_(&std::mem::replace(previous, current))?;
        }
        self.sound.finish_gradient_synchronization()
    }
}
