//! What trains a replica on a rank, by name: a strategy with an optimizer beside it, or an optimizer that is sharded.

use anyhow::Result;
use tch::Tensor;

use super::sharded_optimizer::{ParamGroup, ShardedOptimizer};
use super::zero1::{Stepping, Zero1};
use super::{DataParallel, Options, STRATEGIES, by_name, mutants, overlap_bucketed, trained};
use crate::collective::Shared;
use crate::model::optim::Optimizer;

/// Under the bucketed strategy, which averages the gradients that the owners step by.
pub const SHARDED_OPTIMIZER: &str = "sharded_optimizer";
pub const ZERO1: &str = "zero1";
/// ZeRO-1 that steps each shard while backward goes on.
pub const ZERO1_IN_BACKWARD: &str = "zero1_in_backward";

/// How the ZeRO-1 of that name steps, if it is one.
pub fn zero1(name: &str) -> Option<Stepping> {
    match name {
        ZERO1 => Some(Stepping::OnCall),
        ZERO1_IN_BACKWARD => Some(Stepping::InBackward),
        _ => None,
    }
}

/// Every name that [`Trainer::new`] knows, mutants apart.
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
    /// Wraps a replica as [`super::Strategy::construct`] does. For mutants see [`mutants::faulty`].
    pub fn new(
        name: &str,
        parameters: &[(String, Tensor)],
        optimizer: Box<dyn Optimizer>,
        collective: &Shared,
        options: &Options,
    ) -> Result<Self> {
        let (name, collective) = mutants::faulty(name, collective)?;
        let parallel = |strategy: &super::Strategy| (strategy.construct)(parameters, &collective, options);
        if let Some(stepping) = zero1(name) {
            return Ok(Self::Zero1(Zero1::new(parameters, optimizer, &collective, options, stepping)?));
        }
        Ok(match name {
            SHARDED_OPTIMIZER => {
                let parallel = parallel(&overlap_bucketed::STRATEGY)?;
                let group = ParamGroup::new(parameters, optimizer);
                Self::Sharded { parallel, optimizer: ShardedOptimizer::new(vec![group], &collective)? }
            }
            _ => {
                let parallel = parallel(by_name(name)?)?;
                Self::Replicated { parallel, parameters: trained(parameters), optimizer }
            }
        })
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
}
