//! All strategies side by side, each from the records of its own problem: a table, and a chart of what each step adds.

use std::sync::Arc;

use anyhow::Result;

use super::super::STRATEGY;
use super::fused_steps::{FusedStep, fused_steps};
use crate::bench::all_reduce::RankTimes;
use crate::bench::ddp_step::numbers::{NAIVE, StrategyNumbers};
use crate::bench::ddp_step::tables::{StepCase, StepSetting, on_fewest_ranks, size_mb, title};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{distinct, print};
use crate::harness::answer::machines::machines_of;
use crate::harness::answer::{Cell, Paired, Quantity, Range, RecordSet, Records, Style, Table};
use crate::harness::record::Profile;
use crate::model::Precision;

/// A strategy and the records that contain it.
pub type StrategyRecords<'a> = (&'static str, &'a Records);

/// The strategies on one machine, and the fused step's there.
pub struct SideBySide {
    machine: String,
    sides: Vec<Side>,
    fused: Vec<FusedStep>,
}

/// Every strategy at its problem's planned precisions, for each machine. Of several cases at one precision, the case with
/// the shortest step is shown.
pub fn side_by_side(entries: &[StrategyRecords], fused: &Records, profile: Profile) -> Result<Vec<SideBySide>> {
    // On a CPU its kernels are emulated.
    let fused = || fused.gpu().filter(|_| profile == Profile::Gpu).map_or(Ok(Vec::new()), fused_steps);
    let cases_of = |(_, records): &StrategyRecords| -> Result<Vec<StepCase>> {
        Ok(on_fewest_ranks(records.of(profile).map(RecordSet::cases_as).transpose()?.unwrap_or_default()))
    };
    let on = |machine: String| {
        let mut sides = Vec::new();
        for dtype in [Precision::Float32, Precision::Bfloat16] {
            for entry in entries {
                let mut cases = cases_of(entry)?;
                cases.retain(|case| case.params.dtype == dtype && machines_of([&case.id]) == machine);
                sides.extend(Side::of(*entry, cases, profile, dtype));
            }
        }
        let fused = fused()?.into_iter().filter(|step| machines_of([&step.case]) == machine).collect();
        Ok(SideBySide { machine, sides, fused })
    };
    let cases: Vec<StepCase> =
        entries.iter().map(cases_of).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    distinct(cases.iter().map(|case| machines_of([&case.id]))).into_iter().map(on).collect()
}

/// One strategy at one precision.
pub struct Side {
    strategy: &'static str,
    title: String,
    dtype: Precision,
    /// The case with the shortest step; how the cases ended where none was measured.
    shortest: Result<(StepCase, StrategyNumbers), &'static str>,
}

impl Side {
    /// Of cases at this precision; `None` where there are none and none are planned.
    fn of(
        (strategy, records): StrategyRecords,
        cases: Vec<StepCase>,
        profile: Profile,
        dtype: Precision,
    ) -> Option<Self> {
        let planned = records.planned(profile).any(|(_, params)| params["dtype"] == dtype.name());
        if cases.is_empty() && !planned {
            return None;
        }
        let ended = cases.iter().map(|case| case.outcome.label()).find(|word| *word != "measured");
        let measured = cases.into_iter().filter_map(|case| {
            let numbers = StrategyNumbers::of(&case, case.row()?.steps(), strategy)?;
            Some((case, numbers))
        });
        let shortest = measured.min_by(|a, b| a.1.step.value().total_cmp(&b.1.step.value()));
        let bucket = shortest.as_ref().and_then(|(case, _)| case.params.bucket_size_mb);
        let bucket = bucket.filter(|_| strategy != "sharded_optimizer");
        let bucket = bucket.map_or(String::new(), |mb| format!(" ({} MB)", size_mb(mb)));
        let shortest = shortest.ok_or(ended.unwrap_or("not measured"));
        Some(Self { strategy, title: format!("{}{bucket}", title(strategy)), dtype, shortest })
    }

    fn case(&self) -> Option<&StepCase> {
        self.shortest.as_ref().ok().map(|(case, _)| case)
    }

    fn numbers(&self) -> Option<&StrategyNumbers> {
        self.shortest.as_ref().ok().map(|(_, numbers)| numbers)
    }

    /// The step itself, and the one without communication.
    fn rounds(&self) -> Option<[Paired; 2]> {
        let case = self.case()?;
        let steps = case.row()?.steps();
        let median = |times: &RankTimes| Paired::median(&case.id, &times.turns(case.params.rounds));
        Some([median(&steps.strategies.get(self.strategy)?.step)?, median(&steps.single)?])
    }

    /// The strategy's bar, and that of PyTorch's DDP beside naive steps, by its defaults, and beside buckets.
    fn bars(&self) -> Vec<Bar> {
        let stable = self.numbers().filter(|numbers| numbers.stable);
        let Some((case, numbers)) = self.case().zip(stable) else { return Vec::new() };
        let bar = |name: String, adds: &Paired, step: &Quantity| Bar { name, adds: adds.clone(), step: step.clone() };
        let mut bars = vec![bar(self.title.clone(), &numbers.beyond_single, &numbers.step)];
        let name = match (self.strategy, case.params.bucket_size_mb) {
            (NAIVE, _) => Some("PyTorch DDP (defaults)".to_string()),
            (STRATEGY, Some(mb)) => Some(format!("PyTorch DDP ({} MB)", size_mb(mb))),
            _ => None,
        };
        let pytorch = numbers.pytorch_beyond.as_ref().filter(|beyond| beyond.stable).zip(numbers.pytorch.as_ref());
        bars.extend(name.zip(pytorch).map(|(name, (adds, step))| bar(name, adds, step)));
        bars
    }
}

/// A bar of the chart: what a step adds to the one without communication, and the step itself.
struct Bar {
    name: String,
    adds: Paired,
    step: Quantity,
}

/// A line of the table.
struct Line {
    dtype: Precision,
    title: String,
    step: Cell,
    single: Cell,
    /// What the step takes longer than without communication.
    adds: Cell,
    hidden: Cell,
    stream_overlap: Cell,
}

impl Line {
    fn of(side: &Side) -> Self {
        let (rounds, numbers) = (side.rounds(), side.numbers());
        Self {
            dtype: side.dtype,
            title: side.title.clone(),
            step: match (&rounds, &side.shortest) {
                (Some([step, _]), _) => step.ms(),
                (None, Err(ended)) => Cell::from(*ended),
                (None, Ok(_)) => Cell::Missing,
            },
            single: rounds.map(|[_, single]| single.ms()).into(),
            adds: numbers.map(|numbers| numbers.beyond_single.ms()).into(),
            hidden: numbers.and_then(|numbers| Some(numbers.hidden.as_ref()?.all.clone())).into(),
            stream_overlap: numbers.map(|numbers| numbers.stream_overlap.clone()).into(),
        }
    }

    /// Inside a graph no timeline tells computation from communication.
    fn of_fused(fused: &FusedStep) -> Self {
        Self {
            dtype: fused.dtype,
            title: fused.title.clone(),
            step: fused.step.ms(),
            single: fused.single.ms(),
            adds: fused.adds.ms(),
            hidden: Cell::Missing,
            stream_overlap: Cell::Missing,
        }
    }
}

impl SideBySide {
    pub fn table(&self) -> Table {
        let Self { machine, sides, fused } = self;
        let cases = || sides.iter().filter_map(Side::case);
        let settings = cases().map(|case| StepSetting::of(&case.params).describe());
        let settings = distinct(settings.chain(fused.iter().map(|step| step.setting.describe())));
        let runs = cases().map(|case| &case.id.run).chain(fused.iter().map(|step| &step.case.run));
        Table::of(self.lines())
            .text("dtype", |line| line.dtype.name())
            .text("strategy", |line| line.title.clone())
            .number("step (ms)", Style::Ms, 1, |line| line.step.clone())
            .number("single (ms)", Style::Ms, 1, |line| line.single.clone())
            .number("above single (ms)", Style::Ms, 1, |line| line.adds.clone())
            .number("hidden", Style::Percent, 0, |line| line.hidden.clone())
            .number("stream overlap", Style::Percent, 0, |line| line.stream_overlap.clone())
            .captioned(format!(
                "All strategies, each from its own problem: {}, {machine}.{} *Single* is the step without communication in the \
                 same run. Ranges are of unstable steps.",
                settings.join("; or "),
                of_runs(runs)
            ))
    }

    /// Of each dtype the strategies, and then the fused step's.
    fn lines(&self) -> Vec<Line> {
        let dtypes = [Precision::Float32, Precision::Bfloat16];
        let of = |dtype| {
            let strategies = self.sides.iter().filter(move |side| side.dtype == dtype).map(Line::of);
            strategies.chain(self.fused.iter().filter(move |step| step.dtype == dtype).map(Line::of_fused))
        };
        dtypes.into_iter().flat_map(of).collect()
    }

    /// What each strategy adds to the step without communication, longest first; of stable float32 steps only.
    pub fn chart(&self) -> Option<Figure> {
        let float32 = || self.sides.iter().filter(|side| side.dtype == Precision::Float32);
        let mut bars: Vec<Bar> = float32().flat_map(Side::bars).collect();
        bars.sort_by(|a, b| b.adds.all.value().total_cmp(&a.adds.all.value()));
        let stable = float32().filter(|side| side.numbers().is_some_and(|numbers| numbers.stable));
        let single = Range::of(stable.clone().filter_map(Side::numbers).map(|numbers| &numbers.single))?;
        let ms = |quantity: &Quantity| print(quantity.value(), Style::Ms, 1);
        let words = bars.iter().map(|bar| format!("{} {} (step {})", bar.name, ms(&bar.adds.all), ms(&bar.step)));
        let words: Vec<String> = words.collect();
        let alt = format!("Milliseconds above the step without communication: {}.", words.join(", "));
        let points: Vec<_> = bars.iter().map(|bar| (bar.name.clone(), Some(1e3 * bar.adds.all.value()))).collect();
        let ends = |Range { low, high }: &Range| [1e3 * low.value(), 1e3 * high.value()];
        let ranges: Vec<_> = bars.iter().map(|bar| Some(ends(&bar.adds.range))).collect();
        let series = vec![Series::over_categories("ours above single", points).ranged(ranges)];
        let plot = Plot::new(PlotKind::HorizontalBar, "strategy", "above single (ms)", series);
        Some(Figure::plot(alt, plot).captioned(format!(
            "What each strategy adds to *single*, the step without communication ({} ms), in float32, {}.{} Each uses *single* of \
             the same run, and PyTorch's DDP uses ours. Whiskers are ranges over turns.",
            single.text(Style::Ms, 0),
            self.machine,
            of_runs(stable.filter_map(Side::case).map(|case| &case.id.run))
        )))
    }
}

/// Where cases come from, unless they are of one run.
fn of_runs<'a>(runs: impl Iterator<Item = &'a Arc<str>>) -> String {
    match distinct(runs).len() {
        0 | 1 => String::new(),
        runs => format!(" The strategies come from {runs} runs."),
    }
}

#[cfg(test)]
mod tests;
