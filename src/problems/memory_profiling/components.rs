//! Splits the memory in use into components, by when and where each block of a history was allocated and freed.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::measure::{Params, Run, Usage};
use super::steps::{Phase, Recorded, Step};
use crate::model::Precision;
use crate::torch::memory_history::{Block, Curve, History};

/// Bytes by what they are for; a sum is all that was asked for at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Components {
    pub parameters: u64,
    pub optimizer_state: u64,
    /// What a backward pass allocates and leaves alive.
    pub gradients: u64,
    /// Casts of parameters to bfloat16, in a linear layer under autocast.
    pub weight_copies: u64,
    /// Whatever else a forward pass allocates and leaves alive: the activations that autograd saved, and the loss.
    pub saved: u64,
    /// What is freed in the phase that allocated it.
    pub working: u64,
    /// Tokens, tables that layers share, and the workspaces that libraries keep.
    pub other: u64,
}

/// The fields of [`Components`] as places in a curve's classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Component {
    Parameters,
    OptimizerState,
    Gradients,
    WeightCopies,
    Saved,
    Working,
    Other,
}

const CLASSES: usize = 7;

impl Components {
    fn of([parameters, optimizer_state, gradients, weight_copies, saved, working, other]: [u64; CLASSES]) -> Self {
        Self { parameters, optimizer_state, gradients, weight_copies, saved, working, other }
    }

    pub fn total(&self) -> u64 {
        let Self { parameters, optimizer_state, gradients, weight_copies, saved, working, other } = self;
        parameters + optimizer_state + gradients + weight_copies + saved + working + other
    }
}

/// How [`Components`] change over a step. Point by point, each holds until the next.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timeline {
    pub phases: Vec<Stretch>,
    /// Seconds since the beginning of the first phase; on CUDA the allocator waited for the device at each step.
    pub time_s: Vec<f64>,
    pub parameters: Vec<u64>,
    pub optimizer_state: Vec<u64>,
    pub gradients: Vec<u64>,
    pub weight_copies: Vec<u64>,
    pub saved: Vec<u64>,
    pub working: Vec<u64>,
    pub other: Vec<u64>,
}

impl Timeline {
    fn curves(&self) -> [&Vec<u64>; CLASSES] {
        let Self { parameters, optimizer_state, gradients, weight_copies, saved, working, other, .. } = self;
        [parameters, optimizer_state, gradients, weight_copies, saved, working, other]
    }

    /// Errors: no point, or a component without one for each time.
    pub fn validate(&self) -> Result<()> {
        let points = self.time_s.len();
        let lengths = self.curves().map(Vec::len);
        ensure!(
            points > 0 && lengths == [points; CLASSES],
            "a timeline of {points} times has {lengths:?} numbers of bytes"
        );
        Ok(())
    }

    /// The most bytes at one of its points; `None` without a point.
    pub fn highest(&self) -> Option<u64> {
        let at = |point: usize| self.curves().iter().filter_map(|curve| curve.get(point)).sum();
        (0..self.time_s.len()).map(at).max()
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stretch {
    pub name: String,
    pub start_s: f64,
    pub end_s: f64,
}

/// Allocations of one size that came from one place.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allocation {
    pub bytes_each: u64,
    pub count: u64,
    /// The named ranges of the program, outermost first.
    pub range: String,
    /// The operator that the program called, and those that it led to.
    pub operators: String,
}

/// The kinds of largest allocations that a record keeps.
const LARGEST: usize = 12;

/// Sizes of weights, which distinguish copies of weights from other casts.
pub struct WeightCopies(BTreeSet<u64>);

impl WeightCopies {
    pub fn of(params: &Params) -> Self {
        let shapes = params.config().parameter_shapes();
        let matrices = shapes.filter(|(_, shape)| shape.len() == 2);
        let bytes = matrices.map(|(_, shape)| 2 * shape.iter().product::<i64>() as u64);
        Self(if params.dtype == Precision::Bfloat16 { bytes.collect() } else { BTreeSet::new() })
    }
}

/// What two runs of one step gave, by the allocator's statistics and by its history.
pub fn run(
    plain: Step,
    recorded: &Recorded,
    copies: &WeightCopies,
    points: usize,
    predicted_bytes: u64,
) -> Result<Run> {
    let Recorded { step, history, parameters_bytes, state_bytes } = recorded;
    let blocks = history.blocks()?;
    let other = history.before_bytes.checked_sub(parameters_bytes + state_bytes);
    let other = other.context("fewer bytes were in use before the step than parameters and state take")?;
    let mut before = [0; CLASSES];
    before[Component::Parameters as usize] = *parameters_bytes;
    before[Component::OptimizerState as usize] = *state_bytes;
    before[Component::Other as usize] = other;
    let curve = history.curve(&blocks, before, |block| component(history, block, copies) as usize)?;
    let peak = curve.peak().context("the step allocated nothing")?;
    let of_phases = |step: &Step| step.phases.iter().map(|p| p.peak).reduce(Usage::max).unwrap_or_default();
    let (peak_of_plain, peak_of_recorded) = (of_phases(&plain), of_phases(step));
    let counts = [peak_of_plain.requested_bytes, peak_of_recorded.requested_bytes];
    let in_forward: Vec<&Block> = blocks.iter().filter(|b| phase(history, b.born) == Some("forward")).collect();
    let saved = in_forward.iter().filter(|b| phase(history, b.died) != Some("forward"));
    let largest = history.groups(in_forward.iter().copied()).into_iter().take(LARGEST);
    Ok(Run {
        phases: plain.phases,
        peak: peak_of_plain,
        repeated: counts == [peak.total(); 2],
        at_peak: Components::of(peak.bytes),
        peak_range: history.events[peak.step].source.range.clone(),
        peak_operators: history.events[peak.step].source.operators.clone(),
        saved_bytes: saved.map(|block| block.bytes).sum(),
        predicted_bytes,
        largest: largest
            .map(|group| Allocation {
                bytes_each: group.bytes_each,
                count: group.count,
                range: group.source.range,
                operators: group.source.operators,
            })
            .collect(),
        timeline: (points > 0).then(|| timeline(history, curve, step, points)),
    })
}

/// The phase in which a block was born or died; `None` before the history, after it, and for a block that lives on.
fn phase(history: &History, step: Option<usize>) -> Option<&str> {
    step.map(|step| history.events[step].source.phase())
}

fn component(history: &History, block: &Block, copies: &WeightCopies) -> Component {
    let (born, died) = (phase(history, block.born), phase(history, block.died));
    let is_temporary = born == died;
    match born {
        Some("forward") if is_weight_copy(history, block, copies) => Component::WeightCopies,
        Some("forward" | "backward" | "optimizer") if is_temporary => Component::Working,
        Some("forward") => Component::Saved,
        Some("backward") => Component::Gradients,
        Some("optimizer") => Component::OptimizerState,
        // Tokens are made outside the phases; what is older and ends within the step is no parameter and no state.
        _ => Component::Other,
    }
}

fn is_weight_copy(history: &History, block: &Block, WeightCopies(sizes): &WeightCopies) -> bool {
    let operators = block.born.map(|step| history.events[step].source.operators.as_str()).unwrap_or_default();
    sizes.contains(&block.bytes) && operators.contains("aten::linear") && operators.contains("aten::_to_copy")
}

fn timeline(history: &History, curve: Curve<CLASSES>, step: &Step, points: usize) -> Timeline {
    let start = step.times_us.first().map_or(0, |times| times[0]);
    let end = step.times_us.last().map_or(0, |times| times[1]);
    let seconds = |time_us: i64| (time_us.clamp(start, end) - start) as f64 * 1e-6;
    // By range and not by time: the allocator's clock and ours may differ by microseconds.
    let is_inside = |step: usize| !history.events[step].source.phase().is_empty();
    let first = curve.points.iter().take_while(|point| !is_inside(point.step)).last();
    let (at_start, mut inside) = (first.map_or(curve.before, |point| point.bytes), curve);
    inside.points.retain(|point| is_inside(point.step));
    let at_end = inside.points.last().map_or(at_start, |point| point.bytes);
    let thinned = inside.thinned(points);

    let ends = |time_us, bytes| [(seconds(time_us), bytes)];
    let points = thinned.iter().map(|point| (seconds(point.time_us), point.bytes));
    let moments: Vec<(f64, [u64; CLASSES])> =
        ends(start, at_start).into_iter().chain(points).chain(ends(end, at_end)).collect();
    // The clock of a machine may be set back within a step; a timeline goes on.
    let latest = moments.iter().scan(0.0f64, |latest, (time_s, _)| {
        *latest = latest.max(*time_s);
        Some(*latest)
    });
    let of = |component: Component| moments.iter().map(|(_, bytes)| bytes[component as usize]).collect();
    let stretch = |(phase, times): (&Phase, &[i64; 2])| Stretch {
        name: phase.name.clone(),
        start_s: seconds(times[0]),
        end_s: seconds(times[1]),
    };
    Timeline {
        phases: step.phases.iter().zip(&step.times_us).map(stretch).collect(),
        time_s: latest.collect(),
        parameters: of(Component::Parameters),
        optimizer_state: of(Component::OptimizerState),
        gradients: of(Component::Gradients),
        weight_copies: of(Component::WeightCopies),
        saved: of(Component::Saved),
        working: of(Component::Working),
        other: of(Component::Other),
    }
}
