//! A fused step on ranks against the same step of one process on all rows: eager over Gloo, and captured over NCCL.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::attention::ImplementationName;
use crate::collective::consistency_check::require_equal_parameters;
use crate::collective::ranks::{Launch, Placement, RankTask, launch, parse_input};
use crate::collective::{Backend, Op, Shared};
use crate::harness::problem::Verdict;
use crate::model::optim::AdamWOptions;
use crate::model::{Config, Exchange, FusedStep, Piece, Precision, Shard, Transformer};
use crate::parallel::Options;
use crate::parallel::fused::{FusedBuckets, FusedFlat, broadcast_to_step};
use crate::torch::Generator;
use crate::torch::graph::{Captured, on_side_stream};
use crate::torch::random::SEED;
use crate::torch::stream::synchronize;

pub const TASK: RankTask = RankTask { name: "fused_training", run: train };

/// Three layers in parts of two and one; d_head 16 is a width of all attention kernels.
const CONFIG: Config = Config {
    vocab_size: 56,
    context_length: 16,
    d_model: 64,
    num_layers: 3,
    num_heads: 4,
    d_ff: 72,
    rope_theta: 10_000.0,
};
const ROWS: i64 = 2;
const STEPS: usize = 4;

/// With an eps as large as the gradients, AdamW's step follows their scale, and not the signs of rounding errors alone.
const EPS: f64 = 1e-2;

/// How far the parameters may end from the single process, over the way that they were trained.
fn most_apart(precision: Precision) -> f64 {
    match precision {
        Precision::Float32 => 1e-4,
        Precision::Bfloat16 => 2e-2,
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    precision: Precision,
    averaging: Averaging,
}

/// How gradients are averaged; the last four are mutants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Averaging {
    Buckets,
    Flat,
    /// In buckets, of which a rank steps its share.
    Sharded,
    /// Gradients are added.
    Sum,
    /// Every part but the head's.
    WithoutHead,
    /// None.
    Local,
    /// As [`Self::Sharded`], but the shares of other ranks stay as they were.
    Ungathered,
}

impl Averaging {
    fn is_sharded(self) -> bool {
        matches!(self, Self::Sharded | Self::Ungathered)
    }
}

/// Trains on two ranks and compares with one process: the largest distance of a parameter over the way that it was trained.
/// Over NCCL the steps but the first are replays of a CUDA graph.
///
/// Errors: the ranks' parameters differ, or are not those of one process.
pub fn distance(backend: Backend, placement: Placement, precision: Precision, averaging: Averaging) -> Result<f64> {
    let plan = Launch { backend, placement, ..Launch::new(TASK.name, 2, Duration::from_secs(120)) };
    let apart = launch(&plan, &serde_json::to_value(Input { precision, averaging })?)?;
    let apart: Vec<f64> = apart.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?;
    Ok(apart.into_iter().fold(0.0, f64::max))
}

/// [`distance`] for both precisions and these ways to average.
pub fn train_as_one_process(backend: Backend, placement: Placement, averagings: &[Averaging]) -> Result<Verdict> {
    let mut worst = [0.0f64; 2];
    for (worst, precision) in worst.iter_mut().zip([Precision::Float32, Precision::Bfloat16]) {
        for &averaging in averagings {
            let apart = distance(backend, placement, precision, averaging)
                .with_context(|| format!("{averaging:?} in {}", precision.name()))?;
            *worst = worst.max(apart);
        }
    }
    let [float32, bfloat16] = worst;
    Verdict::passed(format!("{float32:.1e} of the way trained apart in float32, {bfloat16:.1e} in bfloat16"))
}

/// One rank's part of the trial: how far its parameters end from those of one process.
fn train(collective: &Shared, input: Value) -> Result<Value> {
    let Input { precision, averaging } = parse_input(input)?;
    let (device, rank, ranks) = (collective.device(), collective.rank(), collective.world_size());
    // Another start on every rank, so that a missing broadcast shows.
    let shard = if averaging.is_sharded() { Shard { rank: rank as i64, ranks: ranks as i64 } } else { Shard::ALL };
    let (mut model, step) = step(ROWS, precision, device, SEED + rank as i64, shard)?;
    broadcast_to_step(&model, &step, collective)?;
    let start = copies(&model)?;
    let mut single = self::step(ROWS * ranks as i64, precision, device, SEED, Shard::ALL)?;
    let exchange = exchange(averaging, collective, precision)?;
    let batch = |i: usize, rank: usize| draw(device, 100 * i + rank);
    let mine: Vec<_> = (0..STEPS).map(|i| batch(i, rank)).collect::<Result<_>>()?;
    let run = |[tokens, targets]: &[Tensor; 2]| step.train_on_rank(&model, tokens, targets, exchange.as_ref());
    if device.is_cuda() {
        replay(collective, &mine, run)?;
    } else {
        mine.iter().try_for_each(|batch| run(batch).map(drop))?;
    }
    step.gather_parameters(exchange.as_ref())?;
    require_equal_parameters(collective.as_ref(), model.parameters())?;
    for i in 0..STEPS {
        let all = (0..ranks).map(|rank| batch(i, rank)).collect::<Result<Vec<_>>>()?;
        let [tokens, targets] = [0, 1].map(|k| Tensor::f_cat(&all.iter().map(|b| &b[k]).collect::<Vec<_>>(), 0));
        let _loss = single.1.train(&single.0, &tokens?, &targets?)?;
    }
    let apart = farthest(&mut model, &mut single.0, &start)?;
    let limit = most_apart(precision);
    ensure!(
        apart <= limit,
        "a parameter ends {apart:.2e} of the way trained from one process, allowed are {limit:.2e}"
    );
    Ok(serde_json::to_value(apart)?)
}

/// The first step as a warm-up, and the others as replays of one graph.
fn replay(collective: &Shared, batches: &[[Tensor; 2]], run: impl Fn(&[Tensor; 2]) -> Result<Tensor>) -> Result<()> {
    let device = collective.device();
    let (first, others) = batches.split_first().context("no batches")?;
    on_side_stream(device, || run(first).map(drop))?;
    let inputs = [first[0].f_detach_copy()?, first[1].f_detach_copy()?];
    let graph = Captured::capture(device, || run(&inputs))?;
    for batch in others {
        inputs.iter().zip(batch).try_for_each(|(input, new)| input.shallow_clone().f_copy_(new))?;
        graph.replay()?;
        collective.watch_replay()?;
    }
    synchronize(device)
}

fn step(rows: i64, precision: Precision, device: Device, seed: i64, shard: Shard) -> Result<(Transformer, FusedStep)> {
    let attention = if device.is_cuda() { ImplementationName::Flash } else { ImplementationName::Naive };
    let mut model = Transformer::new(&CONFIG, attention, &Generator::new(device, seed)?)?;
    let options = AdamWOptions { lr: 1e-3, eps: EPS, ..AdamWOptions::default() };
    let step = FusedStep::sharded(&mut model, rows, precision, shard, options)?;
    Ok((model, step))
}

fn draw(device: Device, seed: usize) -> Result<[Tensor; 2]> {
    let generator = Generator::new(device, seed as i64)?;
    let tokens = || generator.randint(0, CONFIG.vocab_size, &[ROWS, CONFIG.context_length], Kind::Int64);
    Ok([tokens()?, tokens()?])
}

fn copies(model: &Transformer) -> Result<Vec<Tensor>> {
    model.parameters().iter().map(|(_, p)| Ok(p.f_detach_copy()?)).collect()
}

/// The largest distance of a parameter between the models, over the way from `start` in the second.
fn farthest(ours: &mut Transformer, single: &mut Transformer, start: &[Tensor]) -> Result<f64> {
    let mut farthest = 0.0f64;
    let norm = |t: Tensor| -> Result<f64> { Ok(t.f_to_kind(Kind::Double)?.f_norm()?.f_double_value(&[])?) };
    let _no_graph = tch::no_grad_guard();
    for (((name, ours), (_, single)), start) in ours.parameters().iter().zip(single.parameters()).zip(start) {
        let apart = norm(ours.f_sub(single)?)? / norm(single.f_sub(start)?)?;
        ensure!(apart.is_finite(), "{name} ends {apart} of the way trained from one process");
        farthest = farthest.max(apart);
    }
    Ok(farthest)
}

fn exchange(averaging: Averaging, collective: &Shared, precision: Precision) -> Result<Box<dyn Exchange>> {
    // Room for two layers of float32, or for all of bfloat16.
    let options = Options { bucket_size_mb: 2.5 * 4e-6 * CONFIG.num_layer_weights() as f64 };
    let buckets = || FusedBuckets::new(collective, &CONFIG, precision, &options);
    Ok(match averaging {
        Averaging::Buckets | Averaging::Sharded => Box::new(buckets()?),
        Averaging::Flat => Box::new(FusedFlat::new(collective, &CONFIG)?),
        mutant => Box::new(Mutant { mutant, collective: collective.clone(), parts: 0.into() }),
    })
}

/// What a part's gradients must not become.
struct Mutant {
    mutant: Averaging,
    collective: Shared,
    parts: std::cell::Cell<usize>,
}

impl Exchange for Mutant {
    fn layers(&self) -> usize {
        1
    }

    fn start(&self, gradients: &[Piece]) -> Result<()> {
        let part = self.parts.replace(self.parts.get() + 1) % (CONFIG.num_layers as usize + 2);
        let op = if self.mutant == Averaging::Sum { Op::Sum } else { Op::Average };
        match self.mutant {
            Averaging::Local => Ok(()),
            Averaging::WithoutHead if part == 0 => Ok(()),
            _ => gradients.iter().try_for_each(|piece| self.collective.all_reduce(&piece.whole, op)),
        }
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }

    fn gather(&self, _values: &[Piece]) -> Result<()> {
        Ok(())
    }
}
