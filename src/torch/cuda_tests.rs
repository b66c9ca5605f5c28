//! What only a GPU shows: callbacks during a backward pass, CUDA's out-of-memory, allocator counts and streams.

use std::cell::RefCell;
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use tch::{Device, Kind, Tensor};

use super::Generator;
use super::autograd::{Forward, Function, apply, backward, release_grad};
use super::graph::{Captured, on_side_stream};
use super::hooks::post_accumulate_grad;
use super::memory_history::{self, Action};
use super::nvtx::range;
use super::random::SEED;
use super::{autocast::autocast, clock::Stopwatch, memory, stream};
use crate::error::{Fault, fault_of};

/// The first GPU; these tests are ignored unless asked for, and without one they fail rather than pass unrun.
///
/// It belongs to the calling test until that test's thread ends: while a graph is captured, no other test may empty the
/// allocator's cache.
fn gpu() -> Device {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! {
        static HELD: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    HELD.with_borrow_mut(|held| {
        held.get_or_insert_with(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
    });
    super::cuda_device(0).expect("run with --ignored only where a GPU is")
}

fn leaf(device: Device) -> Tensor {
    random([2, 2], device).set_requires_grad(true)
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

fn loss(x: &Tensor, backward: impl Fn() -> Result<()> + Send + 'static) -> Tensor {
    apply(Identity(backward), &[x]).unwrap().remove(0).sum(Kind::Float)
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn callbacks_run_on_the_calling_thread_and_their_failures_are_returned() {
    let device = gpu();
    let (sender, receiver) = channel();
    let x = leaf(device);
    let from_hook = sender.clone();
    let _handle = post_accumulate_grad(&x, move |_| Ok(from_hook.send(thread::current().id())?)).unwrap();
    backward(&loss(&x, move || Ok(sender.send(thread::current().id())?))).unwrap();
    let threads: Vec<_> = receiver.try_iter().collect();
    assert!(threads.len() == 2 && threads.iter().all(|&id| id == thread::current().id()), "{threads:?}");

    let error = format!("{:#}", backward(&loss(&x, || bail!("told so"))).unwrap_err());
    assert!(error.ends_with("told so"), "{error}");
    let error = format!("{:#}", backward(&loss(&x, || panic!("told so"))).unwrap_err());
    assert!(error.ends_with("panicked: told so"), "{error}");
    let fault = Fault::NotAvailable { needs: "two".into(), has: "one".into() };
    let thrown = fault.clone();
    assert_eq!(fault_of(&backward(&loss(&x, move || Err(thrown.clone().into()))).unwrap_err()), Some(fault));
    backward(&loss(&x, || Ok(()))).unwrap();
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn running_out_of_memory_keeps_its_type_with_and_without_a_callback_between() {
    let device = gpu();
    const ELEMENTS: i64 = 1 << 44;
    let large = move || Ok(Tensor::f_zeros([ELEMENTS], (Kind::Float, device)).map(drop)?);
    let in_callback = backward(&loss(&leaf(device), large)).unwrap_err();
    let wide = leaf(device).view([4]).slice(0, 0, 1, 1).expand([ELEMENTS], false);
    let in_engine = backward(&wide.select(0, 5)).unwrap_err();
    assert!(in_engine.downcast_ref::<Fault>().is_some(), "{in_engine:#}");
    for error in [in_callback, in_engine] {
        let requested = Some(4 * ELEMENTS as u64);
        assert!(
            matches!(fault_of(&error), Some(Fault::OutOfMemory { requested_bytes, .. }) if requested_bytes == requested),
            "{error:#}"
        );
    }
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn an_allocation_raises_the_current_and_the_peak_bytes() {
    let device = gpu();
    const BYTES: u64 = 64 << 20;
    // Other tests of this process may allocate at the same time, so only lower bounds hold.
    let tensor = Tensor::zeros([BYTES as i64 / 4], (Kind::Float, device));
    let with = memory::stats(device).unwrap();
    for gauge in [with.allocated_bytes, with.reserved_bytes, with.active_bytes, with.requested_bytes] {
        assert!(gauge.current >= BYTES && gauge.peak >= gauge.current, "{with:?}");
    }
    drop(tensor);
    assert!(memory::stats(device).unwrap().allocated_bytes.peak >= BYTES);
    memory::reset_peaks(device).unwrap();
    memory::empty_cache(device).unwrap();
    let info = memory::info(device).unwrap();
    assert!(info.free_bytes <= info.total_bytes && info.total_bytes > 1 << 30, "{info:?}");
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn a_thread_starts_on_the_default_stream() {
    let device = gpu();
    assert_eq!(stream::current_stream(device).unwrap(), 0);
    stream::synchronize(device).unwrap();
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn autocast_of_the_gpu_computes_16_bit_products_on_the_gpu_only() {
    let device = gpu();
    let product = |device| {
        let a = Tensor::ones([8, 8], (Kind::Float, device));
        a.matmul(&a).kind()
    };
    for dtype in [Kind::BFloat16, Kind::Half] {
        let inside = autocast(device, dtype, || Ok((product(device), product(Device::Cpu)))).unwrap();
        assert_eq!((inside, product(device)), ((dtype, Kind::Float), Kind::Float));
    }
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn the_versions_of_cuda_and_cudnn_are_known() {
    gpu();
    let (cuda, cudnn) = (super::cuda_version().unwrap(), super::cudnn_version().unwrap());
    eprintln!("CUDA {cuda}, cuDNN {cudnn}");
    assert!(cuda.split('.').count() == 2 && cudnn.split('.').count() == 3, "{cuda}, {cudnn}");
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn device_time_and_host_time_agree_for_long_work() {
    let device = gpu();
    let a = random([4096, 4096], device);
    let stopwatch = Stopwatch::new(device).unwrap();
    let products = || {
        for _ in 0..50 {
            let _ = a.f_matmul(&a)?;
        }
        Ok(())
    };
    stopwatch.lap(products).unwrap();
    let (_, lap) = stopwatch.lap(products).unwrap();
    let device_s = lap.device_s.unwrap();
    // The host's time holds the device's, and beyond it one launch and one wait.
    assert!(device_s > 1e-3 && device_s < lap.host_s && device_s > 0.95 * lap.host_s, "{lap:?}");
}

fn random(size: [i64; 2], device: Device) -> Tensor {
    Generator::new(device, SEED).unwrap().randn(&size, Kind::Float).unwrap()
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn a_replayed_graph_reads_changed_inputs() {
    let device = gpu();
    let x = random([64, 32], device);
    let (a, b) = (random([32, 128], device), random([128, 16], device));
    let chain = |x: &Tensor| -> Result<Tensor> { Ok(x.f_matmul(&a)?.f_relu()?.f_matmul(&b)?) };
    on_side_stream(device, || (0..3).try_for_each(|_| chain(&x).map(drop))).unwrap();
    let captured = Captured::capture(device, || chain(&x)).unwrap();
    assert!(captured.num_nodes() >= 3, "{} nodes", captured.num_nodes());
    assert_eq!(stream::current_stream(device).unwrap(), 0);
    for _ in 0..2 {
        x.shallow_clone().copy_(&random([64, 32], device));
        captured.replay().unwrap();
        stream::synchronize(device).unwrap();
        assert_eq!(captured.output(), &chain(&x).unwrap());
    }
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn a_captured_backward_gives_the_same_bits_as_an_eager_one() {
    let device = gpu();
    let x = random([64, 32], device);
    let weights = [random([32, 128], device), random([128, 16], device)].map(|w| w.set_requires_grad(true));
    let gradients = || weights.each_ref().map(Tensor::grad);
    let step = || -> Result<Tensor> {
        weights.iter().try_for_each(release_grad)?;
        let y = x.f_matmul(&weights[0])?.f_tanh()?.f_matmul(&weights[1])?;
        let loss = y.f_mul(&y)?.f_mean(None::<Kind>)?;
        backward(&loss)?;
        Ok(loss.detach())
    };
    on_side_stream(device, || (0..3).try_for_each(|_| step().map(drop))).unwrap();
    let captured = Captured::capture(device, step).unwrap();
    let written = gradients();
    x.shallow_clone().copy_(&random([64, 32], device));
    captured.replay().unwrap();
    captured.replay().unwrap();
    stream::synchronize(device).unwrap();
    let (loss, replayed) = (captured.output().copy(), written.map(|gradient| gradient.copy()));
    assert_eq!(step().unwrap(), loss);
    assert_eq!(gradients(), replayed);
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn the_device_is_usable_after_a_failed_capture() {
    let device = gpu();
    let x = random([8, 8], device);
    let product = || -> Result<Tensor> { Ok(x.f_matmul(&x)?) };
    on_side_stream(device, || product().map(drop)).unwrap();
    let expected = product().unwrap();
    let reads_on_the_host = || Ok(product()?.f_double_value(&[0, 0]).map(drop)?);
    let generator = Generator::new(device, SEED).unwrap();
    let draws = || generator.rand(&[8, 8], Kind::Float).map(drop);
    let refuses = || bail!("told so");
    let attempts: [&dyn Fn() -> Result<()>; 3] = [&reads_on_the_host, &draws, &refuses];
    for attempt in attempts {
        let error = Captured::capture(device, attempt).map(drop).unwrap_err();
        eprintln!("{error:#}");
        assert!(format!("{error:#}").contains("CUDA graph"), "{error:#}");
        assert_eq!(stream::current_stream(device).unwrap(), 0);
        // Random numbers, the allocator's cache and another capture all work again.
        draws().unwrap();
        memory::empty_cache(device).unwrap();
        let captured = Captured::capture(device, product).unwrap();
        captured.replay().unwrap();
        stream::synchronize(device).unwrap();
        assert_eq!(captured.output(), &expected);
    }
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn dropping_a_graph_frees_its_memory() {
    let device = gpu();
    const BYTES: u64 = 256 << 20;
    let x = Tensor::zeros([BYTES as i64 / 4], (Kind::Float, device));
    let double = || -> Result<Tensor> { Ok(x.f_add(&x)?) };
    on_side_stream(device, || double().map(drop)).unwrap();
    memory::empty_cache(device).unwrap();
    let reserved = || memory::stats(device).unwrap().reserved_bytes.current;
    let before = reserved();
    let captured = Captured::capture(device, double).unwrap();
    assert!(reserved() >= before + BYTES);
    drop(captured);
    memory::empty_cache(device).unwrap();
    assert!(reserved() <= before, "{} bytes reserved, {before} before", reserved());
}

#[test]
#[ignore = "needs a CUDA GPU; there, run cargo test --lib -- --ignored"]
fn a_history_names_ranges_operators_and_nodes() {
    let device = gpu();
    // A size of its own tells these steps from those of other tests of this process.
    const FLOATS: i64 = (12 << 20) + 4096;
    let x = random([1, FLOATS], device).view([FLOATS]).set_requires_grad(true);
    let before = memory::stats(device).unwrap().requested_bytes.current;
    let ((), history) = memory_history::record(device, before, || {
        let loss = range("forward", || range("inner", || x.exp()).sum(Kind::Float));
        range("backward", || backward(&loss))
    })
    .unwrap();
    let mut own: Vec<_> = history.events.iter().filter(|e| e.bytes == 4 * FLOATS as u64).collect();
    own.retain(|e| e.action == Action::Alloc);
    let sources: Vec<_> = own.iter().map(|e| (e.source.range.as_str(), e.source.call())).collect();
    assert_eq!(sources[0], ("forward/inner", "aten::exp"), "{sources:?}");
    assert_eq!(sources.last(), Some(&("backward", "ExpBackward0")), "{sources:?}");
    // From 2020 to 2100.
    const TIMES: std::ops::Range<i64> = 1_577_836_800_000_000..4_102_444_800_000_000;
    assert!(history.events.iter().all(|e| TIMES.contains(&e.time_us)), "times are microseconds since 1970");
    for segment in &history.segments {
        assert_eq!(segment.blocks.iter().map(|block| block.bytes).sum::<u64>(), segment.bytes);
    }
    memory_history::viewer::write(&history, &mut Vec::new()).unwrap();
}
