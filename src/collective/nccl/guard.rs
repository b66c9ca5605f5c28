//! The NCCL collectives under way, and the guard thread that ends a process whose collective cannot end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use tch::Tensor;

use super::communicator::Communicator;
use crate::collective::flight_recorder::FlightRecorder;
use crate::cuda::Event;

/// Collectives that the device has not completed, in the order of the stream.
#[derive(Default)]
pub(super) struct UnderWay(Mutex<VecDeque<Item>>);

struct Item {
    sequence: u64,
    name: String,
    since: Instant,
    ended: Arc<Event>,
    /// Kept until `ended` has passed: libtorch does not track our stream and would reuse their memory.
    _tensors: Vec<Tensor>,
}

impl UnderWay {
    pub fn add(&self, sequence: u64, name: String, ended: Arc<Event>, tensors: Vec<Tensor>) {
        self.lock().push_back(Item { sequence, name, since: Instant::now(), ended, _tensors: tensors });
    }

    /// Drops the tensors of completed collectives.
    ///
    /// # Errors
    /// Those of kernels that failed on the device.
    pub fn release_done(&self) -> Result<()> {
        let mut items = self.lock();
        while let Some(first) = items.front() {
            if !first.ended.has_passed().with_context(|| first.name.clone())? {
                break;
            }
            items.pop_front();
        }
        Ok(())
    }

    pub fn clear(&self) {
        self.lock().clear();
    }

    /// The number and name of the oldest collective, and how long it has been under way.
    fn oldest(&self) -> Option<(u64, String, Duration)> {
        self.lock().front().map(|item| (item.sequence, item.name.clone(), item.since.elapsed()))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Item>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that polls the collectives under way until it is stopped.
pub(super) struct Guard {
    is_stopped: Arc<AtomicBool>,
    ending: Arc<Ending>,
    thread: Option<JoinHandle<()>>,
}

/// When the main thread began to free the communicator.
#[derive(Default)]
struct Ending(OnceLock<Instant>);

impl Ending {
    fn fault(&self) -> Option<String> {
        let is_late = self.0.get()?.elapsed() > FREE_LIMIT;
        is_late.then(|| format!("the communicator has not ended within {} s", FREE_LIMIT.as_secs()))
    }
}

/// How long the main thread may take to free the communicator: its calls return only when every rank has made them.
const FREE_LIMIT: Duration = Duration::from_secs(20);

/// The pause between two polls.
const POLL: Duration = Duration::from_millis(20);

/// A collective older than this is recorded as waited for, in the flight record. That may also be because this rank's own
/// GPU is still busy with earlier work; the supervisor finds the late rank by its calls.
const WAITS: Duration = Duration::from_secs(1);

/// How long the main thread may take to leave NCCL before an abort, and the process to end after it.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The exit status of a rank that its guard has ended.
const STATUS: i32 = 75;

impl Guard {
    pub fn start(
        communicator: Arc<Communicator>,
        under_way: Arc<UnderWay>,
        recorder: Arc<FlightRecorder>,
        rank: usize,
        timeout: Duration,
    ) -> Result<Self> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let ending = Arc::new(Ending::default());
        let (stopped, expected) = (is_stopped.clone(), ending.clone());
        let watch = move || {
            let mut waits_in = None;
            while !stopped.load(Ordering::Acquire) {
                if let Some(fault) = expected.fault().or_else(|| fault(&communicator, &under_way, timeout)) {
                    // The supervisor reports the collective in which this rank ended.
                    under_way.oldest().inspect(|(sequence, name, _)| recorder.start_wait(*sequence, name));
                    end_process(rank, &communicator, &fault);
                }
                let oldest = under_way.oldest().filter(|(_, _, since)| *since >= WAITS);
                let waits = oldest.as_ref().map(|(sequence, ..)| *sequence);
                if waits != waits_in {
                    oldest.map_or_else(
                        || recorder.end_wait(),
                        |(sequence, name, _)| recorder.start_wait(sequence, &name),
                    );
                    waits_in = waits;
                }
                std::thread::sleep(POLL);
            }
        };
        let thread = std::thread::Builder::new().name("nccl-guard".into()).spawn(watch);
        Ok(Self { is_stopped, ending, thread: Some(thread.context("failed to start the guard thread of NCCL")?) })
    }

    /// Starts the time limit for freeing the communicator; when it passes, the process ends.
    pub fn expect_end(&self) {
        self.ending.0.get_or_init(Instant::now);
    }

    pub fn stop(&mut self) {
        self.is_stopped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the guard changes nothing any more.
            let _ = thread.join();
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why the collectives under way cannot end; `None` while they can.
fn fault(communicator: &Communicator, under_way: &UnderWay, timeout: Duration) -> Option<String> {
    if let Err(error) = under_way.release_done() {
        return if is_end_of_process(&error) { None } else { Some(format!("{error:#}")) };
    }
    let oldest = under_way.oldest();
    let name = oldest.as_ref().map_or("between collectives", |(_, name, _)| name);
    if let Some(error) = communicator.asynchronous_fault() {
        return Some(format!("{name}: {error:#}"));
    }
    let (_, name, since) = oldest?;
    (since > timeout).then(|| format!("{name} has not ended within {:.1} s", timeout.as_secs_f64()))
}

/// When the process exits normally, CUDA is shut down before this thread ends; this is not a fault of a collective.
fn is_end_of_process(error: &anyhow::Error) -> bool {
    let gone = DriverError(CUresult::CUDA_ERROR_DEINITIALIZED);
    error.chain().any(|cause| cause.downcast_ref::<DriverError>() == Some(&gone))
}

/// Aborts the communicator, so that kernels that wait for a lost peer end, then ends the process.
fn end_process(rank: usize, communicator: &Communicator, fault: &str) -> ! {
    eprintln!("cs336: rank {rank}: {fault}; the communicator is aborted and this process ends");
    // The exit of a process waits for its GPU, possibly forever.
    std::thread::spawn(|| {
        std::thread::sleep(2 * END_LIMIT);
        std::process::abort();
    });
    communicator.abort(END_LIMIT);
    std::process::exit(STATUS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freeing_the_communicator_is_a_fault_only_once_it_is_late() {
        let ending = Ending::default();
        assert_eq!(ending.fault(), None);
        ending.0.set(Instant::now()).unwrap();
        assert_eq!(ending.fault(), None);
        let late = Ending(OnceLock::from(Instant::now() - FREE_LIMIT - POLL));
        assert_eq!(late.fault().unwrap(), "the communicator has not ended within 20 s");
    }

    #[test]
    fn the_shutdown_of_cuda_is_no_fault_and_other_errors_are() {
        let error =
            |code| anyhow::Error::from(DriverError(code)).context("asking for a CUDA event").context("barrier 1");
        assert!(is_end_of_process(&error(CUresult::CUDA_ERROR_DEINITIALIZED)));
        assert!(!is_end_of_process(&error(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)));
    }
}
