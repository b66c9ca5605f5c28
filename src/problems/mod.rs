//! The registry: every problem whose code exists, in the handout's order.

use crate::bench::ddp_step::{beside as ddp_beside, on_rank as ddp_step};
use crate::bench::steps_on_ranks;
use crate::checks::golden::training;
use crate::checks::{self, device, edge_cases, fault_test, protocol, selftest, sharded_protocol};
use crate::collective::ranks::RankTask;
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Problem;
use crate::harness::subject::SubjectCheck;
use crate::subject::attention::FlashFunction;

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
// Not of the handout, and so not in the registry: the example of "Adding a problem" is compiled here, as a problem is.
#[cfg(test)]
#[path = "../../suites/newcomer/src/problems/harmonic_sum/mod.rs"]
pub mod harmonic_sum;
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

/// What `cs336 measure --subject` measures and `cs336 writeup --subject` answers, by the suites of the same names; each with
/// the adapters that it times.
pub const SUBJECT_PROBLEMS: &[(Problem, &[&str])] = &[
    (flash_benchmarking::subject::PROBLEM, &[FlashFunction::PyTorch.adapter(), FlashFunction::Triton.adapter()]),
    (ddp_overlap_individual_parameters_benchmarking::subject::PROBLEM, &["get_ddp_individual_parameters"]),
    (ddp_bucketed_benchmarking::subject::PROBLEM, &["get_ddp_bucketed"]),
    (optimizer_state_sharding_accounting::subject::PROBLEM, &["get_sharded_optimizer"]),
];

/// What `cs336 rank` can run; one line a task.
pub const RANK_TASKS: &[RankTask] = &[
    fault_test::TASK,
    selftest::TASK,
    protocol::TASK,
    sharded_protocol::TASK,
    edge_cases::TASK,
    training::TASK,
    checks::subject::TASK,
    distributed_communication_single_node::ranks::TASK,
    ddp_step::TASK,
    ddp_beside::TASK,
    checks::ddp_step::TASK,
    checks::fused_ranks::TASK,
    optimizer_state_sharding_accounting::memory::TASK,
    steps_on_ranks::TASK,
];

/// What `cs336 grade --device` runs; one line a group.
pub const DEVICE_CHECKS: &[&[DeviceCheck]] = &[
    device::libtorch::CHECKS,
    device::graphs::CHECKS,
    device::cuda::CHECKS,
    device::attention::CHECKS,
    device::adamw::CHECKS,
    benchmarking_script::fused_adamw::variants::CHECKS,
    benchmarking_script::fused_step::DEVICE_CHECKS,
    nsys_profile::device::CHECKS,
    memory_profiling::checks::DEVICE_CHECKS,
    device::nccl_ranks::CHECKS,
];

/// What `cs336 grade --subject` runs, in the handout's order; one line a problem whose adapters the starter code has.
pub const SUBJECT_CHECKS: &[&[SubjectCheck]] = &[
    flash_forward::SUBJECT,
    flash_backward::checks::SUBJECT,
    ddp_overlap_individual_parameters::SUBJECT,
    ddp_overlap_bucketed::SUBJECT,
    optimizer_state_sharding::SUBJECT,
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::bench::ddp_step::link::PROBED_BY;
    use crate::error::{Fault, fault_of};
    use crate::harness::record::Profile;
    use crate::harness::store::Layout;
    use crate::harness::suite;
    use crate::torch;

    /// No parameter of any problem has one of these values.
    const BAD_PARAMETERS: [&str; 9] =
        ["nan", "inf", "[]", "[1, 1]", "[[1]]", "{a = 1}", "2020-01-01", "-7", "'no such value'"];

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

    /// `measure` computes these in its own process: a panic there would end it, with all other problems.
    #[test]
    fn the_predictions_of_a_case_do_not_overflow_at_the_largest_parameters() {
        let mut predicted = 0;
        for problem in REGISTRY {
            let Some(measured) = &problem.measured else { continue };
            let suite = suite::load(&Layout::find().unwrap().root, problem).unwrap().unwrap();
            for profile in Profile::ALL {
                let Some((_, case)) = suite.cases(profile).last() else { continue };
                let whole: Vec<&String> = case.as_object().unwrap().keys().filter(|key| case[key].is_i64()).collect();
                let pairs = whole.iter().flat_map(|one| whole.iter().map(move |other| [*one, *other]));
                for (pair, exponent) in pairs.flat_map(|pair| (8..64).map(move |exponent| (pair, exponent))) {
                    let mut large = case.clone();
                    pair.iter().for_each(|key| large[key.as_str()] = json!((1u64 << exponent) - exponent % 2));
                    let Ok(large) = (measured.parse)(&large, profile) else { continue };
                    let _ = ((measured.kernels_of)(&large), (measured.fresh_process)(&large));
                    predicted += usize::from((measured.predicted_bytes)(&large, profile).is_some());
                }
            }
        }
        assert!(predicted > 100, "{predicted} predictions");
    }

    #[test]
    fn every_answer_that_predicts_from_the_link_reads_all_its_probes() {
        for name in PROBED_BY.iter().filter(|name| !name.contains("overlap")) {
            let problem = REGISTRY.iter().find(|problem| problem.name == *name).unwrap();
            let read: BTreeSet<_> = problem.reads.iter().chain([name]).collect();
            // It also prints the fused steps.
            let without_link = (*name == "ddp_bucketed_benchmarking").then_some(&"torch_compile");
            assert_eq!(read, PROBED_BY.iter().chain(without_link).collect(), "{name}");
        }
    }

    #[test]
    fn no_key_of_a_suite_takes_a_value_of_another_type_or_an_unknown_name() {
        let mut refused = 0;
        for problem in REGISTRY {
            let Some(measured) = &problem.measured else { continue };
            let origin = format!("suites/{}.toml", problem.name);
            let text = std::fs::read_to_string(Layout::find().unwrap().root.join(&origin)).unwrap();
            let parse = |suite: &toml::Table| suite::parse(&toml::to_string(suite).unwrap(), &origin, &measured.parse);
            let sound: toml::Table = text.parse().unwrap();
            parse(&sound).unwrap();
            for (profile, grids) in &sound {
                for (grid, keys) in grids.as_table().unwrap() {
                    let keys = keys.as_table().unwrap().keys().map(String::as_str).chain(["no_such_key"]);
                    for (key, value) in keys.flat_map(|key| BAD_PARAMETERS.map(|value| (key, value))) {
                        let mut damaged = sound.clone();
                        let value = format!("x = {value}").parse::<toml::Table>().unwrap()["x"].clone();
                        damaged[profile][grid].as_table_mut().unwrap().insert(key.into(), value);
                        let error = parse(&damaged).map(drop).expect_err(&format!("{origin} {profile}.{grid} {key}"));
                        let said = format!("{error:#}");
                        assert!(said.contains(&format!("{origin} [{profile}.{grid}]")), "{said}");
                        refused += 1;
                    }
                }
            }
        }
        assert!(refused > 1000, "{refused}");
    }

    fn device_checks() -> impl Iterator<Item = &'static DeviceCheck> {
        DEVICE_CHECKS.iter().copied().flatten()
    }

    #[test]
    fn every_device_check_has_a_name_of_its_own_and_kernels_that_exist() {
        let names: BTreeSet<_> = device_checks().map(|check| check.name).collect();
        assert_eq!(names.len(), device_checks().count(), "two device checks have one name");
        let layout = Layout::find().unwrap();
        for check in device_checks() {
            let words = check.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
            assert!(words && check.proves.ends_with('.') && [1, 2].contains(&check.gpus), "{}", check.name);
            check.kernels.iter().for_each(|kernel| drop(layout.kernel_hash(kernel).unwrap()));
        }
    }

    #[test]
    fn without_a_gpu_every_device_check_ends_in_what_it_needs() {
        if torch::cuda_device(0).is_ok() {
            return;
        }
        for check in device_checks() {
            let error = (check.run)().unwrap_err();
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{}: {error:#}", check.name);
            assert!(check.lacks(0).is_some_and(|reason| reason.starts_with("needs ")), "{}", check.name);
        }
    }
}
