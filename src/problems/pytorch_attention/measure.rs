//! Measures one pass forward and one backward of attention by its definition: time, and memory in between.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::accounting::Accounting;
use crate::attention::{ImplementationName, attention};
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::error::Fault;
use crate::harness::problem::Measure;
use crate::harness::provenance;
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::torch::Generator;
use crate::torch::allocator_stats::AllocationTracker;
use crate::torch::clock::{Lap, Stopwatch};
use crate::torch::random::SEED;
use crate::torch::{autograd, memory, stream};
use crate::units::human_bytes;

pub struct PytorchAttention;

/// One cell of the handout's grid; no heads, no mask.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub implementation: ImplementationName,
    pub batch: u32,
    pub d_model: u32,
    pub seq: u32,
    pub dtype: Dtype,
    pub warmup: u32,
    pub iterations: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// One pass from q, k, v to o, recording the graph; by the host's clock.
    pub forward: Samples,
    /// The same between CUDA events; none on the CPU. So for the backward pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward_device: Option<Samples>,
    /// One pass from the upstream gradient to dq, dk, dv.
    pub backward: Samples,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backward_device: Option<Samples>,
    /// Bytes in use for tensors between the two passes: q, k, v, the upstream gradient, o, and what the graph keeps.
    pub before_backward_bytes: u64,
    /// The part of it that the forward pass left behind: o and what the graph keeps.
    pub saved_bytes: u64,
    pub forward_peak_bytes: u64,
    pub backward_peak_bytes: u64,
    /// The most that the caching allocator held from the driver, in tensors or not; the CPU has no such allocator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<u64>,
}

pub fn accounting_of(p: &Params, profile: Profile) -> Accounting {
    let element_bytes = p.dtype.kind().elt_size_in_bytes() as u64;
    Accounting::of(p.batch.into(), p.seq.into(), p.d_model.into(), element_bytes, profile)
}

impl Measure for PytorchAttention {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;

    fn validate(p: &Params) -> Result<()> {
        for (key, value) in [("batch", p.batch), ("d_model", p.d_model), ("seq", p.seq), ("iterations", p.iterations)] {
            ensure!(value > 0, "{key} is 0; it must be at least 1");
        }
        ensure!(p.warmup > 0, "warmup is 0; the first pass also sets up libraries and their workspaces");
        // 2^24 squared times a batch of 2^10 still fits a byte count.
        ensure!(p.seq <= 1 << 24 && p.d_model <= 1 << 16 && p.batch <= 1 << 10, "seq, d_model or batch is too large");
        Ok(())
    }

    fn predicted_bytes(p: &Params, profile: Profile) -> Option<u64> {
        (p.implementation == ImplementationName::Naive).then(|| accounting_of(p, profile).needed_bytes())
    }

    fn measure(p: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        if let (Device::Cpu, Some(predicted)) = (device, Self::predicted_bytes(p, profile)) {
            refuse_if_larger(predicted, provenance::available_memory_bytes()?)?;
        }
        let (stopwatch, generator) = (Stopwatch::new(device)?, Generator::new(device, SEED)?);
        for _ in 0..p.warmup {
            pass(p, &generator, &stopwatch)?;
        }
        let passes = (0..p.iterations).map(|_| pass(p, &generator, &stopwatch)).collect::<Result<Vec<_>>>()?;
        let in_use = passes[0].memory;
        ensure!(passes.iter().all(|pass| pass.memory == in_use), "the memory in use differs from pass to pass");
        let host =
            |of: fn(&TimedPass) -> Lap, work| Samples::seconds(passes.iter().map(|p| of(p).host_s).collect(), work);
        let on_device = |of: fn(&TimedPass) -> Lap, work| -> Result<Option<Samples>> {
            let seconds: Option<Vec<f64>> = passes.iter().map(|p| of(p).device_s).collect();
            seconds.map(|seconds| Samples::seconds(seconds, work)).transpose()
        };
        Ok(Row {
            forward: host(|pass| pass.forward, forward_work(p))?,
            forward_device: on_device(|pass| pass.forward, forward_work(p))?,
            backward: host(|pass| pass.backward, backward_work(p))?,
            backward_device: on_device(|pass| pass.backward, backward_work(p))?,
            before_backward_bytes: in_use.before_backward,
            saved_bytes: in_use.saved,
            forward_peak_bytes: in_use.forward_peak,
            backward_peak_bytes: in_use.backward_peak,
            held_bytes: match device {
                Device::Cpu => None,
                device => Some(memory::stats(device)?.reserved_bytes.peak),
            },
        })
    }
}

/// A CPU overcommits memory: the allocation would succeed, and the operating system would kill a process later. So the
/// prediction refuses the case. On a GPU the allocator refuses it.
fn refuse_if_larger(predicted: u64, available: u64) -> Result<()> {
    if predicted <= available {
        return Ok(());
    }
    let message = format!(
        "refused by prediction, before allocating: the backward pass needs {} at its peak, {} of memory are available",
        human_bytes(predicted),
        human_bytes(available)
    );
    Err(Fault::OutOfMemory { requested_bytes: Some(predicted), message }.into())
}

pub struct TimedPass {
    pub forward: Lap,
    pub backward: Lap,
    pub memory: MemoryInUse,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MemoryInUse {
    pub before_backward: u64,
    pub saved: u64,
    pub forward_peak: u64,
    pub backward_peak: u64,
}

/// One forward and one backward pass on fresh inputs, metered and timed, synchronised after each.
pub fn pass(p: &Params, generator: &Generator, stopwatch: &Stopwatch) -> Result<TimedPass> {
    let device = generator.device();
    let meter = AllocationTracker::start(device)?;
    let shape = [p.batch, p.seq, p.d_model].map(i64::from);
    let kind = p.dtype.kind();
    let draw = || -> Result<Tensor> { Ok(generator.randn(&shape, Kind::Float)?.f_to_kind(kind)?) };
    let [q, k, v] = [draw()?, draw()?, draw()?].map(|t| t.set_requires_grad(true));
    let d_o = draw()?;
    stream::synchronize(device)?;
    let inputs = meter.in_use()?;
    meter.reset_peak()?;

    let (o, forward) = stopwatch.lap(|| attention(p.implementation, &q, &k, &v, false))?;
    let (before_backward, forward_peak) = (meter.in_use()?, meter.peak()?);
    meter.reset_peak()?;

    let ((), backward) = stopwatch.lap(|| autograd::backward_from(&o, &d_o, false))?;
    let memory = MemoryInUse {
        before_backward,
        saved: before_backward.saturating_sub(inputs),
        forward_peak,
        backward_peak: meter.peak()?,
    };
    Ok(TimedPass { forward, backward, memory })
}

/// Two products of 2 b T^2 d operations each; q, k and v read, o written.
fn forward_work(p: &Params) -> Work {
    work(p, 2.0, 4.0)
}

/// The four products of Eq. 7, 8, 10 and 11 (nothing is recomputed by the definition); q, k, v, o's gradient read and
/// dq, dk, dv written.
fn backward_work(p: &Params) -> Work {
    work(p, 4.0, 7.0)
}

fn work(p: &Params, products: f64, rows: f64) -> Work {
    let (b, t, d) = (f64::from(p.batch), f64::from(p.seq), f64::from(p.d_model));
    let bytes = rows * b * t * d * p.dtype.kind().elt_size_in_bytes() as f64;
    Work { flops: products * 2.0 * b * t * t * d, bytes, precision: p.dtype.name().into() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::harness::problem::Measured;

    #[test]
    fn a_case_that_fits_gives_a_row() {
        let p = Params {
            implementation: ImplementationName::Tiled,
            batch: 2,
            d_model: 8,
            seq: 32,
            dtype: Dtype::Float32,
            warmup: 1,
            iterations: 3,
        };
        let row = PytorchAttention::measure(&p, Profile::Cpu).unwrap();
        assert_eq!((row.forward.samples.len(), row.backward.samples.len()), (3, 3));
        // o and one logsumexp a row: linear in the sequence length.
        assert_eq!(row.saved_bytes, 2 * 32 * (8 + 1) * 4);
    }

    #[test]
    fn parameters_that_mean_nothing_are_refused_by_name() {
        let mut case = json!({"implementation": "naive", "batch": 8, "d_model": 16, "seq": 64, "dtype": "float32",
            "warmup": 1, "iterations": 1});
        let measured = Measured::of::<PytorchAttention>();
        assert!((measured.parse)(&case, Profile::Cpu).is_ok());
        for (key, value) in
            [("seq", json!(0)), ("warmup", json!(0)), ("implementation", json!("fast")), ("seq", json!(-1))]
        {
            let before = std::mem::replace(&mut case[key], value);
            assert!((measured.parse)(&case, Profile::Cpu).is_err(), "{key}");
            case[key] = before;
        }
    }
}
