//! Collective communication: the [`Collective`] trait, its backends, and the launcher of rank processes.

use std::slice::from_ref;
use std::sync::Arc;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

pub mod consistency_check;
pub mod environment;
pub(crate) mod flight_recorder;
pub mod gloo;
pub mod nccl;
mod network;
pub mod peers;
pub mod ranks;
pub mod rendezvous;
mod request;
mod supervisor;
pub mod timeline;
pub mod trace;
mod waiting;
mod watchdog;

use flight_recorder::FlightRecorder;
pub use request::{Operation, Request};
pub use supervisor::RanksFault;
use timeline::Timeline;
pub use waiting::{saying, saying_collectives};

pub use crate::torch::gloo::ReduceOp as Op;

/// A collective that strategies, hooks and rank tasks share; a hook may run on a thread of libtorch, hence `Arc`.
pub type Shared = Arc<dyn Collective>;

/// The library that carries the collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// CPU tensors.
    Gloo,
    /// CUDA tensors, one GPU a rank.
    Nccl,
}

/// A process group, as one of its ranks sees it.
pub struct Group {
    backend: Backend,
    device: Device,
    rank: usize,
    world_size: usize,
    recorder: Arc<FlightRecorder>,
    timeline: Timeline,
}

impl Group {
    /// `device` is where this rank's tensors must be.
    ///
    /// # Errors
    /// The flight record that the environment names cannot be opened.
    pub fn new(backend: Backend, device: Device, rank: usize, world_size: usize) -> Result<Self> {
        let (recorder, timeline) = (Arc::new(FlightRecorder::open()?), Timeline::new(device));
        Ok(Self { backend, device, rank, world_size, recorder, timeline })
    }
}

/// The collective operations of one process group; every rank must make the same calls in the same order.
///
/// Shapes and dtypes (fp32, bf16, fp16, int64) must agree on all ranks; tensors must be dense and contiguous, and on
/// [`Collective::device`]. Pass a tensor that requires a gradient detached. An operation under way keeps its tensors
/// alive; do not use them until its work has been waited for. An error contains the backend's message, and after it the
/// group cannot be used.
pub trait Collective: Send + Sync {
    fn group(&self) -> &Group;

    /// Starts an operation. The methods below name each.
    fn start(&self, request: Request) -> Result<Box<dyn Work>>;

    /// Returns once every rank has called it.
    fn barrier(&self) -> Result<()> {
        self.start(Request::Barrier)?.wait()
    }

    /// To be called after each replay of a CUDA graph that holds collectives of this group, so that a lost peer is noticed.
    fn watch_replay(&self) -> Result<()> {
        Ok(())
    }

    /// The backend's name: "gloo" or "nccl".
    fn backend(&self) -> &'static str {
        self.group().backend.name()
    }

    /// Where this rank's tensors must be: its GPU under NCCL, the CPU under Gloo.
    fn device(&self) -> Device {
        self.group().device
    }

    /// This process's number, from 0 to `world_size() - 1`.
    fn rank(&self) -> usize {
        self.group().rank
    }

    fn world_size(&self) -> usize {
        self.group().world_size
    }

    /// When each collective started and ended; off until started.
    fn timeline(&self) -> &Timeline {
        &self.group().timeline
    }

    /// Starts [`Request::AllReduce`].
    fn all_reduce_coalesced_async(&self, tensors: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        self.start(Request::AllReduce { tensors, op })
    }

    /// Starts [`Request::Broadcast`].
    fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Box<dyn Work>> {
        self.start(Request::Broadcast { tensor, root })
    }

    /// Starts [`Request::AllGather`].
    fn all_gather_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor]) -> Result<Box<dyn Work>> {
        self.start(Request::AllGather { outputs, inputs })
    }

    /// Starts [`Request::ReduceScatter`].
    fn reduce_scatter_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        self.start(Request::ReduceScatter { outputs, inputs, op })
    }

    /// [`Self::all_reduce_coalesced_async`] of one tensor.
    fn all_reduce_async(&self, tensor: &Tensor, op: Op) -> Result<Box<dyn Work>> {
        self.all_reduce_coalesced_async(from_ref(tensor), op)
    }

    /// [`Self::all_gather_coalesced_async`] of one tensor.
    fn all_gather_async(&self, output: &Tensor, input: &Tensor) -> Result<Box<dyn Work>> {
        self.all_gather_coalesced_async(from_ref(output), from_ref(input))
    }

    /// [`Self::reduce_scatter_coalesced_async`] of one tensor.
    fn reduce_scatter_async(&self, output: &Tensor, input: &Tensor, op: Op) -> Result<Box<dyn Work>> {
        self.reduce_scatter_coalesced_async(from_ref(output), from_ref(input), op)
    }

    /// [`Self::all_reduce_async`], waited for.
    fn all_reduce(&self, tensor: &Tensor, op: Op) -> Result<()> {
        self.all_reduce_async(tensor, op)?.wait()
    }

    /// [`Self::broadcast_async`], waited for.
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.broadcast_async(tensor, root)?.wait()
    }

    /// Every rank's `tensor`, in rank order.
    fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let shape = [vec![i64::try_from(self.world_size())?], tensor.size()].concat();
        let output = Tensor::f_empty(&shape, (tensor.kind(), tensor.device()))?;
        self.all_gather_async(&output, tensor)?.wait()?;
        Ok(output.f_unbind(0)?)
    }

    /// This rank's share of `tensor` (world_size * n, ...) combined over all ranks: (n, ...).
    fn reduce_scatter(&self, tensor: &Tensor, op: Op) -> Result<Tensor> {
        let mut shape = tensor.size();
        let (world_size, rows) = (i64::try_from(self.world_size())?, shape.first().copied().unwrap_or(0));
        ensure!(
            !shape.is_empty() && rows % world_size == 0,
            "reduce-scatter of shape {shape:?} over {world_size} ranks: the first dimension must divide evenly"
        );
        shape[0] = rows / world_size;
        let output = Tensor::f_empty(&shape, (tensor.kind(), tensor.device()))?;
        self.reduce_scatter_async(&output, tensor, op)?.wait()?;
        Ok(output)
    }
}

/// An operation under way. Dropping it does not cancel anything: the tensors stay in use until the group is done.
pub trait Work: Send {
    /// On the CPU, returns when the tensors are ready. On CUDA, returns at once: later launches of this thread wait for
    /// the tensors on the device.
    fn wait(self: Box<Self>) -> Result<()>;
}

/// An operation that was done when it was started.
impl Work for () {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl Backend {
    pub fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            Self::Nccl => "nccl",
        }
    }

    /// As sentences write it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Gloo => "Gloo",
            Self::Nccl => "NCCL",
        }
    }
}
