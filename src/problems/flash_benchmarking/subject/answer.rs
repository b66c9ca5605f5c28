//! Their functions beside plain attention, ours and PyTorch's operators: every cell, and both passes against length.

use std::collections::BTreeSet;

use anyhow::Result;
use serde::Serialize;

use super::super::answer::cells::{self, CellPass, only, passes, shown};
use super::super::answer::figures::{X_LABEL, drawn, widths};
use super::super::answer::tables::times;
use super::super::implementations::THEIRS;
use super::super::measure::Params;
use super::super::verify::{TAIL, WHOLE};
use super::BesideOurs;
use crate::attention::implementations::{Group, Implementation};
use crate::bench::dtype::Dtype;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::work::AttentionPass::Both;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Role, Series, Tone};
use crate::harness::answer::format::{grouped, markdown};
use crate::harness::answer::{Answer, Audience, Quantity, Range, Records, SameRun, Style, Unit};
use crate::harness::stats::Summary;

#[derive(Serialize)]
struct Quoted {
    /// How each function compares that was timed.
    pytorch: Option<Timed>,
    triton: Option<Timed>,
    /// Why a function, or a cell of it, has no time.
    untimed: Vec<String>,
    /// The largest median of a message to their process.
    message: Option<Quantity>,
    whole: String,
    tail: i64,
}

/// One function of theirs, forward and backward together, over all cells.
#[derive(Serialize)]
struct Timed {
    cells: usize,
    of: usize,
    /// Its time over plain attention's, and over that of the fastest of all others.
    over_plain: Option<Range>,
    over_fastest: Option<Range>,
}

pub fn answer(records: &Records, _: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<BesideOurs>()?;
    let all = passes(&cases);
    let grid = cells::grid(&all);
    let both = only(&grid, |p| p.pass == Both);
    let messages = cases.iter().filter_map(|case| {
        let median = Summary::of(&case.row()?.timings()?.message.as_ref()?.samples)?.median;
        Some(case.quantity(median, Unit::Seconds))
    });
    let quoted = Quoted {
        pytorch: Timed::of(&THEIRS[0].0, &both),
        triton: Timed::of(&THEIRS[1].0, &both),
        untimed: untimed(&cases, &grid),
        message: Quantity::largest(messages.collect::<Vec<_>>()),
        whole: grouped(WHOLE as f64, 0),
        tail: TAIL,
    };
    let mut answer = Answer::of(main, &quoted)?;
    answer.is_untimed = !grid.iter().any(|pass| THEIRS.iter().any(|(theirs, _)| pass.median(theirs).is_some()));
    let on = main.machine()?;
    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
        let cells = only(&grid, |p| p.cell.dtype == dtype);
        let of = format!("{}, on {on}", dtype.name());
        let table = times(&cells, |p| format!("d = {}", p.cell.d_model), &of);
        table.map_or(Ok(()), |table| answer.table(format!("full-times-{}", dtype.name()), table))?;
        let table = times(&longest(&cells), |p| format!("d = {}", p.cell.d_model), &format!("{of}, the longest"));
        table.map_or(Ok(()), |table| answer.table(format!("times-{}", dtype.name()), table))?;
    }
    figure(&mut answer, &both, &on)?;
    Ok(answer)
}

/// The cells of the greatest length.
fn longest<'a>(cells: &[CellPass<'a>]) -> Vec<CellPass<'a>> {
    let most = cells.iter().map(|p| p.cell.seq).max();
    only(cells, |p| Some(p.cell.seq) == most)
}

impl Timed {
    fn of(theirs: &Implementation, both: &[CellPass]) -> Option<Self> {
        let over = |other: &dyn Fn(&CellPass) -> Option<Quantity>| {
            let ratio = |p: &CellPass| Some(SameRun::of(&p.median(theirs)?, &other(p)?).ok()?.ratio());
            Range::of(both.iter().filter_map(ratio).collect::<Vec<_>>())
        };
        let plain = |p: &CellPass| p.median(&shown(&[*p]).into_iter().find(|e| e.group == Group::Plain)?);
        let fastest = |p: &CellPass| {
            let others = shown(&[*p]).into_iter().filter(|e| e.group != Group::Subject);
            Quantity::smallest(others.filter_map(|e| p.median(&e)).collect::<Vec<_>>())
        };
        let cells = both.iter().filter(|p| p.median(theirs).is_some()).count();
        let (over_plain, over_fastest) = (over(&plain), over(&fastest));
        (cells > 0).then_some(Self { cells, of: both.len(), over_plain, over_fastest })
    }
}

/// Each reason once.
fn untimed(cases: &[cells::FlashCase], grid: &[CellPass]) -> Vec<String> {
    let mut words = BTreeSet::new();
    for case in cases.iter().filter(|case| matches!(case.params, Params::Cell(_)) && case.row().is_none()) {
        words.insert(format!("a cell: {}", markdown(case.outcome.reason())));
    }
    for ((theirs, _), pass) in THEIRS.iter().flat_map(|theirs| grid.iter().map(move |pass| (theirs, pass))) {
        let why = match pass.ended(theirs) {
            Some(ColumnOutcome::NotRun { reason: why } | ColumnOutcome::Failed { error: why }) => why,
            Some(ColumnOutcome::OutOfMemory { message, .. }) => message,
            Some(ColumnOutcome::Measured { .. }) | None => continue,
        };
        words.insert(format!("{} in {}: {}", theirs.label, pass.cell.dtype.name(), markdown(why)));
    }
    words.into_iter().collect()
}

/// Both passes against length, a panel for each type and width.
fn figure(answer: &mut Answer, both: &[CellPass], on: &str) -> Result<()> {
    let mut plots = Vec::new();
    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
        let of_dtype = only(both, |p| p.cell.dtype == dtype);
        for d in widths(&of_dtype) {
            let cells = only(&of_dtype, |p| p.cell.d_model == d);
            let line = |e: &Implementation| {
                let time = |p: &CellPass| Some(p.median(e)?.value() * Style::Ms.scale());
                let points: Vec<_> = cells.iter().map(|p| (p.cell.seq as f64, time(p))).collect();
                let series = Series::over_numbers(e.label, points);
                let theirs = THEIRS.iter().position(|(theirs, _)| theirs.name == e.name);
                theirs.map_or(series.clone(), |number| series.role(Role::Other(number), Tone::Full))
            };
            let series: Vec<Series> = drawn(&cells).iter().map(line).collect();
            let series: Vec<Series> = series.into_iter().filter(|s| s.points.iter().any(|p| p.1.is_some())).collect();
            if !series.is_empty() {
                let plot = Plot::new(PlotKind::Line, X_LABEL, "time (ms)", series);
                plots.push((format!("{}, d = {d}", dtype.name()), Plot { log_x: true, log_y: true, ..plot }));
            }
        }
    }
    if plots.is_empty() {
        return Ok(());
    }
    let alt = "Lines of time of causal attention, forward and backward, against sequence length: a panel for each type and \
               width, a line for each implementation.";
    let caption = format!("Forward and backward together, one causal head on {on}; medians.");
    answer.figure("times", Figure::small_multiples(alt, 2, plots).captioned(caption))
}

#[cfg(test)]
mod tests {
    use super::super::super::answer::tests::{Times, params, row};
    use super::super::super::implementations::columns;
    use super::*;
    use crate::harness::answer::made_up::MadeUp;

    #[test]
    fn on_a_gpu_both_functions_are_drawn_beside_the_others() {
        let names = THEIRS.iter().map(|(theirs, _)| theirs.name).chain(columns().into_iter().map(|e| e.name));
        let on_gpu: Vec<Times> = names
            .filter(|name| !["tiled", "flash_attention_4"].contains(name))
            .map(|name| (name, &[1e-3][..]))
            .collect();
        let cell = params("bfloat16", 64, 1024, 1, "eager");
        let records = MadeUp::gpu("x").measured("grid", &cell, &row(&on_gpu)).records();
        let answer = answer(&records, Audience::Ours).unwrap();
        assert!(!answer.is_untimed && answer.figures().contains_key("times"));
        let table = answer.tables()["full-times-bfloat16"].markdown();
        for words in ["theirs, PyTorch", "theirs, Triton", "portable", "ours"] {
            assert!(table.contains(words), "{words}: {table}");
        }
    }
}
