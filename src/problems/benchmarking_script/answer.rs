//! What a training step takes: part by part, captured as a CUDA graph, with other attention, and without warm-up.

use anyhow::Result;
use serde::Serialize;

use self::attention::Attention;
use self::captured::Captured;
use self::fused::Fused;
use self::passes::Passes;
use self::warm_up::WarmUp;
use super::measure::BenchmarkingScript;
use crate::bench::training_step::{Params, Row};
use crate::harness::answer::format::{NOTHING, distinct, grouped, print, time};
use crate::harness::answer::{Answer, Audience, Case, Cell, Quantity, Records, SameRun, Style, Table, Turns};
use crate::harness::samples::Samples;
use crate::harness::stats;
use crate::model::sizes::{BATCH_SIZE, TABLE_1, TINY, VOCAB_SIZE};
use crate::model::{Config, SizeName};

mod attention;
mod captured;
mod fused;
mod passes;
mod warm_up;

type StepCase = Case<Params, Row>;

/// The grid of every size and context, which the other grids are compared with.
const SWEEP: &str = "sweep";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Whether a case of the sweep was measured, and a size with every case that the study of the warm-up needs.
    measured: bool,
    studied: bool,
    /// Whether there are captured steps, fused ones, and steps with several kinds of attention.
    captured: bool,
    fused: bool,
    attention: bool,
    #[serde(flatten)]
    passes: Option<Passes>,
    #[serde(flatten)]
    replays: Option<Captured>,
    #[serde(flatten)]
    fused_steps: Option<Fused>,
    #[serde(flatten)]
    attentions: Option<Attention>,
    #[serde(flatten)]
    warm_up: Option<WarmUp>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<BenchmarkingScript>()?;
    let (passes, replays) = (Passes::of(&cases), Captured::of(&cases));
    let fused_steps = Fused::of(&cases, main)?;
    let (attentions, warm_up) = (Attention::of(&cases), WarmUp::of(&cases));
    let quoted = Quoted {
        measured: passes.is_some(),
        studied: warm_up.is_some(),
        captured: replays.is_some(),
        fused: fused_steps.is_some(),
        attention: attentions.is_some(),
        passes,
        replays,
        fused_steps,
        attentions,
        warm_up,
    };
    let mut answer = Answer::of(main, &quoted)?;
    answer.table("sizes", size_table())?;
    if let Some(passes) = &quoted.passes {
        passes.claim().map_or(Ok(()), |claim| answer.claim(claim))?;
        answer.figure("passes", passes::figure(&cases, main)?)?;
    }
    if let Some(captured) = &quoted.replays {
        captured.conclude(&mut answer, main, &cases)?;
    }
    if let Some(fused) = &quoted.fused_steps {
        fused.conclude(&mut answer, main, &cases)?;
    }
    if let Some(attention) = &quoted.attentions {
        attention.conclude(&mut answer, main, &cases)?;
    }
    if let Some(warm_up) = &quoted.warm_up {
        warm_up.conclude(&mut answer)?;
    }
    for (i, set) in records.sets().enumerate() {
        let cases = set.cases::<BenchmarkingScript>()?;
        // Those of the processor stand apart where a GPU has answered.
        let prefix = if i == 0 { "" } else { "cpu-" };
        for (id, table) in passes::tables(set, &cases)?.into_iter().chain(warm_up::tables(set, &cases)?) {
            answer.table(format!("{prefix}{id}"), table)?;
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

/// The median of a measured whole step, unless its samples are unstable.
fn total(case: Option<&StepCase>) -> Option<Quantity> {
    let case = case?;
    let row = case.row()?;
    turns(&row.total).is_stable().then(|| case.median(&row.total))
}

/// None where the two are not of one run.
fn ratio(first: &Quantity, second: &Quantity) -> Option<Quantity> {
    Some(SameRun::of(first, second).ok()?.ratio())
}

/// What a caption adds where not all cases come from one run.
fn mixed<'a>(cases: impl Iterator<Item = &'a StepCase>) -> &'static str {
    let one = distinct(cases.map(|case| &case.id.run)).len() < 2;
    if one { "" } else { " The cells come from more than one run." }
}

/// Samples of a row, if it has them.
type Part = fn(&Row) -> Option<&Samples>;

const FORWARD: Part = |row| row.forward.as_ref();
const BACKWARD: Part = |row| row.backward.as_ref();
const OPTIMIZER: Part = |row| row.optimizer.as_ref();
const TOTAL: Part = |row| Some(&row.total);

/// What `show` makes of a part's samples, how the case ended, or a dash where it was to measure no such part.
fn cell<C: Into<Cell>>(case: &StepCase, part: Part, show: impl Fn(&Samples) -> C) -> Cell {
    case.cell(|row| part(row).map(&show))
}

/// Every step counts as a turn.
fn turns(samples: &Samples) -> Turns {
    Turns::single(&samples.samples)
}

/// "12.6 ± 0.84": mean and standard deviation in milliseconds; one sample has none.
fn mean(samples: &Samples) -> String {
    let std = Some(stats::std(&samples.samples)).filter(|std| std.is_finite());
    let std = std.map_or(NOTHING.into(), |std| if std < 0.01 { print(std, Style::Ms, 2) } else { time(std) });
    format!("{} ± {std}", time(stats::mean(&samples.samples)))
}

/// [`mean`], or the fastest and the slowest sample where these are not stable: "28.9–32.9".
fn mean_or_range(samples: &Samples) -> String {
    turns(samples).range().unwrap_or_else(|| mean(samples))
}

fn whole_step(case: &StepCase) -> Cell {
    cell(case, TOTAL, mean_or_range)
}

#[cfg(test)]
mod tests;
