//! The measuring core of the data-parallel problems: training steps of one model under several strategies, in turns on one
//! set of ranks, with what was communicated, when, and how much of it the backward pass hid.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use self::on_rank::{Input, Output, StepOutput};
use super::all_reduce::Timing;
use super::device::require_devices;
use super::interconnect::{Interconnect, Probe};
use super::peer::Software;
use super::training_step::{self, Execution, StepPass, handout, total_work};
use crate::attention::ImplementationName;
use crate::collective::Backend;
use crate::collective::ranks::{Launch, MAX_WORLD_SIZE, RankTask, launch};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::model::{Config, Precision, SizeName};
use crate::units::MB;

#[cfg(test)]
pub mod made_up;
pub mod on_rank;
pub mod tables;
pub mod timeline;
pub mod trainer;
pub mod variant;

pub use timeline::Timeline;

/// A problem that times its strategies beside PyTorch's DDP, none of them with buckets.
pub trait Compared {
    const STRATEGIES: &'static [&'static str];
}

/// How such a problem is measured.
pub struct Steps<C>(PhantomData<C>);

impl<C: Compared> Measure for Steps<C> {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = KERNELS;

    fn validate(params: &Params) -> Result<()> {
        params.validate_without_buckets()
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        measure(params, &Columns { strategies: C::STRATEGIES, pytorch_ddp: true })
    }
}

/// What a step runs of ours on a GPU.
pub const KERNELS: &[&str] = &["adamw.cu"];

/// One setting; what is left out is the handout's.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub backend: Backend,
    pub world_size: usize,
    pub size: SizeName,
    pub context_length: i64,
    /// Sequences of each rank.
    pub batch_size: i64,
    #[serde(default = "handout::vocab_size")]
    pub vocab_size: i64,
    /// Parameters and gradients are float32 under both.
    #[serde(default = "handout::dtype")]
    pub dtype: Precision,
    /// The most that a bucket holds, in units of 10^6 bytes, ours and PyTorch's alike; without it PyTorch's own default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket_size_mb: Option<f64>,
    pub rounds: usize,
    /// Untimed steps at the start of every turn.
    pub warmup: usize,
    /// Timed steps of every turn.
    pub steps: usize,
}

impl Params {
    /// The smallest named model on two Gloo ranks, a step in each turn: for checks.
    pub fn smallest(bucket_size_mb: Option<f64>) -> Self {
        Self {
            backend: Backend::Gloo,
            world_size: 2,
            size: SizeName::Tiny,
            context_length: 16,
            batch_size: 1,
            vocab_size: 500,
            dtype: Precision::Float32,
            bucket_size_mb,
            rounds: 1,
            warmup: 1,
            steps: 1,
        }
    }

    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), self.vocab_size, self.context_length)
    }

    pub fn validate(&self) -> Result<()> {
        self.config().validate()?;
        let Self { world_size, batch_size, rounds, warmup, steps, bucket_size_mb, .. } = *self;
        ensure!(
            (2..=MAX_WORLD_SIZE).contains(&world_size),
            "world_size is {world_size}: it must lie in 2..{MAX_WORLD_SIZE}"
        );
        ensure!((1..=1 << 20).contains(&batch_size), "batch_size is {batch_size}: it must lie in 1..2^20");
        for (key, value) in [("rounds", rounds), ("warmup", warmup), ("steps", steps)] {
            ensure!((1..=1000).contains(&value), "{key} is {value}: it must lie in 1..1000");
        }
        let mb = bucket_size_mb.unwrap_or(1.0);
        ensure!(mb.is_finite() && mb > 0.0, "bucket_size_mb is {mb}: it must be finite and above zero");
        Ok(())
    }

    /// For a problem whose strategies have no buckets.
    pub fn validate_without_buckets(&self) -> Result<()> {
        ensure!(
            self.bucket_size_mb.is_none(),
            "bucket_size_mb means nothing here: no strategy of this problem has buckets"
        );
        self.validate()
    }

    /// Of all parameters, float32.
    pub fn gradient_bytes(&self) -> u64 {
        4 * self.config().num_parameters()
    }

    /// The least work of one rank's step.
    fn work(&self) -> Work {
        total_work(&training_step::Params {
            size: self.size,
            context_length: self.context_length,
            batch_size: self.batch_size,
            vocab_size: self.vocab_size,
            pass: StepPass::TrainingStep,
            dtype: self.dtype,
            attention: ImplementationName::Naive,
            execution: Execution::Eager,
            allow_tf32: false,
            warmup: self.warmup,
            steps: self.steps,
        })
    }
}

/// Every column of one setting. A step is forward, backward, synchronisation and AdamW on fresh tokens; the release of the
/// gradients is outside its clock.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub parameters: u64,
    /// Of all parameters, float32.
    pub gradient_bytes: u64,
    pub link: Interconnect,
    /// The same step on every rank at the same time, without a word between them.
    pub single: Timing,
    /// By the strategy's name.
    pub strategies: BTreeMap<String, Column>,
    /// PyTorch's DistributedDataParallel, between one Python process a rank, in turns with ours.
    pub pytorch_ddp: Option<Timing>,
    pub software: Option<Software>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    pub step: Timing,
    /// The time that the communication lane was busy in a step, waiting for a late rank included.
    pub communication: OverRanks,
    /// From the end of the backward pass's own work until every gradient is ready, and what the optimizer communicates.
    pub tail: OverRanks,
    /// One minus tail over communication of all timed steps: the share of communication that the backward pass hid.
    pub overlap: f64,
    /// Handed to collectives by each rank in a step, counted.
    pub bytes: u64,
    pub calls: u64,
    /// What each link carries of it in each direction, by the bus factors of nccl-tests.
    pub bus_bytes: f64,
    /// The last step of rank 0.
    pub timeline: Timeline,
}

/// Seconds of something that each rank has of its own.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverRanks {
    /// Over the ranks, for each step.
    pub mean: Samples,
    pub by_rank: Vec<Samples>,
}

/// Which strategies to measure, and beside what.
pub struct Columns<'a> {
    pub strategies: &'a [&'a str],
    pub pytorch_ddp: bool,
}

/// Beyond this a launch hangs: the handout's largest model takes a minute to be made and a second a step.
const DEADLINE: Duration = Duration::from_secs(540);

/// Strategies that communicate after the backward pass, and so hide nothing.
pub const WITHOUT_OVERLAP: [&str; 2] = ["naive", "flat"];
/// A clock's jitter may put a first call before the mark that ends the backward pass.
const MOST_OVERLAP_WITHOUT: f64 = 0.05;

/// Launches the ranks and measures all columns in turns.
///
/// Errors: those of [`run`], communication that beats the link, and overlap where there can be none.
pub fn measure(params: &Params, columns: &Columns) -> Result<Row> {
    row(params, columns, run(params, columns)?)
}

/// Launches the ranks and gives back what each of them counted and timed, in rank order.
///
/// Errors: ranks whose parameters differ after a turn; [`crate::error::Fault::NotAvailable`] where the machine has fewer
/// GPUs than ranks.
pub fn run(params: &Params, columns: &Columns) -> Result<Vec<Output>> {
    run_task(&on_rank::TASK, params, columns)
}

/// [`run`] by another rank task, which calls [`on_rank::measure`] with trainers of its own.
pub fn run_task(task: &RankTask, params: &Params, columns: &Columns) -> Result<Vec<Output>> {
    require_devices(params.backend, params.world_size)?;
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
        let column = Column::of(name, params, &outputs)?;
        column.require_sound(name, &link, &steps_of(name, &outputs)?)?;
        strategies.insert(name.to_string(), column);
    }
    let first = outputs.first().context("no rank gave a result")?;
    let pytorch_ddp = match columns.pytorch_ddp {
        true => Some(Timing::of(outputs.iter().map(|rank| &rank.pytorch_ddp), &work).context("PyTorch's DDP")?),
        false => None,
    };
    Ok(Row {
        parameters: params.config().num_parameters(),
        gradient_bytes: params.gradient_bytes(),
        link,
        single: Timing::of(outputs.iter().map(|rank| &rank.single), &work)?,
        strategies,
        pytorch_ddp,
        software: first.software.clone(),
    })
}

fn steps_of<'a>(name: &str, outputs: &'a [Output]) -> Result<Vec<&'a StepOutput>> {
    let missing = || format!("a rank did not measure {name}");
    outputs.iter().map(|rank| rank.strategies.get(name).with_context(missing)).collect()
}

impl Column {
    /// What the ranks counted and timed under the strategy `name`, as it is: whether it can be is the row's to ask.
    pub fn of(name: &str, params: &Params, outputs: &[Output]) -> Result<Self> {
        Self::over(&steps_of(name, outputs)?, &params.work()).with_context(|| format!("the strategy {name}"))
    }

    fn over(ranks: &[&StepOutput], work: &Work) -> Result<Self> {
        let first = ranks.first().context("no rank measured it")?;
        let other = ranks.iter().position(|rank| (rank.bytes, rank.calls) != (first.bytes, first.calls));
        ensure!(other.is_none(), "the bytes or calls of rank {} are not those of rank 0", other.unwrap_or(0));
        let of = |seconds: fn(&StepOutput) -> &Vec<f64>| {
            OverRanks::of(&ranks.iter().map(|rank| seconds(rank)).collect::<Vec<_>>(), first.bytes)
        };
        let (communication, tail) = (of(|rank| &rank.communication)?, of(|rank| &rank.tail)?);
        let sum = |lane: &OverRanks| lane.mean.samples.iter().sum::<f64>();
        Ok(Self {
            step: Timing::of(ranks.iter().map(|rank| &rank.step), work)?,
            overlap: overlap(sum(&tail), sum(&communication)),
            communication,
            tail,
            bytes: first.bytes,
            calls: first.calls,
            bus_bytes: first.bus_bytes,
            timeline: first.timeline.clone(),
        })
    }

    /// No lane is faster than its link, and what is sent after the backward pass is not hidden by it.
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

/// The share of `communication` that is not in the `tail`. A tail also has gaps in which nothing is sent, and may be longer.
fn overlap(tail: f64, communication: f64) -> f64 {
    if communication > 0.0 { (1.0 - tail / communication).max(0.0) } else { 0.0 }
}

impl OverRanks {
    fn of(ranks: &[&Vec<f64>], bytes: u64) -> Result<Self> {
        let count = ranks.first().map_or(0, |rank| rank.len());
        ensure!(ranks.iter().all(|rank| rank.len() == count), "the ranks timed different numbers of steps");
        let mean = (0..count).map(|k| ranks.iter().map(|rank| rank[k]).sum::<f64>() / ranks.len() as f64).collect();
        // The tail may be shorter than the bytes' own passage, so no roof is held against either here: `require_sound` does.
        let samples = |seconds| Samples::seconds_unbounded(seconds).with_context(|| format!("{bytes} bytes"));
        Ok(Self {
            mean: samples(mean)?,
            by_rank: ranks.iter().map(|rank| samples(rank.to_vec())).collect::<Result<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests;
