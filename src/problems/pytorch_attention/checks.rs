//! The timed implementation against PyTorch's, its memory against the formula, and cases that cannot fit.

use anyhow::{Result, ensure};
use tch::{Device, Kind};

use super::measure::{Params, PytorchAttention, accounting_of, pass};
use crate::attention::{ImplementationName, attention};
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::checks::attention::output_and_gradients;
use crate::error::Fault;
use crate::harness::problem::{Measure as _, Verdict};
use crate::harness::record::Profile;
use crate::torch::Generator;
use crate::torch::clock::Stopwatch;
use crate::torch::random::SEED;
use crate::units::human_bytes;

/// The timed implementation against PyTorch's own operator, output and gradients.
///
/// In float64 both are right to about n * 2^-53 (n below 100 terms a sum, values of order one), far within 1e-12.
pub fn naive_matches_pytorch() -> Result<Verdict> {
    const TOLERANCE: f64 = 1e-12;
    let mut largest = 0.0_f64;
    for (seed, (shape, is_causal)) in [([3, 40, 16], false), ([3, 40, 16], true), ([1, 1, 1], false)].iter().enumerate()
    {
        let generator = Generator::new(Device::Cpu, seed as i64)?;
        let draw = || generator.randn(shape, Kind::Double);
        let inputs = [draw()?, draw()?, draw()?, draw()?];
        let run = |choice| {
            let attention = |q: &_, k: &_, v: &_, is_causal| attention(choice, q, k, v, is_causal);
            output_and_gradients(&attention, inputs.each_ref(), *is_causal)
        };
        for ((name, ours), theirs) in
            ["o", "dq", "dk", "dv"].iter().zip(run(ImplementationName::Naive)?).zip(run(ImplementationName::Sdpa)?)
        {
            let error = ours.f_sub(&theirs)?.f_abs()?.f_max()?.f_double_value(&[])?;
            ensure!(error <= TOLERANCE, "{name} of shape {shape:?}, is_causal {is_causal}, is off by {error:.2e}");
            largest = largest.max(error);
        }
    }
    Verdict::passed(format!("largest error {largest:.1e} (atol {TOLERANCE:.0e})"))
}

/// Counted bytes against [`crate::bench::attention_memory::Accounting`], on the CPU and, where there is one, on the GPU; on
/// the CPU libtorch also keeps the divisor sqrt(d) as a tensor of a few bytes.
pub fn memory_follows_the_formula() -> Result<Verdict> {
    const SLACK: u64 = 64;
    let mut devices = vec![(Profile::Cpu, Device::Cpu)];
    devices.extend(device_for(Profile::Gpu).ok().map(|gpu| (Profile::Gpu, gpu)));
    for (profile, device) in &devices {
        let (stopwatch, generator) = (Stopwatch::new(*device)?, crate::torch::Generator::new(*device, SEED)?);
        for (d_model, seq) in [(8, 64), (32, 96), (100, 30)] {
            let p = plain(3, d_model, seq);
            // The first pass also allocates the workspaces of the products.
            pass(&p, &generator, &stopwatch)?;
            let (predicted, counted) = (accounting_of(&p, *profile), pass(&p, &generator, &stopwatch)?.memory);
            for (what, predicted, counted) in [
                ("saved by the forward pass", predicted.saved_bytes, counted.saved),
                ("in use before the backward pass", predicted.before_backward_bytes, counted.before_backward),
                ("at the peak of the forward pass", predicted.forward_peak_bytes, counted.forward_peak),
                ("at the peak of the backward pass", predicted.backward_peak_bytes, counted.backward_peak),
            ] {
                let fits = counted.abs_diff(predicted) <= SLACK;
                ensure!(
                    fits,
                    "{profile}, d_model {d_model}, seq {seq}: {counted} bytes {what}, the formula says {predicted}"
                );
            }
        }
    }
    let profiles = devices.iter().map(|(profile, _)| profile.name()).collect::<Vec<_>>().join(" and ");
    Verdict::passed(format!("three shapes, four figures each, within {SLACK} bytes, on {profiles}"))
}

/// One pass of plain attention in float32, after one untimed.
fn plain(batch: u32, d_model: u32, seq: u32) -> Params {
    let (implementation, dtype) = (ImplementationName::Naive, Dtype::Float32);
    Params { implementation, batch, d_model, seq, dtype, warmup: 1, iterations: 1 }
}

pub fn what_cannot_fit_is_refused() -> Result<Verdict> {
    let p = plain(8, 64, 1 << 20);
    let Err(error) = PytorchAttention::measure(&p, Profile::Cpu) else {
        anyhow::bail!("a case of {} ran", human_bytes(accounting_of(&p, Profile::Cpu).peak_bytes()))
    };
    match crate::error::fault_of(&error) {
        Some(Fault::OutOfMemory { requested_bytes: Some(bytes), .. }) => {
            Verdict::passed(format!("refused {} before allocating", human_bytes(bytes)))
        }
        _ => Err(error.context("a case that cannot fit must end as an out-of-memory with its size")),
    }
}
