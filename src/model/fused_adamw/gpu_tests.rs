//! What only a GPU shows of the fused AdamW; its numbers are checked by `benchmarking_script`.

use tch::{Device, Kind, Tensor};

use super::*;
use crate::cuda::kernel_params;
use crate::torch::autograd::backward;
use crate::torch::{cuda_device, memory, stream::synchronize};

/// The first GPU; these tests are ignored unless asked for, and without one they fail rather than pass unrun.
fn gpu() -> Device {
    cuda_device(0).expect("run with --ignored only where a GPU is")
}

fn parameter(name: &str, device: Device) -> (String, Tensor) {
    (name.to_string(), Tensor::ones([5000], (Kind::Float, device)).set_requires_grad(true))
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn backward_through_a_parameter_saved_before_a_step_is_refused() {
    let device = gpu();
    let parameters = [parameter("a", device)];
    let mut adamw = FusedAdamW::new(AdamWOptions::default(), device).unwrap();
    let loss = || (&parameters[0].1 * &parameters[0].1).sum(Kind::Float);
    backward(&loss()).unwrap();
    let stale = loss();
    adamw.step(&parameters).unwrap();
    let error = format!("{:#}", backward(&stale).unwrap_err());
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn later_steps_allocate_nothing() {
    let device = gpu();
    let parameters = [parameter("a", device), parameter("b", device)];
    let mut adamw = FusedAdamW::new(AdamWOptions::default(), device).unwrap();
    backward(&(&parameters[0].1 + &parameters[1].1).sum(Kind::Float)).unwrap();
    adamw.step(&parameters).unwrap();
    synchronize(device).unwrap();
    memory::reset_peaks(device).unwrap();
    let before = memory::stats(device).unwrap();
    adamw.step(&parameters).unwrap();
    let after = memory::stats(device).unwrap();
    // Alone in its process only: run with --test-threads 1.
    assert_eq!(before.allocated_bytes.current, after.allocated_bytes.peak);
    assert_eq!(before.allocated_bytes.current, after.allocated_bytes.current);
}

kernel_params! {
    /// Not the kernel's parameters.
    struct Wrong as "adamw_advance" { table: table::Columns, lr: f32, beta1: f64, beta2: f64 }
    struct Missing as "adamw" { lr: f32 }
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn parameters_that_do_not_fit_a_kernel_are_refused_when_it_is_loaded() {
    let module = cuda::load(gpu(), &program(SHAPE)).unwrap();
    let wrong = module.kernel::<Wrong>().unwrap_err().to_string();
    assert!(wrong.contains("adamw_advance has parameters at (offset, bytes)"), "{wrong}");
    let missing = module.kernel::<Missing>().unwrap_err().to_string();
    assert!(missing.contains("the program has"), "{missing}");
}
