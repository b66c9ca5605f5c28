//! Bytes of tensors in use and at their peak since a point in the program, counted exactly on either device.

use anyhow::Result;
use cxx::UniquePtr;
use tch::Device;

use super::memory;

#[cxx::bridge(namespace = "cs336")]
mod ffi {
    unsafe extern "C++" {
        include!("cs336/src/torch/shim/allocator_stats.h");

        type CpuAllocations;
        fn new_cpu_allocations() -> UniquePtr<CpuAllocations>;
        fn in_use(self: &CpuAllocations) -> i64;
        fn peak(self: &CpuAllocations) -> i64;
        fn reset_peak(self: &CpuAllocations);
    }
}

/// Counts from its construction until its drop.
///
/// On the CPU: the allocations of this thread and of the backward passes that it starts, to the byte, as libtorch
/// reports them to its profiler (whose observer this replaces meanwhile). A tensor that is older than the tracker is
/// never counted. On CUDA: what the caching allocator holds for tensors beyond what it held at the start, in its blocks
/// of 512 bytes. Trackers of one thread must be dropped in the reverse of their order.
pub struct AllocationTracker(Source);

enum Source {
    Cpu(UniquePtr<ffi::CpuAllocations>),
    Cuda { device: Device, before: u64 },
}

impl AllocationTracker {
    pub fn start(device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self(Source::Cpu(ffi::new_cpu_allocations()))),
            device => Ok(Self(Source::Cuda { device, before: memory::stats(device)?.allocated_bytes.current })),
        }
    }

    /// Bytes of tensors alive now.
    pub fn in_use(&self) -> Result<u64> {
        match &self.0 {
            Source::Cpu(tracker) => Ok(u64::try_from(tracker.in_use()).unwrap_or(0)),
            Source::Cuda { device, before } => {
                Ok(memory::stats(*device)?.allocated_bytes.current.saturating_sub(*before))
            }
        }
    }

    /// The most bytes alive at once since the start or the last [`AllocationTracker::reset_peak`].
    pub fn peak(&self) -> Result<u64> {
        match &self.0 {
            Source::Cpu(tracker) => Ok(u64::try_from(tracker.peak()).unwrap_or(0)),
            Source::Cuda { device, before } => Ok(memory::stats(*device)?.allocated_bytes.peak.saturating_sub(*before)),
        }
    }

    /// Starts a new peak from what is in use now. On CUDA this resets the allocator's own peaks.
    pub fn reset_peak(&self) -> Result<()> {
        match &self.0 {
            Source::Cpu(tracker) => tracker.reset_peak(),
            Source::Cuda { device, .. } => memory::reset_peaks(*device)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

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
