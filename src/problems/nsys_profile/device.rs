//! GPU checks of a profile: kernels, their launches from the engine's thread, and their names.

use std::collections::BTreeSet;

use anyhow::{Context as _, Error, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::measure::{Params, measure_on};
use super::step::{BACKWARD, FORWARD, ProfiledBench, step_with_nvtx};
use super::summary::{Counted, Summary};
use crate::bench::kernels::{Class, Units};
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::torch::nvtx::range;
use crate::torch::profiler::profile;
use crate::torch::random::SEED;
use crate::torch::stream::synchronize;
use crate::torch::trace::ranges::Ranges;
use crate::torch::trace::{Event, Source};
use crate::torch::{Generator, allowing_tf32, cuda_device};

pub const CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new(
        "every_kernel_of_a_step_has_a_launch_a_pass_and_a_class",
        "A profile attributes every kernel of a training step to a launch, a pass and a class, and counts its products.",
        every_kernel_of_a_step_has_a_launch_a_pass_and_a_class,
    )
    .with_kernels(&["adamw.cu"]),
    DeviceCheck::new(
        "backward_kernels_are_launched_by_another_thread_inside_its_range",
        "Kernels that autograd's own thread launches are found inside the range of the backward pass.",
        backward_kernels_are_launched_by_another_thread_inside_its_range,
    ),
    DeviceCheck::new(
        "a_tf32_product_is_known_by_its_name",
        "The name of a product's kernel distinguishes tensor cores from CUDA cores.",
        a_tf32_product_is_known_by_its_name,
    ),
    DeviceCheck::new(
        "a_case_is_measured_twice_in_one_process_and_the_clocks_agree",
        "Two profiles in one process agree with the host's clock.",
        a_case_is_measured_twice_in_one_process_and_the_clocks_agree,
    )
    .with_kernels(&["adamw.cu"]),
    DeviceCheck::new(
        "a_step_with_nvtx_ranges_runs_without_nsys",
        "A training step runs with NVTX ranges where no nsys listens.",
        a_step_with_nvtx_ranges_runs_without_nsys,
    )
    .with_kernels(&["adamw.cu"]),
];

fn random(size: i64, device: Device) -> Result<Tensor> {
    Generator::new(device, SEED)?.randn(&[size, size], Kind::Float)
}

fn params(optimizer: &str) -> Result<Params> {
    let case = serde_json::json!({"size": "small", "context_length": 128, "optimizer": optimizer, "steps": 2});
    Ok(serde_json::from_value(case)?)
}

fn every_kernel_of_a_step_has_a_launch_a_pass_and_a_class() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let mut notes = Vec::new();
    for optimizer in ["fused", "plain"] {
        let params = params(optimizer)?;
        let mut bench = ProfiledBench::new(&params, device)?;
        bench.warm_up()?;
        let (_, profile) = profile(device, || bench.step())?;
        let trace = profile.trace()?;
        let summary = Summary::of(&trace, Counted::Kernels)?;
        summary.passes()?;
        let (unseen, matmuls, kernels) = (summary.launches_unseen(), summary.matmuls(), summary.matmul_kernels());
        ensure!(unseen == 0, "{optimizer}: {unseen} launches unseen");
        ensure!(matmuls.operators == 9 * 12 + 1, "{matmuls:?}");
        // cuBLAS does some float32 products in two launches.
        ensure!(matmuls.kernels > 9 * 12, "{kernels:?}");
        ensure!(kernels.iter().all(|kernel| kernel.units == Units::CudaCores), "{kernels:?}");
        let unknown = trace.events.iter().filter(|e| e.source == Source::Kernel && Class::of(e) == Class::Other);
        let unknown: BTreeSet<_> = unknown.map(|e| &e.name).collect();
        ensure!(unknown.is_empty(), "no rule matches these names: {unknown:#?}");
        notes.push(format!("{optimizer}: {} kernels of products", matmuls.kernels));
    }
    Verdict::passed(notes.join("; "))
}

fn backward_kernels_are_launched_by_another_thread_inside_its_range() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let x = random(512, device)?.set_requires_grad(true);
    let step = || {
        let loss = range(FORWARD, || x.mm(&x).sum(Kind::Float));
        range(BACKWARD, || loss.f_backward().map_err(Error::from).and_then(|()| synchronize(device)))
    };
    step()?;
    let ((), profile) = profile(device, step)?;
    let trace = profile.trace()?;
    let driving = trace.events.iter().find(|e| e.source == Source::Range).context("the trace has no range")?.thread;
    let other = |e: &&Event| e.source == Source::Call && e.thread != driving;
    ensure!(trace.events.iter().any(|e| other(&e)), "every CUDA call came from the driving thread");
    let ranges = Ranges::of(&trace)?;
    let work = ranges.place_gpu_work(&trace);
    let products = work.iter().filter(|p| Class::of(p.event) == Class::Matmul && ranges.inside(p.span, BACKWARD));
    let products = products.count();
    ensure!(products >= 2, "the gradient of a product takes two, {products} were found");
    Verdict::passed(format!("{products} products"))
}

fn a_tf32_product_is_known_by_its_name() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let x = random(2048, device)?;
    let units = || -> Result<(Units, String)> {
        let product = || {
            let _ = x.f_mm(&x)?;
            synchronize(device)
        };
        product()?;
        let ((), profile) = profile(device, product)?;
        let trace = profile.trace()?;
        let kernel = trace.events.iter().find(|e| e.source == Source::Kernel && Class::of(e) == Class::Matmul);
        let name = &kernel.context("a product ran no matmul kernel")?.name;
        Ok((Units::of(name), name.clone()))
    };
    let (with, without) = (allowing_tf32(units)?, units()?);
    ensure!((with.0, without.0) == (Units::TensorCores, Units::CudaCores), "{with:?} {without:?}");
    Verdict::passed(format!("{} and {}", with.1, without.1))
}

fn a_case_is_measured_twice_in_one_process_and_the_clocks_agree() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let mut notes = Vec::new();
    for _ in 0..2 {
        let row = measure_on(&params("fused")?, device, None)?;
        let (host, work) = (row.host, row.passes.inference);
        let fastest = host.inference.samples.iter().copied().fold(f64::INFINITY, f64::min);
        ensure!(work.busy_s <= work.span_s && work.span_s <= work.host_s, "{work:?}");
        ensure!(work.seconds < 1.2 * fastest, "{} s of kernels in a pass of {fastest} s", work.seconds);
        notes.push(format!("{:.2} ms of kernels in a pass of {:.2} ms", 1e3 * work.seconds, 1e3 * fastest));
    }
    Verdict::passed(notes.join("; "))
}

fn a_step_with_nvtx_ranges_runs_without_nsys() -> Result<Verdict> {
    step_with_nvtx(&params("fused")?, cuda_device(0)?)?;
    Verdict::passed("one step after its warm-up")
}
