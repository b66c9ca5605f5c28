//! The wheel's data parallelism beside PyTorch's, from Python, with ours from Rust in the same turns.

use anyhow::Result;
use serde::Serialize;

use super::super::STRATEGY;
use super::super::measure::Row;
use super::sizes::size_mb;
use super::{BucketCase, mb};
use crate::bench::all_reduce::RankTimes;
use crate::bench::ddp_step::from_python::{FromPython, Library};
use crate::bench::ddp_step::tables::{StepSetting, ending};
use crate::bench::interleave::ColumnOutcome;
use crate::harness::answer::format::{markdown, print};
use crate::harness::answer::{Answer, Cell, Claim, Paired, Range, RecordSet, Style, Table, Unit};
use crate::harness::stats::min;

const CLAIM: &str = "wheel-is-faster";

/// Of the first case that measured steps from Python.
#[derive(Serialize)]
pub struct Wheel {
    mb: f64,
    /// A step over one under PyTorch's DDP, with an optimizer on every rank and with a sharded one.
    buckets: Option<Range>,
    sharded: Option<Range>,
    /// Why there is no step of the wheel.
    untimed: Option<String>,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

impl Wheel {
    pub fn of(cases: &[BucketCase]) -> Option<Self> {
        let (case, _, python) = cases.iter().find_map(measured)?;
        let over = |of: Part| Over { case, python, of }.pytorch();
        let [buckets, sharded] = [BUCKETS, SHARDED].map(over);
        Some(Self {
            mb: mb(&case.params),
            claim: buckets
                .as_ref()
                .map(|ratio| Claim::below(CLAIM, "largest ratio of a round", &ratio.range.high, 1.0)),
            buckets: buckets.map(|ratio| ratio.said()),
            sharded: sharded.map(|ratio| ratio.said()),
            untimed: untimed(&python.wheel),
        })
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
        set.machine()?,
        params.rounds * params.steps,
        params.rounds
    );
    answer.table(format!("wheel-{}", set.profile()), table.captioned(caption))
}

#[cfg(test)]
mod tests;
