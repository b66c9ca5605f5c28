//! Data parallelism: every strategy that trains one model on many ranks, one file a strategy.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::collective::Shared;

pub mod mutants;
pub mod naive;
pub mod protocol;

/// One line a strategy, in the handout's order.
pub const STRATEGIES: &[Strategy] = &[naive::STRATEGY];

/// A way to keep the replicas of a model equal while each rank trains on its own rows.
pub struct Strategy {
    pub name: &'static str,
    /// Wraps a replica: afterwards every rank holds rank 0's parameters, frozen ones too, and gradients of coming
    /// backward passes will be averaged. `parameters` are the replica's, each tensor once.
    pub construct: Construct,
}

pub type Construct = fn(&[(String, Tensor)], &Shared, &Options) -> Result<Box<dyn DataParallel>>;

/// What a strategy may be told; each reads what concerns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// The most that one bucket of gradients may hold, in units of 10^6 bytes.
    pub bucket_size_mb: f64,
}

/// A replica under a strategy.
pub trait DataParallel {
    /// Call after backward and before the optimizer's step: on return every trained parameter's gradient is the mean
    /// over the ranks, on every rank.
    ///
    /// # Errors
    /// Names the parameter; after one the ranks no longer agree and the run must end.
    fn finish_gradient_synchronization(&mut self) -> Result<()>;
}

/// The strategy of that name; the mutants can be asked for too, and are told from the rest by their name.
pub fn by_name(name: &str) -> Result<&'static Strategy> {
    STRATEGIES.iter().chain(mutants::MUTANTS).find(|strategy| strategy.name == name).with_context(|| {
        let known: Vec<_> = STRATEGIES.iter().map(|strategy| strategy.name).collect();
        format!("no strategy {name:?}; there are: {}", known.join(", "))
    })
}

/// Gives every rank the values of rank 0, in place. Frozen parameters are values too: ranks may have drawn them apart.
pub fn broadcast_parameters(parameters: &[(String, Tensor)], collective: &Shared) -> Result<()> {
    for (name, parameter) in parameters {
        collective.broadcast(&parameter.f_detach()?, 0).with_context(|| format!("broadcasting {name}"))?;
    }
    Ok(())
}

/// The parameters that train, in order, sharing their tensors.
pub fn trained(parameters: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let trains = |(_, parameter): &&(String, Tensor)| parameter.requires_grad();
    parameters.iter().filter(trains).map(|(name, parameter)| (name.clone(), parameter.shallow_clone())).collect()
}

/// The gradient that backward left on `parameter`; a missing one is an error, because a rank that left out a
/// collective would pair the others' calls wrongly.
pub fn gradient_of(name: &str, parameter: &Tensor) -> Result<Tensor> {
    let gradient = parameter.f_grad()?;
    gradient.defined().then_some(gradient).with_context(|| {
        format!("{name} has no gradient: the loss of every rank must use it, or it must be frozen on all of them")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_are_found_by_their_unique_names_and_no_mutant_is_registered() {
        let names: Vec<_> = STRATEGIES.iter().chain(mutants::MUTANTS).map(|strategy| strategy.name).collect();
        for name in &names {
            assert_eq!(names.iter().filter(|other| *other == name).count(), 1, "{name}");
            assert_eq!(by_name(name).unwrap().name, *name);
        }
        assert!(STRATEGIES.iter().all(|strategy| !strategy.name.starts_with("mutant")));
        assert!(mutants::MUTANTS.iter().all(|strategy| strategy.name.starts_with("mutant")));
        assert!(by_name("zero").err().unwrap().to_string().contains("there are: naive"));
    }
}
