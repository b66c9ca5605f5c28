//! Deliberately broken strategies and collectives. The checks of data parallelism must detect each of them.
//!
//! They are compiled into the program because a check trains in rank processes, which make their trainer by name with
//! [`trainer`]. Only checks use them.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use tch::Tensor;

use crate::collective::{Collective, Group, Op, Request, Shared, Work};
use crate::model::optim::Optimizer;
use crate::parallel::trainer::Trainer;
use crate::parallel::{Replica, Strategy};

mod overlapped;
mod replicated;

/// Broken strategies.
pub const MUTANTS: &[Strategy] = &[
    // The division by the world size is forgotten.
    Strategy { name: "mutant_summed", construct: |r| replicated::with(CollectiveFault::Summed, r) },
    // Only the first trained parameter's gradient is averaged.
    Strategy { name: "mutant_only_first", construct: replicated::only_first },
    // A weight that two layers share is handled once per use: summed once, divided twice.
    Strategy { name: "mutant_tied_twice", construct: replicated::tied_twice },
    // Communicated before the backward pass has accumulated: the ranks average the previous step's gradients.
    Strategy { name: "mutant_stale", construct: replicated::stale },
    // Gradients are never communicated.
    Strategy { name: "mutant_local", construct: |r| replicated::with(CollectiveFault::Local, r) },
    // No initial parameter is broadcast.
    Strategy { name: "mutant_no_broadcast", construct: |r| replicated::with(CollectiveFault::NoBroadcast, r) },
    // Only parameters that train are broadcast.
    Strategy { name: "mutant_frozen_apart", construct: replicated::frozen_apart },
    // Of two ranks, the last one's values are broadcast, and rank 0 loses its own.
    Strategy { name: "mutant_last_rank_leads", construct: |r| replicated::with(CollectiveFault::WrongRoot, r) },
    // A bucket is started when the first of its gradients is ready.
    Strategy { name: "mutant_bucket_early", construct: overlapped::early },
    // Each bucket is started by the hooks of the one before it.
    Strategy { name: "mutant_wrong_hook", construct: overlapped::wrong_hook },
    // Gradients become views of their buckets once, at construction, and not again after they are released.
    Strategy { name: "mutant_stale_view", construct: overlapped::stale_view },
    // The buckets' readiness is never reset.
    Strategy { name: "mutant_first_step_only", construct: overlapped::first_step_only },
    // Gradients accumulated under `no_sync` are lost when synchronisation is enabled again.
    Strategy { name: "mutant_forgets_passes", construct: overlapped::forgets_passes },
];

/// A fault of the collectives. A check cannot distinguish it from a trainer that makes the call wrongly or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectiveFault {
    /// The mean is a sum: the division is missing.
    Summed,
    /// Reductions return this rank's own values.
    Local,
    /// Broadcasts do nothing.
    NoBroadcast,
    /// Broadcasts use the rank after the owner as the root.
    WrongRoot,
    /// An all-gather fills in only this rank's part.
    NoGather,
    /// A reduce-scatter gives each rank the next rank's shard.
    WrongShard,
}

pub const FAULTS: &[(&str, CollectiveFault)] = &[
    ("summed", CollectiveFault::Summed),
    ("local", CollectiveFault::Local),
    ("no_broadcast", CollectiveFault::NoBroadcast),
    ("wrong_root", CollectiveFault::WrongRoot),
    ("no_gather", CollectiveFault::NoGather),
    ("wrong_shard", CollectiveFault::WrongShard),
];

/// Like [`Trainer::new`], also for the names of [`MUTANTS`], and with a faulty collective for names like `fault@trainer`.
pub fn trainer(name: &str, replica: Replica, optimizer: Box<dyn Optimizer>) -> Result<Trainer> {
    let (name, collective) = faulty(name, replica.collective)?;
    let replica = Replica { collective: &collective, ..replica };
    match MUTANTS.iter().find(|mutant| mutant.name == name) {
        Some(mutant) => Trainer::replicated(mutant, replica, optimizer),
        None => Trainer::new(name, replica, optimizer),
    }
}

/// Splits `fault@trainer` into the trainer's name and the collective with that fault. Other names keep the collective.
pub fn faulty<'a>(name: &'a str, collective: &Shared) -> Result<(&'a str, Shared)> {
    let Some((fault, trainer)) = name.split_once('@') else { return Ok((name, collective.clone())) };
    let (_, fault) = FAULTS.iter().find(|(known, _)| *known == fault).with_context(|| format!("no fault {fault:?}"))?;
    Ok((trainer, with_fault(*fault, collective)))
}

fn with_fault(fault: CollectiveFault, collective: &Shared) -> Shared {
    Arc::new(Faulty { sound: collective.clone(), fault })
}

/// A collective with one fault, for floating-point tensors only. Other tensors carry metadata of the model.
struct Faulty {
    sound: Shared,
    fault: CollectiveFault,
}

impl Faulty {
    /// The part of `whole` that belongs to rank (rank + `offset`) mod world size.
    fn shard(&self, whole: &Tensor, offset: usize) -> Result<Tensor> {
        let shards = whole.f_chunk(self.world_size() as i64, 0)?;
        Ok(shards[(self.rank() + offset) % self.world_size()].shallow_clone())
    }
}

impl Collective for Faulty {
    fn group(&self) -> &Group {
        self.sound.group()
    }

    fn start(&self, request: Request) -> Result<Box<dyn Work>> {
        let are_floats = |tensors: &[Tensor]| tensors.iter().all(Tensor::is_floating_point);
        let request = match (self.fault, request) {
            (CollectiveFault::Summed, Request::AllReduce { tensors, .. }) => {
                Request::AllReduce { tensors, op: Op::Sum }
            }
            (CollectiveFault::Summed, Request::ReduceScatter { outputs, inputs, .. }) => {
                Request::ReduceScatter { outputs, inputs, op: Op::Sum }
            }
            (CollectiveFault::Local, Request::AllReduce { tensors, .. }) if are_floats(tensors) => {
                return Ok(Box::new(()));
            }
            (CollectiveFault::Local, Request::ReduceScatter { outputs, inputs, .. }) => {
                for (output, input) in outputs.iter().zip(inputs) {
                    output.shallow_clone().f_copy_(&self.shard(input, 0)?)?;
                }
                return Ok(Box::new(()));
            }
            (CollectiveFault::WrongShard, Request::ReduceScatter { outputs, inputs, op }) => {
                for (output, input) in outputs.iter().zip(inputs) {
                    let whole = input.copy();
                    self.sound.all_reduce(&whole, op)?;
                    output.shallow_clone().f_copy_(&self.shard(&whole, 1)?)?;
                }
                return Ok(Box::new(()));
            }
            (CollectiveFault::NoBroadcast, Request::Broadcast { .. }) => return Ok(Box::new(())),
            (CollectiveFault::WrongRoot, Request::Broadcast { tensor, root }) => {
                Request::Broadcast { tensor, root: (root + 1) % self.world_size() }
            }
            (CollectiveFault::NoGather, Request::AllGather { outputs, inputs }) if are_floats(inputs) => {
                for (output, input) in outputs.iter().zip(inputs) {
                    self.shard(output, 0)?.f_copy_(input)?;
                }
                return Ok(Box::new(()));
            }
            (_, request) => request,
        };
        self.sound.start(request)
    }

    fn barrier(&self) -> Result<()> {
        self.sound.barrier()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::STRATEGIES;

    #[test]
    fn mutants_have_unique_names_and_none_is_a_strategy() {
        let names: Vec<_> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        for name in &names {
            assert!(name.starts_with("mutant_"), "{name}");
            assert_eq!(names.iter().filter(|other| *other == name).count(), 1, "{name}");
        }
        assert!(STRATEGIES.iter().all(|strategy| !names.contains(&strategy.name)));
    }
}
