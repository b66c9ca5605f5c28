//! Gloo, between processes of one machine: the backend that needs no GPU.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tch::Tensor;

use super::ranks::Environment;
use super::{Collective, Op, Work};
use crate::torch::gloo::{self, ProcessGroup, ReduceOp, Rendezvous};

/// A Gloo process group over libtorch's.
pub struct Gloo {
    rank: usize,
    world_size: usize,
    patience: Duration,
    /// Locked while an operation enters the group's queue, not while it is waited for.
    group: Mutex<ProcessGroup>,
}

/// A late collective is given up by the group itself first, whose words say which peer it waited for.
const EXTRA_PATIENCE: Duration = Duration::from_secs(5);

impl Gloo {
    /// Meets the other ranks of the environment.
    ///
    /// # Errors
    /// In libtorch's words, if the ranks have not all met within the environment's timeout.
    pub fn connect(environment: &Environment) -> Result<Self> {
        let &Environment { rank, world_size, ref master_addr, master_port, agent_store, timeout, .. } = environment;
        let rendezvous = Rendezvous { host: master_addr, port: master_port, rank, world_size, timeout };
        let group = if agent_store { ProcessGroup::join(rendezvous) } else { ProcessGroup::connect(rendezvous) };
        Ok(Self { rank, world_size, patience: timeout + EXTRA_PATIENCE, group: Mutex::new(group?) })
    }

    fn group(&self) -> MutexGuard<'_, ProcessGroup> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outputs(&self, mut work: gloo::Work) -> Result<Vec<Tensor>> {
        work.wait(self.patience)?;
        Ok(work.into_outputs())
    }
}

struct Pending {
    work: gloo::Work,
    patience: Duration,
}

impl Work for Pending {
    fn wait(mut self: Box<Self>) -> Result<()> {
        self.work.wait(self.patience)
    }
}

impl Collective for Gloo {
    fn backend(&self) -> &'static str {
        "gloo"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_async(&self, tensor: &Tensor, op: Op) -> Result<Box<dyn Work>> {
        let op = match op {
            Op::Sum => ReduceOp::Sum,
            Op::Average => ReduceOp::Average,
        };
        let work = self.group().all_reduce_async(&[tensor.f_detach()?], op)?;
        Ok(Box::new(Pending { work, patience: self.patience }))
    }

    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        let work = self.group().broadcast_async(&tensor.f_detach()?, root)?;
        self.outputs(work).map(drop)
    }

    fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let work = self.group().all_gather_async(&tensor.f_detach()?)?;
        self.outputs(work)
    }

    fn reduce_scatter(&self, tensor: &Tensor) -> Result<Tensor> {
        let work = self.group().reduce_scatter_async(&tensor.f_detach()?, ReduceOp::Sum)?;
        Ok(self.outputs(work)?.swap_remove(0))
    }

    fn barrier(&self) -> Result<()> {
        let work = self.group().barrier_async()?;
        self.outputs(work).map(drop)
    }
}
