//! Trains a replica on a rank with a strategy and an optimizer, or with a sharded optimizer, chosen by name.

use anyhow::Result;
use tch::Tensor;

use super::sharded_optimizer::{ParamGroup, ShardedOptimizer};
use super::zero1::{Stepping, Zero1};
use super::{DataParallel, Replica, STRATEGIES, Strategy, by_name, overlap_bucketed, trained};
use crate::model::optim::Optimizer;

/// The sharded optimizer with the bucketed strategy, which averages the gradients.
pub const SHARDED_OPTIMIZER: &str = "sharded_optimizer";
pub const ZERO1: &str = "zero1";
/// ZeRO-1 that steps each shard while backward goes on.
pub const ZERO1_IN_BACKWARD: &str = "zero1_in_backward";

/// When the ZeRO-1 variant of that name steps; `None` for any other name.
pub fn zero1(name: &str) -> Option<Stepping> {
    match name {
        ZERO1 => Some(Stepping::OnCall),
        ZERO1_IN_BACKWARD => Some(Stepping::InBackward),
        _ => None,
    }
}

/// Every name that [`Trainer::new`] accepts.
pub fn names() -> impl Iterator<Item = &'static str> {
    STRATEGIES.iter().map(|strategy| strategy.name).chain([SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD])
}

pub enum Trainer {
    /// Every rank steps every parameter.
    Replicated {
        parallel: Box<dyn DataParallel>,
        parameters: Vec<(String, Tensor)>,
        optimizer: Box<dyn Optimizer>,
    },
    Sharded {
        parallel: Box<dyn DataParallel>,
        optimizer: ShardedOptimizer,
    },
    Zero1(Zero1),
}

impl Trainer {
    /// Wraps a replica as [`Strategy::construct`] does, by the name of a strategy or of an optimizer that shards.
    pub fn new(name: &str, replica: Replica, optimizer: Box<dyn Optimizer>) -> Result<Self> {
        if let Some(stepping) = zero1(name) {
            return Ok(Self::Zero1(Zero1::new(replica, optimizer, stepping)?));
        }
        match name {
            SHARDED_OPTIMIZER => Self::sharded(&overlap_bucketed::STRATEGY, replica, optimizer),
            _ => Self::replicated(by_name(name)?, replica, optimizer),
        }
    }

    /// `strategy` averages the gradients, and every rank steps every parameter.
    pub fn replicated(strategy: &Strategy, replica: Replica, optimizer: Box<dyn Optimizer>) -> Result<Self> {
        let parallel = (strategy.construct)(replica)?;
        Ok(Self::Replicated { parallel, parameters: trained(replica.parameters), optimizer })
    }

    /// `strategy` averages the gradients, and each parameter is stepped by the rank that owns it.
    pub fn sharded(strategy: &Strategy, replica: Replica, optimizer: Box<dyn Optimizer>) -> Result<Self> {
        let parallel = (strategy.construct)(replica)?;
        let group = ParamGroup::new(replica.parameters, optimizer);
        Ok(Self::Sharded { parallel, optimizer: ShardedOptimizer::new(vec![group], replica.collective)? })
    }

    pub fn parallel(&mut self) -> &mut dyn DataParallel {
        match self {
            Self::Replicated { parallel, .. } | Self::Sharded { parallel, .. } => parallel.as_mut(),
            Self::Zero1(zero1) => zero1,
        }
    }

    /// One step of the optimizer, after which the replicas are equal.
    pub fn step(&mut self) -> Result<()> {
        match self {
            Self::Replicated { parameters, optimizer, .. } => optimizer.step(parameters),
            Self::Sharded { optimizer, .. } => optimizer.step(),
            Self::Zero1(zero1) => zero1.step(),
        }
    }

    /// Values that this rank keeps optimizer state for.
    pub fn owned_numel(&self) -> usize {
        match self {
            Self::Replicated { parameters, .. } => parameters.iter().map(|(_, parameter)| parameter.numel()).sum(),
            Self::Sharded { optimizer, .. } => optimizer.owned_numel(),
            Self::Zero1(zero1) => zero1.owned_numel(),
        }
    }
}
