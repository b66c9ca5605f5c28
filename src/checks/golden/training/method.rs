//! How the ranks of a training case train, by its kind: with trainers of ours, or with a subject.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{Given, Training};
use crate::checks::golden::{CaseFile, adamw};
use crate::checks::mutants;
use crate::checks::protocol::pass;
use crate::checks::sharded_optimizers::TestedOptimizer;
use crate::checks::sharded_protocol::squared_error;
use crate::collective::Shared;
use crate::model::optim::{AdamW, AdamWOptions, Sgd};
use crate::model::toy::{Blueprint, Toy};
use crate::parallel::sharded_optimizer::ParamGroup;
use crate::parallel::{Options, Replica};
use crate::subject::rank::{Adapter, OptimizerClass, SubjectRank, Trainee};

/// ZeRO-1's bucket size in a case of `sharded_optimizer`, small enough for several buckets.
const OPTIONS: Options = Options { bucket_size_mb: 0.0016 };

/// How the ranks train, by the case's kind.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Method {
    /// Metadata `lr` and `bucket_size_mb`. Only rank 0 starts from the case's values, which the trainer must broadcast.
    /// In each step every rank takes its contiguous slice of the rows: mean squared error, plain gradient descent.
    DataParallel { lr: f64, options: Options },
    /// Metadata `lr beta1 beta2 eps weight_decay`. Every rank starts from the case's values and trains on all rows: the sum
    /// of squared errors, AdamW, without averaging gradients.
    ShardedOptimizer(AdamWOptions),
}

impl Method {
    /// The adapters that train so.
    pub(super) fn adapters(&self) -> Vec<Adapter> {
        match self {
            Self::DataParallel { lr, options: Options { bucket_size_mb } } => {
                vec![Adapter::Individual { lr: *lr }, Adapter::Bucketed { lr: *lr, bucket_size_mb: *bucket_size_mb }]
            }
            Self::ShardedOptimizer(adamw) => vec![Adapter::Sharded(OptimizerClass::AdamW, *adamw)],
        }
    }

    /// Whether this rank starts from the case's values.
    fn loads(&self, collective: &Shared) -> bool {
        matches!(self, Self::ShardedOptimizer(_)) || collective.rank() == 0
    }

    /// The rows of a step that this rank trains on.
    fn share(&self, rows: &Tensor, collective: &Shared) -> Result<Tensor> {
        if matches!(self, Self::ShardedOptimizer(_)) {
            return Ok(rows.shallow_clone());
        }
        let count = rows.size()[0] / collective.world_size() as i64;
        Ok(rows.f_narrow(0, collective.rank() as i64 * count, count)?)
    }

    /// Trains `network` on this rank with the subject, from `given`.
    pub(super) fn train_subject(
        &self,
        trainee: &Trainee,
        blueprint: &Blueprint,
        network: Toy,
        given: &Given,
        collective: &Shared,
    ) -> Result<SubjectRank> {
        if self.loads(collective) {
            load(&network, given)?;
        }
        let mut rank = SubjectRank::start(trainee, blueprint, network, collective)?;
        for (x, y) in steps(given)? {
            rank.step(&self.share(&x, collective)?, &self.share(&y, collective)?)?;
        }
        Ok(rank)
    }

    pub(super) fn of(case: &CaseFile, training: &Training) -> Result<Self> {
        if case.meta("kind")? != "data_parallel" {
            return Ok(Self::ShardedOptimizer(adamw::options(case)?));
        }
        let lr = case.meta_positive("lr")?;
        let options = Options { bucket_size_mb: case.meta_as("bucket_size_mb")? };
        options.bucket_bytes().context("metadata")?;
        let (rows, ranks) = (training.rows, training.world_size);
        ensure!(rows % ranks as i64 == 0, "{rows} rows cannot be shared equally among {ranks} ranks (world_size)");
        Ok(Self::DataParallel { lr, options })
    }

    /// Trains `network` on this rank from `given`.
    pub(super) fn train(&self, trainer: &str, network: &Toy, given: &Given, collective: &Shared) -> Result<()> {
        if self.loads(collective) {
            load(network, given)?;
        }
        match self {
            Self::DataParallel { lr, options } => {
                let replica = Replica { parameters: network.named_parameters(), collective, options };
                let mut trainer = mutants::trainer(trainer, replica, Box::new(Sgd::new(*lr)?))?;
                for (x, y) in steps(given)? {
                    network.zero_grad();
                    pass(network, &self.share(&x, collective)?, &self.share(&y, collective)?, 1.0)?;
                    trainer.parallel().finish_gradient_synchronization()?;
                    trainer.step()?;
                }
            }
            Self::ShardedOptimizer(options) => {
                let group = ParamGroup::new(network.named_parameters(), Box::new(AdamW::new(*options)?));
                let mut optimizer = TestedOptimizer::new(trainer, group, collective, &OPTIONS)?;
                for (x, y) in steps(given)? {
                    network.zero_grad();
                    squared_error(network, &x, &y)?;
                    optimizer.step()?;
                }
            }
        }
        Ok(())
    }
}

/// Loads the case's initial values.
fn load(network: &Toy, given: &Given) -> Result<()> {
    let initial = given.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("init.")?, tensor)));
    network.load(&initial.map(|(name, tensor)| (name.to_string(), tensor.shallow_clone())).collect())
}

/// Each step's `x` (rows, 10) and `y` (rows, 5).
fn steps(given: &Given) -> Result<Vec<(Tensor, Tensor)>> {
    let (x, y) = (&given["x"], &given["y"]);
    (0..x.size()[0]).map(|step| Ok((x.f_select(0, step)?, y.f_select(0, step)?))).collect()
}
