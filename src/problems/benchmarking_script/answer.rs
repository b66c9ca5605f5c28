//! What a training step takes: part by part, captured as a CUDA graph, with other attention, and without warm-up.

use anyhow::Result;
use serde::Serialize;

use self::attention::Attention;
use self::captured::Captured;
use self::passes::Passes;
use self::warm_up::WarmUp;
use super::measure::BenchmarkingScript;
use crate::bench::training_step::{Params, Row};
use crate::harness::answer::format::{distinct, grouped, with_deviation};
use crate::harness::answer::{Answer, Audience, Case, Cell, Quantity, RecordSet, Records, SameMachine, Style, Table};
use crate::harness::samples::Samples;
use crate::harness::stats;
use crate::model::sizes::{BATCH_SIZE, TABLE_1, TINY, VOCAB_SIZE};
use crate::model::{Config, SizeName};

mod attention;
mod captured;
mod passes;
mod warm_up;

type StepCase = Case<Params, Row>;

/// The grid of every size and context, which the other grids are compared with.
const SWEEP: &str = "sweep";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Whether a case of the sweep was measured, and every case that the study of the warm-up needs.
    measured: bool,
    studied: bool,
    /// The setting of captured steps, and the context of the steps with several kinds of attention, where there are any.
    captured: Option<String>,
    attention: Option<i64>,
    #[serde(flatten)]
    passes: Option<Passes>,
    #[serde(flatten)]
    replays: Option<Captured>,
    #[serde(flatten)]
    attentions: Option<Attention>,
    #[serde(flatten)]
    warm_up: Option<WarmUp>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<BenchmarkingScript>()?;
    let (passes, replays) = (Passes::of(&cases), Captured::of(&cases));
    let (attentions, warm_up) = (Attention::of(&cases), WarmUp::of(&cases));
    let quoted = Quoted {
        measured: passes.is_some(),
        studied: warm_up.is_some(),
        captured: replays.as_ref().map(|captured| captured.setting.clone()),
        attention: attentions.as_ref().map(|attention| attention.params.context_length),
        passes,
        replays,
        attentions,
        warm_up,
    };
    let mut answer = Answer::of(main, &quoted)?;
    answer.table("sizes", size_table())?;
    if let Some(passes) = &quoted.passes {
        passes.conclude(&mut answer, &cases, main.is_gpu())?;
    }
    if let Some(captured) = &quoted.replays {
        captured.conclude(&mut answer, &cases)?;
    }
    if let Some(attention) = &quoted.attentions {
        attention.conclude(&mut answer, main, &cases)?;
    }
    if let Some(warm_up) = &quoted.warm_up {
        warm_up.conclude(&mut answer)?;
    }
    for (i, set) in records.sets().enumerate() {
        let cases = set.cases::<BenchmarkingScript>()?;
        if let Some(table) = passes::table(set, &cases) {
            // Those of the processor stand apart where a GPU has answered.
            answer.table(if i == 0 { "passes" } else { "cpu-passes" }, table)?;
        }
        if let Some(table) = warm_up::table(set, &cases) {
            answer.table(format!("warm-up-{}", set.profile()), table)?;
        }
    }
    Ok(answer)
}

/// The sizes and the work of a forward pass, by counting.
fn size_table() -> Table {
    const CONTEXT: i64 = 512;
    let sizes = TABLE_1.iter().chain([&TINY]).map(|size| (size, Config::of_size(size, VOCAB_SIZE, CONTEXT)));
    let work = format!("forward, context {CONTEXT}, batch {BATCH_SIZE} (TFLOP)");
    Table::of(sizes)
        .text("size", |(size, _)| size.name)
        .number("$d_\\mathrm{model}$", Style::Grouped, 0, |(size, _)| size.d_model as f64)
        .number("$d_\\mathrm{ff}$", Style::Grouped, 0, |(size, _)| size.d_ff as f64)
        .number("layers", Style::Grouped, 0, |(size, _)| size.num_layers as f64)
        .number("heads", Style::Grouped, 0, |(size, _)| size.num_heads as f64)
        .number("parameters", Style::Grouped, 0, |(_, config)| config.num_parameters() as f64)
        .number(work, Style::Fixed, 3, |(_, config)| config.forward_flops(BATCH_SIZE, CONTEXT) / 1e12)
        .into()
}

/// "small, context 512".
fn place(params: &Params) -> String {
    format!("{}, context {}", params.size.size().name, count(params.context_length))
}

fn count(n: i64) -> String {
    grouped(n as f64, 0)
}

fn of_grid<'a>(cases: &'a [StepCase], grid: &str) -> Vec<&'a StepCase> {
    cases.iter().filter(|case| case.grid == grid).collect()
}

fn sizes(cases: &[&StepCase]) -> Vec<SizeName> {
    distinct(cases.iter().map(|case| case.params.size))
}

/// The median of a measured whole step.
fn total(case: Option<&StepCase>) -> Option<Quantity> {
    let case = case?;
    Some(case.median(&case.row()?.total))
}

/// None where the two are not of one machine.
fn ratio(first: &Quantity, second: &Quantity) -> Option<Quantity> {
    Some(SameMachine::of(first, second).ok()?.ratio())
}

/// Digits of milliseconds: steps of a shared processor vary too much for two.
fn digits(set: &RecordSet) -> usize {
    if set.is_gpu() { 2 } else { 1 }
}

/// What a caption says of times that the processor's other users disturb.
fn noise(set: &RecordSet) -> &'static str {
    let noisy = " The cores are shared with others: where a standard deviation nears its median, ratios mean nothing.";
    if set.is_gpu() { "" } else { noisy }
}

/// Samples of a row, if it has them.
type Part = fn(&Row) -> Option<&Samples>;

const TOTAL: Part = |row| Some(&row.total);

/// What `show` makes of a part's samples, how the case ended, or a dash where it was to measure no such part.
fn cell<C: Into<Cell>>(case: &StepCase, part: Part, show: impl Fn(&StepCase, &Samples) -> C) -> Cell {
    case.cell(|row| part(row).map(|samples| show(case, samples)))
}

fn median(case: &StepCase, part: Part) -> Cell {
    cell(case, part, StepCase::median)
}

/// "12.60 ± 0.84", the mean and the standard deviation in milliseconds.
fn mean(case: &StepCase, part: Part, digits: usize) -> Cell {
    cell(case, part, |_, samples| with_deviation(&samples.samples, stats::mean, digits))
}

/// The median of a whole step and its standard deviation.
fn whole_step(case: &StepCase) -> Cell {
    cell(case, TOTAL, |_, samples| with_deviation(&samples.samples, stats::median, 1))
}

#[cfg(test)]
mod tests;
