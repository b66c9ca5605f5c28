//! GPUs by the driver's interface: their properties, and their primary contexts, which libtorch uses too.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::{CudaContext, result};
use tch::Device;

use super::cache::Cache;
use super::emulator;
use crate::error::Fault;
use crate::torch;

/// The GPU architecture that a kernel is compiled for: a compute capability, such as 9.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch {
    pub major: i32,
    pub minor: i32,
}

impl Arch {
    pub const AMPERE: Self = Self { major: 8, minor: 0 };
    pub const HOPPER: Self = Self { major: 9, minor: 0 };
}

/// As NVRTC spells it. From 9.0 on it ends in "a": without it NVRTC refuses instructions of one architecture alone, such as
/// Hopper's wgmma and setmaxnreg. Such code runs on that architecture only.
impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.major >= 9 { "a" } else { "" };
        write!(f, "sm_{}{}{suffix}", self.major, self.minor)
    }
}

/// What a launch asks of its GPU.
struct Properties {
    arch: Arch,
    multiprocessors: u32,
    most_shared_bytes: u32,
}

/// From the driver at the first call.
fn properties_of(device: Device) -> Result<Arc<Properties>> {
    static KNOWN: Cache<(), Properties> = Cache::new();
    KNOWN.get(device, (), || {
        let context = context_of(device)?;
        let (major, minor) = context.compute_capability()?;
        let multiprocessors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        Ok(Properties {
            arch: Arch { major, minor },
            multiprocessors: u32::try_from(multiprocessors)?,
            most_shared_bytes: u32::try_from(shared)?,
        })
    })
}

/// A GPU's architecture. Errors: [`Fault::NotAvailable`] for a GPU that is not there.
pub fn compute_capability(device: Device) -> Result<Arch> {
    Ok(properties_of(device)?.arch)
}

/// Multiprocessors of a device; for the CPU, those that the emulator has.
pub fn multiprocessors(device: Device) -> Result<u32> {
    if device == Device::Cpu { Ok(emulator::multiprocessors()) } else { Ok(properties_of(device)?.multiprocessors) }
}

/// The most shared memory of a block on a device.
pub fn most_shared_bytes(device: Device) -> Result<u32> {
    if device == Device::Cpu { Ok(emulator::SHARED_BYTES) } else { Ok(properties_of(device)?.most_shared_bytes) }
}

/// The GPU's primary context, which libtorch uses too. It is kept, because dropping it would first make it current.
///
/// Errors: [`Fault::NotAvailable`] without the GPU.
pub(super) fn context_of(device: Device) -> Result<Arc<CudaContext>> {
    static OPENED: Cache<(), Arc<CudaContext>> = Cache::new();
    let Device::Cuda(index) = device else {
        return Err(Fault::NotAvailable { needs: "a CUDA GPU".into(), has: format!("{device:?}") }.into());
    };
    let open = || {
        torch::cuda_device(index)?;
        keeping_current(|| CudaContext::new(index)).with_context(|| format!("opening {device:?}"))
    };
    Ok((*OPENED.get(device, (), open)?).clone())
}

/// Runs `body` with `context` current, and then restores the context that was current, as the runtime's current device follows it.
pub(super) fn in_context<T>(context: &CudaContext, body: impl FnOnce() -> Result<T, result::DriverError>) -> Result<T> {
    if result::ctx::get_current()? == Some(context.cu_ctx()) {
        return Ok(body()?);
    }
    keeping_current(|| {
        context.bind_to_thread()?;
        body()
    })
}

/// Runs `body`, which may make another context current, and then restores the one that was.
pub(super) fn keeping_current<T>(body: impl FnOnce() -> Result<T, result::DriverError>) -> Result<T> {
    result::init()?;
    let before = result::ctx::get_current()?;
    let outcome = body();
    if let Some(before) = before {
        // SAFETY: it was current, and nothing here destroys a context that others hold.
        unsafe { result::ctx::set_current(before) }?;
    }
    Ok(outcome?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_has_the_suffix_and_ampere_has_none() {
        assert_eq!((Arch::AMPERE.to_string(), Arch::HOPPER.to_string()), ("sm_80".into(), "sm_90a".into()));
    }
}
