//! Measures one pass forward and one backward of attention by its definition: time, and memory in between.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::Device;

use crate::attention::{ImplementationName, attention};
use crate::bench::attention::Inputs;
use crate::bench::attention_memory::{Accounting, refused_by_prediction};
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::bench::training_step::eager::samples;
use crate::bench::work::{self, AttentionPass};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::samples::Samples;
use crate::torch::Generator;
use crate::torch::allocator_stats::AllocationTracker;
use crate::torch::autograd::backward_from;
use crate::torch::clock::{Lap, Stopwatch};
use crate::torch::random::SEED;
use crate::torch::{memory, stream};

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

impl Params {
    /// (b, T, d).
    fn shape(&self) -> [i64; 3] {
        [self.batch, self.seq, self.d_model].map(i64::from)
    }
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

    fn validate_row(p: &Params, row: &Row) -> Result<()> {
        let Row { before_backward_bytes: before, saved_bytes: saved, .. } = *row;
        let Accounting { input_bytes, row_bytes, .. } = accounting_of(p, Profile::Cpu);
        ensure!(saved >= row_bytes, "saved_bytes is {saved}, less than the {row_bytes} of the output");
        let least = input_bytes + saved;
        ensure!(
            before >= least,
            "before_backward_bytes is {before}, less than the {least} of inputs and what is saved"
        );
        for (name, peak) in [("forward", row.forward_peak_bytes), ("backward", row.backward_peak_bytes)] {
            ensure!(peak >= before, "{name}_peak_bytes is {peak}, less than the {before} in use between the passes");
            let held = row.held_bytes.unwrap_or(peak);
            ensure!(held >= peak, "held_bytes is {held}, less than {name}_peak_bytes, {peak}");
        }
        Ok(())
    }

    fn predicted_bytes(p: &Params, profile: Profile) -> Option<u64> {
        (p.implementation == ImplementationName::Naive).then(|| accounting_of(p, profile).needed_bytes())
    }

    fn measure(p: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        if let (Device::Cpu, Some(bytes)) = (device, Self::predicted_bytes(p, profile)) {
            refused_by_prediction(bytes)?.map_or(Ok(()), Err)?;
        }
        let (stopwatch, generator) = (Stopwatch::new(device)?, Generator::new(device, SEED)?);
        for _ in 0..p.warmup {
            pass(p, &generator, &stopwatch)?;
        }
        let passes = (0..p.iterations).map(|_| pass(p, &generator, &stopwatch)).collect::<Result<Vec<_>>>()?;
        let in_use = passes[0].memory;
        ensure!(passes.iter().all(|pass| pass.memory == in_use), "the memory in use differs from pass to pass");
        let work = |pass| work::plain(p.shape(), p.dtype, pass);
        let (forward, forward_device) =
            samples(passes.iter().map(|pass| Some(pass.forward)), work(AttentionPass::Forward))?;
        let (backward, backward_device) =
            samples(passes.iter().map(|pass| Some(pass.backward)), work(AttentionPass::Backward))?;
        Ok(Row {
            forward: forward.context("no pass was timed")?,
            forward_device,
            backward: backward.context("no pass was timed")?,
            backward_device,
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
    let Inputs { q, k, v, d_o, .. } = &Inputs::draw(&p.shape(), p.dtype.kind(), generator)?;
    stream::synchronize(device)?;
    let inputs = meter.in_use()?;
    meter.reset_peak()?;

    let (o, forward) = stopwatch.lap(|| attention(p.implementation, q, k, v, false))?;
    let (before_backward, forward_peak) = (meter.in_use()?, meter.peak()?);
    meter.reset_peak()?;

    let ((), backward) = stopwatch.lap(|| backward_from(&o, d_o, false))?;
    let memory = MemoryInUse {
        before_backward,
        saved: before_backward.saturating_sub(inputs),
        forward_peak,
        backward_peak: meter.peak()?,
    };
    Ok(TimedPass { forward, backward, memory })
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
