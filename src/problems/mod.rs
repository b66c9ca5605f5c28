//! The registry: every problem whose code exists, in the handout's order.

use anyhow::Result;
use tch::Device;

use crate::cases::data_parallel;
use crate::collective::{drill, ranks::RankTask};
use crate::harness::problem::Problem;
use crate::harness::record::Profile;
use crate::parallel::protocol;
use crate::torch;

pub mod benchmarking_mixed_precision;
pub mod benchmarking_script;
pub mod communication_accounting;
pub mod flash_backward;
pub mod flash_forward;
pub mod machine;
pub mod memory_profiling;
pub mod mixed_precision_accumulation;
pub mod naive_ddp;
pub mod pytorch_attention;

/// One line a problem; the order is the order of the report.
pub const REGISTRY: &[Problem] = &[
    benchmarking_script::PROBLEM,
    mixed_precision_accumulation::PROBLEM,
    benchmarking_mixed_precision::PROBLEM,
    memory_profiling::PROBLEM,
    pytorch_attention::PROBLEM,
    flash_forward::PROBLEM,
    flash_backward::PROBLEM,
    naive_ddp::PROBLEM,
    communication_accounting::PROBLEM,
];

/// What `cs336 rank` can run; one line a task.
pub const RANK_TASKS: &[RankTask] = &[drill::TASK, protocol::TASK, data_parallel::TASK];

/// The device that a profile measures on.
pub fn device_for(profile: Profile) -> Result<Device> {
    match profile {
        Profile::Cpu => Ok(Device::Cpu),
        Profile::Gpu => torch::cuda_device(0),
    }
}
