//! NCCL, between processes that each drive one GPU.
//!
//! Collectives run on the group's own stream. Each waits there for what the calling thread launched before it, and `wait`
//! makes that thread's later work wait for the collective; the host blocks in neither. A guard thread watches the
//! collectives under way. When a peer is lost or late, it aborts the communicator and ends the process: a thread that
//! waits for the device would otherwise continue with values that never arrived. Not for use inside a CUDA graph capture.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::environment::Environment;
use super::flight_recorder::FlightRecorder;
use super::timeline::{Call, Span, Timeline};
use super::{Collective, Op, Operation, Work, bytes_of, detail_of};
use crate::cuda::{Event, Stream, make_current};
use crate::torch;
use crate::torch::store::Store;

mod communicator;
mod guard;
mod library;

use communicator::{Communicator, Membership, Request, data_type};
use guard::{Guard, UnderWay};

/// NVLink multicast. It stays off unless the user decides otherwise: a program that dies while it is in use can take all
/// GPUs of a shared machine out of service, and with up to four GPUs it makes no collective faster (NVIDIA/nccl#1455).
pub const NVLS: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");

/// With 0, NCCL launches each collective on its own thread, so that no call can block forever. By default it launches on
/// the calling thread: 1 MB between two H200s took 35 us that way, and 100 us with 0. If such a call blocks, the guard
/// ends the process.
const BLOCKING: &str = "CS336_NCCL_BLOCKING";

/// An NCCL communicator and its collectives under way.
pub struct Nccl {
    rank: usize,
    world_size: usize,
    device: Device,
    timeline: Timeline,
    recorder: Arc<FlightRecorder>,
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
        let device = torch::cuda_device(local_rank)?;
        make_current(device)?;
        let id = exchange(store, rank, || library::Api::get()?.unique_id())?;
        let is_blocking = std::env::var(BLOCKING).map_or(true, |value| value != "0");
        let communicator = Communicator::form(Membership { id, rank, world_size, device, timeout }, is_blocking)?;
        let (communicator, recorder) = (Arc::new(communicator), Arc::new(FlightRecorder::open()?));
        let under_way = Arc::new(UnderWay::default());
        let guard = Guard::start(communicator.clone(), under_way.clone(), recorder.clone(), rank, timeout)?;
        let stream = Stream::new(device)?;
        let (ready, timeline) = (stream.event(false)?, Timeline::new(device));
        let stream = Mutex::new(CommunicationStream { ready, stream });
        Ok(Self { rank, world_size, device, timeline, recorder, stream, communicator, under_way, guard })
    }

    /// Launches `requests` as one collective over the whole of `tensors`; `held` are all the tensors they touch.
    fn start(
        &self,
        operation: Operation,
        tensors: &[Tensor],
        how: &str,
        requests: &[Request],
        held: Vec<Tensor>,
    ) -> Result<Pending> {
        held.iter().try_for_each(|tensor| self.usable(tensor)).with_context(|| operation.name())?;
        let stream: MutexGuard<_> = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let CommunicationStream { stream, ready } = &*stream;
        self.under_way.release_done()?;
        let detail = detail_of(tensors, how);
        let sequence = self.recorder.call(operation, &detail);
        let name = format!("{operation} {sequence} {detail}").trim_end().to_string();
        let launched = Instant::now();
        let launch = || -> Result<_> {
            ready.record_current()?;
            stream.wait_for(ready)?;
            let started = self.timeline.is_on().then(|| stream.event(true)).transpose()?;
            started.iter().try_for_each(|started| started.record_on(stream))?;
            self.communicator.launch(requests, stream)?;
            let ended = Arc::new(stream.event(started.is_some())?);
            ended.record_on(stream)?;
            if let Some(started) = started {
                let span = Span::Device { started: Arc::new(started), ended: ended.clone() };
                self.timeline.add(Call { sequence, operation, bytes: bytes_of(tensors)?, launched, span });
            }
            Ok(ended)
        };
        let ended = launch().with_context(|| name.clone())?;
        self.under_way.add(sequence, name.clone(), ended.clone(), held);
        Ok(Pending { name, ended })
    }

    /// NCCL counts elements from the data pointer, so from a tensor with gaps it would read other memory.
    fn usable(&self, tensor: &Tensor) -> Result<()> {
        let (device, wanted) = (tensor.device(), self.device);
        ensure!(device == wanted, "this rank's tensors must be on {wanted:?}, this one is on {device:?}");
        ensure!(tensor.is_contiguous(), "nccl works on contiguous tensors, this one has strides {:?}", tensor.stride());
        data_type(tensor).map(drop)
    }

    /// Checks that each of `wholes` has `world_size` times the elements of its counterpart in `shares`.
    fn check_shares(&self, wholes: &[Tensor], shares: &[Tensor]) -> Result<()> {
        ensure!(wholes.len() == shares.len(), "{} tensors, but {} shares", wholes.len(), shares.len());
        ensure!(!wholes.is_empty(), "no tensors");
        for (whole, share) in wholes.iter().zip(shares) {
            let (have, one) = (whole.numel(), share.numel());
            let (of, ours) = (whole.kind(), share.kind());
            ensure!(of == ours, "the whole is of {of:?}, but the share is of {ours:?}");
            let ranks = self.world_size;
            ensure!(have == one * ranks, "{have} elements are not {ranks} shares of {one} elements");
        }
        Ok(())
    }
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

fn check_average(op: Op, tensor: &Tensor) -> Result<()> {
    ensure!(
        op == Op::Sum || tensor.kind() != Kind::Int64,
        "average of {:?} tensors: averages need floating point",
        tensor.kind()
    );
    Ok(())
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
    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn device(&self) -> Device {
        self.device
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_coalesced_async(&self, tensors: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        ensure!(!tensors.is_empty(), "all-reduce of no tensors");
        tensors.iter().try_for_each(|tensor| check_average(op, tensor))?;
        let held = tensors.iter().map(Tensor::shallow_clone).collect();
        let requests: Vec<_> = tensors.iter().map(|tensor| Request::AllReduce { tensor, op }).collect();
        Ok(Box::new(self.start(Operation::AllReduce, tensors, op.detail(), &requests, held)?))
    }

    fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Box<dyn Work>> {
        ensure!(root < self.world_size, "broadcast from rank {root} of {} ranks", self.world_size);
        let (whole, held) = (std::slice::from_ref(tensor), vec![tensor.shallow_clone()]);
        let request = Request::Broadcast { tensor, root };
        Ok(Box::new(self.start(Operation::Broadcast, whole, &format!(" from rank {root}"), &[request], held)?))
    }

    fn all_gather_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor]) -> Result<Box<dyn Work>> {
        self.check_shares(outputs, inputs).context("all_gather")?;
        let pairs = outputs.iter().zip(inputs);
        let requests: Vec<_> = pairs.map(|(output, input)| Request::AllGather { output, input }).collect();
        let held = outputs.iter().chain(inputs).map(Tensor::shallow_clone).collect();
        Ok(Box::new(self.start(Operation::AllGather, outputs, "", &requests, held)?))
    }

    fn reduce_scatter_coalesced_async(&self, outputs: &[Tensor], inputs: &[Tensor], op: Op) -> Result<Box<dyn Work>> {
        self.check_shares(inputs, outputs).context("reduce_scatter")?;
        inputs.iter().try_for_each(|input| check_average(op, input))?;
        let pairs = outputs.iter().zip(inputs);
        let requests: Vec<_> = pairs.map(|(output, input)| Request::ReduceScatter { output, input, op }).collect();
        let held = outputs.iter().chain(inputs).map(Tensor::shallow_clone).collect();
        Ok(Box::new(self.start(Operation::ReduceScatter, inputs, op.detail(), &requests, held)?))
    }

    /// The host waits too. Afterwards no tensor is kept alive for an earlier collective.
    fn barrier(&self) -> Result<()> {
        let token = Tensor::f_zeros([1], (Kind::Float, self.device))?;
        let request = Request::AllReduce { tensor: &token, op: Op::Sum };
        let work = self.start(Operation::Barrier, &[], "", &[request], vec![token.shallow_clone()])?;
        let since = Instant::now();
        while !work.ended.has_passed().with_context(|| work.name.clone())? {
            if since.elapsed() > SPIN {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        self.under_way.release_done()
    }

    fn timeline(&self) -> &Timeline {
        &self.timeline
    }
}

impl Drop for Nccl {
    /// Ends the communicator together with the other ranks. `cs336 rank` lets a failed rank exit without this.
    fn drop(&mut self) {
        // The guard stays until the communicator is gone: a peer may be lost now as well, and in NCCL's default mode
        // the calls below return only when every rank has made them.
        let idle = torch::stream::synchronize(self.device);
        self.guard.expect_end();
        if let Err(error) = idle.and_then(|()| self.communicator.finalize()) {
            eprintln!("cs336: rank {}: {error:#}", self.rank);
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
    fn an_average_of_integers_is_refused_and_the_version_has_dots() {
        let whole = Tensor::from_slice(&[1i64]);
        assert!(check_average(Op::Average, &whole).unwrap_err().to_string().contains("Int64"));
        assert!(check_average(Op::Sum, &whole).is_ok());
        assert!(version().unwrap().starts_with("2."), "{:?}", version());
    }
}
