//! Measures all-reduces of one tensor, ours and c10d's in turns.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::ranks::{self, Input, Output};
use crate::bench::all_reduce::{RankTimes, bus_factor};
use crate::bench::interleave::Turns;
use crate::bench::nvlink::{is_over_nvlink, require_carried};
use crate::bench::peer::Software;
use crate::collective::Backend;
use crate::collective::ranks::{Launch, launch, validate_world_size};
use crate::harness::problem::Measure;
use crate::harness::record::{Machine, Profile};
use crate::harness::samples::Work;
use crate::units::MB;

/// The handout allows five minutes for each run.
pub const DEADLINE: Duration = Duration::from_secs(300);

const FLOAT32: u64 = 4;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Gloo between CPUs, or NCCL between GPUs, one a rank.
    pub backend: Backend,
    pub world_size: usize,
    /// The tensor's size on every rank, in units of 10^6 bytes.
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

    fn turns(&self) -> Turns {
        Turns { rounds: self.rounds, warmup: self.warmup, iterations: self.iterations }
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
    pub ours: RankTimes,
    /// PyTorch's, between one Python process a rank, in turns with ours.
    pub c10d: RankTimes,
    pub software: Software,
}

pub struct AllReduce;

impl Measure for AllReduce {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        let (found, expected) = (row.bytes, params.bytes());
        ensure!(found == expected, "each rank holds {found} bytes, and by the case's parameters {expected}");
        let (found, expected) = (row.bus_factor, bus_factor(params.world_size));
        ensure!((found - expected).abs() < 1e-9, "the bus factor is {found}, and of this number of ranks {expected}");
        Ok(())
    }

    fn validate(params: &Params) -> Result<()> {
        let Params { world_size, size_mb, .. } = *params;
        validate_world_size(world_size)?;
        ensure!((1..=16_000).contains(&size_mb), "size_mb is {size_mb}: it must lie in 1..16000");
        params.turns().validate()
    }

    fn validate_on(params: &Params, row: &Row, machine: &Machine) -> Result<()> {
        if is_over_nvlink(params.backend, machine) {
            [&row.ours, &row.c10d].into_iter().try_for_each(|times| require_carried(row.bytes, times.fastest()))?;
        }
        Ok(())
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let Params { backend, world_size, .. } = *params;
        let folder = tempfile::tempdir().context("making a folder for the peers' meeting place")?;
        let elements = (params.bytes() / FLOAT32) as i64;
        let store = Some(folder.path().join("store"));
        let outputs = run(backend, world_size, &[Input { elements, turns: params.turns(), store }])?;
        let work = work(params);
        Ok(Row {
            bytes: params.bytes(),
            bus_factor: bus_factor(world_size),
            ours: RankTimes::of(outputs.iter().map(|rank| &rank.ours), &work)?,
            c10d: RankTimes::of(outputs.iter().map(|rank| &rank.c10d), &work)?,
            software: outputs[0].software.clone().context("no peer reported its software")?,
        })
    }
}

/// Runs the ranks once for all `inputs`; the outputs of the first rank come first, in the order of the inputs.
pub fn run(backend: Backend, world_size: usize, inputs: &[Input]) -> Result<Vec<Output>> {
    let ranks = Launch { backend, ..Launch::new(ranks::TASK.name, world_size, DEADLINE) };
    let outputs = launch(&ranks, &serde_json::to_value(inputs)?)?;
    let outputs: Vec<Vec<Output>> = outputs.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?;
    Ok(outputs.concat())
}

/// The least traffic of an all-reduce: every rank's tensor is read and its sum written. CPU ranks share one memory.
fn work(params: &Params) -> Work {
    let of_one_rank = 2.0 * params.bytes() as f64;
    let ranks = match params.backend {
        Backend::Gloo => params.world_size,
        Backend::Nccl => 1,
    };
    Work { flops: 0.0, bytes: of_one_rank * ranks as f64, precision: "float32".into() }
}
