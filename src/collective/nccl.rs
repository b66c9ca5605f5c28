//! NCCL, between processes that each drive one GPU.
//!
//! Collectives run on the group's own stream. Each waits there for what the calling thread launched before it, and `wait`
//! makes that thread's later work wait for the collective; the host blocks in neither. A guard thread watches the
//! collectives under way. When a peer is lost or late, it aborts the communicator and ends the process: a thread that
//! waits for the device would otherwise continue with values that never arrived.
//!
//! Collectives can be captured in a CUDA graph. The guard learns of its replays by [`Collective::watch_replay`]; without that
//! call a replay whose peer is lost is found by the supervisor alone.

use std::slice::from_ref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tch::{Device, Kind, Tensor};

use super::environment::Environment;
use super::flight_recorder::call_name;
use super::timeline::{Call, Span};
use super::trace::LAUNCH;
use super::{Backend, Collective, Group, Op, Operation, Request, Work};
use crate::cuda::{Event, Stream, is_capturing, make_current};
use crate::torch;
use crate::torch::nvtx;
use crate::torch::store::Store;

mod communicator;
mod guard;
mod library;

use communicator::{Communicator, Membership, data_type};
use guard::{Guard, UnderWay};

/// NVLink multicast. It stays off unless the user decides otherwise: a program that dies while it is in use can take all
/// GPUs of a shared machine out of service, and with up to four GPUs it makes no collective faster (NVIDIA/nccl#1455).
pub const NVLS: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");

/// An NCCL communicator and its collectives under way.
pub struct Nccl {
    group: Group,
    /// Locked while a collective is launched, so that calls are numbered in the order of the stream.
    stream: Mutex<CommunicationStream>,
    communicator: Arc<Communicator>,
    under_way: Arc<UnderWay>,
    guard: Guard,
}

/// Where collectives run.
struct CommunicationStream {
    stream: Stream,
    /// Recorded by every call on the caller's stream, so that the collective waits for what came before it.
    ready: Event,
}

/// How long a barrier polls without sleeping. A sleep ends up to 70 us late on a single rank, and what follows is timed.
const SPIN: Duration = Duration::from_millis(2);

/// The version of the NCCL library that is loaded, as "2.28.9".
///
/// Errors: [`crate::error::Fault::NotAvailable`].
pub fn version() -> Result<String> {
    let version = library::Api::get()?.version()?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// The GPU of a local rank.
///
/// Errors: [`crate::error::Fault::NotAvailable`].
fn device_of(local_rank: usize) -> Result<Device> {
    torch::cuda_device(local_rank).with_context(|| {
        format!(
            "local rank {local_rank} computes on GPU {local_rank}. Give every task all GPUs of its node (--gpus-per-node), not one \
             GPU for each task"
        )
    })
}

impl Nccl {
    /// Connects to the other ranks through their store, each with the GPU of its local rank.
    ///
    /// # Errors
    /// [`crate::error::Fault::NotAvailable`] without NCCL or that GPU; NCCL's own; a rank that does not arrive within the
    /// environment's timeout.
    pub fn connect(store: &Store, environment: &Environment) -> Result<Self> {
        let &Environment { rank, local_rank, world_size, timeout, .. } = environment;
        let (name, value) = NVLS;
        ensure!(std::env::var_os(name).is_some(), "{name} is not set: set it to {value} before this process starts");
        let device = device_of(local_rank)?;
        make_current(device)?;
        let id = exchange(store, rank, || library::Api::get()?.unique_id())?;
        let communicator = Arc::new(Communicator::form(Membership { id, rank, world_size, device, timeout })?);
        let group = Group::new(Backend::Nccl, device, rank, world_size)?;
        let under_way = Arc::new(UnderWay::default());
        let guard = Guard::start(communicator.clone(), under_way.clone(), group.recorder.clone(), rank, timeout)?;
        let stream = Stream::new(device)?;
        let stream = Mutex::new(CommunicationStream { ready: stream.event(false)?, stream });
        Ok(Self { group, stream, communicator, under_way, guard })
    }

    /// Launches the request as one group of NCCL's calls. A barrier is the sum of one number.
    fn launch(&self, request: Request) -> Result<Pending> {
        let Group { device, recorder, timeline, .. } = &self.group;
        let (operation, detail) = (request.operation(), request.detail());
        let token = match request {
            Request::Barrier => Some(Tensor::f_zeros([1], (Kind::Float, *device))?),
            _ => None,
        };
        let sent = token.as_ref().map_or(request, |token| Request::AllReduce { tensors: from_ref(token), op: Op::Sum });
        check(&self.group, sent).with_context(|| operation.name())?;
        let stream: MutexGuard<_> = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let CommunicationStream { stream, ready } = &*stream;
        let is_captured = is_capturing(*device)?;
        if !is_captured {
            self.under_way.release_done()?;
        }
        let sequence = recorder.call(operation, &detail);
        let name = call_name(operation.name(), sequence, &detail);
        let launched = Instant::now();
        let _launch = nvtx::scope(LAUNCH, &name);
        let launch = || -> Result<_> {
            ready.record_current()?;
            stream.wait_for(ready)?;
            let is_timed = timeline.is_on() && !is_captured;
            let started = is_timed.then(|| stream.event(true)).transpose()?;
            started.iter().try_for_each(|started| started.record_on(stream))?;
            self.communicator.launch(sent, stream)?;
            let ended = Arc::new(stream.event(started.is_some())?);
            ended.record_on(stream)?;
            if let Some(started) = started {
                let span = Span::Device { started, ended: ended.clone() };
                timeline.add(Call { sequence, operation, bytes: request.bytes(), launched, span });
            }
            Ok(ended)
        };
        let ended = launch().with_context(|| name.clone())?;
        // An event of a capture never passes, and the graph's owner keeps its tensors.
        if !is_captured {
            let (outputs, inputs) = sent.tensors();
            let held = outputs.iter().chain(inputs).map(Tensor::shallow_clone).collect();
            self.under_way.add(sequence, name.clone(), ended.clone(), held);
        }
        Ok(Pending { name, ended })
    }
}

/// Refuses tensors and ranks with which NCCL would read or write other memory, and averages that it does not have.
fn check(group: &Group, request: Request) -> Result<()> {
    let (outputs, inputs) = request.tensors();
    ensure!(!outputs.is_empty(), "no tensors");
    for tensor in outputs.iter().chain(inputs) {
        let (device, wanted) = (tensor.device(), group.device);
        ensure!(device == wanted, "this rank's tensors must be on {wanted:?}, this one is on {device:?}");
        // NCCL counts elements from the data pointer, so from a tensor with gaps it would read other memory.
        ensure!(tensor.is_contiguous(), "nccl works on contiguous tensors, this one has strides {:?}", tensor.stride());
        data_type(tensor)?;
    }
    if let Request::AllReduce { op: Op::Average, .. } | Request::ReduceScatter { op: Op::Average, .. } = request {
        let is_float = outputs.iter().all(|tensor| tensor.kind() != Kind::Int64);
        ensure!(is_float, "average of Int64 tensors: averages need floating point");
    }
    let ranks = group.world_size;
    match request {
        Request::AllGather { outputs, inputs } => check_shares(outputs, inputs, ranks),
        Request::ReduceScatter { outputs, inputs, .. } => check_shares(inputs, outputs, ranks),
        Request::Broadcast { root, .. } if root >= ranks => bail!("broadcast from rank {root} of {ranks} ranks"),
        Request::Broadcast { .. } | Request::AllReduce { .. } | Request::Barrier => Ok(()),
    }
}

/// Checks that each of `wholes` has `ranks` times the elements of its counterpart in `shares`.
fn check_shares(wholes: &[Tensor], shares: &[Tensor], ranks: usize) -> Result<()> {
    ensure!(wholes.len() == shares.len(), "{} tensors, but {} shares", wholes.len(), shares.len());
    for (whole, share) in wholes.iter().zip(shares) {
        let (have, one) = (whole.numel(), share.numel());
        let (of, ours) = (whole.kind(), share.kind());
        ensure!(of == ours, "the whole is of {of:?}, but the share is of {ours:?}");
        ensure!(have == one * ranks, "{have} elements are not {ranks} shares of {one} elements");
    }
    Ok(())
}

/// Returns, at every rank, the unique id that rank 0 makes.
fn exchange(store: &Store, rank: usize, make: impl FnOnce() -> Result<[u8; 128]>) -> Result<[u8; 128]> {
    const KEY: &str = "nccl/id";
    if rank == 0 {
        let id = make()?;
        store.set(KEY, &id)?;
        return Ok(id);
    }
    let id = store.get(KEY)?;
    id.as_slice().try_into().with_context(|| format!("rank 0's NCCL id has {} bytes, not 128", id.len()))
}

struct Pending {
    name: String,
    ended: Arc<Event>,
}

impl Work for Pending {
    fn wait(self: Box<Self>) -> Result<()> {
        self.ended.make_current_stream_wait().with_context(|| self.name.clone())
    }
}

impl Collective for Nccl {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, request: Request) -> Result<Box<dyn Work>> {
        Ok(Box::new(self.launch(request)?))
    }

    fn watch_replay(&self) -> Result<()> {
        const DETAIL: &str = "of a replayed graph";
        let stream: MutexGuard<_> = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = Arc::new(stream.stream.event(false)?);
        ended.record_current()?;
        let sequence = self.group.recorder.call(Operation::AllReduce, DETAIL);
        let name = call_name(Operation::AllReduce.name(), sequence, DETAIL);
        self.under_way.add(sequence, name, ended, Vec::new());
        self.under_way.release_done()
    }

    /// The host waits too. Afterwards no tensor is kept alive for an earlier collective.
    fn barrier(&self) -> Result<()> {
        let Pending { name, ended } = self.launch(Request::Barrier)?;
        let since = Instant::now();
        while !ended.has_passed().with_context(|| name.clone())? {
            if since.elapsed() > SPIN {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        self.under_way.release_done()
    }
}

impl Drop for Nccl {
    /// Ends the communicator together with the other ranks. `cs336 rank` lets a failed rank exit without this.
    fn drop(&mut self) {
        // The guard stays until the communicator is gone: a peer may be lost now as well, and the calls below return only
        // when every rank has made them.
        let idle = torch::stream::synchronize(self.group.device);
        self.guard.expect_end();
        if let Err(error) = idle.and_then(|()| self.communicator.finalize()) {
            eprintln!("cs336: rank {}: {error:#}", self.group.rank);
            self.communicator.abort(Duration::ZERO);
        }
        self.guard.stop();
        // Nothing runs any more, so the tensors can be freed even where events can no longer be queried.
        self.under_way.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn a_gpu_that_a_local_rank_lacks_is_a_typed_fault_with_the_remedy() {
        let error = device_of(63).unwrap_err();
        assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        assert!(
            error.to_string().contains("local rank 63") && error.to_string().contains("--gpus-per-node"),
            "{error}"
        );
    }

    #[test]
    fn rank_0s_id_reaches_the_others_and_an_id_of_another_size_is_refused() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let store = Store::serve(listener, Duration::from_secs(5)).unwrap();
        let id: [u8; 128] = std::array::from_fn(|i| i as u8);
        assert_eq!(exchange(&store, 0, || Ok(id)).unwrap(), id);
        assert_eq!(exchange(&store, 1, || anyhow::bail!("only rank 0 makes an id")).unwrap(), id);
        store.set("nccl/id", b"short").unwrap();
        let error = exchange(&store, 1, || Ok(id)).unwrap_err();
        assert!(error.to_string().contains("has 5 bytes, not 128"), "{error}");
    }

    #[test]
    fn a_request_that_nccl_would_carry_out_wrongly_is_refused() {
        let group = Group::new(Backend::Nccl, Device::Cpu, 0, 2).unwrap();
        let [one, two] = [1, 2].map(|n| [Tensor::zeros([n], (Kind::Float, Device::Cpu))]);
        let [integer, gaps] = [Tensor::from_slice(&[1i64]), Tensor::zeros([2, 2], (Kind::Float, Device::Cpu)).tr()];
        let refused = |request| check(&group, request).unwrap_err().to_string();
        let all_reduce = |tensors, op| Request::AllReduce { tensors, op };
        assert!(check(&group, all_reduce(from_ref(&integer), Op::Sum)).is_ok());
        assert!(refused(all_reduce(from_ref(&integer), Op::Average)).contains("Int64"));
        assert!(refused(all_reduce(&[], Op::Sum)).contains("no tensors"));
        assert!(refused(all_reduce(from_ref(&gaps), Op::Sum)).contains("contiguous"));
        assert!(refused(Request::Broadcast { tensor: &integer, root: 2 }).contains("rank 2 of 2"));
        assert!(check(&group, Request::AllGather { outputs: &two, inputs: &one }).is_ok());
        assert!(refused(Request::AllGather { outputs: &one, inputs: &one }).contains("not 2 shares of 1"));
        assert!(check(&group, Request::ReduceScatter { outputs: &one, inputs: &two, op: Op::Average }).is_ok());
        assert!(refused(Request::ReduceScatter { outputs: &two, inputs: &one, op: Op::Sum }).contains("not 2 shares"));
        assert!(
            refused(Request::AllGather { outputs: &two, inputs: from_ref(&integer) }).contains("the share is of Int64")
        );
    }

    #[test]
    fn the_version_has_dots() {
        assert!(version().unwrap().starts_with("2."), "{:?}", version());
    }
}
