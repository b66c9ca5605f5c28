//! Gloo, between processes of one machine: the backend that needs no GPU.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tch::Tensor;

use super::ranks::Environment;
use super::{Collective, Op, Work};
use crate::torch::gloo::{self, ProcessGroup, ReduceOp, Rendezvous};

/// A Gloo process group over libtorch's.
pub struct Gloo {
    rank: usize,
    world_size: usize,
    timeout: Duration,
    /// Held while an operation is put in the group's queue, not while it is waited for.
    group: Mutex<ProcessGroup>,
}

impl Gloo {
    /// Meets the other ranks of the environment; rank 0 listens on the master port.
    ///
    /// # Errors
    /// In libtorch's words, if the ranks have not all met within the environment's timeout.
    pub fn connect(environment: &Environment) -> Result<Self> {
        let &Environment { rank, world_size, ref master_addr, master_port, timeout, .. } = environment;
        let rendezvous = Rendezvous { host: master_addr.clone(), port: master_port, rank, world_size, timeout };
        let group = ProcessGroup::connect(rendezvous)
            .with_context(|| format!("rank {rank} meeting {world_size} ranks at {master_addr}:{master_port}"))?;
        Ok(Self { rank, world_size, timeout, group: Mutex::new(group) })
    }

    fn group(&self) -> MutexGuard<'_, ProcessGroup> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct GlooWork {
    work: gloo::Work,
    timeout: Duration,
    /// Gloo has no average: the sum is divided once it is here.
    divide: Option<(Tensor, i64)>,
}

impl Work for GlooWork {
    fn wait(mut self: Box<Self>) -> Result<()> {
        self.work.wait(self.timeout)?;
        if let Some((tensor, divisor)) = &mut self.divide {
            let _ = tensor.f_div_scalar_(*divisor)?;
        }
        Ok(())
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
        let tensor = tensor.f_detach()?;
        let work = self.group().all_reduce_async(&[tensor.shallow_clone()], ReduceOp::Sum)?;
        let divide = (op == Op::Average).then_some((tensor, self.world_size as i64));
        Ok(Box::new(GlooWork { work, timeout: self.timeout, divide }))
    }

    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.group().broadcast(&tensor.f_detach()?, root)
    }

    fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        self.group().all_gather(&tensor.f_detach()?)
    }

    fn reduce_scatter(&self, inputs: &[Tensor]) -> Result<Tensor> {
        self.group().reduce_scatter(inputs, ReduceOp::Sum)
    }

    fn barrier(&self) -> Result<()> {
        self.group().barrier()
    }
}
