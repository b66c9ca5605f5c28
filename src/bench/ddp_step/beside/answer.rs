//! A subject's steps beside ours and PyTorch's: a table and a figure with a line for each implementation of each case.

use std::collections::BTreeSet;

use anyhow::Result;
use serde::Serialize;

use super::super::Params;
use super::super::tables::{StepSetting, TITLES};
use super::Row;
use crate::bench::all_reduce::RankTimes;
use crate::bench::interleave::ColumnOutcome;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Role, Series, Tone};
use crate::harness::answer::format::markdown;
use crate::harness::answer::{
    Answer, Case, Cell, Column, Emphasis, Quantity, Range, Records, SameRun, Style, Table, Unit,
};
use crate::harness::stats::Summary;

const THEIRS: &str = "theirs";
const SINGLE: &str = "no communication";

#[derive(Serialize)]
struct Quoted {
    /// Model, ranks and tokens.
    setting: Option<String>,
    /// Their step over the same one without communication, and over PyTorch's DDP.
    over_single: Option<Range>,
    over_pytorch: Option<Range>,
    /// Why a case has no time of theirs.
    untimed: Vec<String>,
    /// The largest median of a message, and the largest distance from the definition.
    message: Option<Quantity>,
    off: Option<Quantity>,
    /// Bytes of optimizer state on each rank, and of all parameters on one rank without sharding.
    state: Option<Range>,
    whole_state: Option<Quantity>,
}

type StepCase = Case<Params, Row>;

/// The answer of a problem; `label` names a case among the others.
pub fn answer(records: &Records, label: impl Fn(&Params) -> String) -> Result<Answer> {
    let main = records.main()?;
    let cases: Vec<StepCase> = main.cases_as()?;
    let over = |other: &str| {
        let ratio = |case: &StepCase| {
            let (theirs, other) = (median(case, THEIRS)?, median(case, other)?);
            Some(SameRun::of(&theirs, &other).ok()?.ratio())
        };
        Range::of(cases.iter().filter_map(ratio).collect::<Vec<_>>())
    };
    let measured = || cases.iter().filter_map(|case| Some((case, case.row()?.theirs.measured()?)));
    let messages = measured()
        .filter_map(|(case, theirs)| Some(case.quantity(Summary::of(&theirs.message.samples)?.median, Unit::Seconds)));
    let state = measured()
        .flat_map(|(case, theirs)| theirs.state_bytes.iter().map(|bytes| case.quantity(*bytes as f64, Unit::Bytes)));
    let quoted = Quoted {
        setting: cases.first().map(|case| StepSetting::of(&case.params).describe()),
        over_single: over(SINGLE),
        over_pytorch: over(PYTORCH),
        untimed: untimed(&cases, &label),
        message: Quantity::largest(messages.collect::<Vec<_>>()),
        off: Quantity::largest(measured().map(|(case, t)| case.quantity(t.off, Unit::One)).collect::<Vec<_>>()),
        state: Range::of(state.collect::<Vec<_>>()),
        // Two moments of float32 each.
        whole_state: measured()
            .next()
            .and_then(|(case, _)| Some(case.quantity(8.0 * case.row()?.parameters as f64, Unit::Bytes))),
    };
    let mut answer = Answer::of(main, &quoted)?;
    answer.is_untimed = measured().next().is_none();
    let on = main.machine()?;
    table(&mut answer, &cases, &label, &on)?;
    figure(&mut answer, &cases, &label, &on)?;
    Ok(answer)
}

const PYTORCH: &str = "PyTorch's DDP";

/// Every column of a measured case, in the order of the tables.
fn lines(row: &Row) -> Vec<(String, &RankTimes)> {
    let ours = TITLES.iter().filter_map(|(name, title)| Some((format!("ours, {title}"), row.ours.get(*name)?)));
    let mut lines = vec![(SINGLE.to_string(), &row.single)];
    lines.extend(ours);
    lines.push((PYTORCH.into(), &row.pytorch_ddp));
    lines.extend(row.theirs.measured().map(|theirs| (THEIRS.to_string(), &theirs.step)));
    lines
}

fn median(case: &StepCase, line: &str) -> Option<Quantity> {
    let lines = lines(case.row()?);
    let (_, times) = lines.into_iter().find(|(name, _)| name == line)?;
    Some(case.median(&times.last_rank))
}

fn untimed(cases: &[StepCase], label: &impl Fn(&Params) -> String) -> Vec<String> {
    let why = |case: &StepCase| match case.row().map(|row| &row.theirs) {
        None => Some(markdown(case.outcome.reason())),
        Some(ColumnOutcome::Failed { error: why } | ColumnOutcome::NotRun { reason: why }) => Some(markdown(why)),
        Some(ColumnOutcome::OutOfMemory { message, .. }) => Some(markdown(message)),
        Some(ColumnOutcome::Measured { .. }) => None,
    };
    let words = cases.iter().filter_map(|case| Some(format!("{}: {}", label(&case.params), why(case)?)));
    words.collect::<BTreeSet<_>>().into_iter().collect()
}

fn table(answer: &mut Answer, cases: &[StepCase], label: &impl Fn(&Params) -> String, on: &str) -> Result<()> {
    let mut table = Table::new(vec![
        Column::text("case"),
        Column::text("implementation"),
        Column::time("step (ms)"),
        Column::number("over no communication", Style::Fixed, 2),
    ]);
    for case in cases {
        let Some(row) = case.row() else { continue };
        for (name, times) in lines(row) {
            let step = case.median(&times.last_rank);
            let over = median(case, SINGLE).and_then(|single| Some(SameRun::of(&step, &single).ok()?.ratio()));
            let unstable = !times.turns(case.params.rounds).is_stable();
            let bold = name == THEIRS;
            let cell = Cell::Number(step, Emphasis { bold, unstable });
            table.row(vec![label(&case.params).into(), name.into(), cell, over.into()]);
        }
    }
    let caption =
        format!("Training steps on {on}; medians of the last rank's time. †: unstable, the turns spread beyond 5%.");
    if table.rows.is_empty() { Ok(()) } else { answer.table("steps", table.captioned(caption)) }
}

fn figure(answer: &mut Answer, cases: &[StepCase], label: &impl Fn(&Params) -> String, on: &str) -> Result<()> {
    let measured: Vec<(&StepCase, &Row)> = cases.iter().filter_map(|case| Some((case, case.row()?))).collect();
    let Some((_, first)) = measured.iter().find(|(_, row)| row.theirs.measured().is_some()) else { return Ok(()) };
    let names = lines(first).into_iter().map(|(name, _)| name);
    let series = names.enumerate().map(|(number, name)| {
        let point = |(case, _): &(&StepCase, &Row)| {
            (label(&case.params), median(case, &name).map(|step| step.value() * Style::Ms.scale()))
        };
        let (role, tone) = match name.as_str() {
            SINGLE => (Role::Plain, Tone::Full),
            PYTORCH => (Role::PyTorch, Tone::Full),
            THEIRS => (Role::Other(0), Tone::Full),
            // The first of ours follows the step without communication.
            _ => (Role::Ours, if number == 1 { Tone::Full } else { Tone::Light }),
        };
        Series::over_categories(name.clone(), measured.iter().map(point)).role(role, tone)
    });
    let plot = Plot::new(PlotKind::Bar, "case (setting)", "step (ms)", series.collect());
    let alt = "Bars of the time of a training step: a group for each setting, a bar for each implementation.";
    let caption = format!("Training steps on {on}; medians of the last rank's time.");
    answer.figure("steps", Figure::plot(alt, plot).captioned(caption))
}
