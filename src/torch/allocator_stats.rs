//! Bytes of tensors in use and at their peak since a point in the program, counted exactly on either device.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use anyhow::Result;
use cxx::UniquePtr;
use tch::Device;

use super::memory::{self, Gauge};

#[cxx::bridge(namespace = "cs336")]
mod ffi {
    extern "Rust" {
        type AllocationCallback;
        fn report(self: &AllocationCallback, address: u64, bytes: i64);
    }

    unsafe extern "C++" {
        include!("cs336/src/torch/shim/allocator_stats.h");

        #[namespace = "c10"]
        type DebugInfoGuard;
        fn observe_cpu(callback: Box<AllocationCallback>) -> UniquePtr<DebugInfoGuard>;
    }
}

/// Takes an allocation: its address, and its bytes, negative where they are freed.
struct AllocationCallback(Box<dyn Fn(u64, i64) + Send + Sync>);

impl AllocationCallback {
    fn report(&self, address: u64, bytes: i64) {
        (self.0)(address, bytes);
    }
}

/// Reports the CPU allocations of this thread, and of the backward passes that it starts, until the result is dropped.
///
/// Observers of one thread must be dropped in the reverse of their order; each gets all reports in its life.
pub(super) fn observe_cpu(report: impl Fn(u64, i64) + Send + Sync + 'static) -> UniquePtr<ffi::DebugInfoGuard> {
    ffi::observe_cpu(Box::new(AllocationCallback(Box::new(report))))
}

/// Counts from its construction until its drop.
///
/// On the CPU: the allocations of this thread and of the backward passes that it starts, to the byte, as libtorch
/// reports them to its profiler. A tensor that is older than the tracker is never counted. On CUDA: what the caching
/// allocator holds for tensors beyond what it held at the start, in its own blocks, which may be larger than their
/// tensors. A new tracker resets that allocator's peaks, so one that is inside another ends the outer one's peak.
/// Trackers of one thread must be dropped in the reverse of their order.
pub struct AllocationTracker(Source);

enum Source {
    Cpu { counts: Arc<Counts>, _observer: UniquePtr<ffi::DebugInfoGuard> },
    Caching { allocator: Box<dyn CachingAllocator>, before: u64 },
}

/// An allocator that counts for the whole process and keeps its peak until it is reset.
trait CachingAllocator {
    fn gauge(&self) -> Result<Gauge>;
    fn reset_peak(&self) -> Result<()>;
}

struct Cuda(Device);

impl CachingAllocator for Cuda {
    fn gauge(&self) -> Result<Gauge> {
        Ok(memory::stats(self.0)?.allocated_bytes)
    }

    fn reset_peak(&self) -> Result<()> {
        memory::reset_peaks(self.0)
    }
}

/// Bytes; below zero where a tensor of an outer tracker has been freed.
#[derive(Default)]
struct Counts {
    in_use: AtomicI64,
    peak: AtomicI64,
}

impl AllocationTracker {
    pub fn start(device: Device) -> Result<Self> {
        if device != Device::Cpu {
            return Self::of(Box::new(Cuda(device)));
        }
        let counts = Arc::new(Counts::default());
        let counted = counts.clone();
        let _observer = observe_cpu(move |_, bytes| {
            let in_use = counted.in_use.fetch_add(bytes, SeqCst) + bytes;
            counted.peak.fetch_max(in_use, SeqCst);
        });
        Ok(Self(Source::Cpu { counts, _observer }))
    }

    fn of(allocator: Box<dyn CachingAllocator>) -> Result<Self> {
        // Otherwise the first peak would be that of whatever ran before.
        allocator.reset_peak()?;
        Ok(Self(Source::Caching { before: allocator.gauge()?.current, allocator }))
    }

    /// Bytes of tensors alive now.
    pub fn in_use(&self) -> Result<u64> {
        Ok(self.gauge()?.current)
    }

    /// The most bytes alive at once since the start or the last [`AllocationTracker::reset_peak`].
    pub fn peak(&self) -> Result<u64> {
        Ok(self.gauge()?.peak)
    }

    /// Starts a new peak from what is in use now. On CUDA this resets the allocator's own peaks.
    pub fn reset_peak(&self) -> Result<()> {
        match &self.0 {
            Source::Cpu { counts, .. } => counts.peak.store(counts.in_use.load(SeqCst), SeqCst),
            Source::Caching { allocator, .. } => allocator.reset_peak()?,
        }
        Ok(())
    }

    fn gauge(&self) -> Result<Gauge> {
        match &self.0 {
            Source::Cpu { counts, .. } => {
                let [current, peak] = [&counts.in_use, &counts.peak].map(|count| count.load(SeqCst).max(0) as u64);
                Ok(Gauge { current, peak })
            }
            Source::Caching { allocator, before } => {
                let Gauge { current, peak } = allocator.gauge()?;
                Ok(Gauge { current: current.saturating_sub(*before), peak: peak.saturating_sub(*before) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use tch::{Kind, Tensor};

    use super::*;

    impl CachingAllocator for Rc<Cell<Gauge>> {
        fn gauge(&self) -> Result<Gauge> {
            Ok(self.get())
        }

        fn reset_peak(&self) -> Result<()> {
            self.set(Gauge { peak: self.get().current, ..self.get() });
            Ok(())
        }
    }

    #[test]
    fn a_new_tracker_forgets_the_peak_before_its_start() {
        // What the scheme before left in the process: 10 bytes in use, 100 at its peak.
        let allocator = Rc::new(Cell::new(Gauge { current: 10, peak: 100 }));
        let tracker = AllocationTracker::of(Box::new(allocator.clone())).unwrap();
        assert_eq!((tracker.in_use().unwrap(), tracker.peak().unwrap()), (0, 0));
        allocator.set(Gauge { current: 12, peak: 15 });
        assert_eq!((tracker.in_use().unwrap(), tracker.peak().unwrap()), (2, 5));
        tracker.reset_peak().unwrap();
        assert_eq!(tracker.peak().unwrap(), 2);
    }

    fn zeros(floats: i64) -> Tensor {
        Tensor::zeros([floats], (Kind::Float, Device::Cpu))
    }

    #[test]
    fn bytes_are_exact_and_older_tensors_are_not_counted() {
        let older = zeros(1000);
        let tracker = AllocationTracker::start(Device::Cpu).unwrap();
        drop(older);
        let a = zeros(256);
        drop(zeros(512));
        assert_eq!((tracker.in_use().unwrap(), tracker.peak().unwrap()), (1024, 3072));
        tracker.reset_peak().unwrap();
        assert_eq!(tracker.peak().unwrap(), 1024);
        drop(a);
        assert_eq!(tracker.in_use().unwrap(), 0);
    }

    #[test]
    fn saved_tensors_and_allocations_of_backward_are_counted() {
        let x = zeros(256).set_requires_grad(true);
        let tracker = AllocationTracker::start(Device::Cpu).unwrap();
        let y = x.exp();
        drop(y.shallow_clone());
        assert_eq!(tracker.in_use().unwrap(), 1024);
        crate::torch::autograd::backward_from(&y, &y.detach(), false).unwrap();
        drop(y);
        assert_eq!(tracker.in_use().unwrap(), 1024, "the gradient of x");
    }

    #[test]
    fn allocations_of_another_thread_are_not_counted() {
        let tracker = AllocationTracker::start(Device::Cpu).unwrap();
        let elsewhere = std::thread::spawn(|| zeros(256)).join().unwrap();
        assert_eq!(tracker.in_use().unwrap(), 0);
        drop(elsewhere);
    }
}
