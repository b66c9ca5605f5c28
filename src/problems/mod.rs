//! The registry: every problem whose code exists, in the handout's order.

use anyhow::{Result, ensure};
use tch::Device;

use crate::attention::Choice;
use crate::cases::{data_parallel, sharded_optimizer};
use crate::collective::{Backend, drill, ranks::RankTask, selftest};
use crate::error::Fault;
use crate::harness::problem::Problem;
use crate::harness::record::Profile;
use crate::model::memory::Update;
use crate::parallel::{edges, protocol, sharded_protocol};
use crate::torch;

pub mod benchmarking_mixed_precision;
pub mod benchmarking_script;
pub mod communication_accounting;
pub mod ddp_bucketed_benchmarking;
pub mod ddp_checks;
pub mod ddp_overlap_bucketed;
pub mod ddp_overlap_individual_parameters;
pub mod ddp_overlap_individual_parameters_benchmarking;
pub mod ddp_step;
pub mod distributed_communication_single_node;
pub mod flash_backward;
pub mod flash_benchmarking;
pub mod flash_forward;
mod flash_kernels;
pub mod machine;
pub mod memory_profiling;
pub mod minimal_ddp_flat_benchmarking;
pub mod mixed_precision_accumulation;
pub mod naive_ddp;
pub mod naive_ddp_benchmarking;
pub mod nsys_profile;
pub mod nvml;
pub mod optimizer_state_sharding;
pub mod optimizer_state_sharding_accounting;
pub mod pytorch_attention;
pub mod torch_compile;

/// One line a problem; the order is the order of the report.
pub const REGISTRY: &[Problem] = &[
    benchmarking_script::PROBLEM,
    nsys_profile::PROBLEM,
    mixed_precision_accumulation::PROBLEM,
    benchmarking_mixed_precision::PROBLEM,
    memory_profiling::PROBLEM,
    pytorch_attention::PROBLEM,
    torch_compile::PROBLEM,
    flash_forward::PROBLEM,
    flash_backward::PROBLEM,
    flash_benchmarking::PROBLEM,
    distributed_communication_single_node::PROBLEM,
    naive_ddp::PROBLEM,
    naive_ddp_benchmarking::PROBLEM,
    minimal_ddp_flat_benchmarking::PROBLEM,
    ddp_overlap_individual_parameters::PROBLEM,
    ddp_overlap_individual_parameters_benchmarking::PROBLEM,
    ddp_overlap_bucketed::PROBLEM,
    ddp_bucketed_benchmarking::PROBLEM,
    communication_accounting::PROBLEM,
    optimizer_state_sharding::PROBLEM,
    optimizer_state_sharding_accounting::PROBLEM,
];

/// What `cs336 rank` can run; one line a task.
pub const RANK_TASKS: &[RankTask] = &[
    drill::TASK,
    selftest::TASK,
    protocol::TASK,
    sharded_protocol::TASK,
    edges::TASK,
    data_parallel::TASK,
    sharded_optimizer::TASK,
    distributed_communication_single_node::ranks::TASK,
    ddp_step::on_rank::TASK,
    optimizer_state_sharding_accounting::memory::TASK,
];

/// How [`crate::model::fused_adamw::adamw_for`] updates on the device that a profile measures on.
pub fn update_for(profile: Profile) -> Update {
    match profile {
        Profile::Cpu => Update::ByOperators,
        Profile::Gpu => Update::Fused,
    }
}

/// The attention of models that a profile measures, where a suite names none.
pub fn attention_for(profile: Profile) -> Choice {
    Choice::default_on(match profile {
        Profile::Cpu => Device::Cpu,
        Profile::Gpu => Device::Cuda(0),
    })
}

/// The device that a profile measures on, a GPU's generator seeded.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without it; a switch outside of this program that lets float32 products be
/// rounded to TF32, whose figures would pass for float32's.
pub fn device_for(profile: Profile) -> Result<Device> {
    let device = match profile {
        Profile::Cpu => return Ok(Device::Cpu),
        Profile::Gpu => torch::cuda_device(0)?,
    };
    torch::seed(device)?;
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_suite_that_names_no_attention_means_the_default_of_its_device() {
        let mut case = json!({"size": "tiny", "context_length": 32});
        let measured =
            [benchmarking_script::PROBLEM, memory_profiling::PROBLEM].map(|problem| problem.measured.unwrap());
        for (profile, name) in [(Profile::Cpu, "naive"), (Profile::Gpu, "flash")] {
            assert!(measured.iter().all(|m| (m.parse)(&case, profile).unwrap()["attention"] == name));
        }
        case["attention"] = json!("sdpa");
        assert!(measured.iter().all(|m| (m.parse)(&case, Profile::Gpu).unwrap()["attention"] == "sdpa"));
    }
}
