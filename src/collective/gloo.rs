//! Gloo, between processes on CPU tensors: the backend that needs no GPU.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tch::{Device, Tensor};

use super::flight_recorder::{FlightRecorder, call_name};
use super::timeline::{Call, Span};
use super::trace::LAUNCH;
use super::{Backend, Collective, Group, Operation, Request, Work};
use crate::torch::gloo::{self, Member, ProcessGroup};
use crate::torch::nvtx;
use crate::torch::store::Store;

/// A Gloo process group over libtorch's.
pub struct Gloo {
    group: Group,
    patience: Duration,
    /// Locked while an operation enters the queue, not while it is waited for.
    processes: Mutex<ProcessGroup>,
}

/// Added to the group's own timeout, so that the group's error comes first: it names the late peer.
const EXTRA_PATIENCE: Duration = Duration::from_secs(5);

impl Gloo {
    /// Connects to the other ranks through their store.
    ///
    /// # Errors
    /// libtorch's, if not all ranks have connected within the member's timeout.
    pub fn connect(store: &Store, member: &Member) -> Result<Self> {
        let processes = Mutex::new(ProcessGroup::connect(store, member)?);
        let group = Group::new(Backend::Gloo, Device::Cpu, member.rank, member.world_size)?;
        Ok(Self { group, patience: member.timeout + EXTRA_PATIENCE, processes })
    }
}

impl Collective for Gloo {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, request: Request) -> Result<Box<dyn Work>> {
        let Group { recorder, timeline, .. } = &self.group;
        let (operation, detail) = (request.operation(), request.detail());
        // Locked over the next lines, so that calls are numbered in the order of the queue.
        let processes: MutexGuard<_> = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let sequence = recorder.call(operation, &detail);
        let name = call_name(operation.name(), sequence, &detail);
        let launched = Instant::now();
        let _launch = nvtx::scope(LAUNCH, &name);
        let work = enqueue(&processes, request).with_context(|| name.clone())?;
        let ended = Arc::new(OnceLock::new());
        if timeline.is_on() {
            let span = Span::Host { ended: ended.clone() };
            timeline.add(Call { sequence, operation, bytes: request.bytes(), launched, span });
            // libtorch's reduce-scatter over Gloo has no future (torch 2.11), so its end is the end of its wait.
            if operation != Operation::ReduceScatter {
                let ended = ended.clone();
                work.when_done(move || {
                    let _ = ended.set(Instant::now());
                })?;
            }
        }
        Ok(Box::new(Pending { work, name, sequence, patience: self.patience, recorder: recorder.clone(), ended }))
    }
}

fn enqueue(processes: &ProcessGroup, request: Request) -> Result<gloo::Work> {
    match request {
        Request::AllReduce { tensors, op } => processes.all_reduce_async(&detached(tensors)?, op),
        Request::Broadcast { tensor, root } => processes.broadcast_async(&tensor.f_detach()?, root),
        Request::AllGather { outputs, inputs } => processes.all_gather_async(&detached(outputs)?, &detached(inputs)?),
        Request::ReduceScatter { outputs, inputs, op } => {
            processes.reduce_scatter_async(&detached(outputs)?, &detached(inputs)?, op)
        }
        Request::Barrier => processes.barrier_async(),
    }
}

fn detached(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(|tensor| Ok(tensor.f_detach()?)).collect()
}

struct Pending {
    work: gloo::Work,
    name: String,
    sequence: u64,
    patience: Duration,
    recorder: Arc<FlightRecorder>,
    ended: Arc<OnceLock<Instant>>,
}

impl Work for Pending {
    fn wait(mut self: Box<Self>) -> Result<()> {
        let Self { work, name, sequence, patience, recorder, ended } = &mut *self;
        recorder.waiting(*sequence, name, || work.wait(*patience)).with_context(|| name.clone())?;
        // A time that the callback has set stays.
        let _ = ended.set(Instant::now());
        Ok(())
    }
}
