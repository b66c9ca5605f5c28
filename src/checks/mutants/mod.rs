//! Deliberately broken strategies and collectives. The checks of data parallelism must detect each of them.
//!
//! They are compiled into the program because a check trains in rank processes, which make their trainer by name with
//! [`trainer`]. Only checks use them.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use tch::Tensor;

use crate::collective::timeline::Timeline;
use crate::collective::{Collective, Op, Shared, Work};
use crate::model::optim::Optimizer;
use crate::parallel::trainer::Trainer;
use crate::parallel::{Options, Strategy};

mod overlapped;
mod replicated;

/// Broken strategies.
pub const MUTANTS: &[Strategy] = &[
    // The division by the world size is forgotten.
    Strategy { name: "mutant_summed", construct: |p, c, o| replicated::with(CollectiveFault::Summed, p, c, o) },
    // Only the first trained parameter's gradient is averaged.
    Strategy { name: "mutant_only_first", construct: replicated::only_first },
    // A weight that two layers share is handled once per use: summed once, divided twice.
    Strategy { name: "mutant_tied_twice", construct: replicated::tied_twice },
    // Communicated before the backward pass has accumulated: the ranks average the previous step's gradients.
    Strategy { name: "mutant_stale", construct: replicated::stale },
    // Gradients are never communicated.
    Strategy { name: "mutant_local", construct: |p, c, o| replicated::with(CollectiveFault::Local, p, c, o) },
    // No initial parameter is broadcast.
    Strategy {
        name: "mutant_no_broadcast",
        construct: |p, c, o| replicated::with(CollectiveFault::NoBroadcast, p, c, o),
    },
    // Only parameters that train are broadcast.
    Strategy { name: "mutant_frozen_apart", construct: replicated::frozen_apart },
    // Of two ranks, the last one's values are broadcast, and rank 0 loses its own.
    Strategy {
        name: "mutant_last_rank_leads",
        construct: |p, c, o| replicated::with(CollectiveFault::WrongRoot, p, c, o),
    },
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
pub fn trainer(
    name: &str,
    parameters: &[(String, Tensor)],
    optimizer: Box<dyn Optimizer>,
    collective: &Shared,
    options: &Options,
) -> Result<Trainer> {
    let (name, collective) = faulty(name, collective)?;
    match MUTANTS.iter().find(|mutant| mutant.name == name) {
        Some(mutant) => Trainer::replicated(mutant, parameters, optimizer, &collective, options),
        None => Trainer::new(name, parameters, optimizer, &collective, options),
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

/// Work that has ended already.
struct Done;

impl Work for Done {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl Faulty {
    fn has(&self, fault: CollectiveFault, tensors: &[Tensor]) -> bool {
        self.fault == fault && tensors.iter().all(Tensor::is_floating_point)
    }

    fn op(&self, op: Op) -> Op {
        if self.fault == CollectiveFault::Summed { Op::Sum } else { op }
    }

    /// The part of `whole` that belongs to rank (rank + `offset`) mod world size.
    fn shard(&self, whole: &Tensor, offset: usize) -> Result<Tensor> {
        let shards = whole.f_chunk(self.world_size() as i64, 0)?;
        Ok(shards[(self.rank() + offset) % self.world_size()].shallow_clone())
    }
}

impl Collective for Faulty {
    fn backend(&self) -> &'static str {
        self.sound.backend()
    }

    fn device(&self) -> tch::Device {
        self.sound.device()
    }

    fn rank(&self) -> usize {
        self.sound.rank()
    }

    fn world_size(&self) -> usize {
        self.sound.world_size()
    }

    fn all_reduce_coalesced_async(&self, tensors: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        if self.has(CollectiveFault::Local, tensors) {
            return Ok(Box::new(Done));
        }
        self.sound.all_reduce_coalesced_async(tensors, self.op(op))
    }

    fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Box<dyn Work>> {
        match self.fault {
            CollectiveFault::NoBroadcast => Ok(Box::new(Done)),
            CollectiveFault::WrongRoot => self.sound.broadcast_async(tensor, (root + 1) % self.world_size()),
            _ => self.sound.broadcast_async(tensor, root),
        }
    }

    fn all_gather_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor]) -> Result<Box<dyn Work>> {
        if self.has(CollectiveFault::NoGather, inputs) {
            for (output, input) in outputs.iter().zip(inputs) {
                self.shard(output, 0)?.f_copy_(input)?;
            }
            return Ok(Box::new(Done));
        }
        self.sound.all_gather_coalesced_async(outputs, inputs)
    }

    fn reduce_scatter_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        if !matches!(self.fault, CollectiveFault::Local | CollectiveFault::WrongShard) {
            return self.sound.reduce_scatter_coalesced_async(outputs, inputs, self.op(op));
        }
        for (output, input) in outputs.iter().zip(inputs) {
            let mine = if self.fault == CollectiveFault::Local {
                self.shard(input, 0)?
            } else {
                let whole = input.copy();
                self.sound.all_reduce(&whole, op)?;
                self.shard(&whole, 1)?
            };
            output.shallow_clone().f_copy_(&mine)?;
        }
        Ok(Box::new(Done))
    }

    fn barrier(&self) -> Result<()> {
        self.sound.barrier()
    }

    fn timeline(&self) -> &Timeline {
        self.sound.timeline()
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
