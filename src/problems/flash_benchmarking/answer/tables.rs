//! The tables of the grid, of errors, of other conditions and of the leaderboard's function.

use anyhow::Result;

use super::super::implementations::columns;
use super::super::measure::{ImplementationOutcome, Launch, Row};
use super::cells::{CellPass, FlashCase, only, shape, shown, title};
use crate::attention::implementations::Implementation;
use crate::bench::dtype::Dtype;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::timing::{Cache, FLUSHED_BYTES};
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Cell, Claim, Column, Quantity, RecordSet, SameMachine, Style, Table, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats::{Summary, quantile};
use crate::units::MIB;

/// How one implementation's pass ended: its median, or why there is none.
fn ending(entry: Option<&ImplementationOutcome>, pass: AttentionPass, median: Option<Quantity>) -> Cell {
    let Some((entry, ended)) = entry.and_then(|entry| Some((entry, entry.passes.get(&pass)?))) else {
        return Cell::Missing;
    };
    match ended {
        ColumnOutcome::Measured { .. } => median.into(),
        ColumnOutcome::OutOfMemory { .. } => match entry.predicted_bytes.get(&pass) {
            Some(bytes) => format!("OOM ({} GiB)", grouped(*bytes as f64 * Style::Gib.scale(), 0)).into(),
            None => "OOM".into(),
        },
        ColumnOutcome::NotRun { .. } => Cell::Missing,
        ColumnOutcome::Failed { .. } => "wrong".into(),
    }
}

fn pass_ending(pass: &CellPass, of: &Implementation) -> Cell {
    ending(pass.entry(of), pass.pass, pass.median(of))
}

/// "16 rounds up to $T = 4,096$ and 4 beyond", where the longest cells take fewer; a round has `each` of them.
pub fn by_rounds(passes: &[CellPass], each: usize, noun: &str) -> String {
    let (Some(first), Some(last)) = (passes.first(), passes.last()) else { return String::new() };
    let (short, long) = (first.cell.rounds, last.cell.rounds);
    let longest_short = passes.iter().filter(|p| p.cell.rounds == short).map(|p| p.cell.seq).max().unwrap_or_default();
    let beyond = match short == long {
        true => String::new(),
        false => format!(" up to $T = {}$ and {} beyond", grouped(longest_short as f64, 0), long * each),
    };
    format!("{} {noun}{beyond}", short * each)
}

/// One pass in one type: a column for every implementation that took part in any of these cells.
pub fn times(set: &RecordSet, passes: &[CellPass]) -> Option<Table> {
    let first = passes.first()?;
    let shown = shown(passes);
    let mut head = vec![Column::right("$d$"), Column::right("$T$")];
    head.extend(shown.iter().map(|e| Column::time(e.label)));
    let ratio = |name| Column::number(name, Style::Fixed, 2);
    head.extend([Column::text("best of PyTorch"), ratio("over plain"), ratio("over PyTorch")]);
    let mut table = Table::new(head);
    for pass in passes {
        let mut row = vec![pass.cell.d_model.to_string().into(), grouped(pass.cell.seq as f64, 0).into()];
        row.extend(shown.iter().map(|e| pass_ending(pass, e)));
        row.push(pass.best_of_pytorch().map_or(Cell::Missing, |(best, _)| best.label.into()));
        row.extend([pass.over_plain().into(), pass.over_pytorch().into()]);
        table.row(row);
    }
    let cell = first.cell;
    let calls = by_rounds(passes, cell.most_repeats, "calls");
    let cache = match cell.cache {
        Cache::Cold => format!("each after clearing {} MiB", grouped(FLUSHED_BYTES as f64 / MIB, 0)),
        Cache::Warm => "with warm caches".into(),
    };
    let on_cpu = match set.is_gpu() {
        true => "ours is.",
        false => {
            "ours is, here the tiled version. The cores are shared with others, so that a ratio may be of their work."
        }
    };
    Some(table.captioned(format!(
        "Causal attention, {}, {}, one head of width $d$ and length $T$: medians in ms of at most {calls}, {cache}. \
         The last two columns are how many times as fast {on_cpu} {}.",
        title(first.pass),
        cell.dtype.name(),
        set.source()
    )))
}

/// The largest error of each implementation over the grid, by type.
pub fn errors(grid: &[CellPass]) -> Table {
    let mut table = Table::new(vec![
        Column::text("column"),
        Column::number("largest error, bfloat16", Style::Sci, 1),
        Column::number("largest error, float32", Style::Sci, 1),
        Column::right("longest $T$"),
    ]);
    for implementation in columns() {
        let verified = grid.iter().filter_map(|pass| {
            let entry = pass.entry(&implementation)?;
            Some((pass.cell, pass.case.quantity(entry.errors?.largest(), Unit::One), entry.verified_seq?))
        });
        let verified: Vec<_> = verified.collect();
        let worst = |dtype: Dtype| {
            let errors = verified.iter().filter(|(cell, ..)| cell.dtype == dtype).map(|(_, error, _)| error.clone());
            Quantity::largest(&errors.collect::<Vec<_>>()).cloned().into()
        };
        if let Some(longest) = verified.iter().map(|(.., seq)| *seq).max() {
            let [narrow, wide] = [Dtype::Bfloat16, Dtype::Float32].map(worst);
            table.row(vec![implementation.label.into(), narrow, wide, grouped(longest as f64, 0).into()]);
        }
    }
    table
}

/// Passes under other conditions beside the same ones of the grid; none where the grid lacks them all.
pub fn conditions(others: &[CellPass], grid: &[CellPass]) -> Option<Table> {
    let same = |a: &CellPass, b: &CellPass| {
        (a.cell.dtype, a.cell.d_model, a.cell.seq, a.pass) == (b.cell.dtype, b.cell.d_model, b.cell.seq, b.pass)
    };
    let pairs = others.iter().filter_map(|other| Some((other, grid.iter().find(|base| same(other, base))?)));
    let pairs: Vec<_> = pairs.filter(|(other, _)| other.pass != AttentionPass::Both).collect();
    let shown = shown(others);
    let words = Column::text;
    let mut head = vec![words("type"), Column::right("$T$"), words("pass"), words("cache"), words("launch")];
    for e in &shown {
        head.extend([Column::time(e.label), Column::number("ratio", Style::Fixed, 2)]);
    }
    let mut table = Table::new(head);
    for (other, base) in &pairs {
        let cell = other.cell;
        let cache = if cell.cache == Cache::Cold { "cold" } else { "warm" };
        let launch = if cell.launch == Launch::Eager { "host" } else { "graph" };
        let length = grouped(cell.seq as f64, 0);
        let mut row: Vec<Cell> =
            vec![cell.dtype.name().into(), length.into(), title(other.pass).into(), cache.into(), launch.into()];
        for e in &shown {
            let ratio =
                other.median(e).zip(base.median(e)).and_then(|(a, b)| Some(SameMachine::of(&a, &b).ok()?.ratio()));
            row.extend([pass_ending(other, e), ratio.into()]);
        }
        table.row(row);
    }
    (!pairs.is_empty()).then_some(table)
}

/// The leaderboard's function, an implementation a row.
pub fn leaderboard(case: &FlashCase, row: &Row) -> Table {
    let ms = |head| Column::number(head, Style::Ms, 3);
    let mut table = Table::new(vec![
        Column::text("column"),
        ms("mean (ms)"),
        ms("median (ms)"),
        ms("least (ms)"),
        ms("99th percentile (ms)"),
        Column::right("calls"),
        Column::number("TFLOP/s by the median", Style::Tflops, 0),
    ]);
    for implementation in columns() {
        let Some(entry) = row.columns.get(implementation.name) else { continue };
        let ended = entry.passes.get(&AttentionPass::Summed);
        let numbers = ended.and_then(ColumnOutcome::measured).and_then(|samples| summary(case, samples));
        let why = || match ended {
            Some(ColumnOutcome::NotRun { .. }) => "not run".into(),
            _ => ending(Some(entry), AttentionPass::Summed, None),
        };
        let mut cells = vec![implementation.label.into()];
        cells.extend(numbers.unwrap_or_else(|| vec![why()]));
        cells.resize(table.columns.len(), "".into());
        table.row(cells);
    }
    table
}

fn summary(case: &FlashCase, samples: &Samples) -> Option<Vec<Cell>> {
    let Summary { n, mean, median, min, .. } = Summary::of(&samples.samples)?;
    let mut cells: Vec<Cell> = [mean, median, min, quantile(&samples.samples, 0.99)]
        .map(|time| case.quantity(time, Unit::Seconds).into())
        .to_vec();
    let rate = samples.work.as_ref().map(|work| case.quantity(work.flops / median, Unit::FlopsPerSecond));
    cells.extend([n.to_string().into(), rate.into()]);
    Some(cells)
}

/// Ours against the fastest of everything else.
pub struct Gains {
    /// A row for each type and pass.
    pub table: Table,
    /// Of all cells.
    pub least: Quantity,
    pub claims: [Claim; 2],
}

/// None where no cell has both.
pub fn gains(grid: &[CellPass]) -> Result<Option<Gains>> {
    let ratio = |head| Column::number(head, Style::Fixed, 2);
    let mut table = Table::new(vec![
        Column::text("type"),
        Column::text("pass"),
        Column::right("cells"),
        ratio("geometric mean"),
        ratio("least"),
        Column::text("at"),
        ratio("most"),
    ]);
    let (mut means, mut leasts) = (Vec::new(), Vec::new());
    for dtype in [Dtype::Bfloat16, Dtype::Float32] {
        for pass in [AttentionPass::Forward, AttentionPass::Backward] {
            let passes = only(grid, |p| p.cell.dtype == dtype && p.pass == pass && p.over_all().is_some());
            let ratios: Vec<Quantity> = passes.iter().filter_map(CellPass::over_all).collect();
            let least = passes.iter().zip(&ratios).min_by(|(_, a), (_, b)| a.value().total_cmp(&b.value()));
            let Some((at, least)) = least else { continue };
            let mean = Quantity::geometric_mean(&ratios)?;
            table.row(vec![
                dtype.name().into(),
                title(pass).into(),
                ratios.len().to_string().into(),
                (&mean).into(),
                least.into(),
                shape(at.cell).into(),
                Quantity::largest(&ratios).cloned().into(),
            ]);
            means.push(mean);
            leasts.push(least.clone());
        }
    }
    let (Some(mean), Some(least)) = (Quantity::smallest(&means), Quantity::smallest(&leasts)) else { return Ok(None) };
    let claims = [
        Claim::above("faster-by-geometric-mean", "least geometric mean", mean, 1.0),
        Claim::new("no-cell-slower", least.value() >= 1.0)
            .operand("least ratio", least)
            .operand_text("wanted", "at least 1"),
    ];
    Ok(Some(Gains { table, least: least.clone(), claims }))
}
