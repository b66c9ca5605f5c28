//! One rank's part: sums of known values by our collective and by PyTorch's, in turns, every one of them checked.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::collective::ranks::RankTask;
use crate::collective::{Op, Shared};
use crate::problems::torch_compile::peer::{Software, TorchPeer};
use crate::torch::clock::Stopwatch;
use crate::torch::stream::synchronize;

pub const TASK: RankTask = RankTask { name: "all_reduce", run: on_rank };

/// What `suites/peers/all_reduce.py` sums too: float32 holds the sums of such small integers exactly.
const PERIOD: i64 = 251;
const RANK_STEP: i64 = 7;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// float32, on every rank.
    pub elements: i64,
    pub rounds: usize,
    pub warmup: usize,
    pub iterations: usize,
    /// A file that is not there yet, at which the peers meet; without it there are none.
    pub store: Option<PathBuf>,
}

/// Seconds on one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    pub ours: Vec<f64>,
    pub c10d: Vec<f64>,
    pub software: Option<Software>,
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let Input { elements, rounds, warmup, iterations, store } = serde_json::from_value(input)?;
    let mut peer = store.map(|store| open_peer(collective, &store, elements)).transpose()?;
    let mut output =
        Output { ours: Vec::new(), c10d: Vec::new(), software: peer.as_ref().map(|peer| peer.software.clone()) };
    let ours = Sums::new(collective, elements)?;
    for _ in 0..rounds {
        output.ours.extend(ours.turn(warmup, iterations)?);
        if let Some(peer) = &mut peer {
            let laps = peer.turn("all_reduce", warmup, iterations)?;
            output.c10d.extend(laps.into_values().flatten());
        }
    }
    if let Some(peer) = &mut peer {
        peer.close(None)?;
    }
    Ok(serde_json::to_value(output)?)
}

fn open_peer(collective: &Shared, store: &PathBuf, elements: i64) -> Result<TorchPeer> {
    let mut peer = TorchPeer::start(collective.device())?;
    let (backend, rank, world_size) = (collective.backend(), collective.rank(), collective.world_size());
    let group = json!({
        "elements": elements, "backend": backend, "rank": rank, "world_size": world_size, "store": store,
    });
    peer.open("all_reduce", group)?;
    Ok(peer)
}

/// Sums over all ranks of a tensor that each fills anew before every sum.
pub struct Sums<'a> {
    collective: &'a Shared,
    stopwatch: Stopwatch,
    base: Tensor,
    values: Tensor,
}

impl<'a> Sums<'a> {
    pub fn new(collective: &'a Shared, elements: i64) -> Result<Self> {
        let device = collective.device();
        let base = base(elements, device)?;
        Ok(Self { collective, stopwatch: Stopwatch::new(device)?, values: base.f_empty_like()?, base })
    }

    /// Seconds of each timed sum, from all ranks being there until this one has it.
    pub fn turn(&self, warmup: usize, iterations: usize) -> Result<Vec<f64>> {
        let (rank, device) = (self.collective.rank() as i64, self.collective.device());
        let mut seconds = Vec::new();
        for k in 0..(warmup + iterations) as i64 {
            fill(&self.values, &self.base, rank, k)?;
            synchronize(device)?;
            self.collective.barrier()?;
            let ((), lap) = self.stopwatch.lap(|| self.collective.all_reduce(&self.values, Op::Sum))?;
            seconds.push(lap.host_s);
            require_sum(&self.values, &self.base, self.collective.world_size() as i64, k)?;
        }
        Ok(seconds.split_off(warmup))
    }
}

/// Holds `values` to the sum over ranks r of `base` + 7 r + k, which float32 represents; destroys them.
pub fn require_sum(values: &Tensor, base: &Tensor, world_size: i64, k: i64) -> Result<()> {
    let constant = RANK_STEP * world_size * (world_size - 1) / 2 + world_size * k;
    let off = values.shallow_clone().f_sub_(&base.f_mul_scalar(world_size)?)?.f_sub_scalar_(constant)?;
    // Not a number is no zero either.
    let wrong = off.f_count_nonzero(None)?.f_int64_value(&[])?;
    ensure!(wrong == 0, "{wrong} of {} sums over {world_size} ranks are wrong", base.numel());
    Ok(())
}

/// Makes `values` what `rank` brings to the k-th sum.
pub fn fill(values: &Tensor, base: &Tensor, rank: i64, k: i64) -> Result<()> {
    let mut values = values.shallow_clone();
    values.f_copy_(base)?;
    let _ = values.f_add_scalar_(RANK_STEP * rank + k)?;
    Ok(())
}

/// 0, 1, .., 250, 0, 1, .. in float32.
pub fn base(elements: i64, device: Device) -> Result<Tensor> {
    Ok(Tensor::f_arange(elements, (Kind::Int, device))?.f_remainder(PERIOD)?.f_to_kind(Kind::Float)?)
}
