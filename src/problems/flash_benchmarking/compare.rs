//! Verifies every implementation, times all in turns on the same inputs, and reads the energy of their calls.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use tch::{Device, Kind};

use super::implementations::precision;
use super::measure::{ImplementationOutcome, Timings};
use super::task::Task;
use super::verify::{Others, Runs, Verified, rounded, verify};
use crate::attention::implementations::Implementation;
use crate::bench::attention::Inputs;
use crate::bench::energy::{Energy, EnergyMeter};
use crate::bench::interleave::{ColumnOutcome, Laps, Variant, samples, take_turns};
use crate::bench::timing::{BusyCalls, TimingBench};
use crate::bench::work::{self, AttentionPass};
use crate::harness::samples::Samples;
use crate::torch::Generator;
use crate::torch::autograd::{backward, backward_from};
use crate::torch::random::SEED;

/// The name of the timed calls among a turn's laps.
pub const LAP: &str = "call";

/// An implementation, and its part in the case.
type Entry<'e, 'p> = (&'e Implementation, &'e ColumnOutcome<Verified<'p>>);
type TimedPasses = BTreeMap<AttentionPass, ColumnOutcome<Samples>>;

/// Verifies and measures every one of `implementations`, FlashAttention-4 in `peer`; the key is the name.
pub fn compare<'p>(
    task: &Task,
    implementations: &[Implementation],
    device: Device,
    others: &Others<'p>,
) -> Result<Timings> {
    let generator = Generator::new(device, SEED)?;
    let inputs = task.draw(task.seq(), &generator).context("drawing the inputs")?;
    let verify = |implementation| verify(implementation, task, &inputs, &generator, others);
    let verified = implementations.iter().map(verify).collect::<Result<Vec<_>>>()?;
    let entries: Vec<Entry> = implementations.iter().zip(&verified).collect();
    let timings = timed(task, &inputs, &entries, others.subject.is_some())?;
    let (energies, energy_missing) = energies(task, &inputs, &entries, &timings);
    let mut columns = BTreeMap::new();
    for (((implementation, verified), passes), energy) in entries.into_iter().zip(timings).zip(energies) {
        let verified = verified.measured();
        let outcome = ImplementationOutcome {
            version: verified.and_then(|v| v.version.clone()),
            errors: verified.map(|v| rounded(v.errors)).transpose()?,
            verified_seq: verified.map(|v| v.seq),
            predicted_bytes: task.predicted_bytes(implementation, device),
            passes,
            energy,
        };
        columns.insert(implementation.name.to_string(), outcome);
    }
    Ok(Timings { columns, energy_missing, message: None })
}

/// `by_host`: every column by the host's clock, since a column of another process can be timed by no other.
fn timed(task: &Task, inputs: &Inputs, entries: &[Entry], by_host: bool) -> Result<Vec<TimedPasses>> {
    let device = inputs.device();
    let bench = TimingBench::new(device, task.protocol)?;
    let bench = |clear: &dyn Fn() -> Result<()>, call: &mut dyn FnMut() -> Result<()>| match by_host {
        true => bench.turn_by_host(clear, call),
        false => bench.turn(clear, call),
    };
    let mut variants = Vec::new();
    // Pass by pass, so that compared timings are close together in time.
    for pass in task.passes {
        for &(implementation, verified) in entries {
            variants.push(match task.refused(implementation, *pass, device)? {
                Some(fault) => Variant::out(ColumnOutcome::of(Err(fault.into()))?),
                None => {
                    let bench = &bench;
                    Variant::prepared(verified, move |v| turn(implementation, v, *pass, bench, task, inputs))
                }
            });
        }
    }
    take_turns(task.rounds, &mut variants)?;
    let mut ended = variants.into_iter().map(Variant::ended);
    let mut timings = vec![TimedPasses::new(); entries.len()];
    for pass in task.passes {
        for ((implementation, _), timings) in entries.iter().zip(&mut timings) {
            let column = ended.next().context("a variant has one ending")?;
            let work = work::of(task.shape, task.dtype, *pass, precision(implementation, task.dtype));
            timings.insert(*pass, column.try_map(|laps| samples(&laps, LAP, work))?);
        }
    }
    Ok(timings)
}

/// The energy of each pass that was timed, and the first reason why one has none. Nothing is lost to a missing counter but
/// the energy.
fn energies(
    task: &Task,
    inputs: &Inputs,
    entries: &[Entry],
    timings: &[TimedPasses],
) -> (Vec<BTreeMap<AttentionPass, Energy>>, Option<String>) {
    let mut energies = vec![BTreeMap::new(); entries.len()];
    if task.energy_s == 0.0 {
        return (energies, None);
    }
    let meter = match inputs.device() {
        Device::Cpu => Err(anyhow::anyhow!("a CPU has no energy counter here")),
        _ => EnergyMeter::of_gpu(),
    };
    let meter = match meter {
        Ok(meter) => meter,
        Err(error) => return (energies, Some(format!("{error:#}"))),
    };
    let mut missing = None;
    for pass in task.passes {
        for ((&(implementation, verified), timings), energies) in entries.iter().zip(timings).zip(&mut energies) {
            let (Some(v), Some(_)) = (verified.measured(), timings[pass].measured()) else { continue };
            match meter.measure(|| busy(implementation, v, *pass, task.energy_s, inputs)) {
                Ok(energy) => drop(energies.insert(*pass, energy)),
                Err(error) => drop(missing.get_or_insert(format!("{}: {error:#}", implementation.label))),
            }
        }
    }
    (energies, missing)
}

/// One turn of one implementation in one pass. It frees everything at the end, so that the next turn has the memory.
fn turn(
    implementation: &Implementation,
    verified: &Verified,
    pass: AttentionPass,
    bench: &impl Fn(&dyn Fn() -> Result<()>, &mut dyn FnMut() -> Result<()>) -> Result<Vec<f64>>,
    task: &Task,
    inputs: &Inputs,
) -> Result<Laps> {
    let seconds = match &verified.runs {
        Runs::InPeer(peer) => return peer.turn(pass, &task.protocol),
        Runs::InSubject(function) => function.turn(pass, task, inputs, bench)?,
        Runs::Replayed(replays) => bench(&|| Ok(()), &mut || replays.replay(pass))?,
        Runs::Eager => eager(implementation, pass, inputs, |clear, call| bench(clear, call))?,
    };
    inputs.clear()?;
    Ok([(LAP.to_string(), seconds)].into())
}

/// Calls back to back for about `seconds`.
fn busy(
    implementation: &Implementation,
    verified: &Verified,
    pass: AttentionPass,
    seconds: f64,
    inputs: &Inputs,
) -> Result<BusyCalls> {
    let device = inputs.device();
    let busy = match &verified.runs {
        Runs::InPeer(peer) => return peer.busy(pass, seconds),
        Runs::InSubject(_) => bail!("not read, since their process starts and ends each call by a message"),
        Runs::Replayed(replays) => BusyCalls::run(device, seconds, &|| Ok(()), &mut || replays.replay(pass))?,
        Runs::Eager => eager(implementation, pass, inputs, |clear, call| BusyCalls::run(device, seconds, clear, call))?,
    };
    inputs.clear()?;
    Ok(busy)
}

/// Gives `body` what runs before each call of a pass, and the call.
pub fn eager<T>(
    implementation: &Implementation,
    pass: AttentionPass,
    inputs: &Inputs,
    body: impl FnOnce(&dyn Fn() -> Result<()>, &mut dyn FnMut() -> Result<()>) -> Result<T>,
) -> Result<T> {
    let Inputs { q, k, v, d_o, .. } = inputs;
    let attention = implementation.prepare_causal(inputs.seq(), inputs.device())?;
    let run = || attention(q, k, v);
    let clear = || inputs.clear();
    match pass {
        AttentionPass::Forward => body(&clear, &mut || run().map(drop)),
        AttentionPass::Backward => {
            let o = run()?;
            body(&clear, &mut || backward_from(&o, d_o, true))
        }
        AttentionPass::Both => body(&clear, &mut || backward_from(&run()?, d_o, false)),
        AttentionPass::Summed => body(&|| Ok(()), &mut || backward(&run()?.f_sum(None::<Kind>)?)),
    }
}
