//! Measures data-parallel training steps of one model under several strategies, in turns on one set of ranks: the time,
//! the communicated bytes, and how much communication overlaps with the backward pass.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use self::from_python::FromPython;
use self::on_rank::{Input, Output, StepOutput};
use super::all_reduce::{RankTimes, bus_factor};
use super::interconnect::{Interconnect, Probe};
use super::peer::Software;
use super::training_step::require_parameters;
use crate::collective::ranks::{Launch, RankTask, launch};
use crate::harness::problem::Measure;
use crate::harness::record::{Machine, Profile};
use crate::harness::samples::{Samples, Work};
use crate::units::MB;

pub mod beside;
pub mod from_python;
pub mod link;
#[cfg(test)]
pub mod made_up;
pub mod numbers;
pub mod on_rank;
mod params;
pub mod tables;
pub mod timeline;
pub mod trainer;
pub mod variant;

pub use params::Params;
pub use timeline::Timeline;

/// A problem that times strategies without buckets against PyTorch's DDP.
pub trait Compared {
    const STRATEGIES: &'static [&'static str];
}

/// The measuring routine of a [`Compared`] problem.
pub struct Steps<C>(PhantomData<C>);

impl<C: Compared> Measure for Steps<C> {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = KERNELS;

    fn validate(params: &Params) -> Result<()> {
        params.validate_without_buckets()
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        row.validate(params)
    }

    fn validate_on(params: &Params, row: &Row, machine: &Machine) -> Result<()> {
        row.validate_on(params, machine)
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        measure(params, &Columns { strategies: C::STRATEGIES, pytorch_ddp: true })
    }
}

/// The kernels that a step runs on a GPU.
pub const KERNELS: &[&str] = &["adamw.cu"];

/// Every column of one setting. A step is forward, backward, synchronisation and AdamW on fresh tokens. Releasing the
/// gradients is not timed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub parameters: u64,
    /// Of all parameters, float32.
    pub gradient_bytes: u64,
    pub link: Interconnect,
    /// The same step on every rank at the same time, without communication.
    pub single: RankTimes,
    /// By the strategy's name.
    pub strategies: BTreeMap<String, StrategyColumn>,
    /// PyTorch's DistributedDataParallel, between one Python process a rank, in turns with ours.
    pub pytorch_ddp: Option<RankTimes>,
    /// Where the case has the wheel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_python: Option<FromPython>,
    pub software: Option<Software>,
}

/// Every gradient, and every parameter in up to twice as many bytes a value.
const MOST_SENT: u64 = 3;

impl Row {
    /// Errors: the row is of another model than `params`; a strategy sends less than all of its gradients, or more than any sends;
    /// its calls, its overlap or what its links carry are impossible; the link's line is not that of its probes.
    pub fn validate(&self, params: &Params) -> Result<()> {
        require_parameters(self.parameters, &params.config())?;
        let (found, expected) = (self.gradient_bytes, params.gradient_bytes());
        ensure!(found == expected, "the gradients are {found} bytes, and those of the case's model {expected}");
        let tensors = params.config().parameter_shapes().count() as u64;
        let n = params.world_size as f64;
        for (name, column) in &self.strategies {
            let StrategyColumn { bytes, calls, bus_bytes, .. } = column;
            ensure!(*bytes >= expected, "{name} sends {bytes} bytes, fewer than the {expected} of the gradients");
            let most = MOST_SENT * expected;
            ensure!(
                *bytes <= most,
                "{name} sends {bytes} bytes, more than {MOST_SENT} times the {expected} of the gradients"
            );
            ensure!(
                (1..=2 * tensors).contains(calls),
                "{name} makes {calls} calls, must be one to two for each of the {tensors} tensors"
            );
            let (found, expected) = (column.overlap, overlap(column.tail.sum(), column.communication.sum()));
            ensure!(
                (found - expected).abs() < 0.01,
                "{name} hides {found} of its communication, by its times {expected}"
            );
            for (part, over) in [("communication", &column.communication), ("tail", &column.tail)] {
                ensure!(over.lies_within(&column.step), "{name}'s {part} takes longer than a step of its rank");
            }
            let spans = column.timeline.compute.iter().chain(&column.timeline.communication);
            if let Some(span) = spans.into_iter().find(|span| span.end_s < span.start_s) {
                bail!("{name}'s timeline has a span of {} that ends before it starts", span.name);
            }
            // From a gather or a scatter to a sum.
            let [least, most] = [(n - 1.0) / n, bus_factor(params.world_size)].map(|factor| factor * *bytes as f64);
            ensure!(
                (0.999 * least..=1.001 * most).contains(bus_bytes),
                "{name}'s links carry {bus_bytes} bytes, and for the {bytes} that it sends {least} to {most}"
            );
        }
        self.link.validate(expected)
    }

    /// Errors: a link that `machine` cannot have.
    pub fn validate_on(&self, params: &Params, machine: &Machine) -> Result<()> {
        self.link.validate_on(params.backend, params.world_size, machine)
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StrategyColumn {
    pub step: RankTimes,
    /// Time of the step in which communication was active, including waits for a late rank.
    pub communication: OverRanks,
    /// From the end of the backward pass until every gradient is ready, plus the optimizer's communication.
    pub tail: OverRanks,
    /// One minus tail over communication of all timed steps: the share of communication hidden by the backward pass.
    pub overlap: f64,
    /// Bytes that each rank passes to collectives in a step, counted.
    pub bytes: u64,
    pub calls: u64,
    /// Bytes that each link carries in each direction, by the bus factors of nccl-tests.
    pub bus_bytes: f64,
    /// The last step of rank 0.
    pub timeline: Timeline,
}

/// Seconds of a quantity that differs between ranks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverRanks {
    /// For each step, the mean over the ranks.
    pub mean: Samples,
    pub by_rank: Vec<Samples>,
}

impl OverRanks {
    /// Whether it takes no longer than the step of the same rank in which it lies.
    fn lies_within(&self, step: &RankTimes) -> bool {
        let ranks = self.by_rank.iter().zip(&step.by_rank);
        ranks.flat_map(|(part, whole)| part.samples.iter().zip(&whole.samples)).all(|(part, whole)| part <= whole)
    }

    /// Seconds of all steps, of the mean rank.
    fn sum(&self) -> f64 {
        self.mean.samples.iter().sum()
    }
}

/// The strategies to measure, and their comparisons.
pub struct Columns<'a> {
    pub strategies: &'a [&'a str],
    pub pytorch_ddp: bool,
}

/// A longer launch hangs: the handout's largest model takes a minute to build and a second for each step.
const DEADLINE: Duration = Duration::from_secs(540);

/// Strategies that communicate after the backward pass, without overlap.
pub const WITHOUT_OVERLAP: [&str; 2] = ["naive", "flat"];
/// Clock jitter can place a first call before the end of the backward pass.
const MOST_OVERLAP_WITHOUT: f64 = 0.05;

/// Launches the ranks and measures all columns in turns.
///
/// Errors: those of [`run`], communication faster than the link, and overlap under a strategy that has none.
pub fn measure(params: &Params, columns: &Columns) -> Result<Row> {
    row(params, columns, run(params, columns)?)
}

/// Launches the ranks and returns what each counted and timed, in rank order.
///
/// Errors: the ranks' parameters differ after a turn; [`crate::error::Fault::NotAvailable`] if the machine has fewer GPUs
/// than ranks.
pub fn run(params: &Params, columns: &Columns) -> Result<Vec<Output>> {
    run_task(&on_rank::TASK, params, columns)
}

/// [`run`] by another rank task, which calls [`on_rank::measure`] with trainers of its own.
pub fn run_task(task: &RankTask, params: &Params, columns: &Columns) -> Result<Vec<Output>> {
    let folder = tempfile::tempdir().context("making a folder for the peers' meeting place")?;
    let input = Input {
        params: params.clone(),
        strategies: columns.strategies.iter().map(|name| name.to_string()).collect(),
        store: columns.pytorch_ddp.then(|| folder.path().join("store")),
    };
    let ranks = Launch { backend: params.backend, ..Launch::new(task.name, params.world_size, DEADLINE) };
    let outputs = launch(&ranks, &serde_json::to_value(input)?)?;
    Ok(outputs.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?)
}

fn row(params: &Params, columns: &Columns, outputs: Vec<Output>) -> Result<Row> {
    let work = params.work();
    let probes = |of: fn(&Output) -> &Vec<Probe>| outputs.iter().map(|rank| of(rank).as_slice()).collect::<Vec<_>>();
    let link = Interconnect::of(&probes(|rank| &rank.probes), &probes(|rank| &rank.later_probes))?;
    let mut strategies = BTreeMap::new();
    for name in columns.strategies {
        let column = StrategyColumn::of(name, params, &outputs)?;
        column.require_sound(name, &link, &steps_of(name, &outputs)?)?;
        strategies.insert(name.to_string(), column);
    }
    let first = outputs.first().context("no rank gave a result")?;
    let pytorch_ddp = match columns.pytorch_ddp {
        true => Some(RankTimes::of(outputs.iter().map(|rank| &rank.pytorch_ddp), &work).context("PyTorch's DDP")?),
        false => None,
    };
    let from_python = match params.wheel {
        true => {
            let ranks = outputs.iter().filter_map(|rank| rank.from_python.as_ref()).collect::<Vec<_>>();
            Some(FromPython::of(&ranks, params)?)
        }
        false => None,
    };
    Ok(Row {
        parameters: params.config().num_parameters(),
        gradient_bytes: params.gradient_bytes(),
        link,
        single: RankTimes::of(outputs.iter().map(|rank| &rank.single), &work)?,
        strategies,
        pytorch_ddp,
        from_python,
        software: first.software.clone(),
    })
}

fn steps_of<'a>(name: &str, outputs: &'a [Output]) -> Result<Vec<&'a StepOutput>> {
    let missing = || format!("a rank did not measure {name}");
    outputs.iter().map(|rank| rank.strategies.get(name).with_context(missing)).collect()
}

impl StrategyColumn {
    /// The measurements under the strategy `name`. [`Self::require_sound`] checks whether they are possible.
    pub fn of(name: &str, params: &Params, outputs: &[Output]) -> Result<Self> {
        Self::over(&steps_of(name, outputs)?, &params.work()).with_context(|| format!("the strategy {name}"))
    }

    fn over(ranks: &[&StepOutput], work: &Work) -> Result<Self> {
        let first = ranks.first().context("no rank measured it")?;
        let other = ranks.iter().position(|rank| (rank.bytes, rank.calls) != (first.bytes, first.calls));
        ensure!(other.is_none(), "the bytes or calls of rank {} differ from those of rank 0", other.unwrap_or(0));
        let of = |seconds: fn(&StepOutput) -> &Vec<f64>| {
            OverRanks::of(&ranks.iter().map(|rank| seconds(rank)).collect::<Vec<_>>(), first.bytes)
        };
        let (communication, tail) = (of(|rank| &rank.communication)?, of(|rank| &rank.tail)?);
        let sum = |lane: &OverRanks| lane.mean.samples.iter().sum::<f64>();
        Ok(Self {
            step: RankTimes::of(ranks.iter().map(|rank| &rank.step), work)?,
            overlap: overlap(sum(&tail), sum(&communication)),
            communication,
            tail,
            bytes: first.bytes,
            calls: first.calls,
            bus_bytes: first.bus_bytes,
            timeline: first.timeline.clone(),
        })
    }

    /// Errors: communication faster than the link, or hidden communication under a strategy without overlap.
    fn require_sound(&self, name: &str, link: &Interconnect, ranks: &[&StepOutput]) -> Result<()> {
        for (rank, steps) in ranks.iter().enumerate() {
            let fastest = steps.communication.iter().copied().fold(f64::INFINITY, f64::min);
            let least = link.least_seconds(steps.summed_bus_bytes);
            ensure!(
                fastest >= least,
                "{name}, rank {rank}: {:.1} MB in {fastest:.2e} s; at the fastest bandwidth of this link they take {least:.2e} s",
                steps.summed_bus_bytes / MB
            );
        }
        let hides = !WITHOUT_OVERLAP.contains(&name);
        ensure!(
            hides || self.overlap < MOST_OVERLAP_WITHOUT,
            "{name} communicates after the backward pass, yet {:.1}% of it was hidden",
            100.0 * self.overlap
        );
        Ok(())
    }
}

/// The share of `communication` that is not in the `tail`. A tail can be longer than the communication: it has gaps.
fn overlap(tail: f64, communication: f64) -> f64 {
    if communication > 0.0 { (1.0 - tail / communication).max(0.0) } else { 0.0 }
}

impl OverRanks {
    fn of(ranks: &[&Vec<f64>], bytes: u64) -> Result<Self> {
        let count = ranks.first().map_or(0, |rank| rank.len());
        ensure!(ranks.iter().all(|rank| rank.len() == count), "the ranks timed different numbers of steps");
        let mean = (0..count).map(|k| ranks.iter().map(|rank| rank[k]).sum::<f64>() / ranks.len() as f64).collect();
        // The tail may be shorter than the transfer of these bytes, so no peak is checked here; `require_sound` does that.
        let samples = |seconds| Samples::seconds_unbounded(seconds).with_context(|| format!("{bytes} bytes"));
        Ok(Self {
            mean: samples(mean)?,
            by_rank: ranks.iter().map(|rank| samples(rank.to_vec())).collect::<Result<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests;
