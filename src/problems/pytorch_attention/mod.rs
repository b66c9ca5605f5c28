//! What attention by its definition costs: time, and the memory that its backward pass keeps waiting.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::device_for;
use super::mixed_precision_accumulation::format::Dtype;
use crate::attention::{Choice, attention};
use crate::error::Fault;
use crate::harness::problem::{Check, Measure, Measured, Problem};
use crate::harness::provenance;
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::torch::meter::Meter;
use crate::torch::{autograd, stream};
use crate::units::human_bytes;

mod checks;

pub const PROBLEM: Problem = Problem {
    name: "pytorch_attention",
    answers: &["a"],
    checks: &[
        Check { name: "naive_matches_pytorch", part: "a", run: checks::naive_matches_pytorch },
        Check { name: "memory_follows_the_formula", part: "a", run: checks::memory_follows_the_formula },
        Check { name: "what_cannot_fit_is_refused", part: "a", run: checks::what_cannot_fit_is_refused },
    ],
    measured: Some(Measured::of::<PytorchAttention>()),
    facts,
};

struct PytorchAttention;

/// One cell of the handout's grid; no heads, no mask.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub implementation: Choice,
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
    /// One pass from q, k, v to o, recording the graph.
    pub forward: Samples,
    /// One pass from the upstream gradient to dq, dk, dv.
    pub backward: Samples,
    /// Bytes in use for tensors between the two passes: q, k, v, the upstream gradient, o, and what the graph keeps.
    pub before_backward_bytes: u64,
    /// The part of it that the forward pass left behind: o and what the graph keeps.
    pub saved_bytes: u64,
    pub forward_peak_bytes: u64,
    pub backward_peak_bytes: u64,
}

/// The bytes that [`crate::attention::naive::attention`] needs, tensor by tensor.
///
/// With one score tensor of b T^2 elements and one row tensor of b T d: inputs are q, k, v and the upstream gradient.
/// Forward allocates Q K^T and its quotient by sqrt(d), frees the first, adds P, frees the second, adds o: at most two
/// score tensors and o at once. The graph keeps P. Backward holds P, dP and dS together, beside o and dv; where T is
/// shorter than d, its end is higher instead: o, dv, dq, dk, and dk once more on its way into k's own layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Accounting {
    pub batch: u64,
    pub seq: u64,
    pub d_model: u64,
    pub element_bytes: u64,
    pub score_bytes: u64,
    pub row_bytes: u64,
    pub input_bytes: u64,
    pub forward_peak_bytes: u64,
    pub saved_bytes: u64,
    pub before_backward_bytes: u64,
    pub backward_peak_bytes: u64,
}

impl Accounting {
    pub fn of(batch: u64, seq: u64, d_model: u64, element_bytes: u64) -> Self {
        let score_bytes = batch * seq * seq * element_bytes;
        let row_bytes = batch * seq * d_model * element_bytes;
        let input_bytes = 4 * row_bytes;
        Self {
            batch,
            seq,
            d_model,
            element_bytes,
            score_bytes,
            row_bytes,
            input_bytes,
            forward_peak_bytes: input_bytes + 2 * score_bytes + row_bytes,
            saved_bytes: score_bytes + row_bytes,
            before_backward_bytes: input_bytes + score_bytes + row_bytes,
            backward_peak_bytes: input_bytes + (3 * score_bytes + 2 * row_bytes).max(5 * row_bytes),
        }
    }

    fn of_params(p: &Params) -> Self {
        let element_bytes = p.dtype.kind().elt_size_in_bytes() as u64;
        Self::of(p.batch.into(), p.seq.into(), p.d_model.into(), element_bytes)
    }

    pub fn peak_bytes(&self) -> u64 {
        self.forward_peak_bytes.max(self.backward_peak_bytes)
    }
}

impl Measure for PytorchAttention {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn validate(p: &Params) -> Result<()> {
        for (key, value) in [("batch", p.batch), ("d_model", p.d_model), ("seq", p.seq), ("iterations", p.iterations)] {
            ensure!(value > 0, "{key} is 0; it must be at least 1");
        }
        ensure!(p.warmup > 0, "warmup is 0; the first pass also sets up libraries and their workspaces");
        // 2^24 squared times a batch of 2^10 still fits a byte count.
        ensure!(
            p.seq <= 1 << 24 && p.d_model <= 1 << 16 && p.batch <= 1 << 10,
            "seq, d_model or batch is absurdly large"
        );
        Ok(())
    }

    fn predicted_bytes(p: &Params) -> Option<u64> {
        (p.implementation == Choice::Naive).then(|| Accounting::of_params(p).peak_bytes())
    }

    fn measure(p: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        if let (Device::Cpu, Some(predicted)) = (device, Self::predicted_bytes(p)) {
            refuse_if_larger(predicted, provenance::available_memory_bytes()?)?;
        }
        for _ in 0..p.warmup {
            pass(p, device)?;
        }
        let passes = (0..p.iterations).map(|_| pass(p, device)).collect::<Result<Vec<_>>>()?;
        let memory = passes[0].memory;
        ensure!(passes.iter().all(|pass| pass.memory == memory), "the memory in use differs from pass to pass");
        Ok(Row {
            forward: Samples::seconds(passes.iter().map(|pass| pass.forward_s).collect(), forward_work(p))?,
            backward: Samples::seconds(passes.iter().map(|pass| pass.backward_s).collect(), backward_work(p))?,
            before_backward_bytes: memory.before_backward,
            saved_bytes: memory.saved,
            forward_peak_bytes: memory.forward_peak,
            backward_peak_bytes: memory.backward_peak,
        })
    }
}

/// A CPU is overcommitted: the allocation would succeed and the kernel would kill somebody later. So the prediction
/// stands in for the allocator, which on a GPU refuses by itself.
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

struct Pass {
    forward_s: f64,
    backward_s: f64,
    memory: Memory,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Memory {
    before_backward: u64,
    saved: u64,
    forward_peak: u64,
    backward_peak: u64,
}

/// One forward and one backward pass on fresh inputs, metered and timed, synchronised after each.
fn pass(p: &Params, device: Device) -> Result<Pass> {
    let meter = Meter::start(device)?;
    let shape = [p.batch, p.seq, p.d_model].map(i64::from);
    let kind = p.dtype.kind();
    let draw = || -> Result<Tensor> { Ok(Tensor::f_randn(shape, (Kind::Float, device))?.f_to_kind(kind)?) };
    let [q, k, v] = [draw()?, draw()?, draw()?].map(|t| t.set_requires_grad(true));
    let d_o = draw()?;
    stream::synchronize(device)?;
    let inputs = meter.in_use()?;
    meter.reset_peak()?;

    let start = Instant::now();
    let o = attention(p.implementation, &q, &k, &v, false)?;
    stream::synchronize(device)?;
    let forward_s = start.elapsed().as_secs_f64();
    let (before_backward, forward_peak) = (meter.in_use()?, meter.peak()?);
    meter.reset_peak()?;

    let start = Instant::now();
    autograd::backward_from(&o, &d_o, false)?;
    stream::synchronize(device)?;
    let backward_s = start.elapsed().as_secs_f64();
    let memory = Memory {
        before_backward,
        saved: before_backward.saturating_sub(inputs),
        forward_peak,
        backward_peak: meter.peak()?,
    };
    Ok(Pass { forward_s, backward_s, memory })
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

/// The accounting of every cell that a suite here may hold, in the shape that the template's `one(...)` selects from.
fn facts() -> Result<Value> {
    let mut cells = Vec::new();
    for d_model in [16, 32, 64, 128] {
        for seq in (8..=16).map(|power| 1_u64 << power) {
            let accounting = Accounting::of(8, seq, d_model, 4);
            let (t, d) = (seq as f64, d_model as f64);
            let mut cell = serde_json::to_value(accounting)?;
            cell["params"] = json!({ "batch": 8, "seq": seq, "d_model": d_model });
            // d log(saved) / d log(T) of saved = b s (T^2 + T d).
            cell["saved_exponent"] = json!((2.0 * t + d) / (t + d));
            cell["inputs_and_output_bytes"] = json!(accounting.input_bytes + accounting.row_bytes);
            cells.push(cell);
        }
    }
    Ok(json!({ "accounting": cells }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_tensors_have_the_published_sizes() {
        // 2, 32, 512, 2048 and 8192 MiB at batch 8 in float32, and 256 MiB of q, k, v and o at d = 128, T = 16384.
        for (seq, mib) in [(256, 2), (1024, 32), (4096, 512), (8192, 2048), (16384, 8192)] {
            assert_eq!(Accounting::of(8, seq, 64, 4).score_bytes, mib << 20);
        }
        assert_eq!(Accounting::of(8, 16384, 128, 4).input_bytes, 256 << 20);
    }

    #[test]
    fn the_exponent_in_the_facts_is_the_slope_of_the_formula() {
        let facts = facts().unwrap();
        let cell = &facts["accounting"][3];
        let (t, d) = (cell["seq"].as_u64().unwrap(), cell["d_model"].as_u64().unwrap());
        let saved = |t: u64| (Accounting::of(8, t, d, 4).saved_bytes as f64).ln();
        let slope = (saved(t + 1) - saved(t - 1)) / ((t as f64 + 1.0).ln() - (t as f64 - 1.0).ln());
        assert!((cell["saved_exponent"].as_f64().unwrap() - slope).abs() < 1e-5);
    }

    #[test]
    fn a_case_that_fits_gives_a_row() {
        let p = Params {
            implementation: Choice::Tiled,
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
        assert!((measured.parse)(&case).is_ok());
        for (key, value) in
            [("seq", json!(0)), ("warmup", json!(0)), ("implementation", json!("fast")), ("seq", json!(-1))]
        {
            let before = std::mem::replace(&mut case[key], value);
            assert!((measured.parse)(&case).is_err(), "{key}");
            case[key] = before;
        }
    }
}
