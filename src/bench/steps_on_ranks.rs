//! Whole steps on several ranks at their best: our fused step, captured with its collectives, in turns with PyTorch's DDP.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use self::steps::RankBench;
use crate::attention::ImplementationName;
use crate::bench::all_reduce::RankTimes;
use crate::bench::peer::{Software, TorchPeer};
use crate::bench::training_step::{self, Execution, StepPass, handout};
use crate::collective::ranks::{Launch, RankTask, launch, parse_input, validate_world_size};
use crate::collective::{Backend, Op, Shared};
use crate::harness::samples::Work;
use crate::model::sizes::VOCAB_SIZE;
use crate::model::{Config, Precision, SizeName};
use crate::parallel::Options;
use crate::units::{MB, MIB};

#[cfg(test)]
pub mod made_up;
mod steps;

pub const TASK: RankTask = RankTask { name: "whole_steps_on_ranks", run: on_rank };

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub backend: Backend,
    pub world_size: usize,
    pub size: SizeName,
    pub context_length: i64,
    /// Sequences on each rank.
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    pub dtype: Precision,
    /// Of our step; PyTorch's is SDPA.
    pub attention: ImplementationName,
    /// Of our buckets and PyTorch's.
    pub bucket_size_mb: f64,
    pub pytorch: Form,
    pub rounds: usize,
    /// Untimed steps at the start of every turn.
    pub warmup: usize,
    pub iterations: usize,
}

/// A way to run PyTorch's DDP, always with gradients that are views of its buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Its graph declared as static.
    Eager,
    /// Under torch.compile.
    Compiled,
    /// The same, with gradients sent in bfloat16 (`bf16_compress_hook`), as ours are.
    CompiledBfloat16,
}

impl Form {
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "DDP",
            Self::Compiled => "compile + DDP",
            Self::CompiledBfloat16 => "compile + DDP, bfloat16 sums",
        }
    }
}

/// Every column on all ranks, in turns.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Our step on every rank at the same time, without communication.
    pub single: RankTimes,
    pub buckets: RankTimes,
    /// All gradients in one call after the backward pass.
    pub flat: RankTimes,
    /// Buckets under ZeRO stage 1: a rank steps its share.
    pub sharded: RankTimes,
    pub pytorch: RankTimes,
    /// Bytes of the gradients that a rank sends in a step of ours.
    pub gradient_bytes: u64,
    /// The distance of weight gradients averaged in the type of the products from the same averaged in float32, over the
    /// length of the latter.
    pub reduction_error: f64,
    pub software: Software,
}

impl Row {
    /// Errors: gradients that no format between two and four bytes a parameter gives.
    pub fn validate(&self, params: &Params) -> Result<()> {
        let (sent, parameters) = (self.gradient_bytes, params.config().num_parameters());
        let possible = 2 * parameters..=4 * parameters;
        ensure!(possible.contains(&sent), "a rank sends {sent} bytes of gradients, of {parameters} parameters");
        Ok(())
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    params: Params,
    /// The store file of PyTorch's process group, which does not exist yet.
    store: PathBuf,
}

/// What one rank measured: seconds of timed steps by column.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Output {
    single: Vec<f64>,
    buckets: Vec<f64>,
    flat: Vec<f64>,
    sharded: Vec<f64>,
    pytorch: Vec<f64>,
    gradient_bytes: u64,
    reduction_error: f64,
    software: Option<Software>,
}

/// Compiling takes minutes at the first step.
const DEADLINE: Duration = Duration::from_secs(540);

impl Params {
    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), VOCAB_SIZE, self.context_length)
    }

    pub fn validate(&self) -> Result<()> {
        self.config().validate_with_batch(self.batch_size)?;
        let Self { world_size, rounds, warmup, iterations, .. } = *self;
        validate_world_size(world_size)?;
        for (key, value) in [("rounds", rounds), ("warmup", warmup), ("iterations", iterations)] {
            ensure!((1..=1000).contains(&value), "{key} is {value}: it must lie in 1..1000");
        }
        self.options().bucket_bytes().map(drop)
    }

    fn options(&self) -> Options {
        Options { bucket_size_mb: self.bucket_size_mb }
    }

    /// The least work of one rank's step.
    fn work(&self) -> Work {
        let Self { size, context_length, batch_size, dtype, attention, .. } = *self;
        training_step::total_work(&training_step::Params {
            size,
            context_length,
            batch_size,
            vocab_size: VOCAB_SIZE,
            pass: StepPass::TrainingStep,
            dtype,
            attention,
            execution: Execution::Fused,
            allow_tf32: false,
            warmup: 1,
            steps: 1,
        })
    }
}

/// Launches the ranks and measures all columns in turns.
///
/// Errors: those of a rank; [`crate::error::Fault::NotAvailable`] if the machine has fewer GPUs than ranks.
pub fn measure(p: &Params) -> Result<Row> {
    let folder = tempfile::tempdir().context("making a folder for the peers' meeting place")?;
    let input = Input { params: p.clone(), store: folder.path().join("store") };
    let ranks = Launch { backend: p.backend, ..Launch::new(TASK.name, p.world_size, DEADLINE) };
    let outputs = launch(&ranks, &serde_json::to_value(input)?)?;
    let outputs: Vec<Output> = outputs.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?;
    let times = |of: fn(&Output) -> &Vec<f64>| RankTimes::of(outputs.iter().map(of), &p.work());
    let first = outputs.first().context("no rank gave a result")?;
    Ok(Row {
        single: times(|rank| &rank.single)?,
        buckets: times(|rank| &rank.buckets)?,
        flat: times(|rank| &rank.flat)?,
        sharded: times(|rank| &rank.sharded)?,
        pytorch: times(|rank| &rank.pytorch)?,
        gradient_bytes: first.gradient_bytes,
        reduction_error: first.reduction_error,
        software: first.software.clone().context("rank 0 did not say which PyTorch it measured")?,
    })
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let Input { params: p, store } = parse_input(input)?;
    let bench = RankBench::new(&p, collective)?;
    let mut output = Output {
        gradient_bytes: bench.gradients()?.iter().map(|t| (t.numel() * t.kind().elt_size_in_bytes()) as u64).sum(),
        reduction_error: reduction_error(&bench, collective)?,
        ..Output::default()
    };
    let [mut single, mut buckets, mut flat, mut sharded] = bench.columns()?;
    let mut peer = open_peer(&p, collective, &store)?;
    output.software = Some(peer.software.clone());
    for _ in 0..p.rounds {
        output.single.extend(bench.turn(&mut single).context("in a turn without communication")?);
        output.buckets.extend(bench.turn(&mut buckets).context("in a turn of buckets")?);
        output.flat.extend(bench.turn(&mut flat).context("in a turn of one call")?);
        output.sharded.extend(bench.turn(&mut sharded).context("in a turn of shares")?);
        let laps = peer.turn("ddp", p.warmup, p.iterations).context("in a turn of PyTorch's DDP")?;
        output.pytorch.extend(laps.into_values().flatten());
    }
    peer.close(None)?;
    Ok(serde_json::to_value(output)?)
}

/// Averages one batch's weight gradients as the step does, and in float32, a tensor at a time.
fn reduction_error(bench: &RankBench, collective: &Shared) -> Result<f64> {
    let (mut apart, mut length) = (0.0, 0.0);
    for gradient in bench.gradients()? {
        // Copies, since the step's own gradients stay as they are.
        let narrow = gradient.f_detach_copy()?;
        let exact = narrow.f_to_kind(Kind::Float)?.f_detach_copy()?;
        collective.all_reduce(&narrow, Op::Average)?;
        collective.all_reduce(&exact, Op::Average)?;
        let squared = |t: Tensor| -> Result<f64> { Ok(t.f_norm()?.f_double_value(&[])?.powi(2)) };
        apart += squared(narrow.f_to_kind(Kind::Float)?.f_sub(&exact)?)?;
        length += squared(exact)?;
    }
    ensure!(length > 0.0, "all gradients are zero");
    Ok((apart / length).sqrt())
}

fn open_peer(p: &Params, collective: &Shared, store: &std::path::Path) -> Result<TorchPeer> {
    let mut peer = TorchPeer::start(collective.device())?;
    let settings = json!({
        "config": p.config(), "dtype": p.dtype, "batch_size": p.batch_size,
        // PyTorch counts buckets in MiB.
        "bucket_cap_mib": p.bucket_size_mb * MB / MIB, "form": p.pytorch, "attention": "sdpa",
        "backend": collective.backend(), "rank": collective.rank(), "world_size": collective.world_size(), "store": store,
    });
    peer.open("ddp", settings)?;
    Ok(peer)
}
