//! Data parallelism: every strategy that trains one model on many ranks, one file a strategy.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::collective::Shared;

pub mod bucket;
pub mod flat;
pub mod fused;
pub mod naive;
pub mod ordered_launch;
pub mod overlap_bucketed;
pub mod overlap_coalesced;
pub mod overlap_individual_parameters;
pub mod sharded_optimizer;
pub mod trainer;
pub mod zero1;

/// One line a strategy, in the handout's order; the last is not in the handout.
pub const STRATEGIES: &[Strategy] = &[
    naive::STRATEGY,
    flat::STRATEGY,
    overlap_individual_parameters::STRATEGY,
    overlap_bucketed::STRATEGY,
    overlap_coalesced::STRATEGY,
];

/// A way to keep the replicas of a model equal while each rank trains on its own rows.
pub struct Strategy {
    pub name: &'static str,
    /// Wraps a replica: afterwards every rank holds rank 0's parameters, frozen ones too, and the gradients of later
    /// backward passes are averaged.
    pub construct: fn(Replica) -> Result<Box<dyn DataParallel>>,
}

/// What a strategy wraps.
#[derive(Clone, Copy)]
pub struct Replica<'a> {
    /// Each tensor once.
    pub parameters: &'a [(String, Tensor)],
    pub collective: &'a Shared,
    pub options: &'a Options,
}

/// The options of all strategies; each strategy reads those that it needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// The most that one bucket of gradients may hold, in units of 10^6 bytes.
    pub bucket_size_mb: f64,
}

impl Options {
    /// The most bytes of a bucket.
    ///
    /// # Errors
    /// When no bucket can have that size.
    pub fn bucket_bytes(&self) -> Result<f64> {
        let Self { bucket_size_mb } = *self;
        ensure!(
            bucket_size_mb.is_finite() && bucket_size_mb > 0.0,
            "bucket_size_mb is {bucket_size_mb}: it must be finite and above zero"
        );
        Ok(bucket_size_mb * 1e6)
    }
}

/// A replica under a strategy.
///
/// Gradients accumulate as in a single process: over several backward passes, each followed by
/// `finish_gradient_synchronization`, or with all but the last under [`no_sync`], which communicates once.
///
/// A trained parameter without a gradient at the end of a step is an error. Counting it as zero would be wrong if no
/// rank used it: momentum and weight decay would change a parameter that a single process leaves alone. Asking the
/// other ranks would cost every step a collective that the host has to wait for. A gradient of zeros is averaged like
/// any other, so a parameter that only some ranks use can be given one.
pub trait DataParallel: Send {
    /// Call it after backward and before the optimizer's step: afterwards every trained parameter's gradient is the
    /// mean over the ranks, on every rank. On CUDA this thread does not wait; its later launches do.
    ///
    /// # Errors
    /// Names the parameter; after one the ranks no longer agree and the run must end.
    fn finish_gradient_synchronization(&mut self) -> Result<()>;

    /// Whether later backward passes communicate; [`no_sync`] calls it. The default does nothing, for strategies in
    /// which only `finish_gradient_synchronization` communicates.
    fn set_gradient_synchronization(&mut self, _enabled: bool) {}
}

/// A strategy that communicates only at the end of a step is what it does there.
impl<F: FnMut() -> Result<()> + Send> DataParallel for F {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        self()
    }
}

/// Runs `passes`, whose backward passes accumulate gradients on each rank and communicate nothing (PyTorch's `no_sync`).
pub fn no_sync<T>(parallel: &mut dyn DataParallel, passes: impl FnOnce() -> Result<T>) -> Result<T> {
    parallel.set_gradient_synchronization(false);
    let outcome = passes();
    parallel.set_gradient_synchronization(true);
    outcome
}

/// The strategy of that name.
pub fn by_name(name: &str) -> Result<&'static Strategy> {
    STRATEGIES.iter().find(|strategy| strategy.name == name).with_context(|| {
        let known: Vec<_> = STRATEGIES.iter().map(|strategy| strategy.name).collect();
        format!("no strategy {name:?}; there are: {}", known.join(", "))
    })
}

/// Gives every rank the values of rank 0, in place, of frozen parameters too: ranks may have initialised them
/// differently.
///
/// # Errors
/// When the ranks' models differ, before anything else is exchanged.
pub fn broadcast_parameters(parameters: &[(String, Tensor)], collective: &Shared) -> Result<()> {
    check_same_model(parameters, collective)?;
    for (name, parameter) in parameters {
        collective.broadcast(&parameter.f_detach()?, 0).with_context(|| format!("broadcasting {name}"))?;
    }
    Ok(())
}

/// Ranks with different parameters would pair each other's messages wrongly: Gloo then adds unrelated tensors, and NCCL
/// hangs.
fn check_same_model(parameters: &[(String, Tensor)], collective: &Shared) -> Result<()> {
    let mut hasher = DefaultHasher::new();
    for (name, parameter) in parameters {
        (name, parameter.size(), parameter.kind(), parameter.requires_grad()).hash(&mut hasher);
    }
    let fingerprint = Tensor::f_from_slice(&[hasher.finish() as i64])?.f_to_device(collective.device())?;
    for (rank, theirs) in collective.all_gather(&fingerprint)?.iter().enumerate() {
        ensure!(
            theirs.f_int64_value(&[0])? == fingerprint.f_int64_value(&[0])?,
            "the model of rank {rank} is not that of rank {}: names, shapes, dtypes and what is frozen must agree",
            collective.rank()
        );
    }
    Ok(())
}

/// The parameters, sharing their tensors.
pub fn shared(parameters: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    parameters.iter().map(|(name, parameter)| (name.clone(), parameter.shallow_clone())).collect()
}

/// The parameters that train, in order, sharing their tensors.
pub fn trained(parameters: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let mut trained = shared(parameters);
    trained.retain(|(_, parameter)| parameter.requires_grad());
    trained
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
    fn strategies_are_found_by_their_unique_names() {
        let names: Vec<_> = STRATEGIES.iter().map(|strategy| strategy.name).collect();
        for name in &names {
            assert_eq!(names.iter().filter(|other| *other == name).count(), 1, "{name}");
            assert_eq!(by_name(name).unwrap().name, *name);
        }
        assert!(by_name("zero").err().unwrap().to_string().contains("there are: naive"));
    }
}
