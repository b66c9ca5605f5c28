//! Part (c): the same measurement after no, one, two and the sweep's warm-up steps, for each size that was studied.

use anyhow::Result;
use serde::Serialize;

use super::{BACKWARD, FORWARD, OPTIMIZER, Part, SWEEP, StepCase, TOTAL, cell, mean, mixed, of_grid, ratio, sizes};
use crate::harness::answer::format::{listed, time};
use crate::harness::answer::table::TableBuilder;
use crate::harness::answer::{Answer, Cell, Claim, Quantity, Range, RecordSet, SameMachine, Style, Table, Turns, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats;
use crate::model::SizeName;

const GRID: &str = "warmup";
/// The numbers of warm-up steps that cases of the study have; the sweep has the handout's.
const STUDIED: [usize; 3] = [0, 1, 2];

#[derive(Serialize)]
pub(super) struct WarmUp {
    /// The sizes with every case, and for each how many times its median the first step takes without warm-up: "7.8".
    studied_sizes: String,
    starts: String,
    /// Of runs without warm-up, the forward pass.
    mean_over_median: Range,
    /// How far the first timed step is from the median of its run after one, two and the sweep's warm-up steps, at most.
    apart: Quantity,
    /// How far the medians after one and two steps are from those after the sweep's, at most; none of other machines.
    from_warm: Option<Quantity>,
    /// Readings of the SM clock during the study; none without a sensor.
    clock: Option<Range>,
}

/// The cases of one size: without warm-up, after one and two steps, and after the sweep's.
struct Study<'a> {
    size: SizeName,
    after: [Option<&'a StepCase>; STUDIED.len()],
    warm: Option<&'a StepCase>,
}

impl<'a> Study<'a> {
    fn all(cases: &'a [StepCase]) -> Vec<Self> {
        let studied = of_grid(cases, GRID);
        let swept = of_grid(cases, SWEEP);
        let of_size = |size| {
            let of = |case: &&&StepCase| case.params.size == size;
            let context = studied.iter().find(of).map(|case| case.params.context_length);
            let same = move |case: &&&StepCase| of(case) && Some(case.params.context_length) == context;
            Self {
                size,
                after: STUDIED.map(|n| studied.iter().filter(same).find(|case| case.params.warmup == n).copied()),
                warm: swept.iter().find(same).copied(),
            }
        };
        sizes(&studied).into_iter().map(of_size).collect()
    }

    fn cases(&self) -> impl Iterator<Item = &'a StepCase> {
        self.after.into_iter().chain([self.warm]).flatten()
    }

    /// Whether every case was measured with its parts, is stable after its first step and, but for the sweep's, had a
    /// process of its own.
    fn is_whole(&self) -> bool {
        let fine = |case: &StepCase| {
            let row = case.row().filter(|row| row.first_in_process || case.grid == SWEEP);
            row.is_some_and(|row| row.forward.is_some() && settles(&row.total))
        };
        self.cases().count() > STUDIED.len() && self.cases().all(fine)
    }

    fn cold(&self) -> Option<&'a StepCase> {
        self.after[0]
    }

    fn name(&self) -> &'static str {
        self.size.size().name
    }
}

/// Whether the steps after the first are stable.
fn settles(samples: &Samples) -> bool {
    samples.samples.split_first().is_some_and(|(_, later)| Turns::single(later).is_stable())
}

fn statistic(case: Option<&StepCase>, of: impl Fn(&[f64]) -> f64, part: Part) -> Option<Quantity> {
    let (case, row) = case?.measured()?;
    Some(case.statistic(part(row)?, of))
}

/// The first timed step over the median of its run; none where the later steps are unstable.
fn start(case: Option<&StepCase>) -> Option<Quantity> {
    let first = statistic(case, |samples| samples[0], TOTAL)?;
    let settled = settles(&case?.row()?.total);
    ratio(&first, &median_step(case).filter(|_| settled)?)
}

fn median_step(case: Option<&StepCase>) -> Option<Quantity> {
    statistic(case, stats::median, TOTAL)
}

/// How far a ratio is from one.
fn distance(ratio: &Quantity) -> Quantity {
    Quantity::new((ratio.value() - 1.0).abs(), Unit::One, ratio.sources().to_vec())
}

impl WarmUp {
    /// None where no size has every case, with more than one step.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let studies: Vec<Study> = Study::all(cases).into_iter().filter(Study::is_whole).collect();
        let starts: Vec<Quantity> = studies.iter().filter_map(|study| start(study.cold())).collect();
        let forward = |study: &Study, of: fn(&[f64]) -> f64| statistic(study.cold(), of, FORWARD);
        let mean_over_median =
            studies.iter().filter_map(|study| ratio(&forward(study, stats::mean)?, &forward(study, stats::median)?));
        let warmed = || studies.iter().flat_map(|study| study.cases().skip(1));
        let pairs = studies.iter().flat_map(|study| study.after[1..].iter().map(|case| (*case, study.warm)));
        let from_warm = pairs.map(|(case, warm)| {
            let (median, warm) = (median_step(case)?, median_step(warm)?);
            Some(distance(&SameMachine::of(&median, &warm).ok()?.ratio()))
        });
        let clocks = of_grid(cases, GRID).into_iter().flat_map(clock_ends);
        Some(Self {
            studied_sizes: listed(&studies.iter().map(Study::name).collect::<Vec<_>>()),
            starts: listed(&starts.iter().map(|start| start.text(Style::Fixed, 1)).collect::<Vec<_>>()),
            mean_over_median: Range::of(mean_over_median)?,
            apart: Quantity::largest(warmed().filter_map(|case| Some(distance(&start(Some(case))?))))?,
            from_warm: from_warm.collect::<Option<Vec<_>>>().and_then(Quantity::largest),
            clock: Range::of(clocks),
        })
    }

    /// Adds the claim that explains the distance from the sweep's medians; none of other machines.
    pub(super) fn conclude(&self, answer: &mut Answer) -> Result<()> {
        if self.from_warm.is_none() {
            return Ok(());
        }
        let name = "largest distance of a first timed step from its run's median";
        answer.claim(Claim::below("warm-after-one-step", name, &self.apart, 0.02))
    }
}

/// The lowest and the highest reading of the SM clock during a case.
fn clock_ends(case: &StepCase) -> Vec<Quantity> {
    let during = case.conditions.iter().filter_map(|conditions| conditions.during.as_ref());
    during
        .flat_map(|during| [during.sm_clock_hz.min, during.sm_clock_hz.max])
        .map(|hz| case.quantity(hz, Unit::Hertz))
        .collect()
}

/// The forward pass after each number of warm-up steps, and the first step of a cold start by its parts; none where there
/// is no case.
pub(super) fn tables(set: &RecordSet, cases: &[StepCase]) -> Result<Vec<(&'static str, Table)>> {
    let studied = of_grid(cases, GRID);
    let Some(p) = studied.first().map(|case| &case.params) else { return Ok(Vec::new()) };
    let place = format!("Context {}, batch {}, {}; {}", p.context_length, p.batch_size, p.dtype.name(), set.machine()?);
    let studies = Study::all(cases);
    let others = of_grid(cases, SWEEP).into_iter().find(|case| case.params.steps != p.steps);
    let others =
        others.map(|case| format!(" ({} steps after {} warm-up steps)", case.params.steps, case.params.warmup));
    let forward = format!(
        "Forward pass by number of warm-up steps, mean ± standard deviation of {} steps{}; then the first timed step over the \
         median step, forward to AdamW. {place}.{}",
        p.steps,
        others.unwrap_or_default(),
        mixed(studies.iter().flat_map(Study::cases))
    );
    let cold = format!(
        "The first step without warm-up by its parts, the second step, and the median step. {place}.{}",
        mixed(studies.iter().filter_map(Study::cold))
    );
    Ok(vec![("warm-up", forward_table(cases).captioned(forward)), ("cold", cold_table(studies).captioned(cold))])
}

fn forward_table<'a>(cases: &'a [StepCase]) -> Table {
    let steps = |n: usize| if n == 1 { "1 step (ms)".into() } else { format!("{n} steps (ms)") };
    let warmup = of_grid(cases, SWEEP).first().map_or(0, |case| case.params.warmup);
    let with_forward = |table: TableBuilder<Study<'a>>, at: usize| {
        table.right(steps(STUDIED[at]), move |study| study.after[at].map(|case| cell(case, FORWARD, mean)))
    };
    let with_start = |table: TableBuilder<Study<'a>>, at: usize| {
        let head = format!("first / median after {}", STUDIED[at]);
        table.number(head, Style::Fixed, 2, move |study| start(study.after[at]))
    };
    let table = Table::of(Study::all(cases)).text("size", Study::name);
    let table = (0..STUDIED.len()).fold(table, with_forward);
    let table = table.right(steps(warmup), |study| study.warm.map(|case| cell(case, FORWARD, mean)));
    (0..STUDIED.len()).fold(table, with_start).into()
}

fn cold_table(studies: Vec<Study>) -> Table {
    const PARTS: [(&str, Part); 4] =
        [("forward", FORWARD), ("backward", BACKWARD), ("AdamW", OPTIMIZER), ("first step", TOTAL)];
    let shown = |study: &Study, part: Part, statistic: fn(&[f64]) -> Option<f64>| -> Option<Cell> {
        Some(cell(study.cold()?, part, |samples| statistic(&samples.samples).map(time)))
    };
    let table = PARTS.into_iter().fold(Table::of(studies).text("size", Study::name), |table, (name, part)| {
        table.right(format!("{name} (ms)"), move |study| shown(study, part, |samples| samples.first().copied()))
    });
    table
        .right("second step (ms)", |study| shown(study, TOTAL, |samples| samples.get(1).copied()))
        .right("median step (ms)", |study| shown(study, TOTAL, |samples| Some(stats::median(samples))))
        .into()
}
