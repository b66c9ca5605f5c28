//! How a step grows with the number of ranks, where one machine has measured several: a table and a figure.

use anyhow::Result;

use super::super::STRATEGY;
use crate::bench::all_reduce::RankTimes;
use crate::bench::ddp_step::numbers::is_stable;
use crate::bench::ddp_step::tables::{PYTORCH, StepCase, StepSetting, title};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{distinct, print};
use crate::harness::answer::machines::machines_of;
use crate::harness::answer::{Paired, Quantity, Range, RecordSet, Records, Style, Table, Unit};
use crate::harness::record::Profile;
use crate::model::Precision;
use crate::parallel::trainer::{ZERO1, ZERO1_IN_BACKWARD};

/// The strategies that are followed, beside PyTorch's DDP.
const FOLLOWED: [&str; 3] = [STRATEGY, ZERO1, ZERO1_IN_BACKWARD];

/// Each strategy on each number of ranks, in the case with its shortest step there.
pub struct Scaling {
    machine: String,
    /// Of one rank, whatever their number.
    setting: String,
    points: Vec<Point>,
}

#[derive(Clone)]
struct Point {
    dtype: Precision,
    title: &'static str,
    ranks: usize,
    step: Paired,
    /// What the step takes longer than without communication, and its share of the step.
    adds: Paired,
    exposed: Paired,
}

impl Scaling {
    /// Of the machine and the setting with the most numbers of ranks; `None` where none has two.
    pub fn of(records: &[&Records], profile: Profile) -> Result<Option<Self>> {
        let sets = records.iter().filter_map(|records| records.of(profile));
        let cases: Vec<StepCase> =
            sets.map(RecordSet::cases_as).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        let group = |case: &StepCase| (machines_of([&case.id]), StepSetting::of(&case.params).per_rank());
        let numbers = |of: &(String, String)| {
            distinct(cases.iter().filter(|case| group(case) == *of).map(|case| case.params.world_size)).len()
        };
        let Some(of) = distinct(cases.iter().map(group)).into_iter().max_by_key(numbers) else { return Ok(None) };
        let all: Vec<Point> = cases.iter().filter(|case| group(case) == of).flat_map(Point::all).collect();
        let lines = distinct(all.iter().map(|point| (point.dtype, point.title)));
        let points: Vec<Point> = lines.into_iter().flat_map(|(dtype, title)| line(&all, dtype, title)).collect();
        let (machine, setting) = of;
        Ok((!points.is_empty()).then_some(Self { machine, setting, points }))
    }

    pub fn table(&self) -> Table {
        Table::of(self.points.iter().cloned())
            .text("dtype", |point| point.dtype.name())
            .text("strategy", |point| point.title)
            .right("ranks", |point| point.ranks.to_string())
            .number("step (ms)", Style::Ms, 1, |point| point.step.ms())
            .number("above single (ms)", Style::Ms, 1, |point| point.adds.ms())
            .number("exposed", Style::Percent, 1, |point| {
                point.exposed.cell(|share| print(share, Style::Percent, 1))
            })
            .captioned(format!(
                "Steps on growing numbers of ranks: {}, {}. \"Exposed\" is the share of a step by which it is longer than \
                 *single*, the step without communication of the same run.",
                self.setting, self.machine
            ))
    }

    /// A panel for each dtype.
    pub fn figure(&self) -> Figure {
        let dtypes = distinct(self.points.iter().map(|point| point.dtype.name()));
        let panels = dtypes.iter().map(|dtype| (dtype.to_string(), self.panel(dtype))).collect();
        let words = self.points.iter().map(|point| {
            let share = print(point.exposed.all.value(), Style::Percent, 1);
            format!("{} {} on {} ranks {share}", point.dtype.name(), point.title, point.ranks)
        });
        let alt =
            format!("The exposed share of a step by the number of ranks: {}.", words.collect::<Vec<_>>().join(", "));
        Figure::small_multiples(alt, dtypes.len(), panels).captioned(format!(
            "The share of a step that is exposed communication, by the number of ranks, {}, {}. Whiskers are ranges over turns.",
            self.setting, self.machine
        ))
    }

    /// Bars of each number of ranks, a bar for each strategy.
    fn panel(&self, dtype: &str) -> Plot {
        let of_dtype = || self.points.iter().filter(|point| point.dtype.name() == dtype);
        let mut groups = distinct(of_dtype().map(|point| point.ranks));
        groups.sort_unstable();
        let series = distinct(of_dtype().map(|point| point.title)).into_iter().map(|title| {
            let at = |ranks: &usize| of_dtype().find(|point| (point.title, point.ranks) == (title, *ranks));
            let percent = |quantity: &Quantity| 100.0 * quantity.value();
            let bars =
                groups.iter().map(|ranks| (ranks.to_string(), at(ranks).map(|point| percent(&point.exposed.all))));
            let ends = |Range { low, high }: &Range| [percent(low), percent(high)];
            let ranges = groups.iter().map(|ranks| at(ranks).map(|point| ends(&point.exposed.range)));
            Series::over_categories(title, bars).ranged(ranges)
        });
        Plot::new(PlotKind::Bar, "ranks", "exposed (percent)", series.collect())
    }
}

impl Point {
    /// Of each strategy that a stable case has measured.
    fn all(case: &StepCase) -> Vec<Self> {
        let Some(steps) = case.row().map(|row| row.steps()).filter(|steps| is_stable(case, steps)) else {
            return Vec::new();
        };
        let ours = FOLLOWED.into_iter().filter_map(|name| Some((title(name), &steps.strategies.get(name)?.step)));
        let theirs = steps.pytorch_ddp.as_ref().map(|times| (PYTORCH, times));
        ours.chain(theirs).filter_map(|(title, times)| Self::of(case, title, times, &steps.single)).collect()
    }

    fn of(case: &StepCase, title: &'static str, times: &RankTimes, single: &RankTimes) -> Option<Self> {
        let [step, single] = [times, single].map(|times| times.turns(case.params.rounds));
        Some(Self {
            dtype: case.params.dtype,
            title,
            ranks: case.params.world_size,
            step: Paired::median(&case.id, &step)?,
            adds: Paired::difference(&case.id, &step, &single)?,
            exposed: Paired::of(&case.id, Unit::One, [&step, &single], |[step, single]| (step - single) / step)?,
        })
    }
}

/// One strategy at one precision, the shortest step on each number of ranks, fewest first; nothing of one number alone.
fn line(all: &[Point], dtype: Precision, title: &str) -> Vec<Point> {
    let of_it = || all.iter().filter(|point| point.dtype == dtype && point.title == title);
    let mut ranks = distinct(of_it().map(|point| point.ranks));
    ranks.sort_unstable();
    let shortest = |ranks: usize| {
        let points = of_it().filter(|point| point.ranks == ranks);
        points.min_by(|a, b| a.step.all.value().total_cmp(&b.step.all.value())).cloned()
    };
    if ranks.len() > 1 { ranks.into_iter().filter_map(shortest).collect() } else { Vec::new() }
}

#[cfg(test)]
mod tests;
