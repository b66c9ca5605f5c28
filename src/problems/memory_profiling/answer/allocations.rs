//! Part (e): the largest allocations of a forward pass, and what a step's memory consists of at its peak.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::super::components::Allocation;
use super::timeline::TimelineCase;
use super::{Measured, bytes, memory_format, size_of};
use crate::harness::answer::format::NOTHING;
use crate::harness::answer::{Cell, Claim, Column, RecordSet, Style, Table, Unit};

/// How many kinds of allocations the table shows.
const SHOWN: usize = 8;

/// The largest allocations of the forward pass that is drawn.
#[derive(Serialize)]
pub struct LargestAllocations {
    largest: String,
    /// In Markdown: "`aten::div`, `aten::matmul` in the range *forward/attn*, and from ..".
    places: String,
    #[serde(skip)]
    pub claim: Claim,
}

impl LargestAllocations {
    pub fn of(timeline: &TimelineCase) -> Result<Self> {
        let all = &timeline.row.forward.largest;
        let bytes_each = all.first().context("a forward pass without allocations")?.bytes_each;
        let mut places: Vec<(&str, Vec<String>)> = Vec::new();
        for allocation in all.iter().filter(|allocation| allocation.bytes_each == bytes_each) {
            let called = called(allocation);
            match places.iter_mut().find(|(range, _)| *range == allocation.range) {
                Some((_, calls)) if calls.contains(&called) => {}
                Some((_, calls)) => calls.push(called),
                None => places.push((&allocation.range, vec![called])),
            }
        }
        let place = |(range, calls): (&str, Vec<String>)| format!("{} in the range *{range}*", calls.join(", "));
        let scores = timeline.case.params.memory().scores();
        let [largest, of_scores] = [bytes_each, scores].map(|n| bytes(timeline.case, n));
        Ok(Self {
            places: places.into_iter().map(place).collect::<Vec<_>>().join(", and from "),
            claim: Claim::new("largest-are-scores", bytes_each == scores)
                .operand("largest allocation", &largest)
                .operand("one tensor of scores", &of_scores),
            largest: size_of(&largest),
        })
    }
}

/// The operator that the program called.
fn called(allocation: &Allocation) -> String {
    format!("`{}`", allocation.operators.split('/').next().unwrap_or_default())
}

pub fn largest(set: &RecordSet, timeline: &TimelineCase) -> Result<Table> {
    let mut table = Table::new(vec![
        Column::number("each (MiB)", Style::Mib, 1),
        Column::right("count"),
        Column::text("range of the forward pass"),
        Column::text("called operator"),
        Column::text("allocating operator"),
    ]);
    for allocation in timeline.row.forward.largest.iter().take(SHOWN) {
        let range = allocation.range.strip_prefix("forward/").unwrap_or(NOTHING);
        let allocating = allocation.operators.split('/').next_back().unwrap_or_default();
        table.row(vec![
            bytes(timeline.case, allocation.bytes_each).into(),
            allocation.count.to_string().into(),
            range.into(),
            called(allocation).into(),
            format!("`{allocating}`").into(),
        ]);
    }
    let context = timeline.case.params.context_length;
    let machine = set.machine()?;
    Ok(table.captioned(format!(
        "The largest allocations of one forward pass under no_grad, with the range and the operators that were running: \
         context {context}, float32, {machine}."
    )))
}

/// A line for each case: a full step at its peak, and on a GPU what the allocator holds beyond it.
pub fn components(set: &RecordSet, measured: &[Measured]) -> Result<Table> {
    let (style, digits, unit) = memory_format(set);
    let heads =
        ["parameters", "state", "gradients", "saved", "copies", "working", "other", "rounding", "reserved, idle"];
    let numbers = heads.map(|head| Column::number(head, style, digits));
    let mut columns = [vec![Column::text("precision"), Column::right("context")], numbers.to_vec()].concat();
    columns.truncate(if set.is_gpu() { 11 } else { 9 });
    let width = columns.len();
    let mut table = Table::new(columns);
    for (case, row) in measured {
        let (at, peak) = (&row.training_step.at_peak, &row.training_step.peak);
        let less = |a: u64, b: u64| case.quantity(a as f64 - b as f64, Unit::Bytes);
        let alive = [at.parameters, at.optimizer_state, at.gradients, at.saved, at.weight_copies, at.working, at.other];
        let mut cells: Vec<Cell> = vec![case.params.dtype.name().into(), case.params.context_length.to_string().into()];
        cells.extend(alive.map(|n| bytes(case, n).into()));
        cells.push(less(peak.allocated_bytes, peak.requested_bytes).into());
        cells.push(peak.reserved_bytes.map(|reserved| less(reserved, peak.active_bytes)).into());
        cells.truncate(width);
        table.row(cells);
    }
    let allocator = " Rounding is what blocks exceed the requests by; the last column is held beyond active blocks.";
    let allocator = if set.is_gpu() { allocator } else { "" };
    let machine = set.machine()?;
    Ok(table.captioned(format!(
        "A training step at its peak, in {unit}; {machine}. Working tensors are freed in the phase that made them, and other \
         is tokens, tables and workspaces.{allocator}"
    )))
}
