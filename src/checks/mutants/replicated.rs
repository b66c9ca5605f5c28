//! Broken strategies that communicate after the backward pass: the naive one with a mistake.

use anyhow::Result;
use tch::Tensor;

use super::{CollectiveFault, with_fault};
use crate::collective::Shared;
use crate::parallel::{DataParallel, Options, broadcast_parameters, gradient_of, naive, trained};

type Parameters = [(String, Tensor)];

fn sound(parameters: &Parameters, collective: &Shared, options: &Options) -> Result<Box<dyn DataParallel>> {
    (naive::STRATEGY.construct)(parameters, collective, options)
}

/// With a faulty collective.
pub fn with(
    fault: CollectiveFault,
    parameters: &Parameters,
    collective: &Shared,
    options: &Options,
) -> Result<Box<dyn DataParallel>> {
    sound(parameters, &with_fault(fault, collective), options)
}

pub fn frozen_apart(parameters: &Parameters, collective: &Shared, options: &Options) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(&trained(parameters), collective)?;
    with(CollectiveFault::NoBroadcast, parameters, collective, options)
}

pub fn only_first(parameters: &Parameters, collective: &Shared, options: &Options) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    sound(&trained(parameters)[..1], collective, options)
}

struct TiedTwice {
    sound: Box<dyn DataParallel>,
    /// Only the official tied model has a parameter with this name: the shared weight.
    shared: Option<(String, Tensor)>,
    world_size: f64,
}

pub fn tied_twice(parameters: &Parameters, collective: &Shared, options: &Options) -> Result<Box<dyn DataParallel>> {
    let sound = sound(parameters, collective, options)?;
    let shared = trained(parameters).into_iter().find(|(name, _)| name == "fc2.weight");
    Ok(Box::new(TiedTwice { sound, shared, world_size: collective.world_size() as f64 }))
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

pub fn stale(parameters: &Parameters, collective: &Shared, options: &Options) -> Result<Box<dyn DataParallel>> {
    let (sound, trained) = (sound(parameters, collective, options)?, trained(parameters));
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
