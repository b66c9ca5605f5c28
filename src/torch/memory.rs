//! What a device's caching allocator holds, and what it held at its peak.

use anyhow::Result;
use tch::Device;

pub use super::bridge::ffi::{AllocatorStats, Gauge, MemoryInfo};
use super::bridge::{check, ffi};
use super::library::{cuda_index, load_cuda};

/// Counts of the allocator of `device`, over all its pools and streams.
///
/// Errors: [`crate::error::Fault::NotAvailable`] on the CPU, whose allocator counts nothing.
pub fn stats(device: Device) -> Result<AllocatorStats> {
    check(ffi::allocator_stats(cuda_index(device)?))
}

/// Resets every peak of [`stats`] to the current value.
pub fn reset_peaks(device: Device) -> Result<()> {
    check(ffi::reset_peak_stats(cuda_index(device)?))
}

/// Returns cached memory that no tensor uses to the driver, on every CUDA device.
pub fn empty_cache(device: Device) -> Result<()> {
    check(ffi::empty_cache(cuda_index(device)?))
}

/// Whether this process has used the CUDA allocator; asking does not start CUDA.
pub fn is_used() -> bool {
    load_cuda().is_ok() && check(ffi::allocator_is_used()).unwrap_or(false)
}

/// Free and total memory of `device` by its driver's count.
pub fn info(device: Device) -> Result<MemoryInfo> {
    check(ffi::memory_info(cuda_index(device)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn without_a_driver_nothing_is_used() {
        assert!(load_cuda().is_ok() || !is_used());
    }

    #[test]
    fn the_cpu_allocator_counts_nothing() {
        for error in [stats(Device::Cpu).map(drop), reset_peaks(Device::Cpu), info(Device::Cpu).map(drop)] {
            let error = error.unwrap_err();
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        }
    }
}
