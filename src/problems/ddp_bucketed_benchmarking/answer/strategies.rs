//! Tables of all strategies side by side, each from the records of its own problem.

use anyhow::Result;

use crate::bench::ddp_step::tables::{StepCase, StepSetting, StrategyNumbers, TITLES};
use crate::harness::answer::format::{distinct, print};
use crate::harness::answer::{Cell, Quantity, Range, RecordSet, Records, SameMachine, Style, Table};
use crate::harness::record::Profile;
use crate::model::Precision;

/// A strategy and the records that contain it.
pub type StrategyRecords<'a> = (&'static str, &'a Records);

/// Every strategy at its problem's planned precisions, one table for each machine. Of several cases at one precision, the
/// case with the shortest step is shown.
pub fn side_by_side(entries: &[StrategyRecords], profile: Profile) -> Result<Vec<Table>> {
    let machines = entries.iter().filter_map(|(_, records)| records.of(profile)).map(RecordSet::machine);
    let table = |machine: &String| {
        let mut sides = Vec::new();
        for dtype in PRECISIONS {
            for entry in entries {
                let set = entry.1.of(profile).filter(|set| set.machine().is_ok_and(|name| name == *machine));
                sides.extend(Side::of(*entry, set, profile, dtype)?);
            }
        }
        Ok(side_table(&sides, machine))
    };
    distinct(machines.collect::<Result<Vec<_>>>()?).iter().map(table).collect()
}

const PRECISIONS: [Precision; 2] = [Precision::Float32, Precision::Bfloat16];

/// One strategy at one precision.
struct Side {
    title: String,
    dtype: Precision,
    /// The case with the shortest step; how the cases ended where none was measured.
    shortest: Result<(StepCase, StrategyNumbers), &'static str>,
}

impl Side {
    /// `None` for a precision that is neither recorded in `set` nor planned.
    fn of(
        (strategy, records): StrategyRecords,
        set: Option<&RecordSet>,
        profile: Profile,
        dtype: Precision,
    ) -> Result<Option<Self>> {
        let mut cases: Vec<StepCase> = set.map(RecordSet::cases_as).transpose()?.unwrap_or_default();
        cases.retain(|case| case.params.dtype == dtype);
        let planned = records.planned(profile).any(|(_, params)| params["dtype"] == dtype.name());
        if cases.is_empty() && !planned {
            return Ok(None);
        }
        let ended = cases.iter().map(|case| case.outcome.label()).find(|word| *word != "measured");
        let measured = cases.into_iter().filter_map(|case| {
            let numbers = StrategyNumbers::of(&case, case.row()?.steps(), strategy)?;
            Some((case, numbers))
        });
        let shortest = measured.min_by(|a, b| a.1.step.value().total_cmp(&b.1.step.value()));
        let bucket = shortest.as_ref().and_then(|(case, _)| case.params.bucket_size_mb);
        let bucket = bucket.filter(|_| strategy != "sharded_optimizer");
        let bucket = bucket.map_or(String::new(), |mb| format!(" ({mb:.0} MB)"));
        let title = TITLES.iter().find(|(name, _)| *name == strategy).map_or(strategy, |(_, title)| *title);
        let shortest = shortest.ok_or(ended.unwrap_or("not measured"));
        Ok(Some(Self { title: format!("{title}{bucket}"), dtype, shortest }))
    }

    fn numbers(&self) -> Option<&StrategyNumbers> {
        self.shortest.as_ref().ok().map(|(_, numbers)| numbers)
    }
}

fn side_table(sides: &[Side], machine: &str) -> Table {
    let of = |number: fn(&StrategyNumbers) -> &Quantity| move |side: &&Side| side.numbers().map(number).cloned();
    let cases = || sides.iter().filter_map(|side| Some(&side.shortest.as_ref().ok()?.0));
    let settings = distinct(cases().map(|case| StepSetting::of(&case.params).describe()));
    let runs = distinct(cases().map(|case| &*case.id.run));
    let spreads: Vec<String> = PRECISIONS.iter().filter_map(|dtype| spread(sides, *dtype)).collect();
    let spread = match spreads.is_empty() {
        true => String::new(),
        false => format!(" Between the runs that step differs by up to {}.", spreads.join(" and ")),
    };
    Table::of(sides)
        .text("strategy", |side| side.title.clone())
        .text("arithmetic", |side| side.dtype.name())
        .number("step (ms)", Style::Ms, 1, |side| match &side.shortest {
            Ok((_, numbers)) => Cell::from(&numbers.step),
            Err(ended) => Cell::from(*ended),
        })
        .number("single (ms)", Style::Ms, 1, of(|numbers| &numbers.single))
        .number("over single", Style::Fixed, 3, of(|numbers| &numbers.over_single))
        .number("communication (ms)", Style::Ms, 1, of(|numbers| &numbers.communication))
        .number("exposed tail (ms)", Style::Ms, 1, of(|numbers| &numbers.tail))
        .number("hidden", Style::Percent, 0, of(|numbers| &numbers.hidden))
        .number("PyTorch DDP (ms)", Style::Ms, 1, |side| side.numbers().and_then(|numbers| numbers.pytorch.clone()))
        .captioned(format!(
            "All strategies side by side, {}: medians; *single* is the step without communication in the same run, and \
             *over single* a step's ratio to it.{spread} {machine}, run{} {}.",
            settings.join("; or "),
            if runs.len() == 1 { "" } else { "s" },
            runs.join(", ")
        ))
}

/// How far the step without communication differs between runs of one machine: "1.2% in float32".
fn spread(sides: &[Side], dtype: Precision) -> Option<String> {
    let of_dtype = sides.iter().filter(|side| side.dtype == dtype).filter_map(Side::numbers);
    let single: Vec<&Quantity> = of_dtype.map(|numbers| &numbers.single).collect();
    let Range { low, high } = Range::of(single.iter().copied()).filter(|_| single.len() > 1)?;
    let ratio = SameMachine::of(&high, &low).ok()?.ratio();
    Some(format!("{} in {}", print(ratio.value() - 1.0, Style::Percent, 1), dtype.name()))
}

#[cfg(test)]
mod tests;
