//! Part (a): the memory of a forward pass and of a training step over time, as figures, numbers and claims.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::super::components::Timeline;
use super::super::measure::Row;
use super::{MemoryCase, bytes, memory_format};
use crate::harness::answer::figure::{Figure, Phase, Plot, PlotKind, Series};
use crate::harness::answer::{Answer, Claim, Quantity, RecordSet, SameRun, Style, Unit};
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
        })
    }

    pub fn add_to(&self, answer: &mut Answer, set: &RecordSet) -> Result<()> {
        let ratio = SameRun::of(&self.peak_of("forward")?, &self.peak_of("optimizer")?)?.ratio();
        let name = "peak of the forward pass over the optimizer's";
        answer.claim(Claim::above("stages-differ", name, &ratio, 1.05))?;
        answer.claim(Claim::above("backward-descends", name, &ratio, 1.0))?;
        let Timeline { parameters, optimizer_state, gradients, saved, working, .. } = self.step;
        let stacked = [
            ("parameters", parameters),
            ("optimizer state", optimizer_state),
            ("gradients", gradients),
            ("saved activations", saved),
            (WORKING, working),
        ];
        let (style, _, unit) = memory_format(set);
        let teeth = [(WORKING, &self.forward.working)];
        let forward = area(self.forward, "active memory beside the parameters (MiB)", Style::Mib, &teeth);
        let alt = "Area of the memory in use beside the parameters over one forward pass: teeth for each layer, and a last \
                   one at the loss.";
        answer.figure("forward", Figure::plot(alt, forward))?;
        let step = area(self.step, &format!("active memory ({unit})"), style, &stacked);
        let alt = "Stacked areas of the memory in use over one training step: parameters and optimizer state stay, saved \
                   activations grow through the forward pass and shrink through the backward pass while gradients grow, \
                   and the optimizer changes neither.";
        answer.figure("step", Figure::plot(alt, step))
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
    let mut plot = Plot::new(PlotKind::Area, "time (ms)", y_label, series.collect());
    let phases = timeline.phases.iter();
    plot.phases = phases
        .map(|phase| Phase { name: phase.name.clone(), from: phase.start_s * ms, to: phase.end_s * ms })
        .collect();
    plot
}
