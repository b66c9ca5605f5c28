//! The cost of communication between ranks: a time per call and a bandwidth.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::all_reduce::{RankTimes, Sums, bus_factor};
use super::nvlink::{is_over_nvlink, require_carried};
use crate::collective::timeline::TimelineEntry;
use crate::collective::{Backend, Operation, Shared};
use crate::harness::record::Machine;
use crate::harness::samples::Work;
use crate::harness::stats::median;

/// All-reduces of several sizes before the steps, and a linear fit of their times.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interconnect {
    pub points: Vec<ProbePoint>,
    /// o: the fixed cost of a call in the fit t = o + S / w.
    pub overhead_s: f64,
    /// w: the algorithm bandwidth of the fit.
    pub bytes_per_s: f64,
    /// The largest bus bandwidth of any probe on any rank, before or after the steps. A step's communication cannot exceed it.
    pub fastest_bus_bytes_per_s: f64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbePoint {
    pub bytes: u64,
    pub time: RankTimes,
}

/// Seconds of all-reduces of one size on one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    pub bytes: u64,
    pub seconds: Vec<f64>,
}

/// The handout's largest size is 1 GB.
const LARGEST: u64 = 1_000_000_000;
const SMALLEST: u64 = 1 << 16;
/// Consecutive sums of one size. The first is not timed.
const WARMUP: usize = 1;
const SUMS: usize = 3;
/// Rounds over all sizes, so that a busy moment of the machine affects all sizes alike.
const PASSES: usize = 3;
/// Timed sums of one size.
pub const SAMPLES: usize = PASSES * SUMS;

/// Times sums of 64 KiB and of eight times the previous size each, up to `bytes` or 1 GB.
pub fn probe(collective: &Shared, bytes: u64) -> Result<Vec<Probe>> {
    let mut probes: Vec<Probe> = sizes(bytes).map(|bytes| Probe { bytes, seconds: Vec::new() }).collect();
    for _ in 0..PASSES {
        for Probe { bytes, seconds } in &mut probes {
            let sums = Sums::new(collective, *bytes as i64 / 4)?;
            seconds.extend(sums.turn(WARMUP, SUMS).with_context(|| format!("summing {bytes} bytes"))?);
        }
    }
    Ok(probes)
}

/// The sizes that are probed for gradients of `bytes`.
pub fn sizes(bytes: u64) -> impl Iterator<Item = u64> {
    let sizes = std::iter::successors(Some(SMALLEST), |size| Some(8 * size));
    sizes.take_while(move |size| *size <= bytes.clamp(8 * SMALLEST, LARGEST))
}

impl Interconnect {
    /// From every rank's probes before and after the steps, in rank order. The fit uses the probes before the steps.
    pub fn of(before: &[&[Probe]], after: &[&[Probe]]) -> Result<Self> {
        let first = before.first().context("no rank probed the link")?;
        let factor = bus_factor(before.len());
        let mut points = Vec::new();
        for (i, &Probe { bytes, .. }) in first.iter().enumerate() {
            let work = Work { flops: 0.0, bytes: 2.0 * bytes as f64, precision: "float32".into() };
            points.push(ProbePoint { bytes, time: RankTimes::of(before.iter().map(|rank| &rank[i].seconds), &work)? });
        }
        let all = before.iter().chain(after).flat_map(|rank| rank.iter());
        let fastest =
            all.flat_map(|probe| probe.seconds.iter().map(move |seconds| factor * probe.bytes as f64 / seconds));
        let fastest_bus_bytes_per_s = fastest.fold(0.0, f64::max);
        let (overhead_s, bytes_per_s) = fit(&medians(&points))?;
        Ok(Self { points, overhead_s, bytes_per_s, fastest_bus_bytes_per_s })
    }

    /// Errors: the probes are not of the sizes for gradients of `gradient_bytes`, or the line is not that of their times.
    pub fn validate(&self, gradient_bytes: u64) -> Result<()> {
        let (found, expected): (Vec<_>, Vec<_>) =
            (self.points.iter().map(|point| point.bytes).collect(), sizes(gradient_bytes).collect());
        ensure!(found == expected, "the link was probed with {found:?} bytes, and is with {expected:?}");
        let (overhead_s, bytes_per_s) = fit(&medians(&self.points))?;
        // A record's times are rounded.
        let is_near = |found: f64, expected: f64| (found - expected).abs() <= 0.01 * expected + 1e-7;
        ensure!(
            is_near(self.overhead_s, overhead_s) && is_near(self.bytes_per_s, bytes_per_s),
            "the link has {:e} s a call and {:e} B/s, and by its probes {overhead_s:e} and {bytes_per_s:e}",
            self.overhead_s,
            self.bytes_per_s
        );
        Ok(())
    }

    /// Errors: a probe that NVLink cannot carry, where the ranks communicate over it, or a fastest bandwidth that is impossible or
    /// slower than the probes'.
    pub fn validate_on(&self, backend: Backend, world_size: usize, machine: &Machine) -> Result<()> {
        let factor = bus_factor(world_size);
        let fastest = self.fastest_bus_bytes_per_s;
        for ProbePoint { bytes, time } in &self.points {
            let least = factor * *bytes as f64 / time.fastest();
            ensure!(
                fastest >= 0.999 * least,
                "the fastest probe has {fastest:e} B/s, and one of {bytes} bytes {least:e}"
            );
            if is_over_nvlink(backend, machine) {
                require_carried(*bytes, time.fastest())?;
            }
        }
        let largest = self.points.last().context("the link was not probed")?.bytes;
        if is_over_nvlink(backend, machine) {
            require_carried(largest, factor * largest as f64 / fastest)?;
        }
        Ok(())
    }

    /// The least time in which `bus_bytes` can be communicated, by the fastest probe.
    ///
    /// The margin allows for a step that is faster than all probes before and after it.
    pub fn least_seconds(&self, bus_bytes: f64) -> f64 {
        const MARGIN: f64 = 1.25;
        bus_bytes / (MARGIN * self.fastest_bus_bytes_per_s)
    }
}

/// The size of each probe and the median of its times.
fn medians(points: &[ProbePoint]) -> Vec<(f64, f64)> {
    points.iter().map(|point| (point.bytes as f64, median(&point.time.last_rank.samples))).collect()
}

/// o and w of t = o + S / w by least squares of the relative errors, so that small and large sums have equal weight. o is
/// at least zero.
pub fn fit(points: &[(f64, f64)]) -> Result<(f64, f64)> {
    ensure!(points.len() >= 2, "a line takes two sizes, {} were measured", points.len());
    // With a = 1 / t and b = S / t, minimise the sum of (o a + b / w - 1)^2.
    let sum = |of: fn(f64, f64) -> f64| points.iter().map(|(s, t)| of(1.0 / t, s / t)).sum::<f64>();
    let (aa, ab, bb) = (sum(|a, _| a * a), sum(|a, b| a * b), sum(|_, b| b * b));
    let (a1, b1) = (sum(|a, _| a), sum(|_, b| b));
    let determinant = aa * bb - ab * ab;
    let (mut o, mut u) = ((a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant);
    if o < 0.0 {
        (o, u) = (0.0, b1 / bb);
    }
    ensure!(o.is_finite() && u > 0.0, "no line with a positive slope fits the all-reduces {points:?}");
    Ok((o, 1.0 / u))
}

/// Bytes that each link carries in each direction for these collectives (nccl-tests, doc/PERFORMANCE.md).
pub fn bus_bytes<'a>(entries: impl IntoIterator<Item = &'a TimelineEntry>, world_size: usize) -> f64 {
    let n = world_size as f64;
    let factor = |operation| match operation {
        Operation::AllReduce => bus_factor(world_size),
        Operation::AllGather | Operation::ReduceScatter => (n - 1.0) / n,
        Operation::Broadcast => 1.0,
        Operation::Barrier => 0.0,
    };
    entries.into_iter().map(|entry| factor(entry.operation) * entry.bytes as f64).sum()
}

/// Whether a collective adds values, like the probes. One that only copies may be faster.
pub fn adds(entry: &TimelineEntry) -> bool {
    matches!(entry.operation, Operation::AllReduce | Operation::ReduceScatter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fit_recovers_the_line_of_exact_times() {
        let on_line = |o: f64, w: f64| [1e5, 1e6, 1e7, 1e9].map(|s: f64| (s, o + s / w));
        let (o, w) = fit(&on_line(3e-5, 3e11)).unwrap();
        assert!((o / 3e-5 - 1.0).abs() < 1e-6 && (w / 3e11 - 1.0).abs() < 1e-6, "{o} {w}");
        // A fit with a negative cost per call gets zero instead.
        let (o, w) = fit(&[(1e6, 0.9e-3), (1e7, 1.1e-2)]).unwrap();
        assert!(o == 0.0 && (w / 1e9 - 1.0).abs() < 0.15, "{o} {w}");
        assert!(fit(&[(1e6, 1e-3)]).is_err() && fit(&[(1e6, 1e-2), (1e9, 1e-3)]).is_err());
    }

    #[test]
    fn each_operation_has_its_bus_factor() {
        let entry = |operation| TimelineEntry {
            sequence: 1,
            operation,
            bytes: 80,
            launched_s: 0.0,
            started_s: 0.0,
            ended_s: 1.0,
        };
        let of = |operation| bus_bytes(&[entry(operation), entry(Operation::Barrier)], 4);
        // ZeRO-1's two halves are one all-reduce; a broadcast sends everything over every link.
        assert_eq!(of(Operation::AllReduce), 120.0);
        assert_eq!(of(Operation::ReduceScatter) + of(Operation::AllGather), 120.0);
        assert_eq!(of(Operation::Broadcast), 80.0);
    }
}
