//! The device of a profile, and the defaults of models there.

use anyhow::{Result, ensure};
use tch::Device;

use crate::attention::ImplementationName;
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

/// The default attention of models under a profile.
pub fn attention_for(profile: Profile) -> ImplementationName {
    ImplementationName::default_on(match profile {
        Profile::Cpu => Device::Cpu,
        Profile::Gpu => Device::Cuda(0),
    })
}

/// The device that a profile measures on.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without the device; an environment variable that enables TF32, whose
/// figures would be labelled float32.
pub fn device_for(profile: Profile) -> Result<Device> {
    let device = match profile {
        Profile::Cpu => return Ok(Device::Cpu),
        Profile::Gpu => torch::cuda_device(0)?,
    };
    ensure!(!torch::allow_tf32()?, "TF32 is on in float32 matrix products: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE");
    Ok(device)
}

/// Frees the allocator's cached memory for other processes. Does nothing on the CPU.
pub fn empty_cache(device: Device) -> Result<()> {
    match device {
        Device::Cpu => Ok(()),
        device => torch::memory::empty_cache(device),
    }
}
