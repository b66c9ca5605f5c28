//! What an all-reduce costs: by back end, size and number of processes, beside PyTorch's own and between the back ends.

use anyhow::Result;
use serde::Serialize;

use self::printed::{bandwidth, not_run, table};
use self::sum::{Sum, of_size, on_two, ratio};
use super::measure::AllReduce;
use crate::collective::Backend;
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Range, Records};

mod printed;
mod sum;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// The back end whose sums decide the claims: NCCL where it was measured.
    backend: &'static str,
    /// Whether two processes have several sizes; then they follow. So with the others.
    sized: bool,
    #[serde(flatten)]
    sizes: Option<Sizes>,
    scaled: bool,
    #[serde(flatten)]
    processes: Option<Processes>,
    paired: bool,
    #[serde(flatten)]
    backends: Option<Backends>,
    /// The same of NCCL, for the summary.
    between_gpus: Option<Sizes>,
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

/// The largest sum on two processes, whose size is that of [`Sizes::most_mb`] and of [`Backends`], and on the most.
#[derive(Serialize)]
struct Processes {
    #[serde(rename = "processes")]
    most: usize,
    /// Over the time on two.
    time: Range,
    busbw: Range,
    /// Over the bandwidth of the link; none for GPUs whose links are not known.
    link: Option<Quantity>,
    /// The bus bandwidth over that of two, over all turns.
    #[serde(skip)]
    kept: Range,
}

/// NCCL's largest sum on two processes, and Gloo's of that size.
#[derive(Serialize)]
struct Backends {
    mb: u64,
    nccl: Range,
    gloo: Range,
    /// Gloo's bus bandwidth over all numbers of processes.
    gloo_busbw: Range,
    /// Gloo's time over NCCL's; none where the two are not of one machine.
    ratio: Option<Range>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<AllReduce>()?;
    let of = |backend| -> Vec<Sum> {
        cases.iter().filter(|case| case.params.backend == backend).filter_map(Sum::of).collect()
    };
    let (fast, slow) = (of(Backend::Nccl), of(Backend::Gloo));
    let judged = if fast.is_empty() { &slow } else { &fast };
    let (sizes, processes) = (Sizes::of(judged), Processes::of(judged));
    let backends = Backends::of(&fast, &slow);
    let quoted = Quoted {
        sized: sizes.is_some(),
        scaled: processes.is_some(),
        paired: backends.is_some(),
        backend: if fast.is_empty() { "Gloo" } else { "NCCL" },
        sizes,
        processes,
        backends,
        between_gpus: Sizes::of(&fast),
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
    if !judged.is_empty() {
        answer.figure("bandwidth", bandwidth(&fast, &slow))?;
    }
    Ok(answer)
}

fn claims(answer: &mut Answer, quoted: &Quoted) -> Result<()> {
    if let Some(Sizes { gain, .. }) = &quoted.sizes {
        let name = "least bandwidth of the largest sum over the most of the smallest";
        answer.claim(Claim::above("latency-bound", name, &gain.low, 1.5))?;
    }
    if let Some(Processes { kept, .. }) = &quoted.processes {
        answer.claim(Claim::above("busbw-holds", "least busbw over the most of 2 processes", &kept.low, 0.999))?;
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
            least: first.busbw.said(),
            most: last.busbw.said(),
            gain: ratio(&last.busbw, &first.busbw)?,
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
            time: ratio(&widest.time, &two.time)?,
            busbw: widest.busbw.said(),
            link: widest.of_link(),
            kept: ratio(&widest.busbw, &two.busbw)?,
        })
    }
}

impl Backends {
    fn of(fast: &[Sum], slow: &[Sum]) -> Option<Self> {
        let nccl = on_two(fast).pop()?;
        let gloo = of_size(slow, nccl).find(|sum| sum.params.world_size == 2)?;
        Some(Self {
            mb: nccl.params.size_mb,
            nccl: nccl.time.said(),
            gloo: gloo.time.said(),
            gloo_busbw: Range::of(of_size(slow, nccl).flat_map(|sum| [&sum.busbw.range.low, &sum.busbw.range.high]))?,
            ratio: ratio(&gloo.time, &nccl.time),
        })
    }
}

#[cfg(test)]
mod tests;
