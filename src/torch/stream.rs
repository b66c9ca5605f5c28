//! The stream that libtorch launches its kernels on.

use anyhow::Result;
use tch::Device;

use super::bridge::{check, ffi};
use super::library::cuda_index;

/// Waits until `device` has done everything that was launched on any of its streams; nothing to wait for on the CPU.
///
/// Errors: those of kernels that failed since the last synchronisation.
pub fn synchronize(device: Device) -> Result<()> {
    match device {
        Device::Cpu => Ok(()),
        _ => check(ffi::synchronize_device(cuda_index(device)?)),
    }
}

/// The `cudaStream_t` that this thread's operators on `device` go to; 0 is the default stream.
///
/// Errors: [`crate::error::Fault::NotAvailable`] on the CPU.
pub fn current_stream(device: Device) -> Result<u64> {
    check(ffi::current_stream_handle(cuda_index(device)?))
}

/// Launches a kernel on this thread's stream that does nothing for `cycles` of the GPU's clock, as `torch.cuda._sleep`.
///
/// Errors: [`crate::error::Fault::NotAvailable`] on the CPU.
pub fn spin(device: Device, cycles: i64) -> Result<()> {
    check(ffi::spin(cuda_index(device)?, cycles))
}

/// Runs `body` with this thread's operators on the side stream of `device`. Neither stream waits for the other unless
/// `body` makes it wait. On the CPU `body` just runs.
///
/// libtorch reuses the memory of tensors that `body` makes on the side stream only. It does not track which other
/// tensors `body` uses: they must live until this thread's own stream has waited for what `body` started.
pub fn on_side_stream<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let _side_stream = match device {
        Device::Cpu => None,
        _ => Some(check(ffi::enter_side_stream(cuda_index(device)?))?),
    };
    body()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn synchronizing_the_cpu_does_nothing_and_it_has_no_stream() {
        synchronize(Device::Cpu).unwrap();
        for error in [current_stream(Device::Cpu).unwrap_err(), spin(Device::Cpu, 1).unwrap_err()] {
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        }
    }
}
