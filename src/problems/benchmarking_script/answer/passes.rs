//! Part (b): forward, backward and optimizer of every size and context, by the host's clock and by CUDA events.

use anyhow::Result;
use serde::Serialize;

use super::{Part, SWEEP, StepCase, count, digits, mean, median, noise, of_grid, place, ratio};
use crate::bench::training_step::{Params, Row};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::{Answer, Claim, Quantity, Range, RecordSet, Style, Table, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats;

/// Where a standard deviation stays below this share of its mean, the device sets the pace.
const STEADY: f64 = 0.01;

/// The parts of a step by the host's clock, and between events.
const PARTS: [(&str, Part, Part); 3] = [
    ("forward", |row| row.forward.as_ref(), |row| row.forward_device.as_ref()),
    ("backward", |row| row.backward.as_ref(), |row| row.backward_device.as_ref()),
    ("optimizer", |row| row.optimizer.as_ref(), |row| row.optimizer_device.as_ref()),
];

#[derive(Serialize)]
pub(super) struct Passes {
    /// The shortest mean of a forward pass, of the steady cells if there are any, and the longest of all.
    low: Quantity,
    low_at: String,
    high: Quantity,
    high_at: String,
    /// Backward over forward, medians of one case.
    backward: Range,
    /// Cells of several samples, the steady ones of them, and the largest deviation of both.
    cells: usize,
    worst: Option<Quantity>,
    steady: usize,
    steady_worst: Option<Quantity>,
    /// "small at 128".
    unsteady: Vec<String>,
    /// Of the unsteady cells: "small takes as long at 128 as at 256".
    waiting: Vec<String>,
    /// The largest difference between a median by events and by the host's clock.
    gap: Option<Quantity>,
    gap_at: String,
    /// Of the figure.
    context: i64,
}

/// A measured cell of the sweep.
struct Timed<'a> {
    case: &'a StepCase,
    row: &'a Row,
    forward: &'a Samples,
    backward: &'a Samples,
}

impl<'a> Timed<'a> {
    fn of(case: &'a StepCase) -> Option<Self> {
        let row = case.row()?;
        Some(Self { case, row, forward: row.forward.as_ref()?, backward: row.backward.as_ref()? })
    }

    fn all(cases: &'a [StepCase]) -> Vec<Self> {
        of_grid(cases, SWEEP).into_iter().filter_map(Self::of).collect()
    }

    fn mean(&self) -> Quantity {
        self.case.statistic(self.forward, stats::mean)
    }

    fn place(&self) -> String {
        place(&self.case.params)
    }

    fn backward_over_forward(&self) -> Quantity {
        let [forward, backward] = [self.forward, self.backward].map(|samples| stats::median(&samples.samples));
        self.case.quantity(backward / forward, Unit::One)
    }

    /// The larger standard deviation of forward and backward over its mean; none of one sample.
    fn variation(&self) -> Option<Quantity> {
        let of = |samples: &Samples| stats::coefficient_of_variation(&samples.samples);
        let larger = of(self.forward).max(of(self.backward));
        larger.is_finite().then(|| self.case.quantity(larger, Unit::One))
    }

    fn is_steady(&self) -> bool {
        self.variation().is_some_and(|variation| variation.value() < STEADY)
    }

    /// How far events and the host's clock differ, for each part that both have timed.
    fn between_clocks(&self) -> impl Iterator<Item = (Quantity, String)> {
        PARTS.iter().filter_map(|(_, host, events)| {
            let [host, events] = [host(self.row)?, events(self.row)?].map(|samples| stats::median(&samples.samples));
            Some((self.case.quantity((1.0 - events / host).abs(), Unit::One), self.place()))
        })
    }
}

impl Passes {
    /// None where no case was measured.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let cells = Timed::all(cases);
        let (steady, unsteady): (Vec<&Timed>, Vec<&Timed>) =
            cells.iter().filter(|cell| cell.variation().is_some()).partition(|cell| cell.is_steady());
        let paced = cells.iter().filter(|cell| steady.is_empty() || cell.is_steady());
        let by_mean = |a: &&Timed, b: &&Timed| a.mean().value().total_cmp(&b.mean().value());
        let (low, high) = (paced.min_by(by_mean)?, cells.iter().max_by(by_mean)?);
        let gaps = cells.iter().flat_map(Timed::between_clocks);
        let gap = gaps.reduce(|a, b| if b.0.value() > a.0.value() { b } else { a });
        // Of the contexts that most sizes were measured at, the longest.
        let contexts = || cells.iter().map(|cell| cell.case.params.context_length);
        let context = contexts().max_by_key(|at| (contexts().filter(|other| other == at).count(), *at))?;
        let name = |p: &Params| format!("{} at {}", p.size.size().name, count(p.context_length));
        Some(Self {
            low: low.mean(),
            low_at: low.place(),
            high: high.mean(),
            high_at: high.place(),
            backward: Range::of(cells.iter().map(Timed::backward_over_forward))?,
            cells: steady.len() + unsteady.len(),
            worst: Quantity::largest(cells.iter().filter_map(Timed::variation)),
            steady: steady.len(),
            steady_worst: Quantity::largest(steady.iter().filter_map(|cell| cell.variation())),
            unsteady: unsteady.iter().map(|cell| name(&cell.case.params)).collect(),
            waiting: unsteady.iter().filter_map(|cell| as_long_at_twice(cell, &cells)).collect(),
            gap_at: gap.as_ref().map(|(_, at)| at.clone()).unwrap_or_default(),
            gap: gap.map(|(gap, _)| gap),
            context,
        })
    }

    /// Adds the claims and the figure.
    pub(super) fn conclude(&self, answer: &mut Answer, cases: &[StepCase], gpu: bool) -> Result<()> {
        let Range { low, high } = &self.backward;
        answer.claim(
            Claim::new("backward-is-about-twice", low.value() > 1.6 && high.value() < 2.4)
                .operand("smallest ratio of medians", low)
                .operand("largest", high)
                .operand_text("wanted", "above 1.6 and below 2.4"),
        )?;
        let name = "cells with a standard deviation below 1% of the mean";
        answer.claim(Claim::all("spread-is-small", name, self.steady, self.cells))?;
        answer.claim(
            Claim::new("some-cells-wait-for-the-host", gpu && !self.waiting.is_empty())
                .count("other cells", self.unsteady.len())
                .count("of them above 0.9 of the time at twice the context", self.waiting.len()),
        )?;
        if let Some(gap) = &self.gap {
            answer.claim(Claim::below("events-agree-with-the-host", "largest difference of a median", gap, 0.05))?;
        }
        answer.figure("passes", figure(&Timed::all(cases), self.context))
    }
}

/// Where the same size takes as long at twice the context, the host sets the pace.
fn as_long_at_twice(cell: &Timed, cells: &[Timed]) -> Option<String> {
    let (size, context) = (cell.case.params.size, cell.case.params.context_length);
    let doubled = context.saturating_mul(2);
    let double = cells.iter().find(|c| c.case.params.size == size && c.case.params.context_length == doubled)?;
    let [one, two] = [cell, double].map(|cell| cell.case.median(cell.forward));
    let same = ratio(&one, &two)?.value() > 0.9;
    same.then(|| format!("{} takes as long at {} as at {}", size.size().name, count(context), count(doubled)))
}

fn figure(cells: &[Timed], context: i64) -> Figure {
    let shown: Vec<&Timed> = cells.iter().filter(|cell| cell.case.params.context_length == context).collect();
    let series = PARTS.map(|(name, host, _)| {
        let points = shown.iter().map(|cell| {
            let time = host(cell.row).map(|samples| 1e3 * stats::median(&samples.samples));
            (cell.case.params.size.size().name, time)
        });
        Series::over_categories(name, points)
    });
    let plot = Plot::new(PlotKind::Bar, "size", "time (ms)", series.to_vec());
    let alt = "Marks on a logarithmic axis for the median time of the forward pass, the backward pass and the optimizer \
               step, one group for each model size.";
    Figure::plot(alt, Plot { log_y: true, ..plot })
}

/// Every case of the sweep; none where there is no case.
pub(super) fn table(set: &RecordSet, cases: &[StepCase]) -> Option<Table> {
    let sweep = of_grid(cases, SWEEP);
    let p = &sweep.first()?.params;
    let digits = digits(set);
    let mut table = Table::of(sweep.iter().copied())
        .text("size", |case| case.params.size.size().name)
        .right("context", |case| count(case.params.context_length));
    for (name, host, _) in PARTS {
        table = table.right(format!("{name}: mean ± std"), |case| mean(case, host, digits)).number(
            "median",
            Style::Ms,
            digits,
            |case| median(case, host),
        );
    }
    Some(table.captioned(format!(
        "The parts of a training step by the host's clock, over {} steps after {} warm-up steps; {} with TF32 off, batch {}, \
         vocabulary {}, {} attention, {} AdamW. All times in ms.{} {}.",
        p.steps,
        p.warmup,
        p.dtype.name(),
        p.batch_size,
        count(p.vocab_size),
        p.attention.name(),
        if set.is_gpu() { "fused" } else { "unfused" },
        noise(set),
        set.source()
    )))
}
