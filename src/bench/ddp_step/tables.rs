//! Tables of data-parallel training steps, with a line a column of each case.

use serde::Serialize;

use super::{Params, Row, StrategyColumn};
use crate::collective::Backend;
use crate::harness::answer::{Case, CaseOutcome, Cell, Column, Quantity, RecordSet, Style, Table, Unit};
use crate::harness::stats;

/// The strategies in the order of tables, each with its name there.
pub const TITLES: [(&str, &str); 8] = [
    ("naive", "naive: a call a parameter"),
    ("flat", "flat: one call"),
    ("overlap_individual_parameters", "overlapped: a call a parameter"),
    ("overlap_bucketed", "overlapped: buckets"),
    ("overlap_coalesced", "overlapped: buckets, no copies"),
    ("sharded_optimizer", "overlapped, sharded optimizer"),
    ("zero1", "ZeRO-1"),
    ("zero1_in_backward", "ZeRO-1, stepping in backward"),
];

/// A row with the columns of a step.
pub trait HasSteps {
    fn steps(&self) -> &Row;
}

impl HasSteps for Row {
    fn steps(&self) -> &Row {
        self
    }
}

/// The setting of a record's cases, as sentences describe it.
#[derive(Debug, Clone, Serialize)]
pub struct StepSetting {
    pub size: String,
    pub backend: &'static str,
    /// Sequences of one rank in a step: "1 sequence", "2 sequences".
    pub sequences: String,
    /// Tokens in a sequence.
    pub context: i64,
    pub world_size: usize,
}

impl StepSetting {
    pub fn of(params: &Params) -> Self {
        Self {
            size: params.size.size().name.into(),
            backend: match params.backend {
                Backend::Gloo => "Gloo",
                Backend::Nccl => "NCCL",
            },
            sequences: format!("{} sequence{}", params.batch_size, if params.batch_size == 1 { "" } else { "s" }),
            context: params.context_length,
            world_size: params.world_size,
        }
    }

    /// "the xl model on 2 ranks over NCCL (GPU), 2 sequences of 512 tokens a rank".
    pub fn describe(&self) -> String {
        let Self { size, backend, sequences, context, world_size } = self;
        let device = if *backend == "Gloo" { "CPU" } else { "GPU" };
        format!(
            "the {size} model on {world_size} ranks over {backend} ({device}), {sequences} of \
             {context} tokens a rank"
        )
    }
}

/// The quantities of one column of one case.
pub struct StrategyNumbers {
    pub step: Quantity,
    pub communication: Quantity,
    pub tail: Quantity,
    pub hidden: Quantity,
    pub bytes: Quantity,
    pub bus_bytes: Quantity,
    pub calls: u64,
}

impl StrategyNumbers {
    pub fn of<R>(case: &Case<Params, R>, column: &StrategyColumn) -> Self {
        Self {
            step: case.median(&column.step.last_rank),
            communication: case.median(&column.communication.mean),
            tail: case.median(&column.tail.mean),
            hidden: case.quantity(column.overlap, Unit::One),
            bytes: case.quantity(column.bytes as f64, Unit::Bytes),
            bus_bytes: case.quantity(column.bus_bytes, Unit::Bytes),
            calls: column.calls,
        }
    }
}

/// Every column of every case. `label` names a case.
pub fn steps_table<R: HasSteps>(
    set: &RecordSet,
    head: &str,
    cases: &[&Case<Params, R>],
    label: impl Fn(&Params) -> String,
) -> Table {
    let ms = |head: &str| Column::number(head, Style::Ms, 1);
    let mut table = Table::new(vec![
        Column::text(head),
        Column::text("column"),
        ms("step (ms)"),
        ms("p99 (ms)"),
        ms("beyond single (ms)"),
        ms("communication (ms)"),
        ms("exposed tail (ms)"),
        Column::number("hidden", Style::Percent, 0),
        Column::number("MB sent", Style::Mb, 1),
        Column::right("calls"),
    ]);
    for case in cases {
        let label = label(&case.params);
        match case.row() {
            Some(row) => lines(&mut table, &label, case, row.steps()),
            None => {
                let cells = [vec![label.into(), ending(&case.outcome).into()], dashes(8)].concat();
                table.row(cells);
            }
        }
    }
    table.captioned(caption(set, cases))
}

fn lines<R>(table: &mut Table, label: &str, case: &Case<Params, R>, steps: &Row) {
    let p99 = |samples: &[f64]| stats::quantile(samples, 0.99);
    let alone = &steps.single.last_rank;
    let single = stats::median(&alone.samples);
    let beyond = |step: &Quantity| Cell::from(case.quantity(step.value() - single, Unit::Seconds));
    let times = vec![case.median(alone).into(), case.statistic(alone, p99).into()];
    table.row([vec![label.into(), "single process".into()], times, dashes(6)].concat());
    for (name, title) in TITLES {
        let Some(column) = steps.strategies.get(name) else { continue };
        let numbers = StrategyNumbers::of(case, column);
        table.row(vec![
            label.into(),
            title.into(),
            (&numbers.step).into(),
            case.statistic(&column.step.last_rank, p99).into(),
            beyond(&numbers.step),
            numbers.communication.into(),
            numbers.tail.into(),
            numbers.hidden.into(),
            numbers.bytes.into(),
            numbers.calls.to_string().into(),
        ]);
    }
    if let Some(theirs) = &steps.pytorch_ddp {
        let step = case.median(&theirs.last_rank);
        let times = vec![(&step).into(), case.statistic(&theirs.last_rank, p99).into(), beyond(&step)];
        table.row([vec![label.into(), "PyTorch DDP".into()], times, dashes(5)].concat());
    }
}

/// `n` cells without a number.
pub fn dashes(n: usize) -> Vec<Cell> {
    vec![Cell::Missing; n]
}

/// "not run: needs 6 GPUs, has 2".
pub fn ending<R>(outcome: &CaseOutcome<R>) -> String {
    match outcome {
        CaseOutcome::NotRun { needs, has, .. } => format!("{}: needs {needs}, has {has}", outcome.label()),
        _ => outcome.label().into(),
    }
}

fn caption<R>(set: &RecordSet, cases: &[&Case<Params, R>]) -> String {
    let Some(first) = cases.first() else { return format!("{}.", set.source()) };
    let Params { rounds, steps, warmup, .. } = first.params;
    format!(
        "Training steps of {}: medians of {} steps a column, taken in {rounds} rounds of turns, each after {warmup} \
         untimed. {}.",
        StepSetting::of(&first.params).describe(),
        rounds * steps,
        set.source()
    )
}

#[cfg(test)]
mod tests;
