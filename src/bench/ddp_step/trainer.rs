//! The trainers of the data-parallel benchmarks: a strategy by its name, with the device's AdamW.

use anyhow::Result;
use tch::Tensor;

use crate::collective::Shared;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::AdamWOptions;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, Trainer};
use crate::parallel::{Options, Replica, Strategy, overlap_individual_parameters};

/// `(name, parameters, collective, bucket_size_mb)` to a trainer. Construction broadcasts rank 0's parameters.
pub type MakeTrainer = fn(&str, &[(String, Tensor)], &Shared, Option<f64>) -> Result<Trainer>;

/// The strategy that averages gradients for the sharded optimizer. It keeps no buffers.
pub const BESIDE_SHARDED: Strategy = overlap_individual_parameters::STRATEGY;

/// PyTorch's default of 25 MiB, used if no bucket size is given.
const DEFAULT_BUCKET_MB: f64 = 26.2144;

/// A [`MakeTrainer`] for every name that [`Trainer::new`] accepts.
pub fn make_trainer(
    name: &str,
    parameters: &[(String, Tensor)],
    collective: &Shared,
    bucket_size_mb: Option<f64>,
) -> Result<Trainer> {
    let options = Options { bucket_size_mb: bucket_size_mb.unwrap_or(DEFAULT_BUCKET_MB) };
    let optimizer = adamw_for(collective.device(), AdamWOptions::default())?;
    let replica = Replica { parameters, collective, options: &options };
    match name {
        SHARDED_OPTIMIZER => Trainer::sharded(&BESIDE_SHARDED, replica, optimizer),
        _ => Trainer::new(name, replica, optimizer),
    }
}
