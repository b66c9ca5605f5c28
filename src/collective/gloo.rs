//! Gloo, between processes on CPU tensors: the backend that needs no GPU.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tch::{Device, Tensor};

use super::flight_recorder::FlightRecorder;
use super::timeline::{Call, Span, Timeline};
use super::{Collective, Op, Operation, Work, bytes_of, detail_of};
use crate::torch::gloo::{self, Member, ProcessGroup, ReduceOp};
use crate::torch::store::Store;

/// A Gloo process group over libtorch's.
pub struct Gloo {
    rank: usize,
    world_size: usize,
    patience: Duration,
    recorder: Arc<FlightRecorder>,
    timeline: Timeline,
    /// Locked while an operation enters the group's queue, not while it is waited for.
    group: Mutex<ProcessGroup>,
}

/// Added to the group's own timeout, so that the group's error comes first: it names the late peer.
const EXTRA_PATIENCE: Duration = Duration::from_secs(5);

impl Gloo {
    /// Connects to the other ranks through their store.
    ///
    /// # Errors
    /// libtorch's, if not all ranks have connected within the member's timeout.
    pub fn connect(store: &Store, member: &Member) -> Result<Self> {
        let &Member { rank, world_size, timeout, .. } = member;
        let group = Mutex::new(ProcessGroup::connect(store, member)?);
        let patience = timeout + EXTRA_PATIENCE;
        let recorder = Arc::new(FlightRecorder::open()?);
        Ok(Self { rank, world_size, patience, recorder, timeline: Timeline::new(Device::Cpu), group })
    }

    /// Enqueues one collective over the whole of `tensors` (none for a barrier).
    fn start(
        &self,
        operation: Operation,
        tensors: &[Tensor],
        how: &str,
        enqueue: impl FnOnce(&ProcessGroup) -> Result<gloo::Work>,
    ) -> Result<Pending> {
        // Locked over both lines, so that calls are numbered in the order of the queue.
        let group: MutexGuard<_> = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        let detail = detail_of(tensors, how);
        let sequence = self.recorder.call(operation, &detail);
        let launched = Instant::now();
        let work = enqueue(&group).with_context(|| name(operation, sequence, &detail))?;
        let ended = Arc::new(OnceLock::new());
        if self.timeline.is_on() {
            let bytes = bytes_of(tensors)?;
            let span = Span::Host { ended: ended.clone() };
            self.timeline.add(Call { sequence, operation, bytes, launched, span });
            // libtorch's reduce-scatter over Gloo has no future (torch 2.11), so its end is the end of its wait.
            if operation != Operation::ReduceScatter {
                let ended = ended.clone();
                work.when_done(move || {
                    let _ = ended.set(Instant::now());
                })?;
            }
        }
        let (patience, recorder) = (self.patience, self.recorder.clone());
        Ok(Pending { work, operation, sequence, detail, patience, recorder, ended })
    }
}

struct Pending {
    work: gloo::Work,
    operation: Operation,
    sequence: u64,
    detail: String,
    patience: Duration,
    recorder: Arc<FlightRecorder>,
    ended: Arc<OnceLock<Instant>>,
}

impl Work for Pending {
    fn wait(mut self: Box<Self>) -> Result<()> {
        let Self { work, operation, sequence, detail, patience, recorder, ended } = &mut *self;
        recorder.waiting(*sequence, || work.wait(*patience)).with_context(|| name(*operation, *sequence, detail))?;
        // A time that the callback has set stays.
        let _ = ended.set(Instant::now());
        Ok(())
    }
}

fn name(operation: Operation, sequence: u64, detail: &str) -> String {
    format!("{operation} {sequence} {detail}").trim_end().to_string()
}

impl Collective for Gloo {
    fn backend(&self) -> &'static str {
        "gloo"
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_coalesced_async(&self, tensors: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        let tensors = detached(tensors)?;
        let enqueue = |group: &ProcessGroup| group.all_reduce_async(&tensors, reduce_op(op));
        Ok(Box::new(self.start(Operation::AllReduce, &tensors, op.detail(), enqueue)?))
    }

    fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Box<dyn Work>> {
        let tensor = tensor.f_detach()?;
        let enqueue = |group: &ProcessGroup| group.broadcast_async(&tensor, root);
        Ok(Box::new(self.start(
            Operation::Broadcast,
            std::slice::from_ref(&tensor),
            &format!(" from rank {root}"),
            enqueue,
        )?))
    }

    fn all_gather_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor]) -> Result<Box<dyn Work>> {
        let (outputs, inputs) = (detached(outputs)?, detached(inputs)?);
        let enqueue = |group: &ProcessGroup| group.all_gather_async(&outputs, &inputs);
        Ok(Box::new(self.start(Operation::AllGather, &outputs, "", enqueue)?))
    }

    fn reduce_scatter_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        let (outputs, inputs) = (detached(outputs)?, detached(inputs)?);
        let enqueue = |group: &ProcessGroup| group.reduce_scatter_async(&outputs, &inputs, reduce_op(op));
        Ok(Box::new(self.start(Operation::ReduceScatter, &inputs, op.detail(), enqueue)?))
    }

    fn barrier(&self) -> Result<()> {
        Box::new(self.start(Operation::Barrier, &[], "", ProcessGroup::barrier_async)?).wait()
    }

    fn timeline(&self) -> &Timeline {
        &self.timeline
    }
}

fn detached(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(|tensor| Ok(tensor.f_detach()?)).collect()
}

fn reduce_op(op: Op) -> ReduceOp {
    match op {
        Op::Sum => ReduceOp::Sum,
        Op::Average => ReduceOp::Average,
    }
}
