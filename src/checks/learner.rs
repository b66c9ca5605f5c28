//! A network on one rank with whatever trains it: a trainer of ours, a mutant, or a subject in its own process.

use anyhow::Result;
use tch::Tensor;

use super::mutants;
use super::protocol::{LEARNING_RATE, Passes, TrainingCase, Zeroing, pass};
use crate::collective::Shared;
use crate::model::optim::{self, Sgd};
use crate::model::toy::Toy;
use crate::parallel::trainer::Trainer;
use crate::parallel::{Replica, no_sync};
use crate::subject::rank::SubjectRank;

/// A network on one rank, and what trains it.
pub trait Learner {
    /// The network with the values of now.
    fn network(&self) -> &Toy;

    /// One step on this rank's rows.
    fn step(&mut self, x: &Tensor, y: &Tensor) -> Result<()>;
}

impl Learner for SubjectRank {
    fn network(&self) -> &Toy {
        self.network()
    }

    fn step(&mut self, x: &Tensor, y: &Tensor) -> Result<()> {
        self.step(x, y)
    }
}

/// A replica under a trainer of ours, or a mutant.
pub struct OurReplica<'a> {
    case: &'a TrainingCase,
    network: Toy,
    trainer: Trainer,
}

impl<'a> OurReplica<'a> {
    pub fn new(trainer: &str, case: &'a TrainingCase, network: Toy, collective: &Shared) -> Result<Self> {
        let wrapped = Replica { parameters: network.named_parameters(), collective, options: &case.options };
        let trainer = mutants::trainer(trainer, wrapped, Box::new(Sgd::new(LEARNING_RATE)?))?;
        Ok(Self { case, network, trainer })
    }
}

impl Learner for OurReplica<'_> {
    fn network(&self) -> &Toy {
        &self.network
    }

    fn step(&mut self, x: &Tensor, y: &Tensor) -> Result<()> {
        match self.case.zeroing {
            Zeroing::InPlace => self.network.zero_grad(),
            Zeroing::Release => optim::zero_grad(self.network.named_parameters())?,
        }
        let (rows, half) = (x.size()[0], x.size()[0] / 2);
        // The mean over all rows is the sum of the parts' means, each weighted by its share of the rows.
        let part = |first: i64, count: i64| {
            pass(
                &self.network,
                &x.f_narrow(0, first, count)?,
                &y.f_narrow(0, first, count)?,
                count as f64 / rows as f64,
            )
        };
        let parallel = self.trainer.parallel();
        match self.case.passes {
            Passes::Once => part(0, rows)?,
            Passes::NoSync => {
                no_sync(parallel, || part(0, half))?;
                part(half, rows - half)?;
            }
            Passes::FinishEach => {
                part(0, half)?;
                parallel.finish_gradient_synchronization()?;
                part(half, rows - half)?;
            }
        }
        parallel.finish_gradient_synchronization()?;
        self.trainer.step()
    }
}
