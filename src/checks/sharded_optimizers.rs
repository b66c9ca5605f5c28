//! The sharded optimizers that the protocol and the golden cases test, by name: ours and the mutants.

use anyhow::{Context as _, Result, bail};

use super::mutants;
use crate::collective::Shared;
use crate::parallel::sharded_optimizer::{ParamGroup, ShardedOptimizer};
use crate::parallel::zero1::Zero1;
use crate::parallel::{DataParallel as _, Options, Replica, trainer};

/// Steps every parameter on every rank: correct values, but no memory saved.
pub const UNSHARDED: &str = "mutant_unsharded";
/// Shards a parameter group that is added later, but does not broadcast its new values.
pub const ADDED_GROUP_APART: &str = "mutant_added_group_apart";

/// Makes a sharded optimizer by name, including mutants.
pub enum TestedOptimizer {
    /// Each steps the groups that were added while it was the last.
    Sharded(Vec<ShardedOptimizer>),
    Zero1(Zero1),
    Unsharded(Vec<ParamGroup>),
}

impl TestedOptimizer {
    /// Errors: an unknown name.
    pub fn new(name: &str, group: ParamGroup, collective: &Shared, options: &Options) -> Result<Self> {
        let (name, collective) = mutants::faulty(name, collective)?;
        if let Some(stepping) = trainer::zero1(name) {
            let replica = Replica { parameters: &group.parameters, collective: &collective, options };
            return Ok(Self::Zero1(Zero1::new(replica, group.optimizer, stepping)?));
        }
        Ok(match name {
            trainer::SHARDED_OPTIMIZER => Self::Sharded(vec![ShardedOptimizer::new(vec![group], &collective)?]),
            UNSHARDED => Self::Unsharded(vec![group]),
            ADDED_GROUP_APART => {
                let (_, silent) = mutants::faulty("no_broadcast@", &collective)?;
                let first = ShardedOptimizer::new(vec![group], &collective)?;
                Self::Sharded(vec![first, ShardedOptimizer::new(Vec::new(), &silent)?])
            }
            _ => bail!("no sharded optimizer {name:?}"),
        })
    }

    /// Adds a parameter group to the optimizer that was made last. Errors: ZeRO-1, which has one group.
    pub fn add(&mut self, group: ParamGroup) -> Result<()> {
        match self {
            Self::Sharded(sharded) => sharded.last_mut().context("no optimizer")?.add_param_group(group)?,
            Self::Unsharded(groups) => groups.push(group),
            Self::Zero1(_) => bail!("ZeRO-1 shards the buckets that it is built with: it has one group"),
        }
        Ok(())
    }

    pub fn step(&mut self) -> Result<()> {
        match self {
            Self::Sharded(sharded) => sharded.iter_mut().try_for_each(ShardedOptimizer::step),
            Self::Zero1(zero1) => {
                zero1.finish_gradient_synchronization()?;
                zero1.step()
            }
            Self::Unsharded(groups) => groups.iter_mut().try_for_each(|group| group.optimizer.step(&group.parameters)),
        }
    }
}
