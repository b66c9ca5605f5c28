//! What the memory of a training step consists of, what autocast changes of it, and how far it is from what counting gives.

use anyhow::{Context as _, Result};
use serde::Serialize;

use self::allocations::LargestAllocations;
use self::prediction::{Counted, PeakComparison, PredictionError};
use self::timeline::{TimelineCase, TimelineNumbers};
use super::measure::{MemoryProfiling, Params, Row, Run};
use crate::harness::answer::{
    Answer, Audience, Case, Cell, Claim, Column, Quantity, Range, RecordSet, Records, SameMachine, Style, Table, Unit,
};
use crate::model::Precision;

mod allocations;
mod prediction;
mod timeline;

type MemoryCase = Case<Params, Row>;
/// A case that was measured, and its row.
type Measured<'a> = (&'a MemoryCase, &'a Row);

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Whether the records are a GPU's, of the 2.7B model; else they are a CPU's, of a small one.
    gpu: bool,
    unit: &'static str,
    source: String,
    size: &'static str,
    batch: i64,
    /// How many passes and steps were measured.
    runs: usize,
    /// Whether a step was measured with its timeline; then its numbers follow.
    drawn: bool,
    #[serde(flatten)]
    timeline: Option<TimelineNumbers>,
    #[serde(flatten)]
    largest: Option<LargestAllocations>,
    /// The peaks of the first step in float32; none of a single context.
    first: Option<Range>,
    /// Whether both precisions can be compared; then the numbers follow.
    paired: bool,
    #[serde(flatten)]
    autocast: Option<Autocast>,
    error: Option<PredictionError>,
    #[serde(flatten)]
    counted: Counted,
}

/// Float32 against bfloat16 autocast at the longest context that has both.
#[derive(Serialize)]
struct Autocast {
    longest: i64,
    /// Peaks of a forward pass without a graph.
    forward_float32: Quantity,
    forward: Quantity,
    /// As a share of the float32 peak.
    forward_change: Quantity,
    /// The bfloat16 copies of weights.
    copies: Quantity,
    /// Activations that a recorded forward pass saves, without these copies.
    saved_float32: Quantity,
    saved_bfloat16: Quantity,
    step: Quantity,
    step_change: Quantity,
    #[serde(skip)]
    claims: [Claim; 3],
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = answering(records)?;
    let cases = &cases_of(set)?;
    let first = cases.first().context("the record has no cases")?;
    let measured: Vec<Measured> = cases.iter().filter_map(|case| Some((case, case.row()?))).collect();
    let timeline = TimelineCase::of(cases);
    let comparisons = PeakComparison::of(&measured);
    let autocast = Autocast::of(&measured);
    let quoted = Quoted {
        gpu: set.is_gpu(),
        unit: memory_format(set).2,
        source: set.source(),
        size: first.params.size.size().name,
        batch: first.params.batch_size,
        runs: measured.iter().map(|(_, row)| runs(row).len()).sum(),
        drawn: timeline.is_some(),
        timeline: timeline.as_ref().map(TimelineCase::numbers).transpose()?,
        largest: timeline.as_ref().map(LargestAllocations::of).transpose()?,
        first: first_steps(&measured),
        paired: autocast.is_some(),
        autocast,
        error: PredictionError::largest(&comparisons, set.is_gpu()),
        counted: Counted::of_the_largest_model(),
    };
    let mut answer = Answer::new(&quoted)?;
    claims(&quoted, &measured).into_iter().try_for_each(|claim| answer.claim(claim))?;
    if let Some(timeline) = &timeline {
        answer.figure("forward", timeline.forward_figure())?;
        answer.figure("step", timeline.step_figure(set))?;
        answer.table("largest", allocations::largest(timeline))?;
    }
    if !measured.is_empty() {
        answer.table("components", allocations::components(set, &measured))?;
        answer.table("predictions", prediction::table(set, &comparisons))?;
    }
    answer.table("saved", prediction::saved_tensors())?;
    answer.table("peaks-float32", peaks(set, cases, Precision::Float32))?;
    answer.table("peaks-bfloat16", peaks(set, cases, Precision::Bfloat16))?;
    if let Some(other) = records.sets().find(|other| other.profile() != set.profile()) {
        answer.table("peaks-other", other_peaks(other, &cases_of(other)?))?;
    }
    Ok(answer)
}

fn claims(quoted: &Quoted, measured: &[Measured]) -> Vec<Claim> {
    let mut claims = Vec::new();
    claims.extend(quoted.first.as_ref().map(|Range { low, high }| {
        let claim = Claim::new("first-step-does-not-depend-on-context", high.value() < 1.01 * low.value());
        let claim = claim.operand("highest peak", high).operand("lowest peak", low);
        claim.operand_text("wanted", "under 1.01 of the lowest")
    }));
    claims.extend(quoted.autocast.iter().flat_map(|autocast| autocast.claims.clone()));
    claims.extend(quoted.largest.iter().map(|largest| largest.claim.clone()));
    claims.extend(quoted.error.iter().map(|error| error.claim.clone()));
    if let Some(timeline) = &quoted.timeline {
        claims.extend(timeline.claims.clone());
        let all = || measured.iter().flat_map(|(_, row)| runs(row));
        let repeated = all().filter(|run| run.repeated).count();
        claims.push(Claim::all("runs-repeat-their-peak", "passes and steps", repeated, all().count()));
    }
    claims
}

/// The GPU's records where they hold every step that has a timeline; else the CPU's, if there are any.
fn answering(records: &Records) -> Result<&RecordSet> {
    let main = records.main()?;
    let cases = main.cases::<MemoryProfiling>()?;
    let mut timelines = cases.iter().filter(|case| case.params.timeline_points > 0).peekable();
    let fits = timelines.peek().is_some() && timelines.all(|case| case.row().is_some());
    Ok(records.cpu().filter(|_| !fits).unwrap_or(main))
}

/// In float32 and then under autocast, each by context length.
fn cases_of(set: &RecordSet) -> Result<Vec<MemoryCase>> {
    let mut cases = set.cases::<MemoryProfiling>()?;
    cases.sort_by_key(|case| (case.params.dtype == Precision::Bfloat16, case.params.context_length));
    Ok(cases)
}

fn runs(row: &Row) -> [&Run; 4] {
    [&row.forward, &row.recorded_forward, &row.first_step, &row.training_step]
}

fn bytes(case: &MemoryCase, bytes: u64) -> Quantity {
    case.quantity(bytes as f64, Unit::Bytes)
}

/// How a device's tables print memory: the style, the digits after the point, and the unit's name.
fn memory_format(set: &RecordSet) -> (Style, usize, &'static str) {
    if set.is_gpu() { (Style::Gib, 2, "GiB") } else { (Style::Mib, 1, "MiB") }
}

/// Lowest and highest peak of a first step in float32; none of a single context or of two machines.
fn first_steps(measured: &[Measured]) -> Option<Range> {
    let float32 = measured.iter().filter(|(case, _)| case.params.dtype == Precision::Float32);
    let peaks: Vec<_> = float32.map(|(case, row)| bytes(case, row.first_step.peak.allocated_bytes)).collect();
    Range::of(&peaks).filter(|range| peaks.len() > 1 && SameMachine::of(&range.high, &range.low).is_ok())
}

impl Autocast {
    /// None where no context has both precisions on one machine.
    fn of(measured: &[Measured]) -> Option<Self> {
        let longest_first = |dtype| measured.iter().rev().filter(move |(case, _)| case.params.dtype == dtype);
        longest_first(Precision::Float32).find_map(|full| {
            let same_context = |(case, _): &&Measured| case.params.context_length == full.0.params.context_length;
            Self::between(*full, *longest_first(Precision::Bfloat16).find(same_context)?)
        })
    }

    fn between((full_case, full): Measured, (mixed_case, mixed): Measured) -> Option<Self> {
        let forward_float32 = bytes(full_case, full.forward.peak.allocated_bytes);
        let forward = bytes(mixed_case, mixed.forward.peak.allocated_bytes);
        let step_float32 = bytes(full_case, full.training_step.peak.allocated_bytes);
        let step = bytes(mixed_case, mixed.training_step.peak.allocated_bytes);
        let saved_float32 = bytes(full_case, full.recorded_forward.saved_bytes);
        let copies = bytes(mixed_case, mixed.weight_copies_bytes);
        let saved = mixed.recorded_forward.saved_bytes as f64 - copies.value();
        let saved_bfloat16 = mixed_case.quantity(saved, Unit::Bytes);
        let step_change = change(&step_float32, &step)?;
        let claims = [
            Claim::new("autocast-raises-forward", forward.value() > forward_float32.value())
                .operand("under autocast", &forward)
                .operand("in float32", &forward_float32),
            Claim::new("copies-outweigh", saved + copies.value() > saved_float32.value())
                .operand("activations under autocast", &saved_bfloat16)
                .operand("copies of weights", &copies)
                .operand("activations in float32", &saved_float32),
            Claim::new("autocast-changes-a-step-little", step_change.value().abs() < 0.1)
                .operand("change of the peak", &step_change)
                .operand_text("wanted", "less than 0.1 either way"),
        ];
        Some(Self {
            longest: full_case.params.context_length,
            forward_change: change(&forward_float32, &forward)?,
            forward_float32,
            forward,
            copies,
            saved_float32,
            saved_bfloat16,
            step,
            step_change,
            claims,
        })
    }
}

/// The second less the first, as a share of the first; none where they are of two machines.
fn change(from: &Quantity, to: &Quantity) -> Option<Quantity> {
    let difference = SameMachine::of(to, from).ok()?.difference();
    Some(SameMachine::of(&difference, from).ok()?.ratio())
}

/// A line for each context: the peak of every pass and step, or how the case ended.
fn peaks(set: &RecordSet, cases: &[MemoryCase], dtype: Precision) -> Table {
    let (style, digits, unit) = memory_format(set);
    let heads = ["forward, no graph", "forward, recorded", "first step", "full step", "reserved in it"];
    let numbers = heads.map(|head| Column::number(format!("{head} ({unit})"), style, digits));
    let mut columns = [vec![Column::right("context")], numbers.to_vec()].concat();
    // A CPU's allocator reserves nothing.
    columns.truncate(if set.is_gpu() { 6 } else { 5 });
    let width = columns.len();
    let mut table = Table::new(columns);
    for case in cases.iter().filter(|case| case.params.dtype == dtype) {
        let mut cells: Vec<Cell> = vec![case.params.context_length.to_string().into()];
        if let Some(row) = case.row() {
            cells.extend(runs(row).map(|run| bytes(case, run.peak.allocated_bytes).into()));
            cells.push(row.training_step.peak.reserved_bytes.map(|reserved| bytes(case, reserved)).into());
        }
        cells.resize(width, case.outcome.label().into());
        table.row(cells);
    }
    if table.rows.is_empty() {
        table.row(vec!["not measured".into(); width]);
    }
    table
}

/// The float32 peaks of the device that the rest is not about: a GPU that is too small for the timelines, or the CPU.
fn other_peaks(set: &RecordSet, cases: &[MemoryCase]) -> Table {
    let size = cases.first().map_or("", |case| case.params.size.size().name);
    let device = if set.is_gpu() { "GPU" } else { "CPU" };
    peaks(set, cases, Precision::Float32)
        .captioned(format!("The same peaks of the {size} model on a {device}, float32. {}.", set.source()))
}

#[cfg(test)]
mod tests;
