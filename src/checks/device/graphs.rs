//! GPU checks of CUDA graphs: what a replay reads and writes, and the state after a failed capture.

use anyhow::{Result, bail, ensure};
use tch::{Device, Kind, Tensor};

use super::error_of;
use crate::cuda::{Counters, clear_word, take_clear};
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::torch::autograd::{backward, release_grad};
use crate::torch::graph::{Captured, on_side_stream};
use crate::torch::random::SEED;
use crate::torch::{Generator, cuda_device, memory, stream};

pub const CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new(
        "a_replayed_graph_reads_changed_inputs",
        "A replayed CUDA graph computes from what its inputs hold at the replay.",
        a_replayed_graph_reads_changed_inputs,
    ),
    DeviceCheck::new(
        "a_captured_backward_gives_the_same_bits_as_an_eager_one",
        "Loss and gradients of a captured forward and backward pass have the bits of eager ones.",
        a_captured_backward_gives_the_same_bits_as_an_eager_one,
    ),
    DeviceCheck::new(
        "the_device_is_usable_after_a_failed_capture",
        "After a capture that fails, random numbers, the allocator's cache and another capture work.",
        the_device_is_usable_after_a_failed_capture,
    ),
    DeviceCheck::new(
        "a_graph_clears_its_counters_once",
        "A CUDA graph leaves out the fills of counters that it has cleared, and every replay clears them.",
        a_graph_clears_its_counters_once,
    ),
    DeviceCheck::new(
        "dropping_a_graph_frees_its_memory",
        "A dropped graph gives back the memory that its capture reserved.",
        dropping_a_graph_frees_its_memory,
    ),
];

fn random(size: [i64; 2], device: Device) -> Result<Tensor> {
    Generator::new(device, SEED)?.randn(&size, Kind::Float)
}

fn a_replayed_graph_reads_changed_inputs() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let x = random([64, 32], device)?;
    let (a, b) = (random([32, 128], device)?, random([128, 16], device)?);
    let chain = |x: &Tensor| -> Result<Tensor> { Ok(x.f_matmul(&a)?.f_relu()?.f_matmul(&b)?) };
    on_side_stream(device, || (0..3).try_for_each(|_| chain(&x).map(drop)))?;
    let captured = Captured::capture(device, || chain(&x))?;
    ensure!(captured.num_nodes() >= 3, "{} nodes", captured.num_nodes());
    ensure!(stream::current_stream(device)? == 0, "the capture left its stream current");
    for _ in 0..2 {
        x.shallow_clone().copy_(&random([64, 32], device)?);
        captured.replay()?;
        stream::synchronize(device)?;
        ensure!(*captured.output() == chain(&x)?, "the replay differs from the eager chain");
    }
    Verdict::passed(format!("{} nodes", captured.num_nodes()))
}

fn a_captured_backward_gives_the_same_bits_as_an_eager_one() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let x = random([64, 32], device)?;
    let weights = [random([32, 128], device)?, random([128, 16], device)?].map(|w| w.set_requires_grad(true));
    let gradients = || weights.each_ref().map(Tensor::grad);
    let step = || -> Result<Tensor> {
        weights.iter().try_for_each(release_grad)?;
        let y = x.f_matmul(&weights[0])?.f_tanh()?.f_matmul(&weights[1])?;
        let loss = y.f_mul(&y)?.f_mean(None::<Kind>)?;
        backward(&loss)?;
        Ok(loss.detach())
    };
    on_side_stream(device, || (0..3).try_for_each(|_| step().map(drop)))?;
    let captured = Captured::capture(device, step)?;
    let written = gradients();
    x.shallow_clone().copy_(&random([64, 32], device)?);
    captured.replay()?;
    captured.replay()?;
    stream::synchronize(device)?;
    let (loss, replayed) = (captured.output().copy(), written.map(|gradient| gradient.copy()));
    ensure!(step()? == loss, "the loss differs");
    ensure!(gradients() == replayed, "a gradient differs");
    Verdict::passed("the loss and two gradients")
}

fn the_device_is_usable_after_a_failed_capture() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let x = random([8, 8], device)?;
    let product = || -> Result<Tensor> { Ok(x.f_matmul(&x)?) };
    on_side_stream(device, || product().map(drop))?;
    let expected = product()?;
    let reads_on_the_host = || Ok(product()?.f_double_value(&[0, 0]).map(drop)?);
    let generator = Generator::new(device, SEED)?;
    let draws = || generator.rand(&[8, 8], Kind::Float).map(drop);
    let refuses = || bail!("a deliberate error");
    let attempts: [&dyn Fn() -> Result<()>; 3] = [&reads_on_the_host, &draws, &refuses];
    for attempt in attempts {
        let error = format!("{:#}", error_of(Captured::capture(device, attempt).map(drop))?);
        eprintln!("{error}");
        ensure!(error.contains("CUDA graph"), "{error}");
        ensure!(stream::current_stream(device)? == 0, "the capture left its stream current: {error}");
        // Random numbers, the allocator's cache and another capture all work again.
        draws()?;
        memory::empty_cache(device)?;
        let captured = Captured::capture(device, product)?;
        captured.replay()?;
        stream::synchronize(device)?;
        ensure!(*captured.output() == expected, "the next graph gives another product, after {error}");
    }
    Verdict::passed(format!("{} ways to fail", attempts.len()))
}

fn a_graph_clears_its_counters_once() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let counters = Counters::new(device, 3)?;
    let other = Tensor::f_zeros([1], (Kind::Int, device))?;
    // As cuBLASLt before a product: it clears the word, and the kernel counts in it.
    let count_in = |word: &Tensor| -> Result<()> {
        clear_word(word)?;
        let _ = word.f_narrow(0, 0, 1)?.f_add_scalar_(1)?;
        Ok(())
    };
    let body = || -> Result<Vec<Tensor>> {
        let _clear = counters.clear()?;
        let taken: Vec<_> = std::iter::from_fn(|| take_clear(device).transpose()).collect::<Result<_>>()?;
        taken.iter().chain([&other]).try_for_each(count_in)?;
        Ok(taken)
    };
    on_side_stream(device, || body().map(drop))?;
    let captured = Captured::capture(device, body)?;
    ensure!(captured.num_nodes() == 6, "{} nodes, not a fill, four kernels and the other's fill", captured.num_nodes());
    for _ in 0..3 {
        captured.replay()?;
    }
    stream::synchronize(device)?;
    for counter in captured.output().iter().chain([&other]) {
        let count = counter.f_int64_value(&[0])?;
        ensure!(count == 1, "a counter holds {count}, not the 1 of one replay");
    }
    Verdict::passed(format!("{} nodes for {} counters", captured.num_nodes(), captured.output().len()))
}

fn dropping_a_graph_frees_its_memory() -> Result<Verdict> {
    const BYTES: u64 = 256 << 20;
    let device = cuda_device(0)?;
    let x = Tensor::f_zeros([BYTES as i64 / 4], (Kind::Float, device))?;
    let double = || -> Result<Tensor> { Ok(x.f_add(&x)?) };
    on_side_stream(device, || double().map(drop))?;
    memory::empty_cache(device)?;
    let reserved = || Ok::<_, anyhow::Error>(memory::stats(device)?.reserved_bytes.current);
    let before = reserved()?;
    let captured = Captured::capture(device, double)?;
    let during = reserved()?;
    ensure!(during >= before + BYTES, "{during} bytes reserved by the capture, {before} before");
    drop(captured);
    memory::empty_cache(device)?;
    let after = reserved()?;
    ensure!(after <= before, "{after} bytes reserved, {before} before");
    Verdict::passed(format!("{} bytes given back", during - after))
}
