//! What torch.compile gains for attention and for whole models, and our own passes beside it.

use anyhow::Result;
use serde::Serialize;

use self::cases::Cases;
use self::optimizer::Adamw;
use self::part_a::Attention;
use self::part_b::{Alone, Models};
use super::adamw::BYTES_PER_PARAMETER;
use super::measure::TorchCompile;
use crate::bench::peer::{Compile, Software};
use crate::harness::answer::format::{distinct, markdown};
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Range, RecordSet, Records};
use crate::harness::steadiness::STEADY;

mod cases;
mod optimizer;
mod part_a;
mod part_b;
mod tables;

/// The problem whose records have the forward passes of models timed alone.
pub const ALONE: &str = "benchmarking_mixed_precision";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Of the CPU's smaller grids of attention and of models, where the answer is a GPU's.
    cpu_attention: Option<String>,
    cpu_models: Option<String>,
    /// The largest spread of a steady time.
    steady: f64,
    /// Whether the cases come from more than one run.
    several_runs: bool,
    attention: Option<Attention>,
    models: Option<Models>,
    adamw: Option<Adamw>,
    /// Whether the optimizer was planned.
    updates: bool,
    /// That an AdamW step moves per parameter.
    bytes: u64,
    compilation: Compilation,
    /// Why implementations were not compiled.
    not_compiled: Option<String>,
    /// Of the first measured case.
    software: Option<String>,
}

/// What torch.compile made of all the functions that it was given.
#[derive(Serialize)]
struct Compilation {
    functions: u64,
    /// The first calls, which compile: of both passes of a cell of attention, and of a model's.
    attention: Option<Range>,
    models: Option<Range>,
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
    let machine = cpu.map(RecordSet::machine).transpose()?;
    let quoted = Quoted {
        cpu_attention: machine.clone().filter(|_| !on_cpu.attention.is_empty()),
        cpu_models: machine.filter(|_| !on_cpu.models.is_empty()),
        steady: STEADY,
        several_runs: distinct(all.iter().map(|case| &case.id.run)).len() > 1,
        attention: Attention::of(&cases.attention),
        models: Models::of(&cases.models, &Alone::of(records.other(ALONE)?.of(main.profile()))?),
        adamw: Adamw::of(&cases.updates),
        updates: !cases.updates.is_empty(),
        bytes: BYTES_PER_PARAMETER as u64,
        compilation: Compilation::of(&cases),
        not_compiled: cases.not_compiled(),
        software: all.iter().find_map(|case| Some(software(case.row()?.software()))),
    };
    let mut answer = Answer::of(main, &quoted)?;
    let attention = quoted.attention.iter().flat_map(|attention| &attention.claim);
    let models = quoted.models.iter().flat_map(|models| &models.claim);
    let claims = attention.chain(models).chain(&quoted.compilation.claim);
    claims.cloned().try_for_each(|claim| answer.claim(claim))?;
    tables::main(&mut answer, &cases)?;
    tables::compared(&mut answer, "cpu-", &on_cpu)?;
    Ok(answer)
}

/// "Python 3.12.3, PyTorch 2.11.0, Triton none".
fn software(of: &Software) -> String {
    let Software { python, torch, triton, .. } = of;
    markdown(&format!("Python {python}, PyTorch {torch}, Triton {}", triton.as_deref().unwrap_or("none")))
}

impl Compilation {
    fn of(cases: &Cases) -> Self {
        let attention = || cases.attention.iter().filter_map(|case| Some((case, case.row?.compile.as_ref()?)));
        let models = || cases.models.iter().filter_map(|case| Some((case, case.row?.compile.as_ref()?)));
        let compiled: Vec<&Compile> = attention().map(|(_, c)| c).chain(models().map(|(_, c)| c)).collect();
        let sum = |count: fn(&Compile) -> u64| compiled.iter().map(|compile| count(compile)).sum::<u64>();
        let [functions, graphs] = [sum(|compile| compile.functions), sum(|compile| compile.graphs)];
        let [breaks, hits] = [sum(|compile| compile.graph_breaks), sum(|compile| compile.cache_hits)];
        let claim = Claim::new("one-graph-per-function", graphs == functions && breaks == 0 && hits == 0)
            .operand_text("functions", functions.to_string())
            .operand_text("graphs", graphs.to_string())
            .operand_text("breaks", breaks.to_string())
            .operand_text("cache hits", hits.to_string());
        Self {
            functions,
            attention: first_calls(attention().map(|(case, compile)| case.first_calls(compile))),
            models: first_calls(models().map(|(case, compile)| case.first_calls(compile))),
            claim: (functions > 0).then_some(claim),
        }
    }
}

fn first_calls(seconds: impl Iterator<Item = Option<Quantity>>) -> Option<Range> {
    Range::of(seconds.flatten())
}

#[cfg(test)]
mod tests;
