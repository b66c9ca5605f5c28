//! `distributed_communication_single_node`: what an all-reduce of one tensor costs, by back end, size and number of processes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::ranks::{Input, Output};
use super::require_devices;
use super::torch_compile::peer::Software;
use crate::collective::Backend;
use crate::collective::ranks::{Launch, MAX_WORLD_SIZE, launch};
use crate::harness::problem::{Check, Measure, Measured, Problem};
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::units::MB;

mod checks;
pub mod ranks;

pub const PROBLEM: Problem = Problem {
    name: "distributed_communication_single_node",
    answers: &[""],
    checks: &[
        Check { name: "sums_are_exact_on_every_rank", part: "", run: checks::sums_are_exact_on_every_rank },
        Check { name: "wrong_sums_are_seen", part: "", run: checks::wrong_sums_are_seen },
        Check { name: "c10d_takes_its_turns", part: "", run: checks::c10d_takes_its_turns },
    ],
    measured: Some(Measured::of::<AllReduce>()),
    facts,
};

/// The handout allows five minutes for each run.
const DEADLINE: Duration = Duration::from_secs(300);

const FLOAT32: u64 = 4;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Gloo between CPUs, or NCCL between GPUs, one a rank.
    pub backend: Backend,
    pub world_size: usize,
    /// What every rank holds, in units of 10^6 bytes.
    pub size_mb: u64,
    pub rounds: usize,
    /// Untimed sums at the start of every turn.
    pub warmup: usize,
    /// Timed sums of every turn.
    pub iterations: usize,
}

impl Params {
    fn bytes(&self) -> u64 {
        self.size_mb * MB as u64
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Held by each rank.
    pub bytes: u64,
    /// Bus bandwidth over algorithm bandwidth.
    pub bus_factor: f64,
    /// Our collective.
    pub ours: Timing,
    /// PyTorch's, between one Python process a rank, in turns with ours.
    pub c10d: Timing,
    pub software: Software,
}

/// Seconds of the same sums on every rank, each from all ranks being there until the rank has its sum.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Of each sum, that of the rank that had it last: only then is the sum done.
    pub last_rank: Samples,
    pub by_rank: Vec<Samples>,
}

struct AllReduce;

impl Measure for AllReduce {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn validate(params: &Params) -> Result<()> {
        let Params { world_size, size_mb, rounds, warmup, iterations, .. } = *params;
        ensure!(
            (2..=MAX_WORLD_SIZE).contains(&world_size),
            "world_size is {world_size}: it must lie in 2..{MAX_WORLD_SIZE}"
        );
        ensure!((1..=16_000).contains(&size_mb), "size_mb is {size_mb}: it must lie in 1..16000");
        for (key, value) in [("rounds", rounds), ("warmup", warmup), ("iterations", iterations)] {
            ensure!((1..=10_000).contains(&value), "{key} is {value}: it must lie in 1..10000");
        }
        Ok(())
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let Params { backend, world_size, rounds, warmup, iterations, .. } = *params;
        let folder = tempfile::tempdir().context("making a folder for the peers' meeting place")?;
        let elements = (params.bytes() / FLOAT32) as i64;
        let store = Some(folder.path().join("store"));
        let outputs = run(backend, world_size, &Input { elements, rounds, warmup, iterations, store })?;
        let work = work(params);
        Ok(Row {
            bytes: params.bytes(),
            bus_factor: bus_factor(world_size),
            ours: Timing::of(outputs.iter().map(|rank| &rank.ours), &work)?,
            c10d: Timing::of(outputs.iter().map(|rank| &rank.c10d), &work)?,
            software: outputs[0].software.clone().context("no peer told its software")?,
        })
    }
}

/// Runs the ranks; their results are in rank order.
fn run(backend: Backend, world_size: usize, input: &Input) -> Result<Vec<Output>> {
    require_devices(backend, world_size)?;
    let ranks = Launch { backend, ..Launch::new(ranks::TASK.name, world_size, DEADLINE) };
    let outputs = launch(&ranks, &serde_json::to_value(input)?)?;
    outputs.into_iter().map(|output| Ok(serde_json::from_value(output)?)).collect()
}

impl Timing {
    pub fn of<'a>(ranks: impl Iterator<Item = &'a Vec<f64>>, work: &Work) -> Result<Self> {
        let ranks: Vec<&Vec<f64>> = ranks.collect();
        let count = ranks.first().map_or(0, |rank| rank.len());
        ensure!(ranks.iter().all(|rank| rank.len() == count), "the ranks timed different numbers of sums");
        let last = (0..count).map(|k| ranks.iter().map(|rank| rank[k]).fold(0.0, f64::max)).collect();
        let by_rank = ranks.into_iter().map(|rank| Samples::seconds(rank.clone(), work.clone()));
        Ok(Self { last_rank: Samples::seconds(last, work.clone())?, by_rank: by_rank.collect::<Result<_>>()? })
    }
}

/// What no all-reduce can avoid: every rank's tensor is read and its sum written, and between CPUs all in one memory.
fn work(params: &Params) -> Work {
    let of_one_rank = 2.0 * params.bytes() as f64;
    let ranks = match params.backend {
        Backend::Gloo => params.world_size,
        Backend::Nccl => 1,
    };
    Work { flops: 0.0, bytes: of_one_rank * ranks as f64, precision: "float32".into() }
}

/// Bus bandwidth over algorithm bandwidth of an all-reduce: each of n ranks must send, and receive, (n - 1)/n of the tensor
/// to have it summed and as much again to have the sums spread (nccl-tests, doc/PERFORMANCE.md).
pub fn bus_factor(world_size: usize) -> f64 {
    let n = world_size as f64;
    2.0 * (n - 1.0) / n
}

fn facts() -> Result<Value> {
    Ok(json!({ "deadline_s": DEADLINE.as_secs() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_done_when_the_last_rank_has_it() {
        let work = Work { flops: 0.0, bytes: 8.0, precision: "float32".into() };
        let ranks = [vec![1.0, 5.0, 2.0], vec![3.0, 4.0, 2.5]];
        let timing = Timing::of(ranks.iter(), &work).unwrap();
        assert_eq!(timing.last_rank.samples, [3.0, 5.0, 2.5]);
        assert_eq!(timing.by_rank.len(), 2);
        assert!(Timing::of([vec![1.0], vec![1.0, 2.0]].iter(), &work).is_err());
        assert!(Timing::of([vec![], vec![]].iter(), &work).is_err());
    }

    #[test]
    fn two_ranks_move_each_byte_once_and_many_ranks_twice() {
        assert_eq!(bus_factor(2), 1.0);
        assert_eq!(bus_factor(4), 1.5);
        assert!((bus_factor(1_000_000) - 2.0).abs() < 1e-5);
    }
}
