//! The tables of the answer: a line for each case, whatever came of it.

use anyhow::Result;

use super::super::measure::accounting_of;
use super::{AttentionCase, Ran, length, memory};
use crate::harness::answer::format::print;
use crate::harness::answer::{CaseOutcome, Cell, Column, Quantity, RecordSet, Style, Table};
use crate::harness::samples::Samples;
use crate::harness::stats::Summary;

/// Times and memory of plain attention; of a case that ran out of memory, which pass did and what it needs.
pub(super) fn times(set: &RecordSet, cases: &[&AttentionCase]) -> Result<Table> {
    let ms = |head: &str| Column::number(head, Style::Ms, 2);
    let mib = |head: &str| Column::number(head, Style::Mib, 1);
    let mut table = Table::new(vec![
        Column::right("$d$"),
        Column::right("$T$"),
        ms("forward (ms)"),
        ms("std (ms)"),
        ms("backward (ms)"),
        ms("std (ms)"),
        mib("before backward (MiB)"),
        mib("backward peak (MiB)"),
    ]);
    for &case in cases {
        let cells: [Cell; 6] = match &case.outcome {
            CaseOutcome::Measured(row) => {
                let ran = Ran { case, row };
                [
                    ran.forward().into(),
                    deviation(case, &row.forward).into(),
                    ran.backward().into(),
                    deviation(case, &row.backward).into(),
                    ran.before_backward().into(),
                    ran.bytes(row.backward_peak_bytes).into(),
                ]
            }
            CaseOutcome::OutOfMemory { .. } => {
                let needs = accounting_of(&case.params, set.profile());
                let passes = if memory::forward_fits(set, &needs)? { ["ran", "OOM"] } else { ["OOM", ""] };
                let peak = print(needs.backward_peak_bytes as f64, Style::Gib, 1);
                let [forward, backward] = passes.map(Cell::from);
                [forward, "".into(), backward, "".into(), "".into(), format!("needs {peak} GiB").into()]
            }
            outcome => std::array::from_fn(|_| outcome.label().into()),
        };
        table.row(shape(case).into_iter().chain(cells).collect());
    }
    Ok(table)
}

/// The other implementations.
pub(super) fn implementations(cases: &[&AttentionCase]) -> Table {
    let ms = |head: &str| Column::number(head, Style::Ms, 2);
    let mut table = Table::new(vec![
        Column::text("implementation"),
        Column::right("$d$"),
        Column::right("$T$"),
        ms("forward (ms)"),
        ms("backward (ms)"),
        Column::number("left by forward (MiB)", Style::Mib, 2),
        Column::number("backward peak (MiB)", Style::Mib, 1),
    ]);
    for &case in cases {
        let cells: [Cell; 4] = match case.row() {
            Some(row) => {
                let ran = Ran { case, row };
                let peak = ran.bytes(row.backward_peak_bytes);
                [ran.forward(), ran.backward(), ran.saved(), peak].map(Cell::from)
            }
            None => std::array::from_fn(|_| case.outcome.label().into()),
        };
        let name = Cell::from(case.params.implementation.name());
        table.row([name].into_iter().chain(shape(case)).chain(cells).collect());
    }
    table
}

fn shape(case: &AttentionCase) -> [Cell; 2] {
    [case.params.d_model.to_string(), length(case.params.seq)].map(Cell::from)
}

/// None for a single sample.
fn deviation(case: &AttentionCase, samples: &Samples) -> Option<Quantity> {
    let std = Summary::of(&samples.samples)?.std?;
    Some(case.quantity(std, samples.unit.into()))
}
