//! Timed all-reduces of known values. Every sum is checked.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::collective::{Op, Shared};
use crate::harness::answer::Turns;
use crate::harness::samples::{Samples, Work};
use crate::torch::clock::Stopwatch;
use crate::torch::stream::synchronize;

/// `suites/peers/all_reduce.py` uses the same values. Float32 represents the sums of such small integers exactly.
const PERIOD: i64 = 251;
const RANK_STEP: i64 = 7;

/// Seconds of the same operations on every rank. An operation starts when all ranks have arrived.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankTimes {
    /// For each operation the longest time of any rank: the operation ends with the last rank.
    pub last_rank: Samples,
    pub by_rank: Vec<Samples>,
}

impl RankTimes {
    pub fn of<'a>(ranks: impl Iterator<Item = &'a Vec<f64>>, work: &Work) -> Result<Self> {
        let ranks: Vec<&Vec<f64>> = ranks.collect();
        let count = ranks.first().map_or(0, |rank| rank.len());
        ensure!(ranks.iter().all(|rank| rank.len() == count), "the ranks timed different numbers of sums");
        let last = (0..count).map(|k| ranks.iter().map(|rank| rank[k]).fold(0.0, f64::max)).collect();
        let by_rank = ranks.into_iter().map(|rank| Samples::seconds(rank.clone(), work.clone()));
        Ok(Self { last_rank: Samples::seconds(last, work.clone())?, by_rank: by_rank.collect::<Result<_>>()? })
    }

    /// The least seconds of any rank.
    pub fn fastest(&self) -> f64 {
        self.by_rank.iter().flat_map(|rank| &rank.samples).copied().fold(f64::INFINITY, f64::min)
    }

    pub fn turns(&self, rounds: usize) -> Turns {
        Turns::of(&self.last_rank.samples, rounds)
    }
}

/// Bus bandwidth over algorithm bandwidth of an all-reduce. Each of n ranks must send and receive (n - 1)/n of the tensor
/// for the reduce-scatter, and the same amount for the all-gather (nccl-tests, doc/PERFORMANCE.md).
pub fn bus_factor(world_size: usize) -> f64 {
    let n = world_size as f64;
    2.0 * (n - 1.0) / n
}

/// Timed all-reduces of a tensor that every rank refills before each sum.
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

    /// Seconds of each timed sum, from the barrier until this rank has the sum.
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

/// Fails unless `values` is the sum over ranks r of `base` + 7 r + k, which float32 represents. Overwrites `values`.
pub fn require_sum(values: &Tensor, base: &Tensor, world_size: i64, k: i64) -> Result<()> {
    let constant = RANK_STEP * world_size * (world_size - 1) / 2 + world_size * k;
    let off = values.shallow_clone().f_sub_(&base.f_mul_scalar(world_size)?)?.f_sub_scalar_(constant)?;
    // NaN counts as nonzero.
    let wrong = off.f_count_nonzero(None)?.f_int64_value(&[])?;
    ensure!(wrong == 0, "{wrong} of {} sums over {world_size} ranks are wrong", base.numel());
    Ok(())
}

/// Fills `values` with `rank`'s input of the k-th sum.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_sum_is_that_of_the_last_rank() {
        let work = Work { flops: 0.0, bytes: 8.0, precision: "float32".into() };
        let ranks = [vec![1.0, 5.0, 2.0], vec![3.0, 4.0, 2.5]];
        let timing = RankTimes::of(ranks.iter(), &work).unwrap();
        assert_eq!(timing.last_rank.samples, [3.0, 5.0, 2.5]);
        assert_eq!(timing.by_rank.len(), 2);
        assert!(RankTimes::of([vec![1.0], vec![1.0, 2.0]].iter(), &work).is_err());
        assert!(RankTimes::of([vec![], vec![]].iter(), &work).is_err());
    }

    #[test]
    fn two_ranks_move_each_byte_once_and_many_ranks_twice() {
        assert_eq!(bus_factor(2), 1.0);
        assert_eq!(bus_factor(4), 1.5);
        assert!((bus_factor(1_000_000) - 2.0).abs() < 1e-5);
    }
}
