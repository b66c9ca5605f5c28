//! GPU checks of libtorch: callbacks during a backward pass, CUDA's out-of-memory, memory, autocast and clocks.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tch::{Device, Kind, Tensor};

use super::error_of;
use crate::error::{Fault, fault_of};
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::torch::allocator_stats::AllocationTracker;
use crate::torch::autograd::{Forward, Function, apply, backward};
use crate::torch::clock::Stopwatch;
use crate::torch::hooks::post_accumulate_grad;
use crate::torch::memory_history::{self, Action};
use crate::torch::nvtx::range;
use crate::torch::random::SEED;
use crate::torch::{Generator, autocast, cuda_device, cuda_version, cudnn_version, memory, stream};

pub const CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new(
        "callbacks_run_on_the_calling_thread_and_their_failures_are_returned",
        "A hook and a backward function run on the thread that called backward; their errors and panics come back to it.",
        callbacks_run_on_the_calling_thread_and_their_failures_are_returned,
    ),
    DeviceCheck::new(
        "running_out_of_memory_keeps_its_type_with_and_without_a_callback_between",
        "CUDA's out-of-memory is the typed fault with its request, in autograd's engine and in a callback.",
        running_out_of_memory_keeps_its_type_with_and_without_a_callback_between,
    ),
    DeviceCheck::new(
        "an_allocation_raises_the_peak_and_a_tracker_starts_it_anew",
        "The allocator's statistics count a tensor while it lives, and its peak until a tracker starts.",
        an_allocation_raises_the_peak_and_a_tracker_starts_it_anew,
    ),
    DeviceCheck::new(
        "a_thread_starts_on_the_default_stream",
        "libtorch's current stream of a new thread is the default stream.",
        a_thread_starts_on_the_default_stream,
    ),
    DeviceCheck::new(
        "autocast_of_the_gpu_computes_16_bit_products_on_the_gpu_only",
        "Autocast of the GPU gives products of the chosen 16-bit type there, float32 on the CPU, and ends with its body.",
        autocast_of_the_gpu_computes_16_bit_products_on_the_gpu_only,
    ),
    DeviceCheck::new(
        "the_versions_of_cuda_and_cudnn_are_known",
        "libtorch reports the versions of CUDA and cuDNN.",
        the_versions_of_cuda_and_cudnn_are_known,
    ),
    DeviceCheck::new(
        "device_time_and_host_time_agree_for_long_work",
        "The stopwatch's device time of long work is below the host's and within 5 % of it.",
        device_time_and_host_time_agree_for_long_work,
    ),
    DeviceCheck::new(
        "a_history_names_ranges_operators_and_nodes",
        "A memory history names the range and the operator or autograd node of each allocation, and its segments add up.",
        a_history_names_ranges_operators_and_nodes,
    ),
];

fn leaf(device: Device) -> Result<Tensor> {
    Ok(random(&[2, 2], device)?.set_requires_grad(true))
}

fn random(size: &[i64], device: Device) -> Result<Tensor> {
    Generator::new(device, SEED)?.randn(size, Kind::Float)
}

/// The identity, whose backward is given.
struct Identity<B>(B);

impl<B: Fn() -> Result<()> + Send + 'static> Function for Identity<B> {
    fn forward(&mut self, inputs: &[Tensor]) -> Result<Forward> {
        Ok(Forward { outputs: vec![inputs[0].f_add_scalar(0)?], saved: Vec::new() })
    }

    fn backward(&self, _saved: &[Tensor], grad_outputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
        (self.0)()?;
        Ok(vec![Some(grad_outputs[0].as_ref().context("no gradient")?.shallow_clone())])
    }
}

fn loss(x: &Tensor, backward: impl Fn() -> Result<()> + Send + 'static) -> Result<Tensor> {
    Ok(apply(Identity(backward), &[x])?.remove(0).f_sum(Kind::Float)?)
}

fn callbacks_run_on_the_calling_thread_and_their_failures_are_returned() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let (sender, receiver) = channel();
    let x = leaf(device)?;
    let from_hook = sender.clone();
    let _handle = post_accumulate_grad(&x, move |_| Ok(from_hook.send(thread::current().id())?))?;
    backward(&loss(&x, move || Ok(sender.send(thread::current().id())?))?)?;
    let threads: Vec<_> = receiver.try_iter().collect();
    ensure!(threads.len() == 2 && threads.iter().all(|&id| id == thread::current().id()), "{threads:?}");

    let error = format!("{:#}", error_of(backward(&loss(&x, || bail!("a deliberate error"))?))?);
    ensure!(error.ends_with("a deliberate error"), "{error}");
    let error = format!("{:#}", error_of(backward(&loss(&x, || panic!("a deliberate error"))?))?);
    ensure!(error.ends_with("panicked: a deliberate error"), "{error}");
    let fault = Fault::NotAvailable { needs: "two".into(), has: "one".into() };
    let thrown = fault.clone();
    let error = error_of(backward(&loss(&x, move || Err(thrown.clone().into()))?))?;
    ensure!(fault_of(&error) == Some(fault), "its fault is {:?}", fault_of(&error));
    backward(&loss(&x, || Ok(()))?)?;
    Verdict::passed("an error, a panic and a fault came back")
}

fn running_out_of_memory_keeps_its_type_with_and_without_a_callback_between() -> Result<Verdict> {
    const ELEMENTS: i64 = 1 << 44;
    let device = cuda_device(0)?;
    let large = move || Ok(Tensor::f_zeros([ELEMENTS], (Kind::Float, device)).map(drop)?);
    let in_callback = error_of(backward(&loss(&leaf(device)?, large)?))?;
    let wide = leaf(device)?.view([4]).slice(0, 0, 1, 1).expand([ELEMENTS], false);
    let in_engine = error_of(backward(&wide.select(0, 5)))?;
    ensure!(in_engine.downcast_ref::<Fault>().is_some(), "it has no type: {in_engine:#}");
    for error in [in_callback, in_engine] {
        let requested = Some(4 * ELEMENTS as u64);
        let is_typed = matches!(fault_of(&error), Some(Fault::OutOfMemory { requested_bytes, .. }) if requested_bytes == requested);
        ensure!(is_typed, "not an out-of-memory of {requested:?} bytes: {error:#}");
    }
    Verdict::passed("in a callback and in the engine")
}

fn an_allocation_raises_the_peak_and_a_tracker_starts_it_anew() -> Result<Verdict> {
    const BYTES: u64 = 64 << 20;
    let device = cuda_device(0)?;
    let tensor = Tensor::f_zeros([BYTES as i64 / 4], (Kind::Float, device))?;
    let with = memory::stats(device)?;
    for gauge in [with.allocated_bytes, with.reserved_bytes, with.active_bytes, with.requested_bytes] {
        ensure!(gauge.current >= BYTES && gauge.peak >= gauge.current, "{with:?}");
    }
    drop(tensor);
    let after = memory::stats(device)?;
    ensure!(after.allocated_bytes.peak >= BYTES, "{after:?}");
    let tracker = AllocationTracker::start(device)?;
    ensure!(tracker.peak()? == 0, "a new tracker has the peak of what ran before it: {} bytes", tracker.peak()?);
    memory::empty_cache(device)?;
    let info = memory::info(device)?;
    ensure!(info.free_bytes <= info.total_bytes && info.total_bytes > 1 << 30, "{info:?}");
    Verdict::passed("four gauges")
}

fn a_thread_starts_on_the_default_stream() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let current = thread::spawn(move || stream::current_stream(device));
    let current = current.join().map_err(|_| anyhow!("the thread panicked"))??;
    ensure!(current == 0, "it starts on stream {current:#x}");
    stream::synchronize(device)?;
    Verdict::passed("stream 0")
}

fn autocast_of_the_gpu_computes_16_bit_products_on_the_gpu_only() -> Result<Verdict> {
    let gpu = cuda_device(0)?;
    let product = |device| {
        let a = Tensor::ones([8, 8], (Kind::Float, device));
        a.matmul(&a).kind()
    };
    for dtype in [Kind::BFloat16, Kind::Half] {
        let inside = autocast(gpu, dtype, || Ok((product(gpu), product(Device::Cpu))))?;
        let after = product(gpu);
        ensure!((inside, after) == ((dtype, Kind::Float), Kind::Float), "{inside:?} inside, {after:?} after");
    }
    Verdict::passed("bfloat16 and float16")
}

fn the_versions_of_cuda_and_cudnn_are_known() -> Result<Verdict> {
    cuda_device(0)?;
    let cuda = cuda_version().context("libtorch names no version of CUDA")?;
    let cudnn = cudnn_version().context("libtorch names no version of cuDNN")?;
    ensure!(cuda.split('.').count() == 2 && cudnn.split('.').count() == 3, "{cuda}, {cudnn}");
    Verdict::passed(format!("CUDA {cuda}, cuDNN {cudnn}"))
}

fn device_time_and_host_time_agree_for_long_work() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let a = random(&[4096, 4096], device)?;
    let stopwatch = Stopwatch::new(device)?;
    let products = || {
        for _ in 0..50 {
            let _ = a.f_matmul(&a)?;
        }
        Ok(())
    };
    stopwatch.lap(products)?;
    let (_, lap) = stopwatch.lap(products)?;
    let device_s = lap.device_s.context("the stopwatch gave no device time")?;
    // The host's time holds the device's, and beyond it one launch and one wait.
    ensure!(device_s > 1e-3 && device_s < lap.host_s && device_s > 0.95 * lap.host_s, "{lap:?}");
    Verdict::passed(format!("{:.1} % of the host's time", 100.0 * device_s / lap.host_s))
}

fn a_history_names_ranges_operators_and_nodes() -> Result<Verdict> {
    let device = cuda_device(0)?;
    // No other allocation has this size.
    const FLOATS: i64 = (12 << 20) + 4096;
    let x = random(&[1, FLOATS], device)?.view([FLOATS]).set_requires_grad(true);
    let before = memory::stats(device)?.requested_bytes.current;
    let ((), history) = memory_history::record(device, before, || {
        let loss = range("forward", || range("inner", || x.exp()).sum(Kind::Float));
        range("backward", || backward(&loss))
    })?;
    let mut own: Vec<_> = history.events.iter().filter(|e| e.bytes == 4 * FLOATS as u64).collect();
    own.retain(|e| e.action == Action::Alloc);
    let sources: Vec<_> = own.iter().map(|e| (e.source.range.as_str(), e.source.call())).collect();
    ensure!(sources.first() == Some(&("forward/inner", "aten::exp")), "{sources:?}");
    ensure!(sources.last() == Some(&("backward", "ExpBackward0")), "{sources:?}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros() as i64;
    let recent = history.events.iter().all(|e| (now - e.time_us).abs() < 60_000_000);
    ensure!(recent, "times are not microseconds since 1970");
    for segment in &history.segments {
        let blocks = segment.blocks.iter().map(|block| block.bytes).sum::<u64>();
        ensure!(blocks == segment.bytes, "a segment of {} bytes has blocks of {blocks}", segment.bytes);
    }
    memory_history::viewer::write(&history, &mut Vec::new())?;
    Verdict::passed(format!("{} events, {} segments", history.events.len(), history.segments.len()))
}
