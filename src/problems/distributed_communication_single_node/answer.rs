//! What an all-reduce costs: by back end, size and number of processes, beside PyTorch's own and between the back ends.

use anyhow::Result;
use serde::Serialize;

use super::measure::{AllReduce, Params, Row};
use crate::bench::all_reduce::RankTimes;
use crate::collective::Backend;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{grouped, markdown};
use crate::harness::answer::{
    Answer, Audience, Case, CaseOutcome, Cell, Claim, Column, Quantity, Range, RecordSet, Records, SameMachine, Style,
    Table, Unit,
};
use crate::harness::stats;
use crate::units::GB;

type SumCase = Case<Params, Row>;

/// A claim on the bandwidth of small sums, on more processes, and on PyTorch's own, in that order.
const SMALL: &str = "latency-bounds-small-sums";
const HOLDS: &str = "busbw-holds";
const FASTER: &str = "nccl-is-faster";
const NOT_SLOWER: &str = "as-fast-as-pytorch";

/// What the sentences quote.
#[derive(Default, Serialize)]
struct Quoted {
    gpu: bool,
    /// Whether sums over NCCL, or over Gloo were measured on the main machine.
    nccl: bool,
    gloo: bool,

    source: String,
    sizes: Option<Sizes>,
    processes: Option<Processes>,
    backends: Option<Backends>,
    /// Our time over PyTorch's, over all sums.
    over_c10d: Option<Range>,
    /// Where it is largest.
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
    let of =
        |backend| -> Vec<Sum> { cases.iter().filter_map(Sum::of).filter(|sum| sum.backend() == backend).collect() };
    // A GPU's answer is NCCL's; a CPU has no other back end than Gloo.
    let (fast, slow) = (if main.is_gpu() { of(Backend::Nccl) } else { Vec::new() }, of(Backend::Gloo));
    let judged = if fast.is_empty() { &slow } else { &fast };
    let has = |backend| records.gpu().is_some() && cases.iter().any(|case| case.params.backend == backend);
    let ratios: Vec<Quantity> = fast.iter().chain(&slow).map(Sum::over_c10d).collect();
    let worst = fast.iter().chain(&slow).max_by(|a, b| a.over_c10d().value().total_cmp(&b.over_c10d().value()));
    let quoted = Quoted {
        gpu: records.gpu().is_some(),
        nccl: !fast.is_empty(),
        gloo: !slow.is_empty(),

        source: main.source(),
        sizes: sizes(judged)?,
        processes: processes(judged)?,
        backends: backends(&fast, &slow),
        over_c10d: Range::of(&ratios),
        worst_at: worst.map(Sum::place).unwrap_or_default(),
    };
    let mut answer = Answer::new(&quoted)?;
    claims(&mut answer, &quoted)?;
    if has(Backend::Nccl) {
        answer.table("sums-gpu-nccl", table(main, &cases, Backend::Nccl))?;
    }
    if has(Backend::Gloo) {
        answer.table("sums-gpu-gloo", table(main, &cases, Backend::Gloo))?;
    }
    if let Some(cpu) = records.cpu() {
        answer.table("sums-cpu-gloo", table(cpu, &cpu.cases::<AllReduce>()?, Backend::Gloo))?;
    }
    if quoted.over_c10d.is_some() {
        answer.figure("bandwidth", bandwidth(&fast, &slow))?;
    }
    Ok(answer)
}

fn claims(answer: &mut Answer, quoted: &Quoted) -> Result<()> {
    if let Some(Sizes { gain, .. }) = &quoted.sizes {
        answer.claim(Claim::above(SMALL, "bandwidth of the largest sum over the smallest's", gain, 1.5))?;
    }
    if let Some(Processes { busbw, .. }) = &quoted.processes {
        answer.claim(Claim::above(HOLDS, "busbw over that of 2 processes", busbw, 0.8))?;
    }
    if let Some(Backends { ratio: Some(factor), .. }) = &quoted.backends {
        answer.claim(Claim::above(FASTER, "Gloo's time over NCCL's", factor, 1.0))?;
    }
    if let Some(Range { high, .. }) = &quoted.over_c10d {
        let claim = Claim::new(NOT_SLOWER, high.value() <= 1.1);
        answer.claim(claim.operand("largest time over PyTorch's", high).operand_text("wanted", "at most 1.1"))?;
    }
    Ok(())
}

/// A case that was measured.
struct Sum<'a> {
    case: &'a SumCase,
    row: &'a Row,
}

impl<'a> Sum<'a> {
    fn of(case: &'a SumCase) -> Option<Self> {
        Some(Self { case, row: case.row()? })
    }

    fn backend(&self) -> Backend {
        self.case.params.backend
    }

    fn time(&self) -> Quantity {
        self.case.median(&self.row.ours.last_rank)
    }

    /// Bytes of one rank over the time.
    fn algbw(&self) -> Quantity {
        self.case.quantity(self.row.bytes as f64 / self.time().value(), Unit::BytesPerSecond)
    }

    fn busbw(&self) -> Quantity {
        self.case.quantity(self.row.bus_factor * self.row.bytes as f64 / self.time().value(), Unit::BytesPerSecond)
    }

    fn over_c10d(&self) -> Quantity {
        let theirs = stats::median(&self.row.c10d.last_rank.samples);
        self.case.quantity(self.time().value() / theirs, Unit::One)
    }

    /// "1,000 MB over gloo on 2 processes".
    fn place(&self) -> String {
        let Params { backend, world_size, size_mb, .. } = self.case.params;
        format!("{} MB over {} on {world_size} processes", grouped(size_mb as f64, 0), backend.name())
    }
}

/// Sums on two processes by size.
fn on_two<'a, 'b>(sums: &'b [Sum<'a>]) -> Vec<&'b Sum<'a>> {
    let mut pair: Vec<_> = sums.iter().filter(|sum| sum.case.params.world_size == 2).collect();
    pair.sort_by_key(|sum| sum.case.params.size_mb);
    pair
}

fn sizes(sums: &[Sum]) -> Result<Option<Sizes>> {
    let pair = on_two(sums);
    let [least, .., most] = pair[..] else { return Ok(None) };
    let gain = SameMachine::of(&most.algbw(), &least.algbw())?.ratio();
    Ok(Some(Sizes { least_mb: least.case.params.size_mb, most_mb: most.case.params.size_mb, gain }))
}

fn processes(sums: &[Sum]) -> Result<Option<Processes>> {
    let pair = on_two(sums);
    let [_, .., two] = pair[..] else { return Ok(None) };
    let same_size = sums.iter().filter(|sum| sum.case.params.size_mb == two.case.params.size_mb);
    let widest = same_size.max_by_key(|sum| sum.case.params.world_size);
    let Some(widest) = widest.filter(|sum| sum.case.params.world_size > 2) else { return Ok(None) };
    let time = SameMachine::of(&widest.time(), &two.time())?.ratio();
    let busbw = SameMachine::of(&widest.busbw(), &two.busbw())?.ratio();
    Ok(Some(Processes { most: widest.case.params.world_size, time, busbw }))
}

fn backends(fast: &[Sum], slow: &[Sum]) -> Option<Backends> {
    let fast = on_two(fast);
    let nccl = fast.last()?;
    let size_mb = nccl.case.params.size_mb;
    let gloo = *on_two(slow).iter().find(|sum| sum.case.params.size_mb == size_mb)?;
    let ratio = SameMachine::of(&gloo.time(), &nccl.time()).ok().map(SameMachine::ratio);
    Some(Backends { size_mb, nccl: nccl.time(), gloo: gloo.time(), ratio })
}

/// Rows are sizes, then process counts; the caption says what a case that could not be run lacked.
fn table(set: &RecordSet, cases: &[SumCase], backend: Backend) -> Table {
    let mut cases: Vec<&SumCase> = cases.iter().filter(|case| case.params.backend == backend).collect();
    cases.sort_by_key(|case| (case.params.size_mb, case.params.world_size));
    let mut table = Table::new(vec![
        Column::right("MB"),
        Column::right("processes"),
        Column::right("sums"),
        Column::number("median (ms)", Style::Ms, 3),
        Column::number("p99 (ms)", Style::Ms, 3),
        Column::number("between ranks", Style::Percent, 1),
        Column::number("algbw (GB/s)", Style::Gb, 2),
        Column::number("busbw (GB/s)", Style::Gb, 2),
        Column::number("PyTorch (ms)", Style::Ms, 3),
        Column::number("ours / PyTorch", Style::Fixed, 2),
    ]);
    for case in &cases {
        table.row(cells(case));
    }
    let between = match backend {
        Backend::Nccl => "NCCL between GPUs",
        Backend::Gloo => "Gloo between CPU processes",
    };
    table.captioned(format!(
        "All-reduce of float32 over {between}: medians of the timed sums, of which \"sums\" says how many each column has, \
         taken in rounds of turns, each after untimed ones; \"between ranks\" is the difference between the slowest and \
         the fastest rank's median, as a share of the median. {}.{}",
        set.source(),
        lacking(&cases)
    ))
}

fn cells(case: &SumCase) -> Vec<Cell> {
    let Params { world_size, size_mb, rounds, iterations, .. } = case.params;
    let [size, processes] = [grouped(size_mb as f64, 0), world_size.to_string()].map(Cell::text);
    let Some(sum) = Sum::of(case) else {
        let dashes = [const { Cell::Missing }; 6];
        return [vec![size, processes, Cell::Missing, case.outcome.label().into()], dashes.to_vec()].concat();
    };
    let RankTimes { last_rank, by_rank } = &sum.row.ours;
    let ranks: Vec<f64> = by_rank.iter().map(|rank| stats::median(&rank.samples)).collect();
    let spread = (stats::max(&ranks) - stats::min(&ranks)) / sum.time().value();
    vec![
        size,
        processes,
        (rounds * iterations).to_string().into(),
        sum.time().into(),
        case.statistic(last_rank, |samples| stats::quantile(samples, 0.99)).into(),
        case.quantity(spread, Unit::One).into(),
        sum.algbw().into(),
        sum.busbw().into(),
        case.median(&sum.row.c10d.last_rank).into(),
        sum.over_c10d().into(),
    ]
}

/// " Not measured: 6 processes at 1 MB (needs 6 GPUs, the machine has 4)."
fn lacking(cases: &[&SumCase]) -> String {
    let words = cases.iter().filter_map(|case| {
        let why = match &case.outcome {
            CaseOutcome::Measured(_) => return None,
            CaseOutcome::NotRun { needs, has, .. } => {
                format!("needs {}, the machine has {}", markdown(needs), markdown(has))
            }
            CaseOutcome::OutOfMemory { message, .. } => markdown(message),
            CaseOutcome::Failed { error } => markdown(error),
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
            let line = sums.iter().filter(|sum| sum.case.params.world_size == processes);
            let points: Vec<_> =
                line.map(|sum| (sum.case.params.size_mb as f64, Some(sum.busbw().value() / GB))).collect();
            if !points.is_empty() {
                series.push(Series::over_numbers(format!("{name}, {processes} processes"), points));
            }
        }
    }
    let mut plot = Plot::new(PlotKind::Line, "size (MB)", "busbw (GB/s)", series);
    (plot.log_x, plot.log_y) = (true, true);
    let alt = "Bus bandwidth of an all-reduce against the size of the tensor, a line for each back end and number of \
               processes.";
    Figure::plot(alt, plot)
}

#[cfg(test)]
mod tests;
