//! Part (a): the memory of a forward pass and of a training step over time, as figures, numbers and claims.

use std::ops::RangeInclusive;

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::super::components::Timeline;
use super::super::measure::Row;
use super::{MemoryCase, bytes, memory_format, size_of};
use crate::harness::answer::figure::{Figure, Phase, Plot, PlotKind, Series};
use crate::harness::answer::{Claim, Quantity, RecordSet, SameRun, Style, Unit};
use crate::model::Precision;

const WORKING: &str = "working tensors";

/// The case whose timelines are drawn: the shortest in float32 that has them.
pub struct TimelineCase<'a> {
    pub case: &'a MemoryCase,
    pub row: &'a Row,
    forward: &'a Timeline,
    step: &'a Timeline,
}

/// What the sentences quote of it.
#[derive(Serialize)]
pub struct TimelineNumbers {
    context: i64,
    /// What the step's forward pass leaves for its backward pass.
    saved: String,
    /// Parameters, gradients and both moments.
    fixed: String,
    /// The highest peak of the step's phases.
    peak: String,
    phase: String,
    /// Where the forward pass alone has its peak, what the peak adds to the parameters, and how often it is reached.
    range: String,
    working: String,
    teeth: usize,
    layers: i64,
    /// What never changes in the forward pass.
    unchanging: String,
    #[serde(skip)]
    pub claim: Claim,
}

impl<'a> TimelineCase<'a> {
    pub fn of(cases: &'a [MemoryCase]) -> Option<Self> {
        cases.iter().filter(|case| case.params.dtype == Precision::Float32).find_map(|case| {
            let row = case.row()?;
            let (forward, step) = (row.forward.timeline.as_ref()?, row.training_step.timeline.as_ref()?);
            Some(Self { case, row, forward, step })
        })
    }

    pub fn numbers(&self) -> Result<TimelineNumbers> {
        let Self { row, .. } = self;
        let (forward, step) = (&row.forward, &row.training_step);
        let sum = |parts: &[u64]| size_of(&bytes(self.case, parts.iter().sum()));
        // Of equal peaks the first one is named.
        let top = step.phases.iter().rev().max_by_key(|phase| phase.peak.requested_bytes);
        let top = top.context("a training step has no phases")?;
        let ratio = SameRun::of(&self.peak_of("forward")?, &self.peak_of("optimizer")?)?.ratio();
        let highest = self.forward.working.iter().max();
        Ok(TimelineNumbers {
            context: self.case.params.context_length,
            saved: sum(&[step.saved_bytes]),
            fixed: sum(&[row.parameters_bytes, row.parameters_bytes, row.optimizer_state_bytes]),
            peak: sum(&[top.peak.allocated_bytes]),
            phase: top.name.clone(),
            range: forward.peak_range.clone(),
            working: sum(&[forward.at_peak.working]),
            teeth: self.forward.working.iter().filter(|working| Some(*working) == highest).count(),
            layers: self.layers(),
            unchanging: sum(&[row.parameters_bytes, forward.at_peak.other]),
            claim: Claim::above("stages-differ", "peak of the forward pass over the optimizer's", &ratio, 1.05),
        })
    }

    fn layers(&self) -> i64 {
        self.case.params.size.size().num_layers
    }

    pub fn forward_figure(&self, set: &RecordSet) -> Result<Figure> {
        let alt = "Memory beside the parameters over one forward pass: equal teeth, one per layer.";
        let caption = format!(
            "One forward pass under no_grad, beside {} of parameters, tables and workspaces: {}. Of each {} ms the lowest and \
             the highest moment are recorded; every peak is exact.",
            self.numbers()?.unchanging,
            self.place(set)?,
            self.interval(self.forward)
        );
        Ok(Figure::plot(alt, beside_parameters(self.forward)).captioned(caption))
    }

    /// The layer of the forward pass of which the record keeps most moments; none where the record does not show where
    /// one begins and ends.
    pub fn layer_figure(&self, set: &RecordSet) -> Result<Option<Figure>> {
        let Some(layer) = one_layer(self.forward, self.layers()) else { return Ok(None) };
        let alt = "Memory over one layer: a peak in attention, then a lower one in the feed-forward network.";
        let caption = format!(
            "One layer of the same pass at its {} recorded moments: attention, then feed-forward. Its peaks are exact; other \
             allocations within each {} ms are missing. {}.",
            layer.clone().count(),
            self.interval(self.forward),
            set.machine()?
        );
        let mut plot = beside_parameters(self.forward);
        plot.phases.clear();
        plot.series.iter_mut().for_each(|series| series.points = series.points[layer.clone()].to_vec());
        Ok(Some(Figure::plot(alt, plot).captioned(caption)))
    }

    /// The milliseconds in which the record keeps two moments.
    fn interval(&self, Timeline { time_s, .. }: &Timeline) -> String {
        let all = time_s[time_s.len() - 1] - time_s[0];
        let interval = all / (self.case.params.timeline_points / 2).max(1) as f64;
        self.case.quantity(interval, Unit::Seconds).text(Style::Ms, 1)
    }

    /// "context 512, float32, NVIDIA H200".
    fn place(&self, set: &RecordSet) -> Result<String> {
        let params = &self.case.params;
        Ok(format!("context {}, {}, {}", params.context_length, params.dtype.name(), set.machine()?))
    }

    pub fn step_figure(&self, set: &RecordSet) -> Result<Figure> {
        let stacked = [
            ("parameters", &self.step.parameters),
            ("optimizer state", &self.step.optimizer_state),
            ("gradients", &self.step.gradients),
            ("saved activations", &self.step.saved),
            (WORKING, &self.step.working),
        ];
        let (style, _, unit) = memory_format(set);
        let alt = "Stacked areas over one training step: saved activations grow and shrink, gradients grow, the rest is flat.";
        let caption = format!(
            "One training step with optimizer state: {}. Of each {} ms the lowest and the highest moment are recorded.",
            self.place(set)?,
            self.interval(self.step)
        );
        Ok(Figure::plot(alt, area(self.step, &format!("active memory ({unit})"), style, &stacked)).captioned(caption))
    }

    /// The peak of a phase of the step, as requested.
    fn peak_of(&self, phase: &str) -> Result<Quantity> {
        let found = self.row.training_step.phases.iter().find(|found| found.name == phase);
        let found = found.with_context(|| format!("a training step has no phase {phase:?}"))?;
        Ok(bytes(self.case, found.peak.requested_bytes))
    }
}

/// The points of the layer that has most of them, from the lowest point between two layers to the next such; none where
/// the memory of the two always differs. The first and the last layer are not looked at, since the pass begins and ends there.
pub fn one_layer(timeline: &Timeline, layers: i64) -> Option<RangeInclusive<usize>> {
    let (first, last) = (*timeline.time_s.first()?, *timeline.time_s.last()?);
    let period = (last - first) / layers as f64;
    let lowest = |layer: i64| {
        let within = |at: &usize| ((timeline.time_s[*at] - first) / period).floor() == layer as f64;
        (0..timeline.time_s.len()).filter(within).min_by_key(|at| timeline.working[*at])
    };
    let layer = |at: i64| {
        let (from, to) = (lowest(at)?, lowest(at + 1)?);
        let returns = timeline.working[from] == timeline.working[to];
        // The lowest points of two neighbours may enclose both, or next to nothing.
        let share = (timeline.time_s[to] - timeline.time_s[from]) / period;
        (from + 1 < to && returns && (0.8..1.2).contains(&share)).then_some(from..=to)
    };
    (1..layers - 1).filter_map(layer).max_by_key(|layer| layer.clone().count())
}

fn beside_parameters(forward: &Timeline) -> Plot {
    area(forward, "active memory beside the parameters (MiB)", Style::Mib, &[(WORKING, &forward.working)])
}

fn area(timeline: &Timeline, y_label: &str, style: Style, curves: &[(&str, &Vec<u64>)]) -> Plot {
    let ms = Style::Ms.scale();
    let series = curves.iter().map(|(name, curve)| {
        let points = timeline.time_s.iter().zip(*curve);
        Series::over_numbers(*name, points.map(|(time, bytes)| (time * ms, Some(*bytes as f64 * style.scale()))))
    });
    let phases = timeline.phases.iter();
    let phases = phases.map(|phase| Phase { name: phase.name.clone(), from: phase.start_s * ms, to: phase.end_s * ms });
    let plot = Plot::new(PlotKind::Area, "time (ms)", y_label, series.collect());
    Plot { phases: phases.collect(), ..plot }
}
