//! Collectives between processes on CPU tensors: libtorch's Gloo process group, connected through a TCPStore.

use std::fmt::{self, Display};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cxx::UniquePtr;
use tch::{Device, Kind, Tensor};

use super::bridge::{self, CompletionCallback, borrow, check, ffi};
use super::library::require_built_version;
use super::store::{Store, milliseconds};

/// A rank's number in a group, and the address at which its peers reach it.
#[derive(Debug, Clone)]
pub struct Member {
    /// `0 <= rank < world_size`
    pub rank: usize,
    pub world_size: usize,
    pub address: Address,
    /// How long a rank waits for its peers, here and in each collective.
    pub timeout: Duration,
}

/// Where this rank listens to its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// An address of this machine that every rank reaches, as `"127.0.0.1"`.
    Host(String),
    /// A network interface, as `"eth0"`.
    Interface(String),
}

impl Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Host(address) => write!(f, "address {address}"),
            Self::Interface(name) => write!(f, "interface {name}"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    Sum,
    /// The sum divided by the world size (Gloo itself has no average); floating point only.
    Average,
}

/// One rank of a group of processes; every rank calls the same collectives in the same order.
///
/// Errors contain libtorch's message. After one, the group is broken: drop it (which waits for what is under way, at
/// most the timeout, even if a peer has died).
pub struct ProcessGroup {
    group: UniquePtr<ffi::GlooGroup>,
    rank: usize,
    world_size: usize,
}

impl ProcessGroup {
    /// Connects to the other ranks through a store that all of them reach; returns when all are connected.
    ///
    /// Errors: a peer did not come within the timeout.
    pub fn connect(store: &Store, member: &Member) -> Result<Self> {
        let &Member { rank, world_size, ref address, timeout } = member;
        ensure!(rank < world_size, "rank {rank} of {world_size} ranks");
        require_built_version()?;
        let (interface, host) = match address {
            Address::Host(host) => ("", host.as_str()),
            Address::Interface(interface) => (interface.as_str(), ""),
        };
        let context = || format!("rank {rank} of {world_size} connecting to its peers from {address}");
        let (of, ranks) = (i32::try_from(rank)?, i32::try_from(world_size)?);
        let group = ffi::connect_gloo(&store.inner, interface, host, of, ranks, milliseconds(timeout));
        let group = Self { group: check(group).with_context(context)?, rank, world_size };
        // One rank serves the store, so no rank may continue before all have read their peers' addresses. The group's own
        // timeout ends the wait: its error has more detail than ours.
        group.barrier_async()?.wait(Duration::MAX).with_context(context)?;
        Ok(group)
    }

    /// Starts replacing each tensor by the sum or average over ranks, in place; several tensors of one kind go as one
    /// message. Leave the tensors of any operation alone until its work is waited for.
    pub fn all_reduce_async(&self, tensors: &[Tensor], op: ReduceOp) -> Result<Work> {
        ensure!(!tensors.is_empty(), "all-reduce of no tensors");
        tensors.iter().try_for_each(usable)?;
        let kind = tensors[0].kind();
        ensure!(
            tensors.iter().all(|tensor| tensor.kind() == kind),
            "all-reduce of tensors of different kinds in one message: send one message per kind"
        );
        let divisor = self.divisor(op, kind)?;
        let work = self.group.all_reduce_sum(&bridge::list(tensors));
        self.work("all-reduce", work, tensors.iter().map(Tensor::shallow_clone).collect(), divisor)
    }

    /// Starts replacing `tensor` by rank `root`'s, in place.
    pub fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        ensure!(root < self.world_size, "broadcast from rank {root} of {} ranks", self.world_size);
        usable(tensor)?;
        let work = self.group.broadcast(borrow(tensor), i32::try_from(root)?);
        self.work("broadcast", work, vec![tensor.shallow_clone()], None)
    }

    /// Starts filling each of `outputs` (world_size * n, ...) with every rank's counterpart in `inputs` (n, ...), in order
    /// of rank; several tensors of one kind go as one message.
    pub fn all_gather_async(&self, outputs: &[Tensor], inputs: &[Tensor]) -> Result<Work> {
        let (wholes, shares) = (flattened(outputs)?, flattened(inputs)?);
        self.check_shares(&wholes, &shares).context("all-gather")?;
        let work = self.group.all_gather(&bridge::list(&wholes), &bridge::list(&shares));
        self.work("all-gather", work, wholes, None)
    }

    /// Starts filling each of `outputs` (n, ...) with this rank's share of the sum or average over ranks of its counterpart
    /// in `inputs` (world_size * n, ...).
    pub fn reduce_scatter_async(&self, outputs: &[Tensor], inputs: &[Tensor], op: ReduceOp) -> Result<Work> {
        let (shares, wholes) = (flattened(outputs)?, flattened(inputs)?);
        self.check_shares(&wholes, &shares).context("reduce-scatter")?;
        let divisor = self.divisor(op, wholes[0].kind())?;
        let work = self.group.reduce_scatter_sum(&bridge::list(&shares), &bridge::list(&wholes));
        self.work("reduce-scatter", work, shares, divisor)
    }

    /// Checks that each of `wholes` is its counterpart in `shares` of all ranks together, and that they are of one kind.
    fn check_shares(&self, wholes: &[Tensor], shares: &[Tensor]) -> Result<()> {
        ensure!(wholes.len() == shares.len(), "{} tensors, but {} shares", wholes.len(), shares.len());
        let kind = wholes.first().context("no tensors")?.kind();
        for (whole, share) in wholes.iter().zip(shares) {
            let (have, one) = (whole.numel(), share.numel());
            let (of, ours) = (whole.kind(), share.kind());
            ensure!(of == ours, "the whole is of {of:?}, but the share is of {ours:?}");
            ensure!(of == kind, "tensors of {kind:?} and {of:?} in one message: send one message per kind");
            ensure!(have == one * self.world_size, "{have} elements are not {} shares of {one}", self.world_size);
        }
        Ok(())
    }

    /// Work that is done when every rank has called this and all their earlier work is done.
    pub fn barrier_async(&self) -> Result<Work> {
        self.work("barrier", self.group.barrier(), Vec::new(), None)
    }

    fn divisor(&self, op: ReduceOp, kind: Kind) -> Result<Option<f64>> {
        match op {
            ReduceOp::Sum => Ok(None),
            ReduceOp::Average => {
                let floats = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double];
                ensure!(floats.contains(&kind), "average of {kind:?} tensors: only floating point has averages");
                Ok(Some(self.world_size as f64))
            }
        }
    }

    fn work(
        &self,
        name: &'static str,
        work: Result<UniquePtr<ffi::GlooWork>, cxx::Exception>,
        outputs: Vec<Tensor>,
        divisor: Option<f64>,
    ) -> Result<Work> {
        let (rank, world_size) = (self.rank, self.world_size);
        let name = format!("{name}, rank {rank} of {world_size}");
        let work = check(work).with_context(|| name.clone())?;
        Ok(Work { name, work, outputs, divisor })
    }
}

/// A collective under way; it goes on if dropped, holding its tensors until it ends.
#[must_use = "a collective's tensors are ready only after wait"]
pub struct Work {
    name: String,
    work: UniquePtr<ffi::GlooWork>,
    outputs: Vec<Tensor>,
    divisor: Option<f64>,
}

impl Work {
    /// Waits until the collective is done and its tensors are ready.
    ///
    /// Errors: libtorch's if it failed, or "Operation timed out!" if `timeout` passed first (it then goes on, and may
    /// be waited for again).
    pub fn wait(&mut self, timeout: Duration) -> Result<()> {
        check(self.work.wait(milliseconds(timeout))).with_context(|| self.name.clone())?;
        if let Some(divisor) = self.divisor.take() {
            // A gradient or a parameter may require a gradient of its own; this division is no part of its graph.
            tch::no_grad(|| self.outputs.iter_mut().try_for_each(|tensor| tensor.f_div_scalar_(divisor).map(drop)))?;
        }
        Ok(())
    }

    /// Calls `callback` when the collective ends, with or without an error, before any waiter continues.
    pub fn when_done(&self, callback: impl Fn() + Send + Sync + 'static) -> Result<()> {
        check(self.work.when_done(CompletionCallback::new(callback)))
    }
}

/// Each as one dimension, sharing its memory.
fn flattened(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(|tensor| usable(tensor).and_then(|()| Ok(tensor.f_view([-1])?))).collect()
}

/// Gloo reads `numel` elements from the data pointer, so from a tensor with gaps it would read other memory.
fn usable(tensor: &Tensor) -> Result<()> {
    ensure!(tensor.device() == Device::Cpu, "gloo works on cpu tensors, this one is on {:?}", tensor.device());
    ensure!(tensor.is_contiguous(), "gloo works on contiguous tensors, this one has strides {:?}", tensor.stride());
    Ok(())
}

#[cfg(test)]
mod tests;
