//! The wheel's data parallelism beside PyTorch's, from Python, with ours from Rust in the same turns.

use anyhow::Result;
use serde::Serialize;

use super::super::STRATEGY;
use super::super::measure::Row;
use super::{BucketCase, mb};
use crate::bench::all_reduce::RankTimes;
use crate::bench::ddp_step::from_python::{FromPython, Library};
use crate::bench::ddp_step::tables::{StepSetting, ending, size_mb};
use crate::bench::interleave::ColumnOutcome;
use crate::harness::answer::format::{listed, markdown, print};
use crate::harness::answer::machines::machines_of;
use crate::harness::answer::{Answer, Cell, Claim, Paired, Range, RecordSet, Style, Table, Unit};
use crate::harness::stats::min;

const CLAIM: &str = "wheel-is-faster";

#[derive(Serialize)]
pub struct Wheel {
    /// Of the first case.
    mb: f64,
    /// None without a step of the wheel.
    ratios: Option<Ratios>,
    /// Why there is no step of the wheel.
    untimed: Option<String>,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

/// A step over one under PyTorch's DDP, with an optimizer on every rank and with a sharded one: "0.99 in float32 and 1.06 in
/// bfloat16".
#[derive(Serialize)]
struct Ratios {
    buckets: String,
    sharded: String,
}

impl Wheel {
    /// None where no case measured steps from Python.
    pub fn of(cases: &[BucketCase]) -> Option<Self> {
        let measured: Vec<_> = cases.iter().filter_map(measured).collect();
        let (first, _, from_python) = measured.first()?;
        let over = |of: Part| -> Vec<(Paired, &str)> {
            let ratios = measured.iter().filter_map(|(case, _, python)| {
                let ratio = Over { case, python, of }.pytorch()?;
                Some((ratio, case.params.dtype.name()))
            });
            ratios.collect()
        };
        let said = |ratios: &[(Paired, &str)]| {
            let said = ratios.iter().map(|(ratio, dtype)| format!("{} in {dtype}", ratio.said().text(Style::Fixed, 2)));
            listed(&said.collect::<Vec<_>>())
        };
        let [buckets, sharded] = [BUCKETS, SHARDED].map(over);
        let highest = Range::of(buckets.iter().map(|(ratio, _)| &ratio.range.high));
        let claim = highest.map(|of| Claim::below(CLAIM, "largest ratio of a round", &of.high, 1.0));
        let ratios = claim.is_some().then(|| Ratios { buckets: said(&buckets), sharded: said(&sharded) });
        Some(Self { mb: mb(&first.params), ratios, untimed: untimed(&from_python.wheel), claim })
    }
}

type Part = fn(&Library) -> &RankTimes;
const BUCKETS: Part = |library| &library.buckets;
const SHARDED: Part = |library| &library.sharded;

/// One part of the wheel over the same of PyTorch.
struct Over<'a> {
    case: &'a BucketCase,
    python: &'a FromPython,
    of: Part,
}

impl Over<'_> {
    fn pytorch(&self) -> Option<Paired> {
        let turns = |library| (self.of)(library).turns(self.case.params.rounds);
        let (wheel, pytorch) = (turns(self.python.wheel.measured()?), turns(&self.python.pytorch));
        Paired::of(&self.case.id, Unit::One, [&wheel, &pytorch], |[wheel, pytorch]| wheel / pytorch)
    }
}

fn measured(case: &BucketCase) -> Option<(&BucketCase, &Row, &FromPython)> {
    let row = case.row()?;
    Some((case, row, row.steps.from_python.as_ref()?))
}

fn untimed(wheel: &ColumnOutcome<Library>) -> Option<String> {
    match wheel {
        ColumnOutcome::Measured { .. } => None,
        ColumnOutcome::OutOfMemory { message: why, .. }
        | ColumnOutcome::NotRun { reason: why }
        | ColumnOutcome::Failed { error: why } => Some(markdown(why)),
    }
}

/// One line of the table: a column of a case, or how the case or the wheel ended.
struct Line<'a> {
    case: &'a BucketCase,
    title: &'static str,
    times: Result<&'a RankTimes, String>,
    /// The step without communication of the same language.
    single: Option<&'a RankTimes>,
    over: Option<Paired>,
    version: &'a str,
}

fn lines(case: &BucketCase) -> Vec<Line<'_>> {
    let line = |title, times, single| Line { case, title, times, single, over: None, version: "" };
    let Some((_, row, python)) = measured(case) else { return vec![line("–", Err(ending(&case.outcome)), None)] };
    let single = &python.single;
    let ours = row.steps.strategies.get(STRATEGY).map(|column| &column.step).ok_or("not measured".to_string());
    let version = python.wheel.measured().map_or("", |wheel| &wheel.version);
    let wheel = |title, of: Part| Line {
        over: Over { case, python, of }.pytorch(),
        version,
        ..line(title, python.wheel.measured().map(of).ok_or(python.wheel.label().into()), Some(single))
    };
    let pytorch = |title, of: Part| Line {
        version: &python.pytorch.version,
        ..line(title, Ok(of(&python.pytorch)), Some(single))
    };
    vec![
        line("no communication", Ok(single), None),
        pytorch("PyTorch DDP", BUCKETS),
        wheel("the wheel", BUCKETS),
        pytorch("PyTorch DDP, ZeroRedundancyOptimizer", SHARDED),
        wheel("the wheel, ShardedOptimizer", SHARDED),
        line("ours, from Rust", ours, Some(&row.steps.single)),
    ]
}

/// Adds the table `wheel-<profile>`, unless no case has the wheel.
pub fn table(answer: &mut Answer, set: &RecordSet, cases: &[BucketCase]) -> Result<()> {
    let cases: Vec<&BucketCase> = cases.iter().filter(|case| case.params.wheel).collect();
    let Some(first) = cases.first() else { return Ok(()) };
    let turns = |line: &Line, times: &RankTimes| times.turns(line.case.params.rounds);
    let table = Table::of(cases.iter().flat_map(|case| lines(case)))
        .text("dtype", |line| line.case.params.dtype.name())
        .text("implementation", |line| line.title)
        .number("step (ms)", Style::Ms, 1, |line| match &line.times {
            Ok(times) => Paired::median(&line.case.id, &turns(line, times)).map(|step| step.ms()).into(),
            Err(ended) => Cell::from(ended.as_str()),
        })
        .number("least (ms)", Style::Ms, 1, |line| {
            let times = line.times.as_ref().ok()?;
            Some(line.case.quantity(min(&times.last_rank.samples), Unit::Seconds))
        })
        .number("above single (ms)", Style::Ms, 1, |line| {
            let (times, single) = (line.times.as_ref().ok()?, line.single?);
            Some(Paired::difference(&line.case.id, &turns(line, times), &turns(line, single))?.ms())
        })
        .number("over PyTorch's", Style::Fixed, 2, |line| {
            line.over.as_ref().map(|over| over.cell(|ratio| print(ratio, Style::Fixed, 2)))
        })
        .text("version", |line| markdown(line.version));
    let params = &first.params;
    let caption = format!(
        "Data parallelism from Python: {}, buckets of {} MB, {}; medians of {} steps, or ranges over {} turns where unstable. \
         *Single* is the step without communication, from Python for all but the last line. All of a dtype take turns in one \
         run.",
        StepSetting::of(params).describe(),
        size_mb(mb(params)),
        machines_of(cases.iter().map(|case| &case.id)),
        params.rounds * params.steps,
        params.rounds
    );
    answer.table(format!("wheel-{}", set.profile()), table.captioned(caption))
}

#[cfg(test)]
mod tests;
