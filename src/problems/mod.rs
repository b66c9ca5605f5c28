//! The registry: every problem whose code exists, in the handout's order.

use crate::bench::ddp_step::on_rank as ddp_step;
use crate::checks::golden::{data_parallel, sharded_optimizer};
use crate::checks::{self, edge_cases, fault_test, protocol, sharded_protocol};
use crate::collective::ranks::RankTask;
use crate::collective::selftest;
use crate::harness::problem::Problem;

pub mod benchmarking_mixed_precision;
pub mod benchmarking_script;
pub mod communication_accounting;
pub mod ddp_bucketed_benchmarking;
pub mod ddp_overlap_bucketed;
pub mod ddp_overlap_individual_parameters;
pub mod ddp_overlap_individual_parameters_benchmarking;
pub mod distributed_communication_single_node;
pub mod flash_backward;
pub mod flash_benchmarking;
pub mod flash_forward;
pub mod memory_profiling;
pub mod minimal_ddp_flat_benchmarking;
pub mod mixed_precision_accumulation;
pub mod naive_ddp;
pub mod naive_ddp_benchmarking;
pub mod nsys_profile;
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
    fault_test::TASK,
    selftest::TASK,
    protocol::TASK,
    sharded_protocol::TASK,
    edge_cases::TASK,
    data_parallel::TASK,
    sharded_optimizer::TASK,
    distributed_communication_single_node::ranks::TASK,
    ddp_step::TASK,
    checks::ddp_step::TASK,
    optimizer_state_sharding_accounting::memory::TASK,
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::harness::record::Profile;

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
