//! The tables of the answer: lengths by widths, and a line for each case, whatever came of it.

use std::collections::BTreeSet;

use anyhow::Result;

use super::super::measure::{Row, accounting_of};
use super::{AttentionCase, Ran, length, memory, ran};
use crate::harness::answer::format::{NOTHING, print};
use crate::harness::answer::{CaseOutcome, Cell, Column, Quantity, Range, RecordSet, Style, Table, Turns};
use crate::harness::samples::Samples;
use crate::harness::stats::Summary;

/// Times and memory of plain attention, a line for each length; of what ran out of memory, which pass did.
pub(super) fn times(set: &RecordSet, plain: &[&AttentionCase]) -> Result<Table> {
    let lengths: BTreeSet<u32> = plain.iter().map(|case| case.params.seq).collect();
    let widths: BTreeSet<u32> = plain.iter().map(|case| case.params.d_model).collect();
    let mut table = Table::new(vec![Column::right("$T$")]);
    table.columns.extend(widths.iter().map(|d| Column::right(format!("$d = {d}$ (ms)"))));
    table.columns.extend(["before (MiB)", "peak (MiB)"].map(Column::right));
    for seq in lengths {
        let of_length: Vec<_> = plain.iter().filter(|case| case.params.seq == seq).copied().collect();
        let mut cells = vec![Cell::from(length(seq))];
        for d in &widths {
            let case = of_length.iter().find(|case| case.params.d_model == *d);
            cells.push(case.map(|case| both_passes(set, case)).transpose()?.into());
        }
        let ran = ran(&of_length);
        cells.push(mebibytes(&ran, |row| row.before_backward_bytes).into());
        cells.push(mebibytes(&ran, |row| row.backward_peak_bytes).or(needed(set, &of_length)).into());
        table.row(cells);
    }
    Ok(table)
}

/// "5.16 / 8.00", or how the case ended.
fn both_passes(set: &RecordSet, case: &AttentionCase) -> Result<Cell> {
    Ok(match &case.outcome {
        CaseOutcome::Measured(row) => {
            let [forward, backward] = [&row.forward, &row.backward].map(|pass| {
                let turns = Turns::single(&pass.samples);
                turns.marked(&case.median(pass).mark(&turns.median()))
            });
            format!("{forward} / {backward}").into()
        }
        CaseOutcome::OutOfMemory { .. } => {
            let fits = memory::forward_fits(set, &accounting_of(&case.params, set.profile()))?;
            if fits { "ran / OOM" } else { "OOM" }.into()
        }
        outcome => outcome.label().into(),
    })
}

/// From the narrowest to the widest; none where none ran.
fn mebibytes(ran: &[Ran], bytes: fn(&Row) -> u64) -> Option<String> {
    let range = Range::of(ran.iter().map(|ran| ran.bytes(bytes(ran.row))))?;
    let digits = usize::from(Style::Mib.scale() * range.high.value() < 100.0);
    Some(range.text(Style::Mib, digits).replace(" to ", NOTHING))
}

/// The least that cases which ran out of memory need; none where none did.
fn needed(set: &RecordSet, cases: &[&AttentionCase]) -> Option<String> {
    let exhausted = cases.iter().filter(|case| matches!(case.outcome, CaseOutcome::OutOfMemory { .. }));
    let bytes = exhausted.map(|case| accounting_of(&case.params, set.profile()).backward_peak_bytes).min()?;
    Some(format!("needs {} GiB", print(bytes as f64, Style::Gib, 0)))
}

/// The standard deviations of the times and the memory of every case that ran.
pub(super) fn cells(plain: &[&AttentionCase]) -> Table {
    let mut ran = ran(plain);
    ran.sort_by_key(|ran| (ran.case.params.d_model, ran.seq()));
    Table::of(ran)
        .right("$d$", |ran| ran.case.params.d_model.to_string())
        .right("$T$", |ran| length(ran.seq()))
        .number("forward, std (µs)", Style::Us, 0, |ran| deviation(ran.case, &ran.row.forward))
        .number("backward, std (µs)", Style::Us, 0, |ran| deviation(ran.case, &ran.row.backward))
        .right("forward peak (MiB)", |ran| mebibytes(&[*ran], |row| row.forward_peak_bytes))
        .right("before backward (MiB)", |ran| mebibytes(&[*ran], |row| row.before_backward_bytes))
        .right("backward peak (MiB)", |ran| mebibytes(&[*ran], |row| row.backward_peak_bytes))
        .into()
}

/// The other implementations.
pub(super) fn implementations(cases: &[&AttentionCase]) -> Table {
    let text = |pass: &Samples| Turns::single(&pass.samples).text();
    Table::of(cases)
        .text("implementation", |case| case.params.implementation.name())
        .right("$T$", |case| length(case.params.seq))
        .right("forward (ms)", |case| case.cell(|row| text(&row.forward)))
        .right("backward (ms)", |case| case.cell(|row| text(&row.backward)))
        .number("left by forward (MiB)", Style::Mib, 2, |case| case.cell(|row| Ran { case, row }.saved()))
        .number("backward peak (MiB)", Style::Mib, 1, |case| {
            case.cell(|row| Ran { case, row }.bytes(row.backward_peak_bytes))
        })
        .into()
}

/// None for a single sample.
fn deviation(case: &AttentionCase, samples: &Samples) -> Option<Quantity> {
    let std = Summary::of(&samples.samples)?.std?;
    Some(case.quantity(std, samples.unit.into()))
}
