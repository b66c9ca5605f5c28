//! Tables of all strategies side by side, each from the records of its own problem.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bench::ddp_step::tables::{HasSteps, StepSetting, StrategyNumbers, TITLES, dashes};
use crate::bench::ddp_step::{Params, Row};
use crate::harness::answer::{Case, Column, Quantity, RecordSet, Records, SameMachine, Style, Table, Unit, format};
use crate::harness::record::Profile;
use crate::model::Precision;

/// A strategy and the records that contain it.
pub type StrategyRecords<'a> = (&'static str, &'a Records);

/// A row of any problem on data parallelism, for tables over several of them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum AnyRow {
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

/// Every strategy at its problem's planned precisions, one table for each machine. Of several cases at one precision, the
/// case with the shortest step is shown.
pub fn side_by_side(entries: &[StrategyRecords], profile: Profile) -> Result<Vec<Table>> {
    let mut machines: Vec<String> = Vec::new();
    for (_, records) in entries {
        let machine = set_of(records, profile).map(RecordSet::machine).transpose()?;
        machines.extend(machine.filter(|machine| !machines.contains(machine)));
    }
    let table = |machine: &String| {
        let mut side = SideBySide::new(machine);
        for dtype in [Precision::Float32, Precision::Bfloat16] {
            let mut single = Vec::new();
            for entry in entries {
                let set = set_of(entry.1, profile).filter(|set| set.machine().is_ok_and(|name| name == *machine));
                single.extend(side.strategy(entry, set, profile, dtype)?);
            }
            side.spread(&single, dtype);
        }
        Ok(side.finish())
    };
    machines.iter().map(table).collect()
}

fn set_of(records: &Records, profile: Profile) -> Option<&RecordSet> {
    records.sets().find(|set| set.profile() == profile)
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
        &(strategy, records): &StrategyRecords,
        set: Option<&RecordSet>,
        profile: Profile,
        dtype: Precision,
    ) -> Result<Option<Quantity>> {
        let cases: Vec<Case<Params, AnyRow>> = set.map(RecordSet::cases_as).transpose()?.unwrap_or_default();
        let of_dtype: Vec<_> = cases.iter().filter(|case| case.params.dtype == dtype).collect();
        let title = TITLES.iter().find(|(name, _)| *name == strategy).map_or(strategy, |(_, title)| *title);
        let mut measured: Vec<_> = of_dtype
            .iter()
            .filter_map(|case| {
                let steps = case.row()?.steps();
                Some((*case, steps, StrategyNumbers::of(case, steps.strategies.get(strategy)?)))
            })
            .collect();
        measured.sort_by(|a, b| a.2.step.value().total_cmp(&b.2.step.value()));
        let Some((case, steps, numbers)) = measured.into_iter().next() else {
            let planned = |params: &Value| params["dtype"] == dtype.name();
            if !of_dtype.is_empty() || records.planned(profile).any(|(_, params)| planned(params)) {
                let ended = of_dtype.iter().map(|case| case.outcome.label()).find(|word| *word != "measured");
                let ended = ended.unwrap_or("not measured");
                self.table.row([vec![title.into(), dtype.name().into(), ended.into()], dashes(6)].concat());
            }
            return Ok(None);
        };
        let bucket = case.params.bucket_size_mb.filter(|_| strategy != "sharded_optimizer");
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
        let spread = format::print(pair.ratio().value() - 1.0, Style::Percent, 1);
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
