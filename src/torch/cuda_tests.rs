//! What only a GPU shows: callbacks on the engine's own thread, CUDA's out-of-memory, allocator counts and streams.

use std::sync::mpsc::channel;
use std::thread;

use anyhow::{Context, Result, bail};
use tch::{Device, Kind, Tensor};

use super::autograd::{Forward, Function, apply, backward};
use super::hooks::post_accumulate_grad;
use super::{autocast::autocast, memory, stream};
use crate::error::{Fault, fault_of};

/// The first GPU; these tests are ignored unless asked for, and without one they fail rather than pass unrun.
fn gpu() -> Device {
    super::cuda_device(0).expect("run with --ignored only where a GPU is")
}

fn leaf(device: Device) -> Tensor {
    Tensor::rand([2, 2], (Kind::Float, device)).set_requires_grad(true)
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
fn callbacks_run_on_the_engines_thread_and_their_failures_come_back() {
    let device = gpu();
    let (sender, receiver) = channel();
    let x = leaf(device);
    let from_hook = sender.clone();
    let _handle = post_accumulate_grad(&x, move |_| Ok(from_hook.send(thread::current().id())?)).unwrap();
    backward(&loss(&x, move || Ok(sender.send(thread::current().id())?))).unwrap();
    let threads: Vec<_> = receiver.try_iter().collect();
    assert!(threads.len() == 2 && threads.iter().all(|&id| id != thread::current().id()), "{threads:?}");

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
fn an_allocation_shows_in_current_and_peak() {
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
fn products_are_16_bit_in_autocast_of_the_gpu_alone() {
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
