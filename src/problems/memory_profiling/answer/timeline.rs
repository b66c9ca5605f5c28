//! Part (a): the memory of a forward pass and of a training step over time, as figures, numbers and claims.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::super::components::Timeline;
use super::super::measure::Row;
use super::{MemoryCase, bytes, memory_format};
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
    parameters: Quantity,
    /// What the step's forward pass leaves for its backward pass.
    saved: Quantity,
    /// Parameters, gradients and both moments.
    fixed: Quantity,
    /// The highest peak of the step's phases, as requested and as allocated.
    peak: Quantity,
    allocated: Quantity,
    phase: String,
    /// Tokens, tables and workspaces at the step's peak.
    other: Quantity,
    /// Where the forward pass alone has its peak, with what never changes in it and what the peak adds.
    range: String,
    operator: String,
    unchanging: Quantity,
    working: Quantity,
    points: usize,
    #[serde(skip)]
    pub claims: [Claim; 2],
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
        let of_case = |n| bytes(self.case, n);
        let sum = |parts: &[u64]| self.case.quantity(parts.iter().map(|n| *n as f64).sum(), Unit::Bytes);
        // Of equal peaks the first one is named.
        let top = step.phases.iter().rev().max_by_key(|phase| phase.peak.requested_bytes);
        let top = top.context("a training step has no phases")?;
        let ratio = SameRun::of(&self.peak_of("forward")?, &self.peak_of("optimizer")?)?.ratio();
        let differ =
            |id, threshold| Claim::above(id, "peak of the forward pass over the optimizer's", &ratio, threshold);
        Ok(TimelineNumbers {
            context: self.case.params.context_length,
            parameters: of_case(row.parameters_bytes),
            saved: of_case(step.saved_bytes),
            fixed: sum(&[row.parameters_bytes, row.parameters_bytes, row.optimizer_state_bytes]),
            peak: of_case(top.peak.requested_bytes),
            allocated: of_case(top.peak.allocated_bytes),
            phase: top.name.clone(),
            other: of_case(step.at_peak.other),
            range: forward.peak_range.clone(),
            operator: forward.peak_operators.split('/').next().unwrap_or_default().into(),
            unchanging: sum(&[row.parameters_bytes, forward.at_peak.other]),
            working: of_case(forward.at_peak.working),
            points: self.forward.time_s.len(),
            claims: [differ("stages-differ", 1.05), differ("backward-descends", 1.0)],
        })
    }

    pub fn forward_figure(&self) -> Figure {
        let teeth = [(WORKING, &self.forward.working)];
        let alt = "Area of the memory in use beside the parameters over one forward pass: teeth for each layer, and a last \
                   one at the loss.";
        Figure::plot(alt, area(self.forward, "active memory beside the parameters (MiB)", Style::Mib, &teeth))
    }

    pub fn step_figure(&self, set: &RecordSet) -> Figure {
        let stacked = [
            ("parameters", &self.step.parameters),
            ("optimizer state", &self.step.optimizer_state),
            ("gradients", &self.step.gradients),
            ("saved activations", &self.step.saved),
            (WORKING, &self.step.working),
        ];
        let (style, _, unit) = memory_format(set);
        let alt = "Stacked areas of the memory in use over one training step: parameters and optimizer state stay, saved \
                   activations grow through the forward pass and shrink through the backward pass while gradients grow, \
                   and the optimizer changes neither.";
        Figure::plot(alt, area(self.step, &format!("active memory ({unit})"), style, &stacked))
    }

    /// The peak of a phase of the step, as requested.
    fn peak_of(&self, phase: &str) -> Result<Quantity> {
        let found = self.row.training_step.phases.iter().find(|found| found.name == phase);
        let found = found.with_context(|| format!("a training step has no phase {phase:?}"))?;
        Ok(bytes(self.case, found.peak.requested_bytes))
    }
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
