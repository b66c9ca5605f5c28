//! Cases of kind `sharded_optimizer`: AdamW's final parameters, compared for every sharded optimizer on every rank.
//!
//! The format of [`super::training`], with metadata `lr beta1 beta2 eps weight_decay`. Every rank starts from the case's
//! values and trains on all rows: the sum of squared errors, without averaging gradients.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::training::{OnRank, Training};
use super::{CaseFile, Comparison};
use crate::checks::sharded_protocol::{Subject, squared_error};
use crate::collective::Shared;
use crate::collective::ranks::RankTask;
use crate::model::optim::AdamWOptions;
use crate::parallel::Options;
use crate::parallel::sharded_optimizer::ParamGroup;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

pub const TASK: RankTask = RankTask { name: "sharded_optimizer_case", run: on_rank };

/// ZeRO-1's bucket size, small enough for several buckets.
const OPTIONS: Options = Options { bucket_size_mb: 0.0016 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct How {
    optimizer: String,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
}

impl How {
    fn adamw(&self) -> AdamWOptions {
        let How { lr, beta1, beta2, eps, weight_decay, .. } = *self;
        AdamWOptions { lr, beta1, beta2, eps, weight_decay }
    }
}

/// Runs all sharded optimizers on the case.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    let mut comparisons = Vec::new();
    for optimizer in [SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD] {
        comparisons.extend(compare_optimizer(case, optimizer)?);
    }
    Ok(comparisons)
}

/// Trains the case with one sharded optimizer and compares each rank's parameters with the expected ones.
///
/// # Errors
/// A case that contradicts itself, naming the entry; a rank that crashed or hung.
pub fn compare_optimizer(case: &CaseFile, optimizer: &str) -> Result<Vec<Comparison>> {
    let training = Training::of(case)?;
    let how = How {
        optimizer: optimizer.into(),
        lr: case.meta_as("lr")?,
        beta1: case.meta_as("beta1")?,
        beta2: case.meta_as("beta2")?,
        eps: case.meta_as("eps")?,
        weight_decay: case.meta_as("weight_decay")?,
    };
    how.adamw().validate().context("metadata")?;
    training.compare(optimizer, TASK.name, how)
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let rank = OnRank::<How>::new(collective, input)?;
    rank.load()?;
    let adamw = Box::new(crate::model::optim::AdamW::new(rank.how.adamw())?);
    let group = ParamGroup::new(rank.network.named_parameters(), adamw);
    let mut subject = Subject::new(&rank.how.optimizer, group, collective, &OPTIONS)?;
    for (x, y) in rank.steps()? {
        rank.network.zero_grad();
        squared_error(&rank.network, &x, &y)?;
        subject.step()?;
    }
    rank.finish()
}
