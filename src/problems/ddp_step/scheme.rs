//! What is done between a backward pass and the next forward pass: a strategy of data parallelism with an optimizer on every
//! rank, or with one that the ranks share.

use anyhow::Result;
use tch::Tensor;

use crate::collective::Shared;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::{AdamWOptions, Optimizer};
use crate::parallel::sharded_optimizer::{ParamGroup, ShardedOptimizer};
use crate::parallel::trainer::{SHARDED_OPTIMIZER, zero1};
use crate::parallel::zero1::Zero1;
use crate::parallel::{DataParallel, Options, by_name};

/// AdamW under one way of training on many ranks.
pub enum Scheme {
    Replicated { parallel: Box<dyn DataParallel>, optimizer: Box<dyn Optimizer> },
    Sharded { parallel: Box<dyn DataParallel>, optimizer: ShardedOptimizer },
    Zero1(Box<Zero1>),
}

/// The strategy that averages the gradients where only the optimizer is shared: it keeps no buffer of its own.
pub const BESIDE_SHARDED: &str = "overlap_individual_parameters";

/// PyTorch's default of 25 MiB, for schemes that have no buckets and are asked for none.
const DEFAULT_BUCKET_MB: f64 = 26.2144;

impl Scheme {
    /// `name` is a strategy's, "sharded_optimizer", "zero1" or "zero1_in_backward". Afterwards every rank holds rank 0's
    /// parameters.
    pub fn new(
        name: &str,
        parameters: &[(String, Tensor)],
        collective: &Shared,
        bucket_size_mb: Option<f64>,
    ) -> Result<Self> {
        let options = Options { bucket_size_mb: bucket_size_mb.unwrap_or(DEFAULT_BUCKET_MB) };
        let parallel = |strategy: &str| (by_name(strategy)?.construct)(parameters, collective, &options);
        let optimizer = adamw_for(collective.device(), AdamWOptions::default())?;
        if let Some(stepping) = zero1(name) {
            return Ok(Self::Zero1(Box::new(Zero1::new(parameters, optimizer, collective, &options, stepping)?)));
        }
        Ok(match name {
            SHARDED_OPTIMIZER => {
                let group = ParamGroup::new(parameters, optimizer);
                let parallel = parallel(BESIDE_SHARDED)?;
                Self::Sharded { parallel, optimizer: ShardedOptimizer::new(vec![group], collective)? }
            }
            strategy => Self::Replicated { parallel: parallel(strategy)?, optimizer },
        })
    }

    /// After the backward pass: gradients become the mean over ranks, wherever the optimizer needs them.
    pub fn synchronize(&mut self) -> Result<()> {
        match self {
            Self::Replicated { parallel, .. } | Self::Sharded { parallel, .. } => {
                parallel.finish_gradient_synchronization()
            }
            Self::Zero1(zero) => zero.finish_gradient_synchronization(),
        }
    }

    /// Updates `parameters`, those that it was made for, on every rank.
    pub fn step(&mut self, parameters: &[(String, Tensor)]) -> Result<()> {
        match self {
            Self::Replicated { optimizer, .. } => optimizer.step(parameters),
            Self::Sharded { optimizer, .. } => optimizer.step(),
            Self::Zero1(zero) => zero.step(),
        }
    }

    /// Values that this rank keeps optimizer state for.
    pub fn owned_numel(&self, parameters: &[(String, Tensor)], rank: usize) -> u64 {
        let owned = match self {
            Self::Replicated { .. } => parameters.iter().map(|(_, parameter)| parameter.numel()).sum(),
            Self::Sharded { optimizer, .. } => optimizer.owned_numel()[rank],
            Self::Zero1(zero) => zero.owned_numel(),
        };
        owned as u64
    }
}
