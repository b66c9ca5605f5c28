//! The tables and the figure of the all-reduces, and what their captions say.

use super::super::measure::Params;
use super::sum::{Sum, SumCase};
use crate::bench::nvlink::NVLINK;
use crate::collective::Backend;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{self, distinct, grouped, markdown, time};
use crate::harness::answer::machines::machine_name;
use crate::harness::answer::turns::STABLE;
use crate::harness::answer::{CaseOutcome, Column, Range, Style, Table};
use crate::harness::record::Profile;
use crate::units::GB;

/// The machines of `cases`. Sums over Gloo ran on the processor.
fn machines<'a>(cases: impl IntoIterator<Item = &'a SumCase>) -> String {
    let name = |case: &SumCase| {
        let profile = if case.params.backend == Backend::Nccl { Profile::Gpu } else { Profile::Cpu };
        markdown(&machine_name(case.id.machine(), profile))
    };
    distinct(cases.into_iter().map(name)).join("; ")
}

/// Each reason once.
pub fn not_run(cases: &[SumCase]) -> Vec<String> {
    let words = cases.iter().filter_map(|case| match (&case.params, &case.outcome) {
        (Params { backend: Backend::Nccl, world_size, .. }, CaseOutcome::NotRun { has, .. }) => Some(format!(
            "NCCL was not run with {world_size} processes: each needs a GPU, and the machine has {}.",
            markdown(has)
        )),
        _ => None,
    });
    distinct(words)
}

/// Rows are sizes, then numbers of processes.
pub fn table(cases: &[SumCase], backend: Backend) -> Table {
    let mut cases: Vec<&SumCase> = cases.iter().filter(|case| case.params.backend == backend).collect();
    cases.sort_by_key(|case| (case.params.size_mb, case.params.world_size));
    let (name, digits) = if backend == Backend::Nccl { ("NCCL", 0) } else { ("Gloo", 2) };
    let measured = |case: &&SumCase| case.row().is_some();
    let none = !cases.iter().any(measured);
    let calls = |case: &SumCase| (case.params.rounds * case.params.iterations).to_string();
    let counts = distinct(cases.iter().copied().filter(measured).map(calls));
    let mut table = Table::of(cases.iter().map(|case| (*case, Sum::of(case))))
        .right("MB", |(case, _)| grouped(case.params.size_mb as f64, 0))
        .right("processes", |(case, _)| case.params.world_size.to_string());
    if counts.len() > 1 {
        table = table.right("calls", |(case, sum)| sum.as_ref().map(|_| calls(case)));
    }
    let count = if counts.len() == 1 { &counts[0] } else { "all" };
    table
        .column(Column::time("time (ms)"), |(case, sum)| match sum {
            Some(sum) => sum.time.cell(time),
            None => case.outcome.label().into(),
        })
        .number("busbw (GB/s)", Style::Gb, digits, |(_, sum)| {
            sum.as_ref().map(|sum| sum.busbw.cell(|rate| format::print(rate, Style::Gb, digits)))
        })
        .column(Column::time("PyTorch (ms)"), |(_, sum)| sum.as_ref().map(|sum| sum.pytorch.cell(time)))
        .right("ours / PyTorch", |(_, sum)| {
            Some(sum.as_ref()?.over_pytorch.range.text(Style::Fixed, 2))
        })
        .captioned(format!(
            "All-reduce of float32 over {name} ({}): medians of {count} calls, or the lowest and the highest median of a turn \
             where these differ by over {}. Ratios are of paired turns.",
            machines(cases.iter().copied().filter(|case| none || measured(case))),
            format::print(STABLE - 1.0, Style::Percent, 0)
        ))
}

/// A line for each back end and number of processes, with the ranges of turns, and one for the link.
pub fn bandwidth(fast: &[Sum], slow: &[Sum]) -> Figure {
    let mut series = Vec::new();
    for (name, sums) in [("NCCL", fast), ("Gloo", slow)] {
        for processes in distinct(sums.iter().map(|sum| sum.params.world_size)) {
            let mut line: Vec<&Sum> = sums.iter().filter(|sum| sum.params.world_size == processes).collect();
            line.sort_by_key(|sum| sum.params.size_mb);
            let points = line.iter().map(|sum| (sum.params.size_mb as f64, Some(sum.busbw.all.value() / GB)));
            let ends = |Range { low, high }: &Range| [low.value() / GB, high.value() / GB];
            let ranges = line.iter().map(|sum| Some(ends(&sum.busbw.range)));
            series.push(Series::over_numbers(format!("{name}, {processes} processes"), points).ranged(ranges));
        }
    }
    let names: Vec<_> = series.iter().map(|series| series.name.clone()).collect();
    let plot = Plot::new(PlotKind::Line, "size (MB)", "bus bandwidth (GB/s)", series);
    let mut plot = Plot { log_x: true, log_y: true, ..plot };
    let places = [("NCCL connects GPUs", fast), ("Gloo connects processes", slow)];
    let places = places.iter().filter(|(_, sums)| !sums.is_empty());
    let places = places.map(|(what, sums)| format!("{what} ({})", machines(sums.iter().map(|sum| sum.case))));
    let places = places.collect::<Vec<_>>().join("; ");
    let mut caption = format!("Bus bandwidth of float32 all-reduces, with the range over turns. {places}.");
    if fast.iter().any(Sum::has_nvlink) {
        plot = plot.reference("NVLink", NVLINK / GB);
        caption += &format!(" NVLink carries {} GB/s per GPU and direction (data sheet).", NVLINK / GB);
    }
    let alt = format!("Bus bandwidth of an all-reduce against the size of the tensor: {}.", names.join("; "));
    Figure::plot(alt, plot).captioned(caption)
}
