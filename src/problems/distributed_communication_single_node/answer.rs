//! What an all-reduce costs: by back end, size and number of processes, beside PyTorch's own and between the back ends.

use anyhow::Result;
use serde::Serialize;

use self::printed::{bandwidth, machines, not_run, table};
use self::sum::{Sum, ends, of_size, on_two, ratio};
use super::measure::AllReduce;
use crate::collective::Backend;
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Range, Records, Unit};

mod printed;
mod sum;

/// One GPU's NVLink in one direction, in bytes per second: 18 links of 25 GB/s (data sheets of the H100 SXM and the H200).
const NVLINK: f64 = 450e9;
const GPUS_WITH_NVLINK: [&str; 2] = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"];

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// The back end whose sums decide the claims: NCCL where it was measured.
    backend: &'static str,
    nccl_machine: String,
    gloo_machine: String,
    sizes: Option<Sizes>,
    processes: Option<Processes>,
    backends: Option<Backends>,
    /// Gloo's bus bandwidth at its largest size, over all numbers of processes.
    gloo: Option<Range>,
    link: Option<Link>,
    /// Our time over PyTorch's, in all paired turns of all sums.
    over_pytorch: Option<Range>,
    /// What was not run, in sentences.
    not_run: Vec<String>,
}

/// The smallest against the largest sum on two processes.
#[derive(Serialize)]
struct Sizes {
    least_mb: u64,
    most_mb: u64,
    least: Range,
    most: Range,
    /// Bandwidth at the largest size over that at the smallest, over all turns.
    #[serde(skip)]
    gain: Range,
}

/// The largest sum on two processes and on the most.
#[derive(Serialize)]
struct Processes {
    most: usize,
    /// Over the time on two.
    time: Range,
    busbw: Range,
    /// The bus bandwidth over that of two, over all turns.
    #[serde(skip)]
    kept: Range,
}

/// The largest sum that both back ends have, on two processes.
#[derive(Serialize)]
struct Backends {
    nccl: Range,
    gloo: Range,
    /// Gloo's time over NCCL's; none where the two are not of one machine.
    ratio: Option<Range>,
}

/// The highest bus bandwidth between GPUs against that of their links.
#[derive(Serialize)]
struct Link {
    bandwidth: Quantity,
    share: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<AllReduce>()?;
    let of = |backend| -> Vec<Sum> {
        cases.iter().filter(|case| case.params.backend == backend).filter_map(Sum::of).collect()
    };
    let (fast, slow) = (of(Backend::Nccl), of(Backend::Gloo));
    let judged = if fast.is_empty() { &slow } else { &fast };
    let all = || fast.iter().chain(&slow);
    let quoted = Quoted {
        backend: if fast.is_empty() { "Gloo" } else { "NCCL" },
        nccl_machine: machines(fast.iter().map(|sum| sum.case)),
        gloo_machine: machines(slow.iter().map(|sum| sum.case)),
        sizes: Sizes::of(judged),
        processes: Processes::of(judged),
        backends: Backends::of(&fast, &slow),
        gloo: on_two(&slow).pop().and_then(|two| Range::of(of_size(&slow, two).flat_map(|sum| ends(sum.busbw())))),
        link: Link::of(&fast),
        over_pytorch: Range::of(all().filter_map(|sum| sum.over_pytorch.clone()).flat_map(ends)),
        not_run: not_run(&cases),
    };
    let mut answer = Answer::of(main, &quoted)?;
    claims(&mut answer, &quoted)?;
    for set in records.sets() {
        let cases = set.cases::<AllReduce>()?;
        for backend in [Backend::Nccl, Backend::Gloo] {
            if cases.iter().any(|case| case.params.backend == backend) {
                answer.table(format!("sums-{}-{}", set.profile(), backend.name()), table(&cases, backend))?;
            }
        }
    }
    if all().next().is_some() {
        answer.figure("bandwidth", bandwidth(&fast, &slow, quoted.link.as_ref()))?;
    }
    Ok(answer)
}

fn claims(answer: &mut Answer, quoted: &Quoted) -> Result<()> {
    if let Some(Sizes { gain, .. }) = &quoted.sizes {
        let name = "least bandwidth of the largest sum over the most of the smallest";
        answer.claim(Claim::above("latency-bounds-small-sums", name, &gain.low, 1.5))?;
    }
    if let Some(Processes { kept, .. }) = &quoted.processes {
        answer.claim(Claim::above("busbw-holds", "least busbw over the most of 2 processes", &kept.low, 0.9))?;
    }
    Ok(())
}

impl Sizes {
    /// None of fewer than two sizes.
    fn of(sums: &[Sum]) -> Option<Self> {
        let pair = on_two(sums);
        let [first, .., last] = pair[..] else { return None };
        Some(Self {
            least_mb: first.params.size_mb,
            most_mb: last.params.size_mb,
            least: first.said_busbw(),
            most: last.said_busbw(),
            gain: ratio(&last.busbw(), &first.busbw())?,
        })
    }
}

impl Processes {
    /// None of fewer than two sizes, or of two processes alone.
    fn of(sums: &[Sum]) -> Option<Self> {
        let pair = on_two(sums);
        let [_, .., two] = pair[..] else { return None };
        let wider = of_size(sums, two).filter(|sum| sum.params.world_size > 2);
        let widest = wider.max_by_key(|sum| sum.params.world_size)?;
        Some(Self {
            most: widest.params.world_size,
            time: ratio(&widest.range, &two.range)?,
            busbw: widest.said_busbw(),
            kept: ratio(&widest.busbw(), &two.busbw())?,
        })
    }
}

impl Backends {
    fn of(fast: &[Sum], slow: &[Sum]) -> Option<Self> {
        let nccl = on_two(fast).pop()?;
        let gloo = of_size(slow, nccl).find(|sum| sum.params.world_size == 2)?;
        Some(Self { nccl: nccl.said_time(), gloo: gloo.said_time(), ratio: ratio(&gloo.range, &nccl.range) })
    }
}

impl Link {
    /// None for GPUs whose links are not known.
    fn of(sums: &[Sum]) -> Option<Self> {
        let known = |sum: &Sum| {
            let gpus = &sum.case.id.machine().gpus;
            gpus.iter().all(|gpu| GPUS_WITH_NVLINK.contains(&gpu.name.as_str()))
        };
        let fastest = sums.iter().filter(|sum| sum.turns.is_stable());
        let fastest = fastest.max_by(|a, b| a.busbw().high.value().total_cmp(&b.busbw().high.value()))?;
        let share = fastest.rate(&fastest.time).value() / NVLINK;
        sums.iter().all(known).then(|| Self {
            bandwidth: Quantity::constant(NVLINK, Unit::BytesPerSecond),
            share: fastest.case.quantity(share, Unit::One),
        })
    }
}

#[cfg(test)]
mod tests;
