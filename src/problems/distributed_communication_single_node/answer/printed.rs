//! The tables and the figure of the all-reduces, and what their captions say.

use super::super::measure::Params;
use super::sum::{NVLINK, Sum, SumCase};
use crate::collective::Backend;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{self, distinct, grouped, listed, markdown, time};
use crate::harness::answer::records::machine_name;
use crate::harness::answer::{CaseOutcome, Column, Range, Style, Table};
use crate::harness::record::Profile;
use crate::harness::stats;
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
    let times = |low, high| format!("{} to {}", time(low), time(high));
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
            Some(sum) => sum.turns.cell(&sum.time, times),
            None => case.outcome.label().into(),
        })
        .number("busbw (GB/s)", Style::Gb, digits, |(_, sum)| sum.as_ref().map(|sum| sum.busbw_cell(digits)))
        .column(Column::time("PyTorch (ms)"), |(_, sum)| {
            sum.as_ref().map(|sum| sum.pytorch_turns.cell(&sum.pytorch, times))
        })
        .right("ours / PyTorch", |(_, sum)| {
            let Range { low, high } = sum.as_ref()?.over_pytorch.as_ref()?;
            Some(low.mark(&format::range(low.value(), high.value(), Style::Fixed, 2)))
        })
        .captioned(format!(
            "All-reduce of float32 over {name} ({}): medians of {count} calls, or the lowest and the highest median of a turn \
             where these differ by over {}. Ratios are of paired turns.",
            machines(cases.iter().copied().filter(|case| none || measured(case))),
            format::print(stats::MOST_SPREAD - 1.0, Style::Percent, 0)
        ))
}

/// A line for each back end and number of processes, and one for the link.
pub fn bandwidth(fast: &[Sum], slow: &[Sum], nvlink: bool) -> Figure {
    let mut series = Vec::new();
    for (name, sums) in [("NCCL", fast), ("Gloo", slow)] {
        for processes in distinct(sums.iter().map(|sum| sum.params.world_size)) {
            let line = sums.iter().filter(|sum| sum.params.world_size == processes);
            let points = line.map(|sum| (sum.params.size_mb as f64, Some(sum.rate(&sum.time).value() / GB)));
            series.push(Series::over_numbers(format!("{name}, {processes} processes"), points));
        }
    }
    if nvlink {
        let sizes = distinct(fast.iter().map(|sum| sum.params.size_mb));
        let points = sizes.into_iter().map(|size| (size as f64, Some(NVLINK / GB)));
        series.push(Series::over_numbers("NVLink, one direction", points));
    }
    let names: Vec<_> = series.iter().map(|series| series.name.clone()).collect();
    let plot = Plot::new(PlotKind::Line, "size (MB)", "bus bandwidth (GB/s)", series);
    let alt = format!("Bus bandwidth of an all-reduce against the size of the tensor: {}.", listed(&names));
    let places = [("NCCL connects GPUs", fast), ("Gloo connects processes", slow)];
    let places = places.iter().filter(|(_, sums)| !sums.is_empty());
    let places = places.map(|(what, sums)| format!("{what} ({})", machines(sums.iter().map(|sum| sum.case))));
    let places = places.collect::<Vec<_>>().join("; ");
    let link = format!(" NVLink carries {} GB/s per GPU and direction (data sheet).", NVLINK / GB);
    let link = if nvlink { link } else { String::new() };
    let caption = format!("Bus bandwidth of float32 all-reduces, medians of all calls. {places}.{link}");
    Figure::plot(alt, Plot { log_x: true, log_y: true, ..plot }).captioned(caption)
}
