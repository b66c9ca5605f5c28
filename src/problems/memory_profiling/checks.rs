//! The components of the memory in use, by lifetime, against what is counted.

use anyhow::{Context as _, Result, ensure};
use tch::Device;

use super::measure::{Params, Row, measure_on};
use crate::attention::ImplementationName;
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::model::{Config, Precision, SizeName, fused_adamw};
use crate::torch::cuda_device;

/// On the CPU, the components by lifetime equal the counted ones: gradients, state, saved tensors, and copies.
pub fn components_are_what_they_are_called() -> Result<Verdict> {
    are_what_they_are_called_on(Device::Cpu)
}

/// The GPU check of the components.
pub const DEVICE_CHECKS: &[DeviceCheck] = &[DeviceCheck::new(
    "components_of_a_gpu_are_what_they_are_called",
    "The components of a GPU's memory history equal the counted ones.",
    || are_what_they_are_called_on(cuda_device(0)?),
)
.with_kernels(&["adamw.cu"])];

fn are_what_they_are_called_on(device: Device) -> Result<Verdict> {
    let dtypes = [Precision::Float32, Precision::Bfloat16];
    for dtype in dtypes {
        let params = Params {
            size: SizeName::Tiny,
            context_length: 48,
            batch_size: 1,
            vocab_size: 500,
            dtype,
            attention: ImplementationName::Naive,
            timeline_points: 100,
        };
        let (row, _) = measure_on(&params, device)?;
        counted(&row, &params, device).with_context(|| format!("in {}", dtype.name()))?;
    }
    Verdict::passed(format!("{} dtypes", dtypes.len()))
}

fn counted(row: &Row, params: &Params, device: Device) -> Result<()> {
    let (memory, config): (_, Config) = (params.memory(), params.config());
    let same = |what: &str, measured: u64, counted: u64| {
        ensure!(measured == counted, "{what}: {measured} bytes measured, {counted} counted");
        Ok(())
    };
    same("parameters", row.parameters_bytes, 4 * config.num_parameters())?;
    // On a GPU the fused step counts each tensor's steps there as well.
    let counters = if device == Device::Cpu { 0 } else { fused_adamw::counter_bytes(config.num_tensors()) };
    same("state", row.optimizer_state_bytes, 8 * config.num_parameters() + counters)?;
    same("weight copies", row.weight_copies_bytes, memory.weight_copies())?;
    // The head's copy is the last to be made. Some CPUs' product library borrows so much before that the peak lies there,
    // and then it is higher than the one that is predicted with the copy.
    let recorded = &row.recorded_forward;
    let head = memory.weight_copies().min(2 * (config.vocab_size * config.d_model) as u64);
    let borrowed = device == Device::Cpu && recorded.peak.requested_bytes > recorded.predicted_bytes;
    let missing = if borrowed && recorded.at_peak.weight_copies != memory.weight_copies() { head } else { 0 };
    same("weight copies at the peak", recorded.at_peak.weight_copies + missing, memory.weight_copies())?;
    if params.dtype == Precision::Float32 {
        // No rule of CUDA's autocast enters, so the predictions hold but for the indices of the loss (and, on a GPU,
        // the workspaces of its libraries, which are among the other tensors).
        for run in [&row.forward, &row.recorded_forward] {
            let workspaces = run.at_peak.other - memory.inputs_and_tables();
            let tensors = run.peak.requested_bytes - workspaces;
            let off = tensors.abs_diff(run.predicted_bytes);
            ensure!(off < 4 << 10, "{tensors} bytes of tensors at the peak, {} predicted", run.predicted_bytes);
        }
    }
    // The optimizer's temporaries stand on everything that is fixed.
    let first = row.first_step.phases.last().context("a step has phases")?;
    ensure!(first.peak.requested_bytes >= memory.fixed(), "the optimizer's peak is less than 4 P values");
    for run in [&row.forward, &row.recorded_forward, &row.first_step, &row.training_step] {
        ensure!(run.repeated, "a second run had another peak: {run:?}");
    }
    for (run, gradients) in [(&row.forward, 0), (&row.training_step, memory.gradients())] {
        let timeline = run.timeline.as_ref().context("no timeline")?;
        ensure!(timeline.time_s.is_sorted(), "the times of a timeline do not rise: {timeline:?}");
        same("gradients at the end", timeline.gradients.last().copied().unwrap_or_default(), gradients)?;
    }
    Ok(())
}
