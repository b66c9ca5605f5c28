//! Part (b): forward, backward and optimizer of every size and context, by the host's clock and by CUDA events.

use anyhow::Result;
use serde::Serialize;

use super::{BACKWARD, FORWARD, OPTIMIZER, Part, SWEEP, StepCase, cell, count, mean, of_grid, place, sizes, turns};
use crate::bench::training_step::{Params, Row};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{distinct, listed, time};
use crate::harness::answer::table::TableBuilder;
use crate::harness::answer::{Claim, Quantity, Range, RecordSet, Table, Unit};
use crate::harness::record::Profile;
use crate::harness::samples::Samples;
use crate::harness::stats;
use crate::model::SizeName;

/// The context that sentences quote, where most sizes were measured at it.
const QUOTED_CONTEXT: i64 = 512;

/// The parts of a step by the host's clock and between events.
const CLOCKS: [(Part, Part); 3] = [
    (FORWARD, |row| row.forward_device.as_ref()),
    (BACKWARD, |row| row.backward_device.as_ref()),
    (OPTIMIZER, |row| row.optimizer_device.as_ref()),
];

#[derive(Serialize)]
pub(super) struct Passes {
    /// The sizes measured at the quoted context, and the times of each in ms, "11.2–15.7" where unstable: "a, b and c".
    context: String,
    sizes: String,
    forward: String,
    backward: String,
    /// Backward over forward in stable cells, medians of one case.
    ratio: Option<Range>,
    /// Cells of several samples, the stable ones of them, and the largest standard deviation of these over its mean.
    cells: usize,
    stable: usize,
    deviation: Option<Quantity>,
    /// "small at 128 and xl at 256", and the largest spread of one of them.
    unstable: String,
    worst: Option<Quantity>,
    /// Of a GPU's unstable cells: "small takes as long at 128 as at 256".
    waiting: String,
    /// The largest difference between a median by events and by the host's clock.
    gap: Option<Quantity>,
    gap_at: String,
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

    fn params(&self) -> &'a Params {
        &self.case.params
    }

    fn size(&self) -> &'static str {
        self.params().size.size().name
    }

    fn is_stable(&self) -> bool {
        [self.forward, self.backward].into_iter().all(|samples| turns(samples).is_stable())
    }

    fn time(&self, samples: &Samples) -> String {
        self.case.median(samples).mark(&mean_or_ends(samples))
    }

    fn spread(&self) -> Quantity {
        self.case.quantity(turns(self.forward).spread().max(turns(self.backward).spread()), Unit::One)
    }

    fn backward_over_forward(&self) -> Quantity {
        let [forward, backward] = [self.forward, self.backward].map(|samples| stats::median(&samples.samples));
        self.case.quantity(backward / forward, Unit::One)
    }

    /// The larger standard deviation of forward and backward over its mean; none of one sample.
    fn deviation(&self) -> Option<Quantity> {
        let of = |samples: &Samples| stats::coefficient_of_variation(&samples.samples);
        let larger = of(self.forward).max(of(self.backward));
        larger.is_finite().then(|| self.case.quantity(larger, Unit::One))
    }

    /// How far events and the host's clock differ, for each stable part that both have timed.
    fn between_clocks(&self) -> impl Iterator<Item = (Quantity, String)> {
        CLOCKS.iter().filter_map(|(host, events)| {
            let (host, events) = (host(self.row).filter(|host| turns(host).is_stable())?, events(self.row)?);
            let [host, events] = [host, events].map(|samples| stats::median(&samples.samples));
            Some((self.case.quantity((1.0 - events / host).abs(), Unit::One), place(self.params())))
        })
    }
}

impl Passes {
    /// Whether most cells are stable; none where no cell is.
    pub(super) fn claim(&self) -> Option<Claim> {
        let is_small = 2 * self.stable > self.cells;
        let claim = Claim::new("spread-is-small", is_small);
        self.deviation.as_ref()?;
        Some(claim.operand_text("stable cells", format!("{} of {}", self.stable, self.cells)))
    }

    /// None where no case was measured.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let cells = Timed::all(cases);
        let (stable, unstable): (Vec<&Timed>, Vec<&Timed>) =
            cells.iter().filter(|cell| cell.deviation().is_some()).partition(|cell| cell.is_stable());
        let gaps = cells.iter().flat_map(Timed::between_clocks);
        let gap = gaps.reduce(|a, b| if b.0.value() > a.0.value() { b } else { a });
        // Of the contexts that most sizes were measured at, the longest.
        let contexts = || cells.iter().map(|cell| cell.params().context_length);
        let measured_at = |at: &i64| contexts().filter(|other| other == at).count();
        let context = contexts().max_by_key(|at| (measured_at(at), *at == QUOTED_CONTEXT, *at))?;
        let shown = || cells.iter().filter(|cell| cell.params().context_length == context);
        let name = |cell: &&Timed| format!("{} at {}", cell.size(), count(cell.params().context_length));
        Some(Self {
            context: count(context),
            sizes: listed_of(shown().map(|cell| cell.size().into())),
            forward: listed_of(shown().map(|cell| cell.time(cell.forward))),
            backward: listed_of(shown().map(|cell| cell.time(cell.backward))),
            ratio: Range::of(stable.iter().map(|cell| cell.backward_over_forward())),
            cells: stable.len() + unstable.len(),
            stable: stable.len(),
            deviation: Quantity::largest(stable.iter().filter_map(|cell| cell.deviation())),
            unstable: listed_of(unstable.iter().map(name)),
            worst: Quantity::largest(unstable.iter().map(|cell| cell.spread())),
            waiting: listed_of(unstable.iter().filter_map(|cell| as_long_at_twice(cell, &cells))),
            gap_at: gap.as_ref().map(|(_, at)| at.clone()).unwrap_or_default(),
            gap: gap.map(|(gap, _)| gap),
        })
    }
}

fn listed_of(words: impl Iterator<Item = String>) -> String {
    listed(&words.collect::<Vec<_>>())
}

fn mean_or_ends(samples: &Samples) -> String {
    turns(samples).range().unwrap_or_else(|| time(stats::mean(&samples.samples)))
}

/// Where some step at twice the context is as fast as one at this context, kernels do not set the pace.
fn as_long_at_twice(cell: &Timed, cells: &[Timed]) -> Option<String> {
    let doubled = cell.params().context_length.saturating_mul(2);
    let is_double =
        |other: &&Timed| (other.params().size, other.params().context_length) == (cell.params().size, doubled);
    let of_a_gpu = |double: &&Timed| double.case.id.profile == Profile::Gpu && double.case.id.run == cell.case.id.run;
    let double = cells.iter().find(is_double).filter(of_a_gpu)?;
    let overlap = stats::min(&double.forward.samples) <= stats::max(&cell.forward.samples);
    let context = count(cell.params().context_length);
    overlap.then(|| format!("{} takes as long at {context} as at {}", cell.size(), count(doubled)))
}

pub(super) fn figure(cases: &[StepCase], set: &RecordSet) -> Result<Figure> {
    let cells = Timed::all(cases);
    let series = distinct(cells.iter().map(|cell| cell.size())).into_iter().map(|size| {
        let points = cells
            .iter()
            .filter(|cell| cell.size() == size)
            .map(|cell| (cell.params().context_length as f64, Some(1e3 * stats::mean(&cell.forward.samples))));
        Series::over_numbers(size, points)
    });
    let plot = Plot::new(PlotKind::Line, "context length (tokens)", "forward pass (ms)", series.collect());
    let alt = "Lines on logarithmic axes: mean time of the forward pass over context length, by model size.";
    let caption = format!("Mean time of the forward pass, float32. {}.", set.machine()?);
    Ok(Figure::plot(alt, Plot { log_x: true, log_y: true, ..plot }).captioned(caption))
}

/// The passes of every case of the sweep, and its optimizer steps; none where there is no case.
pub(super) fn tables(set: &RecordSet, cases: &[StepCase]) -> Result<Vec<(&'static str, Table)>> {
    let sweep = of_grid(cases, SWEEP);
    let Some(p) = sweep.first().map(|case| &case.params) else { return Ok(Vec::new()) };
    let setting = format!(
        "over {} steps after {} warm-up steps; {} without TF32, batch {}, {} attention, {}. †: slowest step over 1.05 times \
         the fastest.",
        p.steps,
        p.warmup,
        p.dtype.name(),
        p.batch_size,
        p.attention.name(),
        set.machine()?
    );
    let fused = if set.is_gpu() { "fused" } else { "unfused" };
    let passes = times(&sweep, &[("forward", FORWARD), ("backward", BACKWARD)]);
    let optimizer = times(&sweep, &[("AdamW", OPTIMIZER)]);
    Ok(vec![
        ("passes", passes.captioned(format!("Mean ± standard deviation {setting}"))),
        ("optimizer", optimizer.captioned(format!("A step of {fused} AdamW: mean ± standard deviation {setting}"))),
    ])
}

/// A line for each part and size, and a column for each context.
fn times(sweep: &[&StepCase], parts: &[(&'static str, Part)]) -> Table {
    let lines = parts.iter().flat_map(|(name, part)| sizes(sweep).into_iter().map(move |size| (*name, *part, size)));
    let table = Table::of(lines);
    let table = if parts.len() > 1 { table.text("pass", |(name, ..)| *name) } else { table };
    let mut contexts = distinct(sweep.iter().map(|case| case.params.context_length));
    contexts.sort_unstable();
    let add = |table: TableBuilder<(&'static str, Part, SizeName)>, context: i64| {
        table.right(format!("context {} (ms)", count(context)), |(_, part, size)| {
            let at = |case: &&&StepCase| (case.params.size, case.params.context_length) == (*size, context);
            sweep.iter().find(at).map(|case| cell(case, *part, marked))
        })
    };
    contexts.into_iter().fold(table.text("size", |(.., size)| size.size().name), add).into()
}

fn marked(samples: &Samples) -> String {
    turns(samples).marked(&mean(samples))
}
