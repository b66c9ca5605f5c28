//! What counting gives: measured peaks beside predicted ones, and the tensors that the largest model saves.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::{Params, Run};
use super::super::predicted::{CONTEXT_LENGTHS, memory};
use super::{Measured, MemoryCase, memory_format};
use crate::harness::answer::{Cell, Column, Quantity, RecordSet, Style, Table, Unit};
use crate::model::Precision;
use crate::units::MIB;

const LONGEST: i64 = CONTEXT_LENGTHS[CONTEXT_LENGTHS.len() - 1];

/// The passes that are predicted, as the table and as the prose name them.
const PASSES: [(&str, &str); 3] =
    [("forward", "a forward pass"), ("recorded", "a recorded forward pass"), ("full step", "a full step")];

/// A measured peak beside the one that counting gives.
pub struct PeakComparison<'a> {
    case: &'a MemoryCase,
    run: &'a Run,
    /// Of [`PASSES`].
    pass: (&'static str, &'static str),
    /// Measured less predicted, in bytes.
    difference: f64,
    /// What the prediction leaves out: the allocator's rounding, and the workspaces of libraries.
    uncounted: f64,
}

impl<'a> PeakComparison<'a> {
    pub fn of(measured: &[Measured<'a>]) -> Vec<Self> {
        let passes = |(case, row): &Measured<'a>| {
            let (case, row) = (*case, *row);
            let runs = [&row.forward, &row.recorded_forward, &row.training_step];
            PASSES.into_iter().zip(runs).map(move |(pass, run)| {
                let (allocated, requested) = (run.peak.allocated_bytes as f64, run.peak.requested_bytes as f64);
                let workspaces = run.at_peak.other as f64 - row.inputs_and_tables_bytes as f64;
                let difference = allocated - run.predicted_bytes as f64;
                Self { case, run, pass, difference, uncounted: allocated - requested + workspaces }
            })
        };
        measured.iter().flat_map(passes).collect()
    }

    fn unexplained(&self) -> f64 {
        self.difference - self.uncounted
    }

    /// Of the measured peak.
    fn share(&self) -> f64 {
        self.unexplained().abs() / self.run.peak.allocated_bytes as f64
    }
}

/// The largest share of a peak that the prediction does not explain.
#[derive(Serialize)]
pub struct PredictionError {
    share: Quantity,
    /// "a forward pass in bfloat16 at context 512".
    at: String,
}

impl PredictionError {
    /// A CPU's autocast keeps more in bfloat16 than the prediction's rules, so that its errors do not count.
    pub fn largest(comparisons: &[PeakComparison], gpu: bool) -> Option<Self> {
        let judged = comparisons.iter().filter(|one| gpu || one.case.params.dtype == Precision::Float32);
        let worst = judged.reduce(|worst, one| if one.share() > worst.share() { one } else { worst })?;
        let PeakComparison { case, pass, .. } = worst;
        let Params { dtype, context_length, .. } = &case.params;
        Some(Self {
            at: format!("{} in {} at context {context_length}", pass.1, dtype.name()),
            share: case.quantity(worst.share(), Unit::One),
        })
    }
}

pub fn table(set: &RecordSet, comparisons: &[PeakComparison]) -> Result<Table> {
    let (style, digits, unit) = memory_format(set);
    let bytes = |one: &PeakComparison, bytes: f64| one.case.quantity(bytes, Unit::Bytes);
    let table = Table::of(comparisons)
        .text("precision", |one| one.case.params.dtype.name())
        .right("context", |one| one.case.params.context_length.to_string())
        .text("pass", |one| one.pass.0)
        .number(format!("predicted ({unit})"), style, digits, |one| bytes(one, one.run.predicted_bytes as f64))
        .number("measured, more (MiB)", Style::Mib, 1, |one| bytes(one, one.difference))
        .number("not counted (MiB)", Style::Mib, 1, |one| bytes(one, one.uncounted))
        .number("unexplained (MiB)", Style::Mib, 1, |one| bytes(one, one.unexplained()));
    Ok(table.captioned(format!(
        "Peaks that `src/model/memory.rs` computes, operation by operation, from what libtorch saves, and how far the measured \
         ones lie above; not counted is what the allocator rounds up and the workspaces of libraries; {}.",
        set.machine()?
    )))
}

/// Sizes of tensors of the handout's largest model at its longest context.
#[derive(Serialize)]
pub struct Counted {
    residual: Quantity,
    /// "5 MiB at 128, 10 MiB at 256, ..".
    residuals: String,
    /// All that a forward pass saves.
    all_float32: Quantity,
    all_bfloat16: Quantity,
}

impl Counted {
    pub fn of_the_largest_model() -> Self {
        let (float32, bfloat16) = (memory(LONGEST, Precision::Float32), memory(LONGEST, Precision::Bfloat16));
        let residual = |seq: i64| memory(seq, Precision::Float32).residual() as f64 / MIB;
        Self {
            residual: constant(float32.residual()),
            residuals: CONTEXT_LENGTHS.map(|seq| format!("{:.0} MiB at {seq}", residual(seq))).join(", "),
            all_float32: constant(float32.saved_bytes()),
            all_bfloat16: constant(bfloat16.saved_bytes()),
        }
    }
}

fn constant(bytes: u64) -> Quantity {
    Quantity::constant(bytes as f64, Unit::Bytes)
}

/// What one forward pass saves, a line a tensor; those of under a fiftieth of all are one line together.
pub fn saved_tensors() -> Table {
    let mib = |head: &str, digits| Column::number(head, Style::Mib, digits);
    let mut table = Table::new(vec![
        Column::text("saved tensor of the 2.7B model"),
        Column::text("shape"),
        mib("float32: each (MiB)", 1),
        Column::right("count"),
        mib("bfloat16: each (MiB)", 1),
        Column::right("count"),
        mib("bfloat16: together (MiB)", 0),
    ]);
    let (wide, narrow) = (memory(LONGEST, Precision::Float32).saved(), memory(LONGEST, Precision::Bfloat16).saved());
    let all: u64 = narrow.iter().map(|tensor| tensor.bytes()).sum();
    let (large, small): (Vec<_>, Vec<_>) = narrow.iter().partition(|tensor| 50 * tensor.bytes() > all);
    for tensor in large {
        let float32 = wide.iter().find(|wide| wide.name == tensor.name);
        table.row(vec![
            tensor.name.into(),
            tensor.shape.into(),
            float32.map(|wide| constant(wide.bytes_each)).into(),
            float32.map_or(Cell::Missing, |wide| wide.count.to_string().into()),
            constant(tensor.bytes_each).into(),
            tensor.count.to_string().into(),
            constant(tensor.bytes()).into(),
        ]);
    }
    let rest = constant(small.iter().map(|tensor| tensor.bytes()).sum());
    let empty = vec![Cell::from(""); 5];
    table.row([vec![format!("{} others", small.len()).into()], empty, vec![rest.into()]].concat());
    table
}
