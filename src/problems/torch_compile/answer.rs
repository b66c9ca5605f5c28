//! What torch.compile gains for attention and for whole models, and our own passes beside it.

use anyhow::Result;
use serde::Serialize;

use self::best::Best;
use self::by_class::ByClass;
use self::cases::Cases;
use self::curve::Curve;
use self::on_ranks::OnRanks;
use self::optimizer::Adamw;
use self::part_a::Attention;
use self::part_b::{Alone, Models};
use super::adamw::BYTES_PER_PARAMETER;
use super::measure::TorchCompile;
use crate::bench::peer::{Compile, Software};
use crate::harness::answer::format::{self, markdown};
use crate::harness::answer::turns::STABLE;
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Range, RecordSet, Records, Style};
use crate::model::Precision;

mod best;
mod by_class;
mod cases;
mod curve;
mod on_ranks;
mod optimizer;
mod part_a;
mod part_b;
mod tables;

/// The problem whose records have the forward passes of models timed alone.
pub const ALONE: &str = "benchmarking_mixed_precision";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Whether the CPU's smaller grids stand beside a GPU's.
    cpu: bool,
    /// The largest spread of a stable time.
    stable: f64,
    #[serde(flatten)]
    attention: Attention,
    #[serde(flatten)]
    models: Models,
    adamw: Option<Adamw>,
    /// Whole steps at their best.
    best: Option<Best>,
    /// Whole steps by class of kernel.
    classes: Option<ByClass>,
    /// Our fused step's losses beside autograd's.
    curve: Option<Curve>,
    /// Whole steps on several ranks.
    ranks: Option<OnRanks>,
    /// That an AdamW step moves per parameter.
    bytes: u64,
    #[serde(flatten)]
    compilation: Compilation,
    /// Why functions were not compiled, in parentheses.
    why: String,
    /// Ours over PyTorch's eager time: "0.95 to 1.01 for attention and 0.98 to 1.00 for models".
    eager: String,
    /// PyTorch's results against ours: "$6.0 \\times 10^{-7}$ in attention and ..".
    errors: String,
    /// Of the first measured case: "Python 3.12.3, PyTorch 2.11.0, Triton none."
    software: String,
}

/// What torch.compile made of all the functions that it was given.
#[derive(Serialize)]
struct Compilation {
    functions: u64,
    /// Of both passes: "0.7 to 3.3 s for attention and 23.4 to 106.9 s for a model".
    first_calls: String,
    #[serde(skip)]
    claim: Option<Claim>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let all = main.cases::<TorchCompile>()?;
    let cases = Cases::of(&all);
    let cpu = records.cpu().filter(|_| main.is_gpu());
    let on_cpu = cpu.map(RecordSet::cases::<TorchCompile>).transpose()?.unwrap_or_default();
    let on_cpu = Cases::of(&on_cpu);
    let attention = Attention::of(&cases.attention);
    let models = Models::of(&cases.models, &Alone::of(records.other(ALONE)?.of(main.profile()))?);
    let eager = [(attention.eager.clone(), "for attention"), (models.eager.clone(), "for models")];
    let quoted = Quoted {
        cpu: cpu.is_some(),
        stable: STABLE,
        eager: described(eager),
        errors: errors(&attention, &models),
        attention,
        models,
        adamw: Adamw::of(&cases.updates),
        best: Best::of(&cases.best),
        classes: ByClass::of(&cases.classes),
        curve: Curve::of(&cases.curves),
        ranks: OnRanks::of(&cases.ranks),
        bytes: BYTES_PER_PARAMETER as u64,
        compilation: Compilation::of(&cases),
        why: cases.not_compiled().map(|why| format!(" ({why})")).unwrap_or_default(),
        software: all.iter().find_map(|case| Some(software(case.row()?.software()?))).unwrap_or_default(),
    };
    let mut answer = Answer::of(main, &quoted)?;
    let claims = [&quoted.attention.claim, &quoted.models.claim, &quoted.compilation.claim].into_iter().flatten();
    let whole = [
        quoted.best.as_ref().map(|best| &best.claim),
        quoted.curve.as_ref().map(|curve| &curve.claim),
        quoted.ranks.as_ref().map(|ranks| &ranks.claim),
    ];
    claims.chain(whole.into_iter().flatten()).cloned().try_for_each(|claim| answer.claim(claim))?;
    tables::main(&mut answer, main, &cases)?;
    tables::best(&mut answer, "best", &cases, &best::unmeasured(records, main))?;
    by_class::main(&mut answer, &cases.classes, &by_class::unmeasured(records, main))?;
    curve::table(&mut answer, "curve", &cases.curves, &curve::unmeasured(records, main))?;
    on_ranks::table(&mut answer, "ranks", &cases.ranks, &on_ranks::unmeasured(records, main))?;
    if let Some(cpu) = cpu {
        tables::compared(&mut answer, "cpu-", cpu, &on_cpu)?;
        tables::best(&mut answer, "cpu-best", &on_cpu, &[])?;
        by_class::tables(&mut answer, "cpu-classes", &on_cpu.classes, &[])?;
        curve::table(&mut answer, "cpu-curve", &on_cpu.curves, &[])?;
        on_ranks::table(&mut answer, "cpu-ranks", &on_cpu.ranks, &[])?;
    }
    Ok(answer)
}

fn software(of: &Software) -> String {
    let Software { python, torch, triton, .. } = of;
    markdown(&format!("Python {python}, PyTorch {torch}, Triton {}.", triton.as_deref().unwrap_or("none")))
}

impl Compilation {
    fn of(cases: &Cases) -> Self {
        let attention = || cases.attention.iter().filter_map(|case| Some((case, case.row?.compile.as_ref()?)));
        let models = || cases.models.iter().filter_map(|case| Some((case, case.row?.compile.as_ref()?)));
        let compiled: Vec<&Compile> = attention().map(|(_, c)| c).chain(models().map(|(_, c)| c)).collect();
        let sum = |count: fn(&Compile) -> u64| compiled.iter().map(|compile| count(compile)).sum::<u64>();
        let [functions, graphs] = [sum(|compile| compile.functions), sum(|compile| compile.graphs)];
        let [breaks, hits] = [sum(|compile| compile.graph_breaks), sum(|compile| compile.cache_hits)];
        let attention_calls = first_calls(attention().map(|(case, compile)| case.first_calls(compile)));
        let model_calls = first_calls(models().map(|(case, compile)| case.first_calls(compile)));
        let claim = Claim::new("one-graph-per-function", graphs == functions && breaks == 0 && hits == 0)
            .operand_text("functions", functions.to_string())
            .operand_text("graphs", graphs.to_string())
            .operand_text("breaks", breaks.to_string())
            .operand_text("cache hits", hits.to_string());
        Self {
            functions,
            first_calls: described([(attention_calls, "s for attention"), (model_calls, "s for a model")]),
            claim: (functions > 0).then_some(claim),
        }
    }
}

/// "1.02 to 1.35".
fn times(range: &Range) -> String {
    range.text(Style::Fixed, 2)
}

/// "5 turns of 10 passes, each after 2 untimed".
fn turns(rounds: usize, iterations: usize, warmup: usize) -> String {
    format!("{rounds} turns of {iterations} passes, each after {warmup} untimed")
}

fn first_calls(seconds: impl Iterator<Item = Option<Quantity>>) -> Option<String> {
    Some(Range::of(seconds.flatten())?.text(Style::Sec, 1))
}

/// "0.95 to 1.01 for attention and 0.98 to 1.00 for models": the numbers that there are, each with its words.
fn described<'a>(numbers: impl IntoIterator<Item = (Option<String>, &'a str)>) -> String {
    let words = numbers.into_iter().filter_map(|(number, words)| Some(format!("{} {words}", number?)));
    format::listed(&words.collect::<Vec<_>>())
}

/// The errors of attention and of the models of each dtype.
fn errors(attention: &Attention, models: &Models) -> String {
    let print = |error: &Quantity| error.text(Style::Sci, 1);
    let attention = attention.error.as_ref().map(print);
    let models = models.errors.iter().map(|(dtype, error)| match dtype {
        Precision::Float32 => (Some(print(error)), "in models in float32"),
        Precision::Bfloat16 => (Some(print(error)), "in models in bfloat16"),
    });
    described(std::iter::once((attention, "in attention")).chain(models))
}

#[cfg(test)]
mod tests;
