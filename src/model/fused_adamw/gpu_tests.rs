//! What only a GPU shows of the fused AdamW; its numbers are checked by `benchmarking_script`.

use tch::{Device, Kind, Tensor};

use super::*;
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

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn arguments_that_do_not_fit_a_kernel_are_refused_before_the_launch() {
    let device = gpu();
    let module = cuda::load(device, &program(SHAPE)).unwrap();
    let kernel = module.kernel("adamw_advance").unwrap();
    let geometry = Geometry { grid: (1, 1, 1), block: (1, 1, 1), shared_bytes: 0 };
    let words = |arguments: Arguments| format!("{:#}", kernel.launch(geometry, &arguments).unwrap_err());
    let few = words(Arguments::new().scalar(1.0f64));
    assert!(few.contains("adamw_advance has 4 parameters, 1 were given"), "{few}");
    let narrow = words(Arguments::new().words(&[0; table::WORDS]).scalar(1.0f32).scalar(1.0f64).scalar(1.0f64));
    assert!(narrow.contains("parameter 1 of adamw_advance has 8 bytes, 4 were given"), "{narrow}");
    let none = module.kernel("adamw").unwrap_err().to_string();
    assert!(none.contains("the program has"), "{none}");
    let host = Tensor::zeros([1], (Kind::Float, Device::Cpu));
    let elsewhere = words(Arguments::new().words(&[0; table::WORDS]).tensor(&host).scalar(1.0f64).scalar(1.0f64));
    assert!(elsewhere.contains("argument 1 is on Cpu"), "{elsewhere}");
}
