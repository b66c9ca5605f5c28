//! What only a GPU shows of a profile: kernels, the calls that launched them from the engine's thread, and their names.

use std::collections::BTreeSet;

use tch::{Device, Kind, Tensor};

use super::kernels::{Class, Units};
use super::measure::{Collector, Params, measure_on};
use super::step::{BACKWARD, FORWARD, INFERENCE, OPTIMIZER, ProfiledBench};
use super::summary::{Counted, Summary};
use crate::torch::nvtx::range;
use crate::torch::profiler::{profile, with_nvtx};
use crate::torch::random::SEED;
use crate::torch::stream::synchronize;
use crate::torch::trace::Source;
use crate::torch::{AllowTf32, Generator, cuda_device, set_allow_tf32};

fn gpu() -> Device {
    cuda_device(0).expect("run with --ignored only where a GPU is")
}

fn random(size: i64, device: Device) -> Tensor {
    Generator::new(device, SEED).unwrap().randn(&[size, size], Kind::Float).unwrap()
}

fn params(optimizer: &str) -> Params {
    let case = serde_json::json!({"size": "small", "context_length": 128, "optimizer": optimizer, "steps": 2});
    serde_json::from_value(case).unwrap()
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored --test-threads=1"]
fn every_kernel_of_a_step_has_a_launch_a_pass_and_a_class() {
    let device = gpu();
    for optimizer in ["fused", "plain"] {
        let params = params(optimizer);
        let mut bench = ProfiledBench::new(&params, device).unwrap();
        bench.warm_up().unwrap();
        let (_, profile) = profile(device, || bench.step()).unwrap();
        let trace = profile.trace().unwrap();
        let summary = Summary::of(&trace, Counted::Kernels, Collector::Kineto).unwrap();
        assert_eq!(summary.launches_unseen, 0, "{optimizer}");
        assert_eq!(summary.matmuls.operators, Some(9 * 12 + 1), "{:?}", summary.matmuls);
        // cuBLAS does some float32 products in two launches.
        assert!(summary.matmuls.kernels > 9 * 12, "{:?}", summary.matmul_kernels);
        assert!(summary.matmul_kernels.iter().all(|k| k.units == Units::CudaCores), "{:?}", summary.matmul_kernels);
        let unknown = trace.events.iter().filter(|e| e.source == Source::Kernel && Class::of(e) == Class::Other);
        let unknown: BTreeSet<_> = unknown.map(|e| &e.name).collect();
        assert!(unknown.is_empty(), "no rule knows these names: {unknown:#?}");
    }
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored --test-threads=1"]
fn backward_kernels_are_launched_by_another_thread_inside_its_range() {
    let device = gpu();
    let x = random(512, device).set_requires_grad(true);
    let step = || {
        let loss = range(FORWARD, || x.mm(&x).sum(Kind::Float));
        range(BACKWARD, || loss.f_backward().map_err(anyhow::Error::from).and_then(|()| synchronize(device)))
    };
    step().unwrap();
    let ((), profile) = profile(device, step).unwrap();
    let trace = profile.trace().unwrap();
    let driving = trace.events.iter().find(|e| e.source == Source::Range).unwrap().thread;
    let other = |e: &&crate::torch::trace::Event| e.source == Source::Call && e.thread != driving;
    assert!(trace.events.iter().any(|e| other(&e)), "every CUDA call came from the driving thread");
    let ranges = crate::torch::trace::ranges::Ranges::of(&trace).unwrap();
    let work = ranges.place_gpu_work(&trace);
    let products = work.iter().filter(|p| Class::of(p.event) == Class::Matmul && ranges.inside(p.span, BACKWARD));
    let products = products.count();
    assert!(products >= 2, "the gradient of a product takes two, {products} were found");
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored --test-threads=1"]
fn a_tf32_product_is_known_by_its_name() {
    let device = gpu();
    let x = random(2048, device);
    let units = |matmul| {
        set_allow_tf32(AllowTf32 { matmul, cudnn: true }).unwrap();
        let product = || {
            let _ = x.f_mm(&x)?;
            synchronize(device)
        };
        product().unwrap();
        let ((), profile) = profile(device, product).unwrap();
        let trace = profile.trace().unwrap();
        let kernel = trace.events.iter().find(|e| e.source == Source::Kernel && Class::of(e) == Class::Matmul);
        let name = &kernel.expect("a product ran no matmul kernel").name;
        (Units::of(name), name.clone())
    };
    let (with, without) = (units(true), units(false));
    assert_eq!((with.0, without.0), (Units::TensorCores, Units::CudaCores), "{with:?} {without:?}");
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored --test-threads=1"]
fn a_case_is_measured_twice_in_one_process_and_the_clocks_agree() {
    let device = gpu();
    for _ in 0..2 {
        let row = measure_on(&params("fused"), device, None).unwrap();
        let (host, work) = (row.host.unwrap(), row.passes.inference);
        let fastest = host.inference.samples.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(work.busy_s <= work.span_s && work.span_s <= work.host_s, "{work:?}");
        assert!(work.seconds < 1.2 * fastest, "{} s of kernels in a pass of {fastest} s", work.seconds);
    }
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored --test-threads=1"]
fn nvtx_ranges_can_be_opened_without_nsys() {
    gpu();
    let value = with_nvtx(|| Ok(range(INFERENCE, || range(OPTIMIZER, || 7)))).unwrap();
    assert_eq!(value, 7);
}
