//! What an all-reduce costs: by back end, size and number of processes, beside PyTorch's own and between the back ends.

use anyhow::Result;
use serde::Serialize;

use super::measure::{AllReduce, Params, Row};
use crate::collective::Backend;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{grouped, markdown};
use crate::harness::answer::{
    Answer, Audience, Case, CaseOutcome, Cell, Claim, Quantity, Range, RecordSet, Records, SameMachine, SameRun, Style,
    Table, Unit,
};
use crate::harness::stats;
use crate::units::GB;

type SumCase = Case<Params, Row>;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Whether sums over NCCL, or over Gloo were measured on the main machine.
    nccl: bool,
    gloo: bool,
    sizes: Option<Sizes>,
    processes: Option<Processes>,
    backends: Option<Backends>,
    /// Our time over PyTorch's, over all sums.
    over_c10d: Option<Range>,
    /// Where it is largest: "1,000 MB over gloo on 2 processes".
    worst_at: String,
}

/// The smallest against the largest sum on two processes.
#[derive(Serialize)]
struct Sizes {
    least_mb: u64,
    most_mb: u64,
    /// Bandwidth at the largest size over that at the smallest.
    gain: Quantity,
}

/// The largest sum on two processes and on the most.
#[derive(Serialize)]
struct Processes {
    most: usize,
    time: Quantity,
    busbw: Quantity,
}

/// The largest sum that both back ends have, on two processes.
#[derive(Serialize)]
struct Backends {
    size_mb: u64,
    nccl: Quantity,
    gloo: Quantity,
    /// Gloo's time over NCCL's; none where the two are not of one machine.
    ratio: Option<Quantity>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<AllReduce>()?;
    let of = |backend| -> Vec<Sum> {
        cases.iter().filter(|case| case.params.backend == backend).filter_map(Sum::of).collect()
    };
    // A GPU's answer is NCCL's; a CPU has no other back end than Gloo.
    let (fast, slow) = (if main.is_gpu() { of(Backend::Nccl) } else { Vec::new() }, of(Backend::Gloo));
    let judged = if fast.is_empty() { &slow } else { &fast };
    let all = || fast.iter().chain(&slow);
    let worst = all().max_by(|a, b| a.over_c10d.value().total_cmp(&b.over_c10d.value()));
    let quoted = Quoted {
        nccl: !fast.is_empty(),
        gloo: !slow.is_empty(),
        sizes: Sizes::of(judged)?,
        processes: Processes::of(judged)?,
        backends: Backends::of(&fast, &slow),
        over_c10d: Range::of(all().map(|sum| &sum.over_c10d)),
        worst_at: worst.map(Sum::place).unwrap_or_default(),
    };
    let mut answer = Answer::of(main, &quoted)?;
    claims(&mut answer, &quoted)?;
    for set in records.sets() {
        let cases = set.cases::<AllReduce>()?;
        for backend in [Backend::Nccl, Backend::Gloo] {
            if cases.iter().any(|case| case.params.backend == backend) {
                answer.table(format!("sums-{}-{}", set.profile(), backend.name()), table(set, &cases, backend))?;
            }
        }
    }
    if quoted.over_c10d.is_some() {
        answer.figure("bandwidth", bandwidth(&fast, &slow))?;
    }
    Ok(answer)
}

fn claims(answer: &mut Answer, quoted: &Quoted) -> Result<()> {
    if let Some(Sizes { gain, .. }) = &quoted.sizes {
        let name = "bandwidth of the largest sum over the smallest's";
        answer.claim(Claim::above("latency-bounds-small-sums", name, gain, 1.5))?;
    }
    if let Some(Processes { busbw, .. }) = &quoted.processes {
        answer.claim(Claim::above("busbw-holds", "busbw over that of 2 processes", busbw, 0.8))?;
    }
    if let Some(Backends { ratio: Some(factor), .. }) = &quoted.backends {
        answer.claim(Claim::above("nccl-is-faster", "Gloo's time over NCCL's", factor, 1.0))?;
    }
    if let Some(Range { high, .. }) = &quoted.over_c10d {
        answer.claim(Claim::at_most("as-fast-as-pytorch", "largest time over PyTorch's", high, 1.1))?;
    }
    Ok(())
}

/// A case that was measured.
struct Sum<'a> {
    params: &'a Params,
    time: Quantity,
    p99: Quantity,
    /// Between the medians of the slowest rank and of the fastest, over the time.
    spread: Quantity,
    /// Bytes of one rank over the time.
    algbw: Quantity,
    busbw: Quantity,
    c10d: Quantity,
    over_c10d: Quantity,
}

impl<'a> Sum<'a> {
    fn of(case: &'a SumCase) -> Option<Self> {
        let row = case.row()?;
        let (time, c10d) = (case.median(&row.ours.last_rank), case.median(&row.c10d.last_rank));
        let ranks: Vec<f64> = row.ours.by_rank.iter().map(|rank| stats::median(&rank.samples)).collect();
        let rate = |bytes: f64| case.quantity(bytes / time.value(), Unit::BytesPerSecond);
        Some(Self {
            params: &case.params,
            p99: case.statistic(&row.ours.last_rank, |samples| stats::quantile(samples, 0.99)),
            spread: case.quantity((stats::max(&ranks) - stats::min(&ranks)) / time.value(), Unit::One),
            algbw: rate(row.bytes as f64),
            busbw: rate(row.bus_factor * row.bytes as f64),
            over_c10d: SameRun::of(&time, &c10d).ok()?.ratio(),
            time,
            c10d,
        })
    }

    /// "1,000 MB over gloo on 2 processes".
    fn place(&self) -> String {
        let Params { backend, world_size, size_mb, .. } = self.params;
        format!("{} MB over {} on {world_size} processes", grouped(*size_mb as f64, 0), backend.name())
    }
}

/// Sums on two processes by size.
fn on_two<'a, 'b>(sums: &'b [Sum<'a>]) -> Vec<&'b Sum<'a>> {
    let mut pair: Vec<_> = sums.iter().filter(|sum| sum.params.world_size == 2).collect();
    pair.sort_by_key(|sum| sum.params.size_mb);
    pair
}

impl Sizes {
    /// None of fewer than two sizes.
    fn of(sums: &[Sum]) -> Result<Option<Self>> {
        let pair = on_two(sums);
        let [least, .., most] = pair[..] else { return Ok(None) };
        let gain = SameMachine::of(&most.algbw, &least.algbw)?.ratio();
        Ok(Some(Self { least_mb: least.params.size_mb, most_mb: most.params.size_mb, gain }))
    }
}

impl Processes {
    /// None of fewer than two sizes, or of two processes alone.
    fn of(sums: &[Sum]) -> Result<Option<Self>> {
        let pair = on_two(sums);
        let [_, .., two] = pair[..] else { return Ok(None) };
        let wider = sums.iter().filter(|sum| sum.params.size_mb == two.params.size_mb && sum.params.world_size > 2);
        let Some(widest) = wider.max_by_key(|sum| sum.params.world_size) else { return Ok(None) };
        Ok(Some(Self {
            most: widest.params.world_size,
            time: SameMachine::of(&widest.time, &two.time)?.ratio(),
            busbw: SameMachine::of(&widest.busbw, &two.busbw)?.ratio(),
        }))
    }
}

impl Backends {
    fn of(fast: &[Sum], slow: &[Sum]) -> Option<Self> {
        let nccl = on_two(fast).pop()?;
        let size_mb = nccl.params.size_mb;
        let gloo = on_two(slow).into_iter().find(|sum| sum.params.size_mb == size_mb)?;
        let ratio = SameMachine::of(&gloo.time, &nccl.time).ok().map(|times| times.ratio());
        Some(Self { size_mb, nccl: nccl.time.clone(), gloo: gloo.time.clone(), ratio })
    }
}

/// Rows are sizes, then process counts; the caption says what a case that could not be run lacked.
fn table(set: &RecordSet, cases: &[SumCase], backend: Backend) -> Table {
    let mut cases: Vec<&SumCase> = cases.iter().filter(|case| case.params.backend == backend).collect();
    cases.sort_by_key(|case| (case.params.size_mb, case.params.world_size));
    let of = |number: for<'s> fn(&'s Sum) -> &'s Quantity| {
        move |(_, sum): &(&SumCase, Option<Sum>)| sum.as_ref().map(number).cloned()
    };
    let between = match backend {
        Backend::Nccl => "NCCL between GPUs",
        Backend::Gloo => "Gloo between CPU processes",
    };
    Table::of(cases.iter().map(|case| (*case, Sum::of(case))))
        .right("MB", |(case, _)| grouped(case.params.size_mb as f64, 0))
        .right("processes", |(case, _)| case.params.world_size.to_string())
        .right("sums", |(_, sum)| sum.as_ref().map(|sum| (sum.params.rounds * sum.params.iterations).to_string()))
        .number("median (ms)", Style::Ms, 3, |(case, sum)| match sum {
            Some(sum) => Cell::from(&sum.time),
            None => case.outcome.label().into(),
        })
        .number("p99 (ms)", Style::Ms, 3, of(|sum| &sum.p99))
        .number("between ranks", Style::Percent, 1, of(|sum| &sum.spread))
        .number("algbw (GB/s)", Style::Gb, 2, of(|sum| &sum.algbw))
        .number("busbw (GB/s)", Style::Gb, 2, of(|sum| &sum.busbw))
        .number("PyTorch (ms)", Style::Ms, 3, of(|sum| &sum.c10d))
        .number("ours / PyTorch", Style::Fixed, 2, of(|sum| &sum.over_c10d))
        .captioned(format!(
            "All-reduce of float32 over {between}: medians of the timed sums, of which \"sums\" says how many each column \
             has, taken in rounds of turns, each after untimed ones; \"between ranks\" is the difference between the \
             slowest and the fastest rank's median, as a share of the median. {}.{}",
            set.source(),
            lacking(&cases)
        ))
}

/// " Not measured: 6 processes at 1 MB (needs 6 GPUs, the machine has 4)."
fn lacking(cases: &[&SumCase]) -> String {
    let words = cases.iter().filter_map(|case| {
        let why = match &case.outcome {
            CaseOutcome::Measured(_) => return None,
            CaseOutcome::NotRun { needs, has, .. } => {
                format!("needs {}, the machine has {}", markdown(needs), markdown(has))
            }
            outcome => markdown(outcome.reason()),
        };
        let Params { world_size, size_mb, .. } = case.params;
        Some(format!("{world_size} processes at {} MB ({why})", grouped(size_mb as f64, 0)))
    });
    let words: Vec<String> = words.collect();
    if words.is_empty() { String::new() } else { format!(" Not measured: {}.", words.join("; ")) }
}

/// A line for each back end and number of processes.
fn bandwidth(fast: &[Sum], slow: &[Sum]) -> Figure {
    let mut series = Vec::new();
    for (name, sums) in [("NCCL", fast), ("Gloo", slow)] {
        for processes in [2, 4, 6] {
            let line = sums.iter().filter(|sum| sum.params.world_size == processes);
            let points = line.map(|sum| (sum.params.size_mb as f64, Some(sum.busbw.value() / GB)));
            series.push(Series::over_numbers(format!("{name}, {processes} processes"), points));
        }
    }
    series.retain(|series| !series.points.is_empty());
    let plot = Plot::new(PlotKind::Line, "size (MB)", "busbw (GB/s)", series);
    let alt = "Bus bandwidth of an all-reduce against the size of the tensor, a line for each back end and number of \
               processes.";
    Figure::plot(alt, Plot { log_x: true, log_y: true, ..plot })
}

#[cfg(test)]
mod tests;
