//! Measures one cell of the grid, or the leaderboard's function: every implementation is verified, then all are timed in
//! turns on the same inputs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::implementations::{columns, precision};
use super::verify::{Verified, rounded, verify};
use crate::attention::FLASH_KERNELS;
use crate::attention::implementations::Implementation;
use crate::bench::attention::Inputs;
use crate::bench::attention_memory::{Accounting, refused_by_prediction};
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::bench::errors::AttentionErrors;
use crate::bench::interleave::{ColumnOutcome, Laps, Variant, samples, take_turns};
use crate::bench::timing::{Cache, Protocol, TimingBench};
use crate::bench::work::{self, AttentionPass};
use crate::error::Fault;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::samples::Samples;
use crate::torch::Generator;
use crate::torch::autograd::{backward, backward_from};
use crate::torch::random::SEED;

pub struct FlashBenchmarking;

/// One cell of the grid, or the leaderboard's function.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Cell(Cell),
    Leaderboard(Leaderboard),
}

/// Causal attention of one head, forward, backward and both.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    pub dtype: Dtype,
    pub d_model: i64,
    pub seq: i64,
    pub batch: i64,
    pub cache: Cache,
    pub launch: Launch,
    /// Turns of each implementation; every second round goes the other way.
    pub rounds: usize,
    /// Of each turn.
    pub warmup_ms: f64,
    pub rep_ms: f64,
    pub most_repeats: usize,
}

/// The handout's `flash_forward_backward` under `do_bench`, one implementation after the other.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaderboard {
    pub dtype: Dtype,
    pub n_heads: i64,
    pub d_head: i64,
    pub seq: i64,
    pub warmup_ms: f64,
    pub rep_ms: f64,
}

/// Whether the host launches each kernel, or the whole pass as one CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Launch {
    Eager,
    Graph,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub columns: BTreeMap<String, ImplementationOutcome>,
}

/// How one implementation's part of a case ended.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImplementationOutcome {
    /// The largest over the lengths that were verified, as shares of the norm, to two digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors: Option<AttentionErrors>,
    /// The longest sequence on which it was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified_seq: Option<i64>,
    /// Bytes of tensors at the peak of each pass, where a formula knows them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub predicted_bytes: BTreeMap<AttentionPass, u64>,
    pub passes: BTreeMap<AttentionPass, ColumnOutcome<Samples>>,
}

impl Measure for FlashBenchmarking {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = FLASH_KERNELS;

    fn validate(params: &Params) -> Result<()> {
        let task = Task::of(params);
        let [batch, heads, seq, d] = task.shape;
        for (key, value, most) in [("batch", batch, 1 << 10), ("n_heads", heads, 1 << 10), ("seq", seq, 1 << 20)] {
            ensure!((1..=most).contains(&value), "{key} is {value}: it must lie in 1..{most}");
        }
        ensure!((8..=256).contains(&d) && d % 8 == 0, "d is {d}: it must be a multiple of 8 up to 256");
        ensure!((1..=1000).contains(&task.rounds), "rounds is {}: it must lie in 1..1000", task.rounds);
        task.protocol.validate()
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        if let (Params::Leaderboard(_), Profile::Cpu) = (params, profile) {
            let needs = "a GPU, on which the handout times it".to_string();
            return Err(Fault::NotAvailable { needs, has: "a CPU".into() }.into());
        }
        Ok(Row { columns: compare(&Task::of(params), &columns(), device)? })
    }
}

/// What all implementations of one case do.
pub struct Task {
    /// (batch, heads, n, d).
    pub shape: [i64; 4],
    pub dtype: Dtype,
    pub launch: Launch,
    pub passes: &'static [AttentionPass],
    pub protocol: Protocol,
    pub rounds: usize,
    /// Whether q, k and v are parts of one leaf, as in the leaderboard's function.
    pub unpacked: bool,
}

impl Task {
    fn of(params: &Params) -> Self {
        match *params {
            Params::Cell(Cell {
                dtype,
                d_model,
                seq,
                batch,
                cache,
                launch,
                rounds,
                warmup_ms,
                rep_ms,
                most_repeats,
                ..
            }) => Self {
                shape: [batch, 1, seq, d_model],
                dtype,
                launch,
                passes: &[AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both],
                protocol: Protocol { cache, warmup_ms, rep_ms, most_repeats },
                rounds,
                unpacked: false,
            },
            Params::Leaderboard(Leaderboard { dtype, n_heads, d_head, seq, warmup_ms, rep_ms }) => Self {
                shape: [1, n_heads, seq, d_head],
                dtype,
                launch: Launch::Eager,
                passes: &[AttentionPass::Summed],
                protocol: Protocol { cache: Cache::Cold, warmup_ms, rep_ms, most_repeats: 0 },
                rounds: 1,
                unpacked: true,
            },
        }
    }

    pub fn seq(&self) -> i64 {
        self.shape[2]
    }

    /// The inputs of a given length.
    pub fn draw(&self, seq: i64, generator: &Generator) -> Result<Inputs> {
        let ([batch, heads, _, d], kind) = (self.shape, self.dtype.kind());
        match self.unpacked {
            true => Inputs::draw_unpacked(heads, seq, d, kind, generator),
            false => Inputs::draw(&[batch, heads, seq, d], kind, generator),
        }
    }

    /// Bytes of tensors at the peak of each pass, inputs and a mask of T^2 bytes included; none without a formula.
    pub fn predicted_bytes(&self, implementation: &Implementation, device: Device) -> BTreeMap<AttentionPass, u64> {
        if !implementation.keeps_scores() {
            return BTreeMap::new();
        }
        let [batch, heads, seq, d] = self.shape.map(|n| n.unsigned_abs());
        let element_bytes = self.dtype.kind().elt_size_in_bytes() as u64;
        let profile = if device == Device::Cpu { Profile::Cpu } else { Profile::Gpu };
        let plain = Accounting::of(batch * heads, seq, d, element_bytes, profile);
        let of_pass = |pass| match pass {
            AttentionPass::Forward => plain.forward_peak_bytes,
            AttentionPass::Backward | AttentionPass::Both | AttentionPass::Summed => plain.peak_bytes(),
        };
        self.passes.iter().map(|pass| (*pass, seq * seq + of_pass(*pass))).collect()
    }

    /// A CPU overcommits memory, so the prediction refuses the case. On a GPU the allocator refuses it.
    pub fn refused(&self, by: &Implementation, pass: AttentionPass, device: Device) -> Result<Option<Fault>> {
        let predicted = self.predicted_bytes(by, device).get(&pass).copied();
        let (Device::Cpu, Some(bytes)) = (device, predicted) else { return Ok(None) };
        refused_by_prediction(bytes)
    }
}

/// Verifies and times every one of `implementations`; the key is its name.
fn compare(
    task: &Task,
    implementations: &[Implementation],
    device: Device,
) -> Result<BTreeMap<String, ImplementationOutcome>> {
    let generator = Generator::new(device, SEED)?;
    let inputs = task.draw(task.seq(), &generator).context("drawing the inputs")?;
    let verified = implementations.iter().map(|e| verify(e, task, &inputs, &generator)).collect::<Result<Vec<_>>>()?;
    let bench = TimingBench::new(device, task.protocol)?;
    let entered = || implementations.iter().zip(&verified);
    let mut variants = Vec::new();
    // Pass by pass, so that compared timings are close together in time.
    for pass in task.passes {
        for (implementation, verified) in entered() {
            variants.push(match task.refused(implementation, *pass, device)? {
                Some(fault) => Variant::out(ColumnOutcome::of(Err(fault.into()))?),
                None => {
                    let (bench, inputs) = (&bench, &inputs);
                    Variant::prepared(verified, move |v| turn(implementation, v, *pass, bench, inputs))
                }
            });
        }
    }
    take_turns(task.rounds, &mut variants)?;
    let mut ended = variants.into_iter().map(Variant::ended);
    let mut passes = vec![BTreeMap::new(); implementations.len()];
    for pass in task.passes {
        for (implementation, passes) in implementations.iter().zip(&mut passes) {
            let column = ended.next().context("a variant has one ending")?;
            let work = work::of(task.shape, task.dtype, *pass, precision(implementation, task.dtype));
            passes.insert(*pass, column.try_map(|laps| samples(&laps, LAP, work))?);
        }
    }
    let outcomes = entered().zip(passes).map(|((implementation, verified), passes)| {
        let verified = verified.measured();
        let outcome = ImplementationOutcome {
            errors: verified.map(|v| rounded(v.errors)).transpose()?,
            verified_seq: verified.map(|v| v.seq),
            predicted_bytes: task.predicted_bytes(implementation, device),
            passes,
        };
        Ok((implementation.name.to_string(), outcome))
    });
    outcomes.collect()
}

/// The name of the timed calls among a turn's laps.
const LAP: &str = "call";

/// One turn of one implementation in one pass. It frees everything at the end, so that the next turn has the memory.
fn turn(
    implementation: &Implementation,
    verified: &Verified,
    pass: AttentionPass,
    bench: &TimingBench,
    inputs: &Inputs,
) -> Result<Laps> {
    let seconds = match &verified.replays {
        Some(replays) => bench.turn(&|| Ok(()), &mut || replays.replay(pass))?,
        None => eager_turn(implementation, pass, bench, inputs)?,
    };
    inputs.clear()?;
    Ok([(LAP.to_string(), seconds)].into())
}

fn eager_turn(
    implementation: &Implementation,
    pass: AttentionPass,
    bench: &TimingBench,
    inputs: &Inputs,
) -> Result<Vec<f64>> {
    let Inputs { q, k, v, d_o, .. } = inputs;
    let attention = implementation.prepare_causal(inputs.seq(), inputs.device())?;
    let run = || -> Result<Tensor> { attention(q, k, v) };
    let clear = || inputs.clear();
    match pass {
        AttentionPass::Forward => bench.turn(&clear, &mut || run().map(drop)),
        AttentionPass::Backward => {
            let o = run()?;
            bench.turn(&clear, &mut || backward_from(&o, d_o, true))
        }
        AttentionPass::Both => bench.turn(&clear, &mut || backward_from(&run()?, d_o, false)),
        AttentionPass::Summed => bench.turn(&|| Ok(()), &mut || backward(&run()?.f_sum(None::<tch::Kind>)?)),
    }
}

#[cfg(test)]
mod tests;
