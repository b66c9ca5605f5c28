//! GPUs by the driver's interface: their properties, and their primary contexts, which libtorch uses too.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::{CudaContext, result};
use tch::Device;

use super::cache::Cache;
use super::emulator;
use crate::torch;

/// Major and minor number of a GPU's architecture.
///
/// Errors: [`crate::error::Fault::NotAvailable`] for a GPU that is not there.
pub fn compute_capability(index: usize) -> Result<(i32, i32)> {
    Ok(properties_of(index)?.compute_capability)
}

/// Multiprocessors of a device; for the CPU, those that the emulator has.
pub fn multiprocessors(device: Device) -> Result<u32> {
    match device {
        Device::Cuda(index) => Ok(properties_of(index)?.multiprocessors),
        _ => Ok(emulator::multiprocessors()),
    }
}

/// What a launch asks of its device.
struct Properties {
    compute_capability: (i32, i32),
    multiprocessors: u32,
}

/// From the driver at the first call.
fn properties_of(index: usize) -> Result<Arc<Properties>> {
    static KNOWN: Cache<(), Properties> = Cache::new();
    KNOWN.get(Device::Cuda(index), (), || {
        torch::cuda_device(index)?;
        let context = context_of(index).with_context(|| format!("opening GPU {index}"))?;
        let multiprocessors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Properties {
            compute_capability: context.compute_capability()?,
            multiprocessors: u32::try_from(multiprocessors)?,
        })
    })
}

/// The device's primary context, which libtorch uses too. It is kept, because dropping it would first make it current.
pub(super) fn context_of(index: usize) -> Result<Arc<CudaContext>> {
    static OPENED: Mutex<BTreeMap<usize, Arc<CudaContext>>> = Mutex::new(BTreeMap::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = opened.get(&index) {
        return Ok(context.clone());
    }
    let context = keeping_current(|| CudaContext::new(index))?;
    opened.insert(index, context.clone());
    Ok(context)
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
