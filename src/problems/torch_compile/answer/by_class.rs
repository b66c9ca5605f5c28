//! Whole steps by class of kernel: a table, a figure, and what each way to run the step gave over the one before.

use anyhow::Result;
use serde::Serialize;

use super::super::classes::{Params, Row, Step, StepName};
use super::super::measure;
use super::cases::{ClassesCase, machines};
use crate::attention::ImplementationName;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::step_classes::{StepClass, StepFloor, StepProfile};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Role, Series, Tone};
use crate::harness::answer::format::{grouped, listed};
use crate::harness::answer::table::TableBuilder;
use crate::harness::answer::{Answer, Cell, Emphasis, Quantity, RecordSet, Records, Style, Table, Turns, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats;

/// Of the first case.
#[derive(Serialize)]
pub struct ByClass {
    /// The floor over each measured step: "85% of the fused step's time and 60% of torch.compile's time".
    shares: String,
    /// Whether there are two steps to be drawn.
    drawn: bool,
    /// The fastest of the rates by which the floor is computed.
    product: Quantity,
    copy: Quantity,
}

/// A part of a step's time: what its kernels do, or that none runs.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Class(StepClass),
    Gaps,
}

const PARTS: [Part; 7] = {
    use StepClass::*;
    [
        Part::Class(Products),
        Part::Class(Attention),
        Part::Class(Elementwise),
        Part::Class(Optimizer),
        Part::Class(Copies),
        Part::Class(Other),
        Part::Gaps,
    ]
};

impl Part {
    fn label(self) -> &'static str {
        match self {
            Self::Class(class) => class.label(),
            Self::Gaps => "gaps",
        }
    }

    /// Seven colours that differ.
    fn colour(self) -> (Role, Tone) {
        use StepClass::*;
        match self {
            Self::Class(Products) => (Role::Other(0), Tone::Full),
            Self::Class(Attention) => (Role::Other(1), Tone::Full),
            Self::Class(Elementwise) => (Role::Other(2), Tone::Full),
            Self::Class(Optimizer) => (Role::Optimizer, Tone::Full),
            Self::Class(Copies) => (Role::Other(3), Tone::Full),
            Self::Class(Other) => (Role::Plain, Tone::Dark),
            Self::Gaps => (Role::Plain, Tone::Light),
        }
    }
}

/// One measured step, by the profile of median time.
struct Taken<'a> {
    step: &'a Step,
    profile: &'a StepProfile,
}

impl<'a> Taken<'a> {
    fn of(step: &'a Step) -> Option<Self> {
        let mut profiles: Vec<&StepProfile> = step.profiles.iter().collect();
        profiles.sort_by(|a, b| a.busy_s.total_cmp(&b.busy_s));
        Some(Self { step, profile: profiles.get(profiles.len() / 2)? })
    }

    fn step_s(&self) -> f64 {
        stats::median(&self.step.step.samples)
    }

    fn seconds(&self, part: Part) -> f64 {
        match part {
            Part::Class(class) => self.profile.classes.get(&class).map_or(0.0, |tally| tally.seconds),
            Part::Gaps => self.step_s() - self.profile.busy_s,
        }
    }
}

impl ClassesCase<'_> {
    fn taken(&self, name: StepName) -> Option<Taken<'_>> {
        Taken::of(self.row?.steps.get(&name)?.measured()?)
    }

    fn floor(&self) -> Option<StepFloor> {
        let (p, Row { product, copy, .. }) = (self.params, self.row?);
        StepFloor::of(&p.config(), p.batch_size, p.dtype, product, copy)
    }

    fn seconds(&self, value: f64) -> Quantity {
        self.case.quantity(value, Unit::Seconds)
    }

    /// The floor's time over the step's.
    fn share(&self, name: StepName) -> Option<Quantity> {
        Some(self.case.quantity(self.floor()?.total_s() / self.taken(name)?.step_s(), Unit::One))
    }

    /// Of our fused step and of PyTorch's, where they were measured.
    fn shares(&self) -> String {
        let share =
            |(name, whose): (StepName, &str)| Some(format!("{} of {whose}", self.share(name)?.text(Style::Percent, 0)));
        let steps = [(StepName::Fused, "the fused step's time"), (StepName::Compiled, "torch.compile's time")];
        listed(&steps.into_iter().filter_map(share).collect::<Vec<_>>())
    }

    /// The step's time, or how it or else the whole case ended.
    fn time_cell(&self, name: StepName) -> Cell {
        if let Some(taken) = self.taken(name) {
            let unstable = !Turns::single(&taken.step.step.samples).is_stable();
            return Cell::Number(self.seconds(taken.step_s()), Emphasis { bold: false, unstable });
        }
        let column = self.row.and_then(|row| row.steps.get(&name));
        Cell::text(column.map_or(self.case.outcome.label(), ColumnOutcome::label))
    }

    /// The parts that some step has; other kernels only where they take a thousandth of one.
    fn parts(&self) -> Vec<Part> {
        let is_shown = |part: &Part| {
            let some =
                |name: &StepName| self.taken(*name).is_some_and(|taken| taken.seconds(*part) > 1e-3 * taken.step_s());
            *part != Part::Class(StepClass::Other) || StepName::ALL.iter().any(some)
        };
        PARTS.into_iter().filter(is_shown).collect()
    }
}

impl ByClass {
    /// None where no case was measured.
    pub fn of(cases: &[ClassesCase]) -> Option<Self> {
        let case = measured(cases)?;
        let row = case.row?;
        let fastest = |samples: &Samples| samples.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let (product, copy) = (row.product.work.as_ref()?, row.copy.work.as_ref()?);
        Some(Self {
            shares: case.shares(),
            drawn: ladder(case).is_some(),
            product: case.case.quantity(product.flops / fastest(&row.product), Unit::FlopsPerSecond),
            copy: case.case.quantity(copy.bytes / fastest(&row.copy), Unit::BytesPerSecond),
        })
    }
}

/// The planned cases that `set` does not hold.
pub fn unmeasured(records: &Records, set: &RecordSet) -> Vec<Params> {
    let planned = records.planned(set.profile()).filter(|(_, params)| set.file.case(params).is_none());
    let classes = planned.filter_map(|(_, params)| match serde_json::from_value(params.clone()).ok()? {
        measure::Params::Classes(params) => Some(params),
        _ => None,
    });
    classes.collect()
}

/// The figure of the first measured case, and all tables.
pub fn main(answer: &mut Answer, cases: &[ClassesCase], planned: &[Params]) -> Result<()> {
    if let Some(case) = measured(cases).filter(|case| ladder(case).is_some()) {
        answer.figure("classes", figure(case, &machines(cases)))?;
    }
    tables(answer, "classes", cases, planned)
}

fn measured<'c, 'a>(cases: &'c [ClassesCase<'a>]) -> Option<&'c ClassesCase<'a>> {
    cases.iter().find(|case| case.row.is_some())
}

/// A table of each recorded and each planned case, and the ladder of a measured one.
pub fn tables(answer: &mut Answer, id: &str, cases: &[ClassesCase], planned: &[Params]) -> Result<()> {
    let machine = machines(cases);
    for (i, case) in cases.iter().enumerate() {
        let id = if i == 0 { id.to_string() } else { format!("{id}-{}", i + 1) };
        answer.table(id.clone(), table(case, &machine))?;
        if let Some(ladder) = ladder(case) {
            answer.table(format!("{id}-ladder"), ladder)?;
        }
    }
    for (i, params) in planned.iter().enumerate() {
        let table =
            Table::of(StepName::ALL).text("step", |name| label(*name, params)).text("time (ms)", |_| None::<Cell>);
        let caption = format!("A training step by class of kernel: {}; not measured yet.", setting(params));
        answer.table(format!("{id}-planned-{}", i + 1), table.captioned(caption))?;
    }
    Ok(())
}

/// "xl, context 512, batch 4, bfloat16".
fn setting(p: &Params) -> String {
    let context = grouped(p.context_length as f64, 0);
    format!("{}, context {context}, batch {}, {}", p.size.size().name, p.batch_size, p.dtype.name())
}

/// Markdown.
fn label(name: StepName, p: &Params) -> String {
    let attention = match p.attention {
        ImplementationName::Flash => "our attention".to_string(),
        other => other.implementation().map_or(String::new(), |found| format!("{} attention", found.label)),
    };
    match name {
        StepName::Plain => "eager, plain attention".into(),
        StepName::Eager => format!("eager, {attention}"),
        StepName::Captured => format!("captured, {attention}"),
        StepName::Compiled => format!("torch.compile, {}", p.mode.name()),
        StepName::Fused => "fused".into(),
    }
}

/// A step, or the floor of all.
#[derive(Clone, Copy)]
enum Line {
    Step(StepName),
    Floor,
}

fn lines() -> impl Iterator<Item = Line> {
    StepName::ALL.into_iter().map(Line::Step).chain([Line::Floor])
}

impl Line {
    fn label(self, p: &Params) -> String {
        match self {
            Self::Step(name) => label(name, p),
            Self::Floor => "floor".into(),
        }
    }

    fn seconds(self, case: &ClassesCase, part: Part) -> Option<f64> {
        match (self, part) {
            (Self::Step(name), _) => Some(case.taken(name)?.seconds(part)),
            (Self::Floor, Part::Class(class)) => case.floor()?.of_class(class),
            (Self::Floor, Part::Gaps) => None,
        }
    }
}

fn table(case: &ClassesCase, machine: &str) -> Table {
    let table =
        Table::of(lines()).text("step", |line| line.label(case.params)).number("time (ms)", Style::Ms, 1, |line| {
            match *line {
                Line::Step(name) => case.time_cell(name),
                Line::Floor => case.floor().map(|floor| case.seconds(floor.total_s())).into(),
            }
        });
    let with_parts = |table: TableBuilder<Line>, part: Part| {
        let cell = |line: &Line| Some(case.seconds(line.seconds(case, part)?));
        table.number(part.label(), Style::Ms, 1, cell)
    };
    let kernels = |name| Some(case.case.quantity(case.taken(name)?.profile.count() as f64, Unit::One));
    let step = |line: &Line| if let Line::Step(name) = line { Some(*name) } else { None };
    let table = case
        .parts()
        .into_iter()
        .fold(table, with_parts)
        .number("kernels", Style::Grouped, 0, |line| step(line).and_then(kernels))
        .number("floor / time", Style::Percent, 0, |line| step(line).and_then(|name| case.share(name)));
    let runs = case.params.steps;
    let on_cpu = if case.case.id.machine().gpus.is_empty() {
        " Operators of the CPU stand in for kernels; those of AdamW are elementwise."
    } else {
        ""
    };
    table.captioned(format!(
        "A training step by class of kernel, in ms: {}; {machine}. Times are medians of {runs} steps without a profiler; † marks \
         those whose steps differ by more than 5 %. Classes are of one profiled step. Gaps are the time without a kernel: the \
         step's time less that of its kernels. Plain attention counts as products and elementwise kernels.{on_cpu}",
        setting(case.params)
    ))
}

/// What each measured step saves over the measured one before it; none where fewer than two were.
fn ladder(case: &ClassesCase) -> Option<Table> {
    let measured: Vec<StepName> = StepName::ALL.into_iter().filter(|name| case.taken(*name).is_some()).collect();
    let rungs: Vec<[StepName; 2]> = measured.windows(2).map(|pair| [pair[0], pair[1]]).collect();
    if rungs.is_empty() {
        return None;
    }
    let saved = |[from, to]: &[StepName; 2], of: &dyn Fn(&Taken) -> f64| {
        Some(case.seconds(of(&case.taken(*from)?) - of(&case.taken(*to)?)))
    };
    let table = Table::of(rungs)
        .text("from", |[from, _]| label(*from, case.params))
        .text("to", |[_, to]| label(*to, case.params))
        .number("saves (ms)", Style::Ms, 1, |rung| saved(rung, &|taken| taken.step_s()));
    let with_parts = |table: TableBuilder<[StepName; 2]>, part: Part| {
        table.number(part.label(), Style::Ms, 1, |rung| saved(rung, &|taken| taken.seconds(part)))
    };
    let table = case.parts().into_iter().fold(table, with_parts);
    Some(table.captioned("What each way to run the step saves over the one before, in all and by class, in ms."))
}

fn figure(case: &ClassesCase, machine: &str) -> Figure {
    let shown: Vec<Line> = lines().filter(|line| line.seconds(case, PARTS[0]).is_some()).collect();
    let series = case.parts().into_iter().map(|part| {
        // The clock without a profiler may be a little faster than the kernels under it.
        let value = |line: &Line| 1e3 * line.seconds(case, part).unwrap_or(0.0).max(0.0);
        let bars = shown.iter().map(|line| (line.label(case.params), Some(value(line))));
        let (role, tone) = part.colour();
        Series::over_categories(part.label(), bars).role(role, tone)
    });
    let plot = Plot::new(PlotKind::HorizontalBar, "step", "time (ms)", series.collect());
    let alt = "Stacked bars of a training step's time by class of kernel, one bar for each way to run it, and one for the floor.";
    let caption = format!("A training step by class of kernel: {}; {machine}.", setting(case.params));
    Figure::plot(alt, plot).captioned(caption)
}

#[cfg(test)]
mod tests;
