//! One case: every entrant is held to the definition, then all of them are timed in turns on the same inputs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::Dtype;
use super::entrants::Entrant;
use super::inputs::Inputs;
use super::protocol::{Bench, Protocol};
use super::replays::Replays;
use super::verify::{Expected, WHOLE, rounded, tolerance, worse};
use crate::error::{Fault, fault_of};
use crate::harness::provenance::available_memory_bytes;
use crate::harness::samples::{Samples, Work};
use crate::problems::torch_compile::attention::Errors;
use crate::problems::torch_compile::columns::{Column, Contender, Laps, samples, take_turns};
use crate::torch::autograd::{backward, backward_from};
use crate::units::human_bytes;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// From q, k and v to o, recording the graph.
    Forward,
    /// From the upstream gradient to dq, dk and dv, on a graph that is kept.
    Backward,
    /// One after the other.
    Both,
    /// The leaderboard's function: forward, the sum of o, and backward from it, into gradients that accumulate.
    Summed,
}

/// Whether the host launches each kernel, or the whole pass as one CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Launch {
    Eager,
    Graph,
}

/// What all entrants of one case do.
pub struct Task {
    /// (batch, heads, n, d).
    pub shape: [i64; 4],
    pub dtype: Dtype,
    pub launch: Launch,
    pub passes: &'static [Pass],
    pub protocol: Protocol,
    pub rounds: usize,
    /// The inputs of a given length.
    pub draw: fn(&Task, i64, Device) -> Result<Inputs>,
}

/// How one entrant's part of a case ended.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The largest over the lengths that were verified, as shares of the norm, to two digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors: Option<Errors>,
    /// The longest sequence on which it was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified_seq: Option<i64>,
    /// Bytes of tensors at the peak of each pass, where a formula knows them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub predicted_bytes: BTreeMap<Pass, u64>,
    pub passes: BTreeMap<Pass, Column<Samples>>,
}

impl Task {
    fn seq(&self) -> i64 {
        self.shape[2]
    }

    /// The least work of a pass: see [`super::work`].
    fn work(&self, pass: Pass, entrant: &Entrant) -> Work {
        super::work::of(self.shape, self.dtype, pass, entrant.precision(self.dtype))
    }

    fn predicted(&self, entrant: &Entrant, device: Device) -> BTreeMap<Pass, u64> {
        let formula = |pass: &Pass| (*pass, super::memory::peak_bytes(self.shape, self.dtype, *pass, device));
        if entrant.keeps_scores() { self.passes.iter().map(formula).collect() } else { BTreeMap::new() }
    }
}

/// Verifies and times every one of `entrants`; the key is its name.
pub fn hold(task: &Task, entrants: &[Entrant], device: Device) -> Result<BTreeMap<String, Entry>> {
    let inputs = (task.draw)(task, task.seq(), device).context("drawing the inputs")?;
    let verified = entrants.iter().map(|e| verify(e, task, &inputs)).collect::<Result<Vec<_>>>()?;
    let bench = Bench::new(device, task.protocol)?;
    let entered = || entrants.iter().zip(&verified);
    let mut contenders = Vec::new();
    // Pass by pass, so that what is compared stands close together in time.
    for pass in task.passes {
        for (entrant, verified) in entered() {
            contenders.push(match refused(task, entrant, *pass, device)? {
                Some(fault) => Contender::out(Column::of(Err(fault.into()))?),
                None => {
                    let (bench, inputs) = (&bench, &inputs);
                    Contender::prepared(verified, move |v| turn(entrant, v, *pass, bench, inputs))
                }
            });
        }
    }
    take_turns(task.rounds, &mut contenders)?;
    let mut ended: Vec<Option<Column<Laps>>> = contenders.into_iter().map(|c| Some(c.ended())).collect();
    let mut entries = BTreeMap::new();
    for (j, (entrant, verified)) in entered().enumerate() {
        let mut passes = BTreeMap::new();
        for (i, pass) in task.passes.iter().enumerate() {
            let column = ended[i * entrants.len() + j].take().context("a contender has one ending")?;
            let work = task.work(*pass, entrant);
            passes.insert(*pass, column.try_map(|laps| samples(&laps, LAP, work))?);
        }
        let proof = verified.measured().map(|v| (v.errors, v.seq));
        entries.insert(
            entrant.name.to_string(),
            Entry {
                errors: proof.map(|p| rounded(p.0)).transpose()?,
                verified_seq: proof.map(|p| p.1),
                predicted_bytes: task.predicted(entrant, device),
                passes,
            },
        );
    }
    Ok(entries)
}

/// A CPU is overcommitted: there the prediction stands in for the allocator, which on a GPU refuses by itself.
fn refused(task: &Task, entrant: &Entrant, pass: Pass, device: Device) -> Result<Option<Fault>> {
    let predicted = task.predicted(entrant, device).get(&pass).copied();
    let (Device::Cpu, Some(bytes)) = (device, predicted) else { return Ok(None) };
    let available = available_memory_bytes()?;
    let (needed, has) = (human_bytes(bytes), human_bytes(available));
    let message = format!("refused by prediction, before allocating: it needs {needed}, {has} of memory are available");
    Ok((bytes > available).then_some(Fault::OutOfMemory { requested_bytes: Some(bytes), message }))
}

/// An entrant that computes what it should.
struct Verified {
    errors: Errors,
    seq: i64,
    replays: Option<Replays>,
}

/// The entrant's part in the case, or why it has none: not supported, wrong, or not to be captured.
fn verify(entrant: &Entrant, task: &Task, inputs: &Inputs) -> Result<Column<Verified>> {
    let device = inputs.device();
    if let Err(reason) = entrant.supports(task.dtype.kind(), device, inputs.head_dim()) {
        return Ok(Column::NotRun { reason });
    }
    let attempt = || -> Result<Verified> {
        let small = (task.draw)(task, task.seq().min(WHOLE), device)?;
        let mut verified = Verified { errors: within(entrant, task, &small)?, seq: small.seq(), replays: None };
        if task.seq() > small.seq() && refused(task, entrant, task.passes[task.passes.len() - 1], device)?.is_none() {
            match within(entrant, task, inputs) {
                Ok(errors) => {
                    verified.errors = worse(verified.errors, errors);
                    verified.seq = task.seq();
                }
                // Its passes may still fit one by one; each of them will tell.
                Err(error) if matches!(fault_of(&error), Some(Fault::OutOfMemory { .. })) => inputs.clear()?,
                Err(error) => return Err(error),
            }
        }
        if task.launch == Launch::Graph {
            let replays = Replays::new(entrant, inputs).context("capturing CUDA graphs")?;
            let expected = Expected::of(inputs)?;
            for outputs in replays.outputs()? {
                verified.errors = worse(verified.errors, held(entrant, task, expected.errors(&outputs)?)?);
            }
            verified.replays = Some(replays);
        }
        Ok(verified)
    };
    match attempt() {
        Ok(verified) => Ok(Column::Measured { row: verified }),
        Err(error) if fault_of(&error).is_some() => Column::of(Err(error)),
        Err(error) => Ok(Column::Failed { error: format!("{error:#}") }),
    }
}

/// The errors of one forward and backward pass, none beyond the tolerance.
pub fn within(entrant: &Entrant, task: &Task, inputs: &Inputs) -> Result<Errors> {
    let run = entrant.prepare(inputs.seq(), inputs.device())?;
    let o = run(&inputs.q, &inputs.k, &inputs.v)?;
    backward_from(&o, &inputs.d_o, false)?;
    let [dq, dk, dv] = inputs.take_gradients()?;
    held(entrant, task, Expected::of(inputs)?.errors(&[o.f_detach()?, dq, dk, dv])?)
}

fn held(entrant: &Entrant, task: &Task, errors: Errors) -> Result<Errors> {
    let (largest, most) = (errors.largest(), tolerance(task.dtype));
    let name = entrant.name;
    ensure!(largest <= most, "{name} disagrees with the definition: off by {largest:.1e} of the norm, {errors:?}");
    Ok(errors)
}

/// The name of the timed calls among a turn's laps.
const LAP: &str = "call";

/// One turn of one entrant in one pass. What it sets up, it drops: the next one finds the memory free.
fn turn(entrant: &Entrant, verified: &Verified, pass: Pass, bench: &Bench, inputs: &Inputs) -> Result<Laps> {
    let seconds = match &verified.replays {
        Some(replays) => bench.turn(&|| Ok(()), &mut || replays.replay(pass))?,
        None => eager_turn(entrant, pass, bench, inputs)?,
    };
    inputs.clear()?;
    Ok([(LAP.to_string(), seconds)].into())
}

fn eager_turn(entrant: &Entrant, pass: Pass, bench: &Bench, inputs: &Inputs) -> Result<Vec<f64>> {
    let Inputs { q, k, v, d_o, .. } = inputs;
    let attention = entrant.prepare(inputs.seq(), inputs.device())?;
    let run = || -> Result<Tensor> { attention(q, k, v) };
    let clear = || inputs.clear();
    match pass {
        Pass::Forward => bench.turn(&clear, &mut || run().map(drop)),
        Pass::Backward => {
            let o = run()?;
            bench.turn(&clear, &mut || backward_from(&o, d_o, true))
        }
        Pass::Both => bench.turn(&clear, &mut || backward_from(&run()?, d_o, false)),
        Pass::Summed => bench.turn(&|| Ok(()), &mut || backward(&run()?.f_sum(None::<tch::Kind>)?)),
    }
}

#[cfg(test)]
mod tests;
