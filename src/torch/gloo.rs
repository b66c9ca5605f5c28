//! Collectives between processes on CPU tensors: libtorch's Gloo process group, meeting over a TCPStore.

use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cxx::UniquePtr;
use tch::{Device, Kind, Tensor};

use super::bridge::{self, borrow, ffi, lift};
use super::library::require_built_version;

/// Where and as whom to meet.
#[derive(Debug, Clone, Copy)]
pub struct Rendezvous<'a> {
    /// An address of this machine that every rank reaches, as `"127.0.0.1"`; nothing listens on any other.
    pub host: &'a str,
    /// Where the store listens.
    pub port: u16,
    /// `0 <= rank < world_size`
    pub rank: usize,
    pub world_size: usize,
    /// How long a rank waits for its peers, here and in each collective.
    pub timeout: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    Sum,
    /// The sum divided by the world size (Gloo itself has no average); floating point only.
    Average,
}

/// A port on `host` that is free now; another program may take it before a rank does ([`Store`] leaves no such gap).
pub fn free_port(host: &str) -> Result<u16> {
    Ok(TcpListener::bind((host, 0)).with_context(|| format!("looking for a free port on {host}"))?.local_addr()?.port())
}

/// A store that a launcher serves for its ranks, so that no rank has to listen and no port is guessed.
pub struct Store {
    _server: UniquePtr<ffi::StoreServer>,
    port: u16,
}

impl Store {
    /// Listens on a free port of `host` until dropped.
    pub fn serve(host: &str, timeout: Duration) -> Result<Self> {
        let listener = TcpListener::bind((host, 0)).with_context(|| format!("listening on {host}"))?;
        let port = listener.local_addr()?.port();
        let server = lift(ffi::serve_store(host, port, listener.into_raw_fd(), milliseconds(timeout)))
            .with_context(|| format!("serving a store on {host}:{port}"))?;
        Ok(Self { _server: server, port })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

/// One rank of a group of processes; every rank calls the same collectives in the same order.
///
/// Errors carry libtorch's words. After one, the group is broken: drop it (which waits for what is under way, at most
/// the timeout, even if a peer has died).
pub struct ProcessGroup {
    group: UniquePtr<ffi::GlooGroup>,
    rank: usize,
    world_size: usize,
}

impl ProcessGroup {
    /// Meets the other ranks at a store that rank 0 serves; returns when all are connected.
    ///
    /// Errors: the port is taken, or a peer did not come within the timeout.
    pub fn connect(rendezvous: Rendezvous) -> Result<Self> {
        let Rendezvous { host, port, rank, .. } = rendezvous;
        ensure!(port != 0, "port 0 names no meeting place: use free_port or a Store");
        let listener = match rank {
            0 => Some(TcpListener::bind((host, port)).with_context(|| format!("rank 0 listening on {host}:{port}"))?),
            _ => None,
        };
        Self::meet(rendezvous, listener)
    }

    /// As [`ProcessGroup::connect`], at a [`Store`] that is served already.
    pub fn join(rendezvous: Rendezvous) -> Result<Self> {
        Self::meet(rendezvous, None)
    }

    fn meet(rendezvous: Rendezvous, listener: Option<TcpListener>) -> Result<Self> {
        let Rendezvous { host, port, rank, world_size, timeout } = rendezvous;
        ensure!(rank < world_size, "rank {rank} of {world_size} ranks");
        require_built_version()?;
        let context = || format!("rank {rank} of {world_size} meeting at {host}:{port}");
        let listener = listener.map_or(-1, IntoRawFd::into_raw_fd);
        let group = ffi::connect_gloo(
            host,
            port,
            listener,
            i32::try_from(rank)?,
            i32::try_from(world_size)?,
            milliseconds(timeout),
        );
        let group = Self { group: lift(group).with_context(context)?, rank, world_size };
        // The store lives in one rank's process: nobody leaves before everybody has read their peers' addresses.
        group.barrier().with_context(context)?;
        Ok(group)
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Replaces each tensor by the sum or average over ranks, in place; several tensors of one kind go as one message.
    pub fn all_reduce(&self, tensors: &[Tensor], op: ReduceOp) -> Result<()> {
        self.all_reduce_async(tensors, op)?.wait_done()
    }

    /// Starts [`ProcessGroup::all_reduce`]; leave the tensors alone until the work is waited for.
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

    /// Replaces `tensor` by rank `root`'s, in place.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.broadcast_async(tensor, root)?.wait_done()
    }

    pub fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        ensure!(root < self.world_size, "broadcast from rank {root} of {} ranks", self.world_size);
        usable(tensor)?;
        let work = self.group.broadcast(borrow(tensor), i32::try_from(root)?);
        self.work("broadcast", work, vec![tensor.shallow_clone()], None)
    }

    /// Every rank's `tensor`, in order of rank; all have one shape and kind.
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let mut work = self.all_gather_async(tensor)?;
        work.wait_done()?;
        Ok(work.into_outputs())
    }

    pub fn all_gather_async(&self, tensor: &Tensor) -> Result<Work> {
        usable(tensor)?;
        let outputs = (0..self.world_size).map(|_| tensor.f_empty_like()).collect::<Result<Vec<_>, _>>()?;
        let work = self.group.all_gather(&bridge::list(&outputs), borrow(tensor));
        self.work("all-gather", work, outputs, None)
    }

    /// This rank's share of the sum or average over ranks: `tensor` (world_size * n, ...) gives (n, ...).
    pub fn reduce_scatter(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let mut work = self.reduce_scatter_async(tensor, op)?;
        work.wait_done()?;
        Ok(work.into_outputs().remove(0))
    }

    pub fn reduce_scatter_async(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        usable(tensor)?;
        let mut shape = tensor.size();
        let world_size = i64::try_from(self.world_size)?;
        ensure!(
            shape.first().is_some_and(|rows| rows % world_size == 0),
            "reduce-scatter of shape {shape:?} over {world_size} ranks: the first dimension must divide evenly"
        );
        shape[0] /= world_size;
        let output = Tensor::f_empty(&shape, (tensor.kind(), Device::Cpu))?;
        let divisor = self.divisor(op, tensor.kind())?;
        let work = self.group.reduce_scatter_sum(borrow(&output), borrow(tensor));
        self.work("reduce-scatter", work, vec![output], divisor)
    }

    /// Returns when every rank has called it and all their earlier work is done.
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async()?.wait_done()
    }

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
        let work = lift(work).with_context(|| name.clone())?;
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
    /// Errors: libtorch's words if it failed, or "Operation timed out!" if `timeout` passed first (it then goes on,
    /// and may be waited for again).
    pub fn wait(&mut self, timeout: Duration) -> Result<()> {
        self.wait_milliseconds(milliseconds(timeout))
    }

    /// Waits as long as the group's own timeout lets the collective live, for Gloo's words tell more than ours.
    fn wait_done(&mut self) -> Result<()> {
        self.wait_milliseconds(0)
    }

    fn wait_milliseconds(&mut self, timeout: i64) -> Result<()> {
        lift(self.work.wait(timeout)).with_context(|| self.name.clone())?;
        if let Some(divisor) = self.divisor.take() {
            // A gradient or a parameter may require a gradient of its own; this division is no part of its graph.
            tch::no_grad(|| self.outputs.iter_mut().try_for_each(|tensor| tensor.f_div_scalar_(divisor).map(drop)))?;
        }
        Ok(())
    }

    /// Whether the collective has ended, well or badly; never blocks.
    pub fn is_completed(&self) -> Result<bool> {
        lift(self.work.is_completed())
    }

    /// The tensors that the collective filled: for an all-reduce and a broadcast those it was given.
    pub fn into_outputs(self) -> Vec<Tensor> {
        self.outputs
    }
}

/// Gloo reads `numel` elements from the data pointer, so a tensor with gaps would be taken for its neighbours.
fn usable(tensor: &Tensor) -> Result<()> {
    ensure!(tensor.device() == Device::Cpu, "gloo works on cpu tensors, this one is on {:?}", tensor.device());
    ensure!(tensor.is_contiguous(), "gloo works on contiguous tensors, this one has strides {:?}", tensor.stride());
    Ok(())
}

/// At least one: zero means no limit to libtorch.
fn milliseconds(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX).clamp(1, i64::from(i32::MAX))
}

#[cfg(test)]
mod tests;
