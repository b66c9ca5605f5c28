//! The device that a profile measures on, and what models use there where a suite names nothing.

use anyhow::{Result, ensure};
use tch::Device;

use crate::attention::ImplementationName;
use crate::collective::Backend;
use crate::error::Fault;
use crate::harness::record::Profile;
use crate::model::memory::Update;
use crate::torch;

/// How [`crate::model::fused_adamw::adamw_for`] updates on the device that a profile measures on.
pub fn update_for(profile: Profile) -> Update {
    match profile {
        Profile::Cpu => Update::ByOperators,
        Profile::Gpu => Update::Fused,
    }
}

/// The attention of models that a profile measures, where a suite names none.
pub fn attention_for(profile: Profile) -> ImplementationName {
    ImplementationName::default_on(match profile {
        Profile::Cpu => Device::Cpu,
        Profile::Gpu => Device::Cuda(0),
    })
}

/// The device that a profile measures on.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without it; a switch outside of this program that lets float32 products be
/// rounded to TF32, whose figures would pass for float32's.
pub fn device_for(profile: Profile) -> Result<Device> {
    let device = match profile {
        Profile::Cpu => return Ok(Device::Cpu),
        Profile::Gpu => torch::cuda_device(0)?,
    };
    ensure!(
        !torch::allow_tf32()?.matmul,
        "TF32 is on in float32 matrix products: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    );
    Ok(device)
}

/// Whether this machine has a device for each of `world_size` ranks: a GPU under NCCL, nothing special under Gloo.
///
/// Errors: [`Fault::NotAvailable`] with both numbers.
pub fn require_devices(backend: Backend, world_size: usize) -> Result<()> {
    if backend == Backend::Gloo {
        return Ok(());
    }
    let gpus = match torch::cuda_device(0) {
        Ok(_) => usize::try_from(tch::Cuda::device_count()).unwrap_or(0),
        Err(_) => 0,
    };
    if gpus >= world_size {
        return Ok(());
    }
    Err(Fault::NotAvailable { needs: format!("{world_size} GPUs, one a process"), has: format!("{gpus}") }.into())
}

/// Gives memory that no tensor uses back to the driver, for another process; nothing to do on the CPU.
pub fn empty_cache(device: Device) -> Result<()> {
    match device {
        Device::Cpu => Ok(()),
        device => torch::memory::empty_cache(device),
    }
}
