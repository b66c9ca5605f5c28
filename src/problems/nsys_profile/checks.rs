//! Checks of the analysis of a profile.

use anyhow::{Context as _, Result, ensure};
use tch::Device;

use super::measure::{OptimizerName, Params, Pass};
use super::step::{BACKWARD, FORWARD, INFERENCE, OPTIMIZER, ProfiledBench};
use super::summary::{Counted, RangeWork, Summary};
use crate::attention::naive::{FINAL_MATMUL, SCORES, SOFTMAX};
use crate::bench::kernels::{Class, Tally, is_matmul_operator};
use crate::harness::problem::Verdict;
use crate::model::{Precision, SizeName};
use crate::torch::profiler::profile;
use crate::torch::trace::ranges::Ranges;
use crate::torch::trace::{Event, Source, Trace};

fn tiny() -> Params {
    Params {
        size: SizeName::Tiny,
        context_length: 16,
        batch_size: 1,
        vocab_size: 100,
        pass: Pass::TrainingStep,
        dtype: Precision::Float32,
        optimizer: OptimizerName::Plain,
        warmup: 1,
        steps: 1,
    }
}

/// A real profile on the CPU: 9 L + 1 products in a forward pass, two for each in the backward pass, the three ranges
/// of attention in every layer, and no operator lost.
pub fn a_profiled_step_adds_up() -> Result<Verdict> {
    let params = tiny();
    let layers = params.config().num_layers as usize;
    let mut bench = ProfiledBench::new(&params, Device::Cpu)?;
    let (_, profile) = profile(Device::Cpu, || bench.step())?;
    let trace = profile.trace()?;
    let summary = Summary::of(&trace, Counted::Operators)?;
    let ranges = Ranges::of(&trace)?;
    let products = |name| {
        let inside = |event: &&Event| ranges.inside(ranges.at(event.start_ns), name);
        trace.events.iter().filter(|event| is_matmul_operator(event)).filter(inside).count()
    };
    let forward = 9 * layers + 1;
    for (name, expected) in [(INFERENCE, forward), (FORWARD, forward), (BACKWARD, 2 * forward), (OPTIMIZER, 0)] {
        ensure!(products(name) == expected, "{} products in {name}, expected {expected}", products(name));
    }
    for name in [SCORES, SOFTMAX, FINAL_MATMUL] {
        let spans = ranges.named(name).count();
        ensure!(spans == 2 * layers, "{spans} ranges {name:?} in two forward passes of {layers} layers");
    }
    summary.passes()?;
    let products = summary.attention()?.products;
    ensure!(products.count == 2 * layers as u64, "{products:?}");
    let operators = trace.events.iter().filter(|event| event.source == Source::Operator).count();
    Verdict::passed(format!("{operators} operators in their ranges, {forward} products in a forward pass"))
}

/// One step of a GPU as a trace, with the answer known: launches on two threads, late kernels, a stray, a split product.
fn known_trace() -> Trace {
    let mut events = Vec::new();
    let mut range = |name: &str, start, end| events.push(event(Source::Range, name, start, end, 1, None));
    range("warm-up", 0, 900);
    range("inference", 100, 800);
    range("inference", 1000, 2000);
    range("attn", 1100, 1900);
    for (name, start) in [(SCORES, 1200), (SOFTMAX, 1400), (FINAL_MATMUL, 1600)] {
        range(name, start, start + 100);
    }
    range("forward", 3000, 4000);
    range("backward", 4000, 5000);
    range("optimizer", 5000, 6000);
    let work = [
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_ffma", 150, 1, 10),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_ffma", 1250, 1, 400),
        ("void at::native::elementwise_kernel<4, at::native::masked_fill_kernel(int)>(int)", 1260, 1, 30),
        ("void softmax_warp_forward<float>(float*)", 1450, 1, 50),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_ffma", 1650, 1, 300),
        ("void cublasLt::splitKreduce_kernel<32>(int)", 1660, 1, 20),
        ("ampere_sgemm_128x64_nn", 3500, 1, 700),
        ("ampere_sgemm_128x64_nt", 4500, 2, 1400),
        ("adamw_float32", 5500, 1, 80),
        ("what_is_this", 7000, 1, 5),
    ];
    let mut free = 10_000;
    for (i, (name, launched, thread, duration)) in work.into_iter().enumerate() {
        let correlation = Some(i as i64 + 1);
        events.push(event(Source::Call, "cudaLaunchKernel", launched, launched + 5, thread, correlation));
        events.push(event(Source::Kernel, name, free, free + duration, 7, correlation));
        free += duration + 1;
    }
    Trace { events }
}

fn event(source: Source, name: &str, start_ns: i64, end_ns: i64, thread: i64, correlation: Option<i64>) -> Event {
    Event { source, name: name.into(), start_ns, duration_ns: end_ns - start_ns, thread, correlation }
}

/// The analysis of the known trace, kernel by kernel.
pub fn every_kernel_finds_its_range() -> Result<Verdict> {
    let trace = known_trace();
    let summary = Summary::of(&trace, Counted::Kernels)?;
    let (passes, attention, outside) = (summary.passes()?, summary.attention()?, summary.outside());
    let pass = |work: &RangeWork| (work.count, (work.seconds * 1e9).round() as i64);
    let all: Vec<_> = passes.all().into_iter().map(pass).collect();
    ensure!(all == [(5, 800), (1, 700), (1, 1400), (1, 80)], "the passes hold {all:?}");
    let parts: Vec<_> = [&attention.scores, &attention.softmax, &attention.final_matmul].map(pass).to_vec();
    ensure!(parts == [(2, 430), (1, 50), (2, 320)], "the ranges of attention hold {parts:?}");
    ensure!(nanoseconds(attention.products) == (3, 720), "its products are {:?}", attention.products);
    // The warm-up's product and the stray.
    ensure!(nanoseconds(outside) == (2, 15), "outside of the passes are {outside:?}");
    let classes = &passes.inference.classes;
    let matmul = classes.get(&Class::Matmul).context("no class matmul")?;
    ensure!(nanoseconds(*matmul) == (2, 700) && summary.matmuls().helpers == 1, "{classes:?}");
    let span = (passes.inference.span_s * 1e9).round() as i64;
    ensure!(span == 804, "the inference pass spans {span} ns, not its 800 and four gaps");
    let optimizer = passes.optimizer.as_ref().context("no optimizer pass")?;
    ensure!(optimizer.kernels[0].class == Class::Optimizer, "{:?}", optimizer.kernels);
    Verdict::passed("ten kernels of two launching threads")
}

fn nanoseconds(tally: Tally) -> (u64, i64) {
    (tally.count, (tally.seconds * 1e9).round() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_pass_here() {
        for check in [a_profiled_step_adds_up, every_kernel_finds_its_range] {
            assert!(matches!(check().unwrap(), Verdict::Passed { .. }));
        }
    }

    #[test]
    fn a_trace_without_the_ranges_of_a_step_is_refused_by_name() {
        let mut trace = known_trace();
        trace.events.retain(|event| event.name != "optimizer");
        let error = Summary::of(&trace, Counted::Kernels).unwrap().passes().unwrap_err();
        assert!(format!("{error:#}").contains("\"optimizer\""), "{error:#}");
    }
}
