//! One case: every implementation is verified against the definition, then all are timed in turns on the same inputs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::graph_replay::GraphReplays;
use super::implementations::{precision, takes_part};
use super::inputs::Inputs;
use super::verify::{Expected, WHOLE, rounded, worse};
use crate::attention::implementations::Implementation;
use crate::bench::dtype::Dtype;
use crate::bench::errors::AttentionErrors;
use crate::bench::interleave::{ColumnOutcome, Laps, Variant, samples, take_turns};
use crate::bench::timing::{Protocol, TimingBench};
use crate::bench::tolerance;
use crate::bench::work::{self, AttentionPass};
use crate::error::{Fault, fault_of};
use crate::harness::provenance::available_memory_bytes;
use crate::harness::samples::{Samples, Work};
use crate::torch::Generator;
use crate::torch::autograd::{backward, backward_from};
use crate::torch::random::SEED;
use crate::units::human_bytes;

/// Whether the host launches each kernel, or the whole pass as one CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Launch {
    Eager,
    Graph,
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
    /// The inputs of a given length.
    pub draw: fn(&Task, i64, &Generator) -> Result<Inputs>,
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

impl Task {
    fn seq(&self) -> i64 {
        self.shape[2]
    }

    /// The least work of a pass: see [`crate::bench::work`].
    fn work(&self, pass: AttentionPass, implementation: &Implementation) -> Work {
        work::of(self.shape, self.dtype, pass, precision(implementation, self.dtype))
    }

    fn predicted(&self, implementation: &Implementation, device: Device) -> BTreeMap<AttentionPass, u64> {
        let formula = |pass: &AttentionPass| (*pass, super::memory::peak_bytes(self.shape, self.dtype, *pass, device));
        if implementation.keeps_scores() { self.passes.iter().map(formula).collect() } else { BTreeMap::new() }
    }
}

/// Verifies and times every one of `implementations`; the key is its name.
pub fn compare(
    task: &Task,
    implementations: &[Implementation],
    device: Device,
) -> Result<BTreeMap<String, ImplementationOutcome>> {
    let generator = Generator::new(device, SEED)?;
    let inputs = (task.draw)(task, task.seq(), &generator).context("drawing the inputs")?;
    let verified = implementations.iter().map(|e| verify(e, task, &inputs, &generator)).collect::<Result<Vec<_>>>()?;
    let bench = TimingBench::new(device, task.protocol)?;
    let entered = || implementations.iter().zip(&verified);
    let mut variants = Vec::new();
    // Pass by pass, so that compared timings are close together in time.
    for pass in task.passes {
        for (implementation, verified) in entered() {
            variants.push(match refused(task, implementation, *pass, device)? {
                Some(fault) => Variant::out(ColumnOutcome::of(Err(fault.into()))?),
                None => {
                    let (bench, inputs) = (&bench, &inputs);
                    Variant::prepared(verified, move |v| turn(implementation, v, *pass, bench, inputs))
                }
            });
        }
    }
    take_turns(task.rounds, &mut variants)?;
    let mut ended: Vec<Option<ColumnOutcome<Laps>>> = variants.into_iter().map(|v| Some(v.ended())).collect();
    let mut entries = BTreeMap::new();
    for (j, (implementation, verified)) in entered().enumerate() {
        let mut passes = BTreeMap::new();
        for (i, pass) in task.passes.iter().enumerate() {
            let column = ended[i * implementations.len() + j].take().context("a variant has one ending")?;
            let work = task.work(*pass, implementation);
            passes.insert(*pass, column.try_map(|laps| samples(&laps, LAP, work))?);
        }
        let proof = verified.measured().map(|v| (v.errors, v.seq));
        entries.insert(
            implementation.name.to_string(),
            ImplementationOutcome {
                errors: proof.map(|p| rounded(p.0)).transpose()?,
                verified_seq: proof.map(|p| p.1),
                predicted_bytes: task.predicted(implementation, device),
                passes,
            },
        );
    }
    Ok(entries)
}

/// A CPU overcommits memory, so the prediction refuses the case. On a GPU the allocator refuses it.
fn refused(task: &Task, implementation: &Implementation, pass: AttentionPass, device: Device) -> Result<Option<Fault>> {
    let predicted = task.predicted(implementation, device).get(&pass).copied();
    let (Device::Cpu, Some(bytes)) = (device, predicted) else { return Ok(None) };
    let available = available_memory_bytes()?;
    let (needed, has) = (human_bytes(bytes), human_bytes(available));
    let message = format!("refused by prediction, before allocating: it needs {needed}, {has} of memory are available");
    Ok((bytes > available).then_some(Fault::OutOfMemory { requested_bytes: Some(bytes), message }))
}

/// An implementation that computes what it should.
struct Verified {
    errors: AttentionErrors,
    seq: i64,
    replays: Option<GraphReplays>,
}

/// The implementation's part in the case, or why it has none: not supported, wrong, or not to be captured.
fn verify(
    implementation: &Implementation,
    task: &Task,
    inputs: &Inputs,
    generator: &Generator,
) -> Result<ColumnOutcome<Verified>> {
    let device = inputs.device();
    if let Err(reason) = takes_part(implementation, task.dtype.kind(), device, inputs.head_dim()) {
        return Ok(ColumnOutcome::NotRun { reason });
    }
    let attempt = || -> Result<Verified> {
        let small = (task.draw)(task, task.seq().min(WHOLE), generator)?;
        let mut verified = Verified { errors: within(implementation, task, &small)?, seq: small.seq(), replays: None };
        if task.seq() > small.seq()
            && refused(task, implementation, task.passes[task.passes.len() - 1], device)?.is_none()
        {
            match within(implementation, task, inputs) {
                Ok(errors) => {
                    verified.errors = worse(verified.errors, errors);
                    verified.seq = task.seq();
                }
                // Single passes may still fit; each reports its own outcome.
                Err(error) if matches!(fault_of(&error), Some(Fault::OutOfMemory { .. })) => inputs.clear()?,
                Err(error) => return Err(error),
            }
        }
        if task.launch == Launch::Graph {
            let replays = GraphReplays::new(implementation, inputs).context("capturing CUDA graphs")?;
            let expected = Expected::of(inputs)?;
            for outputs in replays.outputs()? {
                verified.errors =
                    worse(verified.errors, within_tolerance(implementation, task, expected.errors(&outputs)?)?);
            }
            verified.replays = Some(replays);
        }
        Ok(verified)
    };
    match attempt() {
        Ok(verified) => Ok(ColumnOutcome::Measured { row: verified }),
        Err(error) if fault_of(&error).is_some() => ColumnOutcome::of(Err(error)),
        Err(error) => Ok(ColumnOutcome::Failed { error: format!("{error:#}") }),
    }
}

/// The errors of one forward and backward pass, none beyond the tolerance.
pub fn within(implementation: &Implementation, task: &Task, inputs: &Inputs) -> Result<AttentionErrors> {
    let run = implementation.prepare_causal(inputs.seq(), inputs.device())?;
    let o = run(&inputs.q, &inputs.k, &inputs.v)?;
    backward_from(&o, &inputs.d_o, false)?;
    let [dq, dk, dv] = inputs.take_gradients()?;
    within_tolerance(implementation, task, Expected::of(inputs)?.errors(&[o.f_detach()?, dq, dk, dv])?)
}

fn within_tolerance(implementation: &Implementation, task: &Task, errors: AttentionErrors) -> Result<AttentionErrors> {
    let (largest, most) = (errors.largest(), tolerance::attention(task.dtype));
    let name = implementation.name;
    ensure!(largest <= most, "{name} disagrees with the definition: off by {largest:.1e} of the norm, {errors:?}");
    Ok(errors)
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
