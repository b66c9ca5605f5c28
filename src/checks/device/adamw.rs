//! GPU checks of the fused AdamW. `benchmarking_script` checks its numbers.

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use super::error_of;
use crate::cuda::{self, kernel_params};
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::model::FusedAdamW;
use crate::model::fused_adamw::{Columns, SHAPE, program};
use crate::model::optim::{AdamWOptions, Optimizer as _};
use crate::torch::autograd::backward;
use crate::torch::{cuda_device, memory, stream::synchronize};

const KERNELS: &[&str] = &["adamw.cu"];

pub const CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new(
        "backward_through_a_parameter_saved_before_a_step_is_refused",
        "Autograd detects that the fused step changed a parameter that a graph had saved.",
        backward_through_a_parameter_saved_before_a_step_is_refused,
    )
    .with_kernels(KERNELS),
    DeviceCheck::new(
        "later_steps_allocate_nothing",
        "A fused step over parameters that it has seen leaves current and peak memory as they were.",
        later_steps_allocate_nothing,
    )
    .with_kernels(KERNELS),
    DeviceCheck::new(
        "parameters_that_do_not_fit_a_kernel_are_refused_when_it_is_loaded",
        "Loading compares a kernel's parameters with the host's struct and refuses others.",
        parameters_that_do_not_fit_a_kernel_are_refused_when_it_is_loaded,
    )
    .with_kernels(KERNELS),
];

fn parameter(name: &str, device: Device) -> (String, Tensor) {
    (name.to_string(), Tensor::ones([5000], (Kind::Float, device)).set_requires_grad(true))
}

fn backward_through_a_parameter_saved_before_a_step_is_refused() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let parameters = [parameter("a", device)];
    let mut adamw = FusedAdamW::new(AdamWOptions::default(), device)?;
    let loss = || (&parameters[0].1 * &parameters[0].1).sum(Kind::Float);
    backward(&loss())?;
    let stale = loss();
    adamw.step(&parameters)?;
    let error = format!("{:#}", error_of(backward(&stale))?);
    ensure!(error.contains("modified by an inplace operation"), "{error}");
    Verdict::passed("")
}

fn later_steps_allocate_nothing() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let parameters = [parameter("a", device), parameter("b", device)];
    let mut adamw = FusedAdamW::new(AdamWOptions::default(), device)?;
    backward(&(&parameters[0].1 + &parameters[1].1).sum(Kind::Float))?;
    adamw.step(&parameters)?;
    synchronize(device)?;
    memory::reset_peaks(device)?;
    let before = memory::stats(device)?.allocated_bytes.current;
    adamw.step(&parameters)?;
    let after = memory::stats(device)?.allocated_bytes;
    ensure!((after.peak, after.current) == (before, before), "{before} bytes before the step, {after:?} after it");
    Verdict::passed(format!("{before} bytes"))
}

kernel_params! {
    /// Not the kernel's parameters.
    struct Wrong as "adamw_advance" { table: Columns, lr: f32, beta1: f64, beta2: f64 }
    /// The parameters of no kernel.
    struct Missing as "adamw" { lr: f32 }
}

fn parameters_that_do_not_fit_a_kernel_are_refused_when_it_is_loaded() -> Result<Verdict> {
    let module = cuda::load(cuda_device(0)?, &program(SHAPE))?;
    let wrong = error_of(module.kernel::<Wrong>())?.to_string();
    ensure!(wrong.contains("adamw_advance has parameters at (offset, bytes)"), "{wrong}");
    let missing = error_of(module.kernel::<Missing>())?.to_string();
    ensure!(missing.contains("the program has"), "{missing}");
    Verdict::passed("")
}
