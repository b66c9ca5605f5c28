//! Tables of data-parallel training steps: each case's columns, and all strategies side by side.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Params, Row, StrategyColumn};
use crate::collective::Backend;
use crate::harness::answer::{
    Case, CaseOutcome, Cell, Column, Quantity, RecordSet, Records, SameMachine, Style, Table, Unit,
};
use crate::harness::record::Profile;
use crate::harness::stats;
use crate::model::Precision;

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

/// A row of any problem on data parallelism, for tables over several of them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AnyRow {
    Within { steps: Row },
    Alone(Row),
}

impl HasSteps for AnyRow {
    fn steps(&self) -> &Row {
        match self {
            Self::Within { steps } | Self::Alone(steps) => steps,
        }
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
    fn describe(&self) -> String {
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

fn dashes(n: usize) -> Vec<Cell> {
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

/// A strategy and the records that contain it.
pub struct StrategyRecords<'a> {
    pub strategy: &'static str,
    pub records: &'a Records,
}

impl<'a> StrategyRecords<'a> {
    fn set(&self, profile: Profile) -> Option<&'a RecordSet> {
        match profile {
            Profile::Gpu => self.records.gpu(),
            Profile::Cpu => self.records.cpu(),
        }
    }
}

/// Every strategy at its problem's planned precisions, one table for each machine. Of several cases at one precision, the
/// case with the shortest step is shown.
pub fn side_by_side(entries: &[StrategyRecords], profile: Profile) -> Result<Vec<Table>> {
    let mut machines: Vec<String> = Vec::new();
    for entry in entries {
        let machine = entry.set(profile).map(RecordSet::machine).transpose()?;
        machines.extend(machine.filter(|machine| !machines.contains(machine)));
    }
    let table = |machine: &String| {
        let mut side = SideBySide::new(machine);
        for dtype in [Precision::Float32, Precision::Bfloat16] {
            let mut single = Vec::new();
            for entry in entries {
                let set = entry.set(profile).filter(|set| set.machine().is_ok_and(|name| name == *machine));
                single.extend(side.strategy(entry, set, profile, dtype)?);
            }
            side.spread(&single, dtype);
        }
        Ok(side.finish())
    };
    machines.iter().map(table).collect()
}

struct SideBySide<'a> {
    machine: &'a str,
    table: Table,
    settings: Vec<String>,
    runs: Vec<String>,
    spreads: Vec<String>,
}

impl<'a> SideBySide<'a> {
    fn new(machine: &'a str) -> Self {
        let ms = |head: &str| Column::number(head, Style::Ms, 1);
        let table = Table::new(vec![
            Column::text("strategy"),
            Column::text("arithmetic"),
            ms("step (ms)"),
            ms("single (ms)"),
            Column::number("over single", Style::Fixed, 3),
            ms("communication (ms)"),
            ms("exposed tail (ms)"),
            Column::number("hidden", Style::Percent, 0),
            ms("PyTorch DDP (ms)"),
        ]);
        Self { machine, table, settings: Vec::new(), runs: Vec::new(), spreads: Vec::new() }
    }

    /// Adds the line of one strategy at one precision, and returns the step without communication of the same case.
    fn strategy(
        &mut self,
        entry: &StrategyRecords,
        set: Option<&RecordSet>,
        profile: Profile,
        dtype: Precision,
    ) -> Result<Option<Quantity>> {
        let cases: Vec<Case<Params, AnyRow>> = set.map(RecordSet::cases_as).transpose()?.unwrap_or_default();
        let of_dtype: Vec<_> = cases.iter().filter(|case| case.params.dtype == dtype).collect();
        let title = TITLES.iter().find(|(name, _)| *name == entry.strategy).map_or(entry.strategy, |(_, title)| *title);
        let mut measured: Vec<_> = of_dtype
            .iter()
            .filter_map(|case| {
                let steps = case.row()?.steps();
                Some((*case, steps, StrategyNumbers::of(case, steps.strategies.get(entry.strategy)?)))
            })
            .collect();
        measured.sort_by(|a, b| a.2.step.value().total_cmp(&b.2.step.value()));
        let Some((case, steps, numbers)) = measured.into_iter().next() else {
            let planned = |params: &Value| params["dtype"] == dtype.name();
            if !of_dtype.is_empty() || entry.records.planned(profile).any(|(_, params)| planned(params)) {
                let ended = of_dtype.iter().map(|case| case.outcome.label()).find(|word| *word != "measured");
                let ended = ended.unwrap_or("not measured");
                self.table.row([vec![title.into(), dtype.name().into(), ended.into()], dashes(6)].concat());
            }
            return Ok(None);
        };
        let bucket = case.params.bucket_size_mb.filter(|_| entry.strategy != "sharded_optimizer");
        let bucket = bucket.map_or(String::new(), |mb| format!(" ({mb:.0} MB)"));
        let single = case.median(&steps.single.last_rank);
        let over = case.quantity(numbers.step.value() / single.value(), Unit::One);
        self.table.row(vec![
            format!("{title}{bucket}").into(),
            dtype.name().into(),
            numbers.step.into(),
            (&single).into(),
            over.into(),
            numbers.communication.into(),
            numbers.tail.into(),
            numbers.hidden.into(),
            steps.pytorch_ddp.as_ref().map(|theirs| case.median(&theirs.last_rank)).into(),
        ]);
        add(&mut self.settings, StepSetting::of(&case.params).describe());
        add(&mut self.runs, case.id.run.to_string());
        Ok(Some(single))
    }

    /// How far the step without communication differs between runs of one machine.
    fn spread(&mut self, single: &[Quantity], dtype: Precision) {
        let (Some(least), Some(most)) = (Quantity::smallest(single), Quantity::largest(single)) else { return };
        let Some(pair) = SameMachine::of(most, least).ok().filter(|_| single.len() > 1) else { return };
        let spread = crate::harness::answer::format::print(pair.ratio().value() - 1.0, Style::Percent, 1);
        self.spreads.push(format!("{spread} in {}", dtype.name()));
    }

    fn finish(self) -> Table {
        let Self { machine, table, settings, runs, spreads } = self;
        let spread = match spreads.is_empty() {
            true => String::new(),
            false => format!(" Between the runs that step differs by up to {}.", spreads.join(" and ")),
        };
        let plural = if runs.len() == 1 { "" } else { "s" };
        table.captioned(format!(
            "All strategies side by side, {}: medians; *single* is the step without communication in the same run, and \
             *over single* a step's ratio to it.{spread} {machine}, run{plural} {}.",
            settings.join("; or "),
            runs.join(", ")
        ))
    }
}

fn add(list: &mut Vec<String>, word: String) {
    if !list.contains(&word) {
        list.push(word);
    }
}

#[cfg(test)]
mod tests;
