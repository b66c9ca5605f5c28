//! What the memory of a training step consists of, what autocast changes of it, and how far it is from what counting gives.

use anyhow::{Context as _, Result};
use serde::Serialize;

use self::allocations::LargestAllocations;
use self::prediction::{Counted, PeakComparison, PredictionError};
use self::timeline::{TimelineCase, TimelineNumbers};
use super::measure::{MemoryProfiling, Params, Row, Run};
use crate::harness::answer::format::{listed, print};
use crate::harness::answer::{
    Answer, Audience, Case, Cell, Claim, Column, Quantity, RecordSet, Records, SameMachine, Style, Table, Unit,
};
use crate::model::Precision;
use crate::units::GIB;

mod allocations;
mod prediction;
mod timeline;

type MemoryCase = Case<Params, Row>;
/// A case that was measured, and its row.
type Measured<'a> = (&'a MemoryCase, &'a Row);

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    size: &'static str,
    /// How many passes and steps were measured.
    runs: usize,
    /// Whether a step was measured with its timeline; then its numbers follow.
    drawn: bool,
    #[serde(flatten)]
    timeline: Option<TimelineNumbers>,
    #[serde(flatten)]
    largest: Option<LargestAllocations>,
    #[serde(flatten)]
    float32: Float32Peaks,
    /// Whether both precisions can be compared; then the numbers follow.
    paired: bool,
    #[serde(flatten)]
    autocast: Option<Autocast>,
    error: Option<PredictionError>,
    #[serde(flatten)]
    counted: Counted,
}

/// Peaks of every measured context in float32: "12.9 GiB, 13.0 GiB and 13.2 GiB".
#[derive(Serialize)]
struct Float32Peaks {
    contexts: String,
    forwards: String,
    steps: String,
    /// Of a forward pass that autograd records.
    recorded: String,
}

/// Float32 against bfloat16 autocast at the longest context that has both.
#[derive(Serialize)]
struct Autocast {
    longest: i64,
    /// Peaks of a forward pass without a graph.
    forward_float32: String,
    forward: String,
    /// The bfloat16 copies of weights.
    copies: String,
    /// Activations that a recorded forward pass saves, without these copies.
    saved_float32: String,
    saved_bfloat16: String,
    step: String,
    /// As a share of the float32 peak.
    step_change: Quantity,
    #[serde(skip)]
    claim: Claim,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = answering(records)?;
    let cases = &cases_of(set)?;
    let first = cases.first().context("the record has no cases")?;
    let measured: Vec<Measured> = cases.iter().filter_map(|case| Some((case, case.row()?))).collect();
    let timeline = TimelineCase::of(cases);
    let comparisons = PeakComparison::of(&measured);
    let autocast = Autocast::of(&measured);
    let other = records.sets().find(|other| other.profile() != set.profile());
    let quoted = Quoted {
        size: first.params.size.size().name,
        runs: measured.iter().map(|(_, row)| runs(row).len()).sum(),
        drawn: timeline.is_some(),
        timeline: timeline.as_ref().map(TimelineCase::numbers).transpose()?,
        largest: timeline.as_ref().map(LargestAllocations::of).transpose()?,
        float32: Float32Peaks::of(&measured),
        paired: autocast.is_some(),
        autocast,
        error: PredictionError::largest(&comparisons, set.is_gpu()),
        counted: Counted::of_the_largest_model(),
    };
    let mut answer = Answer::of(set, &quoted)?;
    claims(&quoted, &measured).into_iter().try_for_each(|claim| answer.claim(claim))?;
    if let Some(timeline) = &timeline {
        answer.figure("forward", timeline.forward_figure(set)?)?;
        timeline.layer_figure(set)?.into_iter().try_for_each(|figure| answer.figure("layer", figure))?;
        answer.figure("step", timeline.step_figure(set)?)?;
        answer.table("largest", allocations::largest(set, timeline)?)?;
    }
    if !measured.is_empty() {
        answer.table("components", allocations::components(set, &measured)?)?;
        answer.table("predictions", prediction::table(set, &comparisons)?)?;
    }
    answer.table("saved", prediction::saved_tensors())?;
    answer.table("peaks", peaks(set, cases)?)?;
    if let Some(other) = other {
        answer.table("other-peaks", peaks(other, &cases_of(other)?)?)?;
    }
    Ok(answer)
}

fn claims(quoted: &Quoted, measured: &[Measured]) -> Vec<Claim> {
    let mut claims = Vec::new();
    claims.extend(quoted.autocast.iter().map(|autocast| autocast.claim.clone()));
    claims.extend(quoted.largest.iter().map(|largest| largest.claim.clone()));
    claims.extend(quoted.timeline.iter().map(|timeline| timeline.claim.clone()));
    if !measured.is_empty() {
        let all = || measured.iter().flat_map(|(_, row)| runs(row));
        let repeated = all().filter(|run| run.repeated).count();
        claims.push(Claim::all("runs-repeat-their-peak", "passes and steps", repeated, all().count()));
    }
    claims
}

/// The GPU's records where they hold a step with its timeline; else the CPU's, if there are any.
fn answering(records: &Records) -> Result<&RecordSet> {
    let main = records.main()?;
    let cases = main.cases::<MemoryProfiling>()?;
    let fits = cases.iter().any(|case| case.params.timeline_points > 0 && case.row().is_some());
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

/// "61.4 GiB", or MiB below one GiB: three significant digits.
fn size(bytes: f64) -> String {
    let (style, unit) = if bytes >= GIB { (Style::Gib, "GiB") } else { (Style::Mib, "MiB") };
    let digits = match bytes * style.scale() {
        number if number < 10.0 => 2,
        number if number < 100.0 => 1,
        _ => 0,
    };
    format!("{} {unit}", print(bytes, style, digits))
}

/// [`size`] with the mark of the quantity's cases.
fn size_of(memory: &Quantity) -> String {
    memory.mark(&size(memory.value()))
}

impl Float32Peaks {
    fn of(measured: &[Measured]) -> Self {
        let float32 = || measured.iter().filter(|(case, _)| case.params.dtype == Precision::Float32);
        let of = |run: fn(&Row) -> &Run| {
            let peak = |(case, row): &Measured| size_of(&bytes(case, run(row).peak.allocated_bytes));
            listed(&float32().map(peak).collect::<Vec<_>>())
        };
        Self {
            contexts: listed(&float32().map(|(case, _)| case.params.context_length.to_string()).collect::<Vec<_>>()),
            forwards: of(|row| &row.forward),
            steps: of(|row| &row.training_step),
            recorded: of(|row| &row.recorded_forward),
        }
    }
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
        let step_float32 = bytes(full_case, full.training_step.peak.allocated_bytes);
        let step = bytes(mixed_case, mixed.training_step.peak.allocated_bytes);
        let saved_bfloat16 = mixed.recorded_forward.saved_bytes as f64 - mixed.weight_copies_bytes as f64;
        let step_change = change(&step_float32, &step)?;
        let claim = Claim::new("autocast-changes-a-step-little", step_change.value().abs() < 0.1)
            .operand("change of the peak", &step_change)
            .operand_text("wanted", "less than 0.1 either way");
        Some(Self {
            longest: full_case.params.context_length,
            forward_float32: size_of(&bytes(full_case, full.forward.peak.allocated_bytes)),
            forward: size_of(&bytes(mixed_case, mixed.forward.peak.allocated_bytes)),
            copies: size_of(&bytes(mixed_case, mixed.weight_copies_bytes)),
            saved_float32: size_of(&bytes(full_case, full.recorded_forward.saved_bytes)),
            saved_bfloat16: size_of(&mixed_case.quantity(saved_bfloat16, Unit::Bytes)),
            step: size_of(&step),
            step_change,
            claim,
        })
    }
}

/// The second less the first, as a share of the first; none where they are of two machines.
fn change(from: &Quantity, to: &Quantity) -> Option<Quantity> {
    let difference = SameMachine::of(to, from).ok()?.difference();
    Some(SameMachine::of(&difference, from).ok()?.ratio())
}

/// A line for each precision and context: the peak of every pass and step, or how the case ended.
fn peaks(set: &RecordSet, cases: &[MemoryCase]) -> Result<Table> {
    let (style, _, unit) = memory_format(set);
    let heads = ["forward, no graph", "forward, recorded", "first step", "full step", "reserved in it"];
    let numbers = heads.map(|head| Column::number(format!("{head} ({unit})"), style, 1));
    let mut columns = [vec![Column::text("precision"), Column::right("context")], numbers.to_vec()].concat();
    // A CPU's allocator reserves nothing.
    columns.truncate(if set.is_gpu() { 7 } else { 6 });
    let width = columns.len();
    let mut table = Table::new(columns);
    for case in cases {
        let mut cells: Vec<Cell> = vec![case.params.dtype.name().into(), case.params.context_length.to_string().into()];
        if let Some(row) = case.row() {
            cells.extend(runs(row).map(|run| bytes(case, run.peak.allocated_bytes).into()));
            cells.push(row.training_step.peak.reserved_bytes.map(|reserved| bytes(case, reserved)).into());
        }
        cells.resize(width, case.outcome.label().into());
        table.row(cells);
    }
    let params = cases.first().map(|case| &case.params).context("the record has no cases")?;
    Ok(table.captioned(format!(
        "Peak of allocated memory, {} model, batch {}, {} attention; bfloat16 is autocast; {}.",
        params.size.size().name,
        params.batch_size,
        params.attention.name(),
        set.machine()?
    )))
}

#[cfg(test)]
mod tests;
