//! `cs336 doctor --ranks`: whether the ranks of a launcher reach each other, and what their network gives.

use std::time::SystemTime;

use anyhow::{Context as _, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Kind, Tensor};

use super::super::rank::{keep_multicast_off, settings};
use super::Ended;
use crate::bench::all_reduce::{Sums, bus_factor};
use crate::collective::environment::Environment;
use crate::collective::peers::{Peer, Peers};
use crate::collective::rendezvous::{arrive, connect, connect_pair, exchange, opening};
use crate::collective::{Backend, Shared, saying};
use crate::harness::stats::{max, median, min};
use crate::torch;
use crate::torch::clock::Stopwatch;
use crate::torch::store::Store;
use crate::units::{GB, MB, human_seconds};

/// The size at which latency shows, in bytes.
const SMALL: u64 = 1_000_000;
/// What a pair sends to measure its bandwidth, in bytes.
const SENT: i64 = 16_000_000;
/// How often each thing is measured. The median counts.
const REPEATS: usize = 9;
const WARMUP: usize = 2;

#[derive(clap::Args)]
pub struct Arguments {
    /// Examine the ranks that torchrun, srun or mpirun started with this command: reach, clocks and bandwidth
    #[arg(long)]
    ranks: bool,
    /// NCCL where there is a GPU, else Gloo
    #[arg(long, value_enum, requires = "ranks")]
    backend: Option<Backend>,
    /// Megabytes of the large all-reduce: 1000 over NCCL, 100 over Gloo, whose ranks share the host's memory
    #[arg(long, requires = "ranks", value_parser = clap::value_parser!(u64).range(1..=16_000))]
    large: Option<u64>,
}

/// What one rank found.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Report {
    /// This host's clock after each of several barriers, in seconds since 1970.
    clock: Vec<f64>,
    /// For each pair in order: seconds for 4 bytes and for [`SENT`] bytes; zero where this rank is not of the pair.
    pairs: Vec<[f64; 2]>,
    /// Seconds of the two all-reduces.
    sums: [f64; 2],
}

impl Arguments {
    pub fn asks(&self) -> bool {
        self.ranks
    }
}

/// Every rank measures; rank 0 prints.
///
/// # Errors
/// A run of one rank; those of [`arrive`] and [`connect`], which name the rank, the host and the setting.
pub fn run(arguments: &Arguments) -> Result<Ended> {
    let default = if torch::cuda_device(0).is_ok() { Backend::Nccl } else { Backend::Gloo };
    let backend = arguments.backend.unwrap_or(default);
    keep_multicast_off(backend)?;
    let environment = Environment::read()?;
    ensure!(
        environment.world_size > 1,
        "this run has one rank, and so no other rank to reach; start two or more ranks as one run, as `srun --ntasks 2` does"
    );
    let large = arguments.large.unwrap_or(if backend == Backend::Nccl { 1000 } else { 100 }) * MB as u64;
    let settings = settings("doctor --ranks", Some(&json!({ "large": large })));
    let (store, peers) = arrive(&environment, backend, &settings)?;
    let lost = serde_json::to_vec(&unreached(&peers))?;
    let lost: Vec<Vec<String>> = parsed(&exchange(&environment, &store, &peers, "view of the network", &lost)?)?;
    if let Some(first) = lost.iter().flatten().next() {
        bail!("{first}. {}", opening(backend));
    }
    let collective = connect(&environment, backend, &store, &peers)?;
    let report = measure(&environment, backend, (&store, &peers), &collective, large);
    let report = serde_json::to_vec(&report.map_err(|error| peers.explain(error))?)?;
    let reports = parsed(&exchange(&environment, &store, &peers, "report", &report)?)?;
    if environment.rank == 0 {
        let ranks: Vec<String> = peers.all().iter().map(Peer::to_string).collect();
        print!("{}", table(&ranks, backend, large, &reports));
    }
    Ok(Ended::Well)
}

fn parsed<T: DeserializeOwned>(of_ranks: &[Vec<u8>]) -> Result<Vec<T>> {
    of_ranks.iter().map(|bytes| serde_json::from_slice(bytes).context("a rank's report is not JSON")).collect()
}

/// A sentence for each rank that this one cannot connect to.
fn unreached(peers: &Peers) -> Vec<String> {
    let sentence = |(peer, reached): (&Peer, std::io::Result<()>)| {
        reached.err().map(|error| format!("{} cannot reach {peer}: {error}", peers.own()))
    };
    peers.reach_all().into_iter().filter_map(sentence).collect()
}

fn measure(
    environment: &Environment,
    backend: Backend,
    (store, peers): (&Store, &Peers),
    collective: &Shared,
    large: u64,
) -> Result<Report> {
    let &Environment { rank, world_size, .. } = environment;
    let mut clock = Vec::new();
    for _ in 0..WARMUP + REPEATS {
        saying(environment, "all ranks at a barrier", || collective.barrier())?;
        clock.push(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64());
    }
    let mut of_pairs = Vec::new();
    for (one, other) in pairs(world_size) {
        // The other ranks are silent meanwhile.
        let before = format!("all ranks at the barrier before rank {one} and rank {other} send to each other");
        saying(environment, &before, || collective.barrier())?;
        of_pairs.push(if rank == one || rank == other {
            let pair = connect_pair(environment, backend, store, peers, [one, other])?;
            let awaited = format!("rank {one} and rank {other} to send to each other");
            let seconds = |bytes| seconds_to_send(&pair, bytes, &|send| saying(environment, &awaited, send));
            [seconds(4)?, seconds(SENT)?]
        } else {
            [0.0; 2]
        });
    }
    let mut sums = [0.0; 2];
    for (seconds, bytes) in sums.iter_mut().zip([SMALL, large]) {
        let all = Sums::new(collective, i64::try_from(bytes / 4)?)?;
        // The deadline is that of one collective.
        let turn = |_| Ok(saying(environment, "all ranks at an all-reduce", || all.turn(0, 1))?[0]);
        *seconds = median(&(0..WARMUP + REPEATS).map(turn).collect::<Result<Vec<_>>>()?[WARMUP..]);
    }
    Ok(Report { clock: clock.split_off(WARMUP), pairs: of_pairs, sums })
}

/// Says at intervals what a rank waits for while it sends.
type Saying<'a> = &'a dyn Fn(&dyn Fn() -> Result<f64>) -> Result<f64>;

/// The median time of a broadcast from the first of two ranks to the second, as this rank sees it, each inside `saying`.
fn seconds_to_send(pair: &Shared, bytes: i64, saying: Saying) -> Result<f64> {
    let tensor = Tensor::f_zeros([bytes / 4], (Kind::Float, pair.device()))?;
    let stopwatch = Stopwatch::new(pair.device())?;
    let mut seconds = Vec::new();
    for _ in 0..WARMUP + REPEATS {
        seconds.push(saying(&|| {
            pair.barrier()?;
            let ((), lap) = stopwatch.lap(|| pair.broadcast(&tensor, 0))?;
            Ok(lap.host_s)
        })?);
    }
    Ok(median(&seconds[WARMUP..]))
}

fn pairs(world_size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..world_size).flat_map(move |one| (one + 1..world_size).map(move |other| (one, other)))
}

/// What rank 0 prints, from all ranks' reports in rank order.
fn table(ranks: &[String], backend: Backend, large: u64, reports: &[Report]) -> String {
    let n = ranks.len();
    let mut lines =
        vec![format!("{n} ranks over {}, of one version, commit and suites; all reach each other", backend.name())];
    for (rank, report) in ranks.iter().zip(reports) {
        let ahead: Vec<f64> = report.clock.iter().zip(&reports[0].clock).map(|(own, zero)| own - zero).collect();
        let (offset, half) = (1e3 * median(&ahead), 5e2 * (max(&ahead) - min(&ahead)));
        lines.push(format!("{rank:<40} clock {offset:+9.3} ms, +- {half:.3} ms"));
    }
    let (mut latency, mut bandwidth) = (0.0f64, f64::INFINITY);
    for (at, (one, other)) in pairs(n).enumerate() {
        // A broadcast has ended when the later of the two ranks has ended it.
        let [short, long] = [0, 1].map(|which| reports[one].pairs[at][which].max(reports[other].pairs[at][which]));
        (latency, bandwidth) = (latency.max(short), bandwidth.min(SENT as f64 / long));
        let of_pair = format!("rank {one} to rank {other}");
        lines.push(format!("{of_pair:<40} {:>10} for 4 B, {:.3} GB/s", human_seconds(short), SENT as f64 / long / GB));
    }
    for (at, bytes) in [SMALL, large].into_iter().enumerate() {
        let measured = max(&reports.iter().map(|report| report.sums[at]).collect::<Vec<_>>());
        let expected = 2.0 * (n as f64 - 1.0) * latency + bus_factor(n) * bytes as f64 / bandwidth;
        lines.push(format!(
            "{:<40} {:>10}, expected {} ({:.2} times)",
            format!("all-reduce of {} MB", bytes / MB as u64),
            human_seconds(measured),
            human_seconds(expected),
            measured / expected
        ));
    }
    lines.push(
        "expected: 2 (n - 1) latencies, and 2 (n - 1)/n of the bytes at the bandwidth of the slowest pair".into(),
    );
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_all_reduce_is_that_of_a_ring_over_the_slowest_pair() {
        let report = |clock: f64, pairs: [[f64; 2]; 3]| Report {
            clock: vec![clock, clock + 1.002, clock + 2.001],
            pairs: pairs.to_vec(),
            sums: [1e-3, 0.3],
        };
        // 16 MB in 10 ms is 1.6 GB/s; the pair of rank 1 and rank 2 takes twice as long.
        let (fast, slow, none) = ([1e-4, 1e-2], [1e-4, 2e-2], [0.0; 2]);
        let reports =
            [report(5.0, [fast, fast, none]), report(7.0, [fast, none, fast]), report(5.0, [none, fast, slow])];
        let ranks = ["rank 0 on a (10.0.0.1)", "rank 1 on b (10.0.0.2)", "rank 2 on c (10.0.0.3)"].map(String::from);
        let table = table(&ranks, Backend::Gloo, 120_000_000, &reports);
        let has = |words: &str| assert!(table.contains(words), "{words:?} is not in\n{table}");
        has("rank 1 on b (10.0.0.2)                   clock +2000.000 ms, +- 0.000 ms");
        has("rank 1 to rank 2                           100.0 us for 4 B, 0.800 GB/s");
        // 4 latencies are 0.4 ms; 4/3 of 120 MB at 0.8 GB/s are 200 ms.
        has("all-reduce of 120 MB                       300.0 ms, expected 200.4 ms (1.50 times)");
    }

    #[test]
    fn every_pair_of_ranks_is_examined_once() {
        assert_eq!(pairs(3).collect::<Vec<_>>(), [(0, 1), (0, 2), (1, 2)]);
        assert_eq!(pairs(1).count(), 0);
    }
}
