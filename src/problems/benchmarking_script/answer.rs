//! What a training step takes: part by part, captured as a CUDA graph, with other attention, and without warm-up.

use anyhow::Result;
use serde::Serialize;

use self::attention::Attention;
use self::captured::Captured;
use self::passes::Passes;
use self::warm_up::WarmUp;
use super::measure::BenchmarkingScript;
use crate::bench::training_step::{Params, Row};
use crate::harness::answer::format::{NOTHING, grouped, print};
use crate::harness::answer::{
    Answer, Audience, Case, CaseOutcome, Cell, Column, Quantity, RecordSet, Records, SameMachine, Style, Table, Unit,
};
use crate::harness::samples::Samples;
use crate::harness::stats::Summary;
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
    gpu: bool,
    source: String,
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
        gpu: main.is_gpu(),
        source: main.source(),
        measured: passes.is_some(),
        studied: warm_up.is_some(),
        captured: replays.as_ref().map(Captured::setting),
        attention: attentions.as_ref().map(Attention::context),
        passes,
        replays,
        attentions,
        warm_up,
    };
    let mut answer = Answer::new(&quoted)?;
    answer.table("sizes", size_table())?;
    if let Some(passes) = &quoted.passes {
        passes.conclude(&mut answer, &cases, quoted.gpu)?;
    }
    if let Some(replays) = &quoted.replays {
        replays.conclude(&mut answer, &cases)?;
    }
    if let Some(attentions) = &quoted.attentions {
        attentions.conclude(&mut answer, main, &cases)?;
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
    let whole = |head: &str| Column::number(head, Style::Grouped, 0);
    let mut table = Table::new(vec![
        Column::text("size"),
        whole("$d_\\mathrm{model}$"),
        whole("$d_\\mathrm{ff}$"),
        whole("layers"),
        whole("heads"),
        whole("parameters"),
        Column::number(format!("forward, context {CONTEXT}, batch {BATCH_SIZE} (TFLOP)"), Style::Fixed, 3),
    ]);
    for size in TABLE_1.iter().chain([&TINY]) {
        let config = Config::of_size(size, VOCAB_SIZE, CONTEXT);
        let counts = [size.d_model, size.d_ff, size.num_layers, size.num_heads].map(|n| n as f64);
        let work = [config.num_parameters() as f64, config.forward_flops(BATCH_SIZE, CONTEXT) / 1e12];
        let numbers = counts.into_iter().chain(work).map(|x| Quantity::constant(x, Unit::One).into());
        table.row([Cell::from(size.name)].into_iter().chain(numbers).collect());
    }
    table
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

/// Each once, in the order of the cases.
fn sizes(cases: &[&StepCase]) -> Vec<SizeName> {
    let mut sizes = Vec::new();
    for case in cases {
        if !sizes.contains(&case.params.size) {
            sizes.push(case.params.size);
        }
    }
    sizes
}

/// The median of a measured whole step.
fn total(case: Option<&StepCase>) -> Option<Quantity> {
    let case = case?;
    Some(case.median(&case.row()?.total))
}

/// None where the two are not of one machine.
fn ratio(first: &Quantity, second: &Quantity) -> Option<Quantity> {
    SameMachine::of(first, second).ok().map(SameMachine::ratio)
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

/// What `show` makes of a case's samples; of a case that was not measured its outcome, and a dash where there is nothing.
fn cell(case: Option<&StepCase>, part: Part, show: impl Fn(&StepCase, &Samples) -> Cell) -> Cell {
    let Some(case) = case else { return Cell::Missing };
    match &case.outcome {
        CaseOutcome::Measured(row) => part(row).map_or(Cell::Missing, |samples| show(case, samples)),
        ended => ended.label().into(),
    }
}

fn median(case: &StepCase, samples: &Samples) -> Cell {
    case.median(samples).into()
}

/// "12.60 ± 0.84", a statistic and the standard deviation in milliseconds.
fn with_deviation(samples: &Samples, statistic: fn(&Summary) -> f64, digits: usize) -> Cell {
    Summary::of(&samples.samples).map_or(Cell::Missing, |summary| {
        let deviation = summary.std.map_or(NOTHING.into(), |std| print(std, Style::Ms, digits));
        format!("{} ± {deviation}", print(statistic(&summary), Style::Ms, digits)).into()
    })
}

/// The median of a whole step and its standard deviation.
fn whole_step(case: Option<&StepCase>) -> Cell {
    cell(case, TOTAL, |_, samples| with_deviation(samples, |summary| summary.median, 1))
}

#[cfg(test)]
mod tests;
