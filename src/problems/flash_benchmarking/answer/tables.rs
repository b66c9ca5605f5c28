//! The tables of the grid, of tile sizes, of errors and of the leaderboard's function.

use anyhow::Result;

use super::super::implementations::columns;
use super::super::measure::{ImplementationOutcome, Timings};
use super::cells::{CellPass, FlashCase, PASSES, only, shown, title};
use crate::attention::flash::tiles::Tiles;
use crate::attention::implementations::{Group, Implementation, by_name};
use crate::bench::dtype::Dtype;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::{self, grouped};
use crate::harness::answer::{Cell, Column, Emphasis, Quantity, RecordSet, Style, Table, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats::Summary;

/// The widths and lengths of the table that answers the handout; [`times`] has all.
const ANSWERED: ([i64; 4], [i64; 3]) = ([16, 32, 64, 128], [1024, 16_384, 65_536]);

/// Why one implementation's pass has no median.
fn ending(of: &Implementation, entry: Option<&ImplementationOutcome>, pass: AttentionPass) -> Cell {
    let Some((entry, ended)) = entry.and_then(|entry| Some((entry, entry.passes.get(&pass)?))) else {
        return Cell::Missing;
    };
    match ended {
        ColumnOutcome::OutOfMemory { .. } => match entry.predicted_bytes.get(&pass) {
            Some(bytes) => format!("OOM ({} GiB)", grouped(*bytes as f64 * Style::Gib.scale(), 0)).into(),
            None => "OOM".into(),
        },
        ColumnOutcome::Measured { .. } | ColumnOutcome::NotRun { .. } => Cell::Missing,
        // It may never have been called; the text beside the table has the reason.
        ColumnOutcome::Failed { .. } if of.group == Group::Subject => "not timed".into(),
        ColumnOutcome::Failed { .. } => "wrong".into(),
    }
}

/// The median, marked where it is unstable, or why there is none.
pub fn time(pass: &CellPass, of: &Implementation) -> Cell {
    emphasized(pass, of, false)
}

fn emphasized(pass: &CellPass, of: &Implementation, bold: bool) -> Cell {
    let unstable = pass.turns(of).is_some_and(|turns| !turns.is_stable());
    match pass.median(of) {
        Some(median) => Cell::Number(median, Emphasis { bold, unstable }),
        None => ending(of, pass.entry(of), pass.pass),
    }
}

/// The handout's table: plain attention beside ours, pass by pass, at some of its lengths in bfloat16 on the machine `on`.
/// `None` without a cell.
pub fn answered(grid: &[CellPass], on: &str) -> Result<Option<Table>> {
    let (plain, ours) = (by_name("naive")?, by_name("flash")?);
    let (widths, lengths) = ANSWERED;
    let mut head = vec![Column::right("$d$"), Column::right("$T$")];
    for pass in ["forward", "backward", "both"] {
        head.extend(["plain", "ours"].map(|name| Column::time(format!("{pass}, {name} (ms)"))));
    }
    let mut table = Table::new(head);
    for (d, seq) in widths.into_iter().flat_map(|d| lengths.map(|seq| (d, seq))) {
        let cells = only(grid, |p| (p.cell.dtype, p.cell.d_model, p.cell.seq) == (Dtype::Bfloat16, d, seq));
        let times = cells.iter().flat_map(|pass| [time(pass, plain), time(pass, ours)]);
        let row: Vec<Cell> = [d.to_string().into(), grouped(seq as f64, 0).into()].into_iter().chain(times).collect();
        if row.len() == table.columns.len() {
            table.row(row);
        }
    }
    let caption = format!(
        "Plain attention and ours on one {on}: bfloat16, causal, batch size 1; medians. †: unstable, the turns spread \
         beyond 5%. All cells: appendix B."
    );
    Ok((!table.rows.is_empty()).then(|| table.captioned(caption)))
}

/// All passes of these cells, with a column for every implementation that took part; the least median of a row is bold.
/// `group` names what the passes of a block of rows have in common, `of` what all have.
pub fn times(cells: &[CellPass], group: impl Fn(&CellPass) -> String, of: &str) -> Option<Table> {
    let shown = shown(cells);
    let head = [Column::text("pass"), Column::right("$T$")].into_iter();
    let mut table = Table::new(head.chain(shown.iter().map(|e| Column::time(format!("{} (ms)", e.label)))).collect());
    let mut sorted: Vec<&CellPass> = cells.iter().collect();
    sorted.sort_by_key(|p| (PASSES.iter().position(|pass| *pass == p.pass), p.cell.d_model, group(p), p.cell.seq));
    for pass in sorted {
        // As printed: two that print alike are both bold.
        let printed = |e: &Implementation| Some(format::time(pass.median(e)?.value()));
        let medians = shown.iter().filter_map(|e| pass.median(e));
        let least = Quantity::smallest(medians).map(|least| format::time(least.value()));
        let is_least = |e: &Implementation| least.is_some() && printed(e) == least;
        let mut row =
            vec![format!("{}, {}", title(pass.pass), group(pass)).into(), grouped(pass.cell.seq as f64, 0).into()];
        row.extend(shown.iter().map(|e| emphasized(pass, e, is_least(e))));
        table.row(row);
    }
    let caption = format!(
        "Causal attention, one head, {of}; medians. Bold: the least of a row. †: unstable, the turns spread beyond 5%."
    );
    (!table.rows.is_empty()).then(|| table.captioned(caption))
}

/// The tiles that Hopper's kernels take in the grid; neighbouring lengths with equal tiles share a row.
pub struct TileRow {
    pub dtype: Dtype,
    pub d: i64,
    pub lengths: [i64; 2],
    pub tiles: Tiles,
}

/// `None` where the records are of another GPU than Hopper.
pub fn tile_rows(set: &RecordSet, grid: &[CellPass]) -> Result<Option<Vec<TileRow>>> {
    let mut gpus = set.runs().into_iter().flat_map(|run| &run.machine.gpus);
    if !gpus.all(|gpu| gpu.compute_capability == "9.0") {
        return Ok(None);
    }
    let mut cells = only(grid, |p| p.pass == AttentionPass::Forward);
    cells.sort_by_key(|p| (p.cell.dtype == Dtype::Float32, p.cell.d_model, p.cell.seq));
    let mut rows: Vec<TileRow> = Vec::new();
    for cell in cells.iter().map(|p| p.cell) {
        let heads = u32::try_from(cell.batch)?;
        let tiles = Tiles::on_hopper(cell.dtype.kind(), cell.d_model, u32::try_from(cell.seq)?, heads);
        let tiles = tiles.map_err(anyhow::Error::msg)?;
        match rows.last_mut() {
            Some(last) if (last.dtype, last.d, &last.tiles) == (cell.dtype, cell.d_model, &tiles) => {
                last.lengths[1] = cell.seq;
            }
            _ => rows.push(TileRow { dtype: cell.dtype, d: cell.d_model, lengths: [cell.seq; 2], tiles }),
        }
    }
    Ok((!rows.is_empty()).then_some(rows))
}

pub fn tiles(rows: &[TileRow]) -> Table {
    let size = |[a, b]: [u32; 2]| format!("{a} × {b}");
    Table::of(rows)
        .text("type and width", |row| format!("{}, d = {}", row.dtype.name(), row.d))
        .right("$T$", |row| format::range(row.lengths[0] as f64, row.lengths[1] as f64, Style::Grouped, 0))
        .right("forward (queries × keys)", |row| size(row.tiles.forward))
        .right("dK and dV (keys × queries)", |row| size(row.tiles.key_gradients))
        .right("dQ (queries × keys)", |row| row.tiles.query_gradients.map_or("with dK and dV".into(), size))
        .captioned(
            "Tiles that our kernels choose on Hopper for one causal head of width $d$ and length $T$. The second number is a \
             step of the tile's loop.",
        )
}

/// The largest error of each implementation over the grid, by type.
pub fn errors(grid: &[CellPass], on: &str) -> Option<Table> {
    let mut table = Table::new(vec![
        Column::text("implementation"),
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
    let caption = format!(
        "The largest error of an implementation in any cell of the grid on {on}, over $O$, $dQ$, $dK$ and $dV$, as a share of \
         the norm."
    );
    (!table.rows.is_empty()).then(|| table.captioned(caption))
}

/// The leaderboard's function, an implementation a row.
pub fn leaderboard(case: &FlashCase, timings: &Timings, on: &str) -> Table {
    let mut table = Table::new(vec![
        Column::text("implementation"),
        Column::time("mean (ms)"),
        Column::time("median (ms)"),
        Column::time("least (ms)"),
        Column::right("calls"),
        Column::number("TFLOP/s by the median", Style::Tflops, 0),
    ]);
    for implementation in columns() {
        let Some(entry) = timings.columns.get(implementation.name) else { continue };
        let ended = entry.passes.get(&AttentionPass::Summed);
        if matches!(ended, None | Some(ColumnOutcome::NotRun { .. })) {
            continue;
        }
        let numbers = ended.and_then(ColumnOutcome::measured).and_then(|samples| summary(case, samples));
        let mut cells = vec![implementation.label.into()];
        cells.extend(numbers.unwrap_or_else(|| vec![ending(&implementation, Some(entry), AttentionPass::Summed)]));
        cells.resize(table.columns.len(), "".into());
        table.row(cells);
    }
    table.captioned(format!("The leaderboard's function on {on}, each implementation without interruption."))
}

fn summary(case: &FlashCase, samples: &Samples) -> Option<Vec<Cell>> {
    let Summary { n, mean, median, min, .. } = Summary::of(&samples.samples)?;
    let mut cells: Vec<Cell> = [mean, median, min].map(|time| case.quantity(time, Unit::Seconds).into()).to_vec();
    let rate = samples.work.as_ref().map(|work| case.quantity(work.flops / median, Unit::FlopsPerSecond));
    cells.extend([grouped(n as f64, 0).into(), rate.into()]);
    Some(cells)
}
