//! Whole steps at their best: ours beside the fastest of PyTorch's modes, and what each column costs.

use serde::Serialize;

use super::super::best::{Compared, Mode, Params, Row, Step};
use super::super::measure;
use super::cases::{BestCase, ColumnOf};
use super::times;
use crate::bench::energy::Energy;
use crate::bench::interleave::ColumnOutcome as Timed;
use crate::harness::answer::format::{distinct, grouped, listed, markdown, time};
use crate::harness::answer::{
    Cell, Claim, Emphasis, Quantity, Range, RecordSet, Records, Style, Table, TableBuilder, Turns, Unit,
};
use crate::harness::samples::Samples;
use crate::harness::stats;

/// A mode of PyTorch, and ours in turns with it.
struct Column {
    mode: Mode,
    head: &'static str,
    compared: fn(&Row) -> &Compared,
    python: ColumnOf<Row, Step>,
    rust: ColumnOf<Row, Step>,
}

const COLUMNS: [Column; 3] = [
    Column {
        mode: Mode::Default,
        head: "compile over SDPA (ms)",
        compared: |row| &row.default,
        python: |row| &row.default.python,
        rust: |row| &row.default.rust,
    },
    Column {
        mode: Mode::ReduceOverhead,
        head: "reduce-overhead (ms)",
        compared: |row| &row.reduce_overhead,
        python: |row| &row.reduce_overhead.python,
        rust: |row| &row.reduce_overhead.rust,
    },
    Column {
        mode: Mode::MaxAutotune,
        head: "max-autotune (ms)",
        compared: |row| &row.max_autotune,
        python: |row| &row.max_autotune.python,
        rust: |row| &row.max_autotune.rust,
    },
];

/// What the sentence quotes.
#[derive(Serialize)]
pub struct Best {
    /// Of our step: "captured".
    execution: String,
    /// Ours over the fastest mode of PyTorch: "1.41 to 2.38".
    ratio: String,
    /// The cases in which ours takes less time, of those with both.
    faster: usize,
    of: usize,
    #[serde(skip)]
    pub claim: Claim,
}

impl Best {
    /// None where no case has both sides.
    pub fn of(cases: &[BestCase]) -> Option<Self> {
        let ratios: Vec<Quantity> = cases.iter().filter_map(|case| Some(case.against_fastest()?.0)).collect();
        let range = Range::of(&ratios)?;
        let compared = cases.iter().filter(|case| case.against_fastest().is_some());
        Some(Self {
            execution: listed(&distinct(compared.map(|case| case.params.execution.name()))),
            ratio: times(&range),
            faster: ratios.iter().filter(|ratio| ratio.value() < 1.0).count(),
            of: ratios.len(),
            claim: Claim::below("our-step-is-faster", "largest ours / fastest PyTorch", &range.high, 1.0),
        })
    }
}

impl BestCase<'_> {
    fn step(&self, column: ColumnOf<Row, Step>) -> Option<Turns> {
        self.turns(column, |step| &step.step)
    }

    /// The mode that takes the least time.
    fn fastest(&self) -> Option<&'static Column> {
        let seconds = |column: &&Column| self.step(column.python).map(|turns| turns.median_or_least());
        let measured = COLUMNS.iter().filter(|column| seconds(column).is_some());
        measured.min_by(|a, b| seconds(a).partial_cmp(&seconds(b)).unwrap_or(std::cmp::Ordering::Equal))
    }

    /// Ours over the fastest mode, both of the turns that they took together, and whether all those turns agree.
    fn against_fastest(&self) -> Option<(Quantity, bool)> {
        let column = self.fastest()?;
        let [ours, theirs] = [self.step(column.rust)?, self.step(column.python)?];
        let ratio = ours.median_or_least() / theirs.median_or_least();
        Some((self.case.quantity(ratio, Unit::One), ours.is_stable() && theirs.is_stable()))
    }

    /// "12.6", "12.4 †", or how the column or else the whole case ended.
    fn cell_of(&self, column: ColumnOf<Row, Step>) -> Cell {
        let ended = || self.row.map_or(self.case.outcome.label(), |row| column(row).label()).to_string();
        let text = self.step(column).map(|turns| turns.marked(&time(turns.median_or_least())));
        Cell::text(text.unwrap_or_else(ended)).of_case(&self.case.id)
    }

    /// Ours in turns with the fastest mode, or else with the first.
    fn ours(&self) -> Cell {
        self.cell_of(self.fastest().unwrap_or(&COLUMNS[0]).rust)
    }

    fn ratio_cell(&self) -> Option<Cell> {
        let (ratio, stable) = self.against_fastest()?;
        Some(Cell::Number(ratio, Emphasis { bold: false, unstable: !stable }))
    }

    /// Why columns of this case have no time: "max-autotune did not compile within 120 s".
    fn reasons(&self) -> Vec<String> {
        let reason = |column: &Column| match (column.python)(self.row?) {
            Timed::NotRun { reason } | Timed::Failed { error: reason } => {
                Some(format!("`{}` {}", column.mode.name(), markdown(reason.lines().next().unwrap_or_default())))
            }
            _ => None,
        };
        COLUMNS.iter().filter_map(reason).collect()
    }
}

/// A line of the table: a case that is recorded, or one that is planned.
type Line<'a> = (&'a Params, Option<&'a BestCase<'a>>);

/// The planned cases that `set` does not hold.
pub fn unmeasured(records: &Records, set: &RecordSet) -> Vec<Params> {
    let planned = records.planned(set.profile()).filter(|(_, params)| set.file.case(params).is_none());
    let best = planned.filter_map(|(_, params)| match serde_json::from_value(params.clone()).ok()? {
        measure::Params::Best(params) => Some(params),
        _ => None,
    });
    best.collect()
}

/// None where no such case is recorded or planned.
pub fn table(cases: &[BestCase], unmeasured: &[Params], machine: &str) -> Option<Table> {
    let lines: Vec<Line> = cases
        .iter()
        .map(|case| (case.params, Some(case)))
        .chain(unmeasured.iter().map(|params| (params, None)))
        .collect();
    if lines.is_empty() {
        return None;
    }
    let mut builder = model(Table::of(lines), |(params, _)| params)
        .text("our step", |(params, _)| params.execution.name())
        .right("ours (ms)", |(_, case)| case.map(BestCase::ours));
    for column in &COLUMNS {
        builder = builder.right(column.head, |(_, case)| case.map(|case| case.cell_of(column.python)));
    }
    let table = builder.number("ratio", Style::Fixed, 2, |(_, case)| case.and_then(BestCase::ratio_cell));
    let reasons = distinct(cases.iter().flat_map(BestCase::reasons));
    let reasons = if reasons.is_empty() { String::new() } else { format!(" Without a time: {}.", reasons.join("; ")) };
    Some(table.captioned(format!(
        "Whole steps at their best: forward, backward and AdamW; {machine}. The ratio is ours over the fastest column of \
         PyTorch, in the turns that they took together. Where the turns of a time spread above 5 % (†), the median of \
         the fastest turn stands for all.{reasons}"
    )))
}

fn model<T>(builder: TableBuilder<T>, params: impl Fn(&T) -> &Params) -> TableBuilder<T> {
    builder
        .text("size", |line| params(line).size.size().name)
        .right("context", |line| grouped(params(line).context_length as f64, 0))
        .right("batch", |line| params(line).batch_size.to_string())
        .text("dtype", |line| params(line).dtype.name())
}

/// What one column cost.
struct Cost<'a> {
    case: &'a BestCase<'a>,
    name: String,
    seconds: f64,
    peak: Option<&'a Samples>,
    energy: Option<&'a Energy>,
}

/// None where nothing was measured.
pub fn costs(cases: &[BestCase], machine: &str) -> Option<Table> {
    let costs: Vec<Cost> = cases.iter().flat_map(costs_of).collect();
    if costs.is_empty() {
        return None;
    }
    let compared = cases.iter().filter_map(|case| case.row).flat_map(|row| COLUMNS.iter().map(|c| (c.compared)(row)));
    let skipped = compared.filter_map(|compared| compared.compiled.as_ref()).filter(|c| c.graphs_skipped > 0).count();
    let skipped =
        if skipped > 0 { format!(" Columns that went without CUDA graphs: {skipped}.") } else { String::new() };
    let median = |cost: &Cost, samples: Option<&Samples>| Some(cost.case.case.median(samples?));
    let table = model(Table::of(costs), |cost| cost.case.params)
        .text("column", |cost| cost.name.clone())
        .number("preparation (s)", Style::Sec, 1, |cost| cost.case.case.quantity(cost.seconds, Unit::Seconds))
        .number("peak (GiB)", Style::Gib, 1, |cost| median(cost, cost.peak))
        .number("energy (J)", Style::Fixed, 1, |cost| median(cost, cost.energy.map(|energy| &energy.joules)));
    Some(table.captioned(format!(
        "What the columns cost: the first calls, which compile or capture; the most that the process's allocator held; the \
         device's energy for one of many steps back to back; {machine}.{skipped}"
    )))
}

fn costs_of<'a>(case: &'a BestCase) -> Vec<Cost<'a>> {
    let Some(row) = case.row else { return Vec::new() };
    let ours = row.ours.as_ref().map(|ours| Cost {
        case,
        name: format!("ours, {}", case.params.execution.name()),
        seconds: stats::median(&ours.preparation.samples),
        peak: ours.peak.as_ref(),
        energy: ours.energy.as_ref(),
    });
    let compiled = COLUMNS.iter().filter_map(|column| {
        let compiled = (column.compared)(row).compiled.as_ref()?;
        Some(Cost {
            case,
            name: format!("`{}`", column.mode.name()),
            seconds: case.first_calls(compiled.compile.as_ref()?)?.value(),
            peak: compiled.peak.as_ref(),
            energy: compiled.energy.as_ref(),
        })
    });
    ours.into_iter().chain(compiled).collect()
}

#[cfg(test)]
mod tests;
