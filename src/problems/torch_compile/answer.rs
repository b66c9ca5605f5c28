//! What compiled and captured passes gain over eager ones, and how near an optimizer's step comes to a plain copy.

use anyhow::Result;
use serde::Serialize;

use self::cases::Cases;
use self::optimizer::Adamw;
use self::part_a::Attention;
use self::part_b::Models;
use super::adamw::BYTES_PER_PARAMETER;
use super::measure::TorchCompile;
use crate::bench::peer::{Compile, Software};
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Range, Records, Style, format};

mod cases;
mod optimizer;
mod part_a;
mod part_b;
mod tables;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    source: String,
    #[serde(flatten)]
    attention: Attention,
    #[serde(flatten)]
    models: Models,
    /// Of the GPU's records alone.
    adamw: Option<Adamw>,
    /// That an AdamW step moves for each parameter.
    bytes: u64,
    #[serde(flatten)]
    compilation: Compilation,
    /// Why columns were not compiled.
    not_compiled: String,
    /// Of the first measured case.
    software: Option<String>,
    /// Whether the steps have figures.
    bars: bool,
}

/// What torch.compile made of all the functions that it was given.
#[derive(Serialize)]
struct Compilation {
    functions: u64,
    /// Seconds for both passes of a cell of attention.
    compiling: Option<String>,
    #[serde(skip)]
    claim: Claim,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let all = main.cases::<TorchCompile>()?;
    let cases = Cases::of(&all);
    let bars = part_b::figures(&cases.models);
    let quoted = Quoted {
        source: main.source(),
        attention: Attention::of(&cases.attention),
        models: Models::of(&cases.models),
        adamw: Adamw::of(&cases.updates).filter(|_| main.is_gpu()),
        bytes: BYTES_PER_PARAMETER as u64,
        compilation: Compilation::of(&cases),
        not_compiled: cases.not_compiled().unwrap_or("the tables say how each column ended".into()),
        software: all.iter().find_map(|case| Some(software(case.row()?.software()))),
        bars: bars.is_some(),
    };
    let mut answer = Answer::new(&quoted)?;
    let claims = quoted.attention.claims.iter().chain(&quoted.models.claims);
    let claims = claims.chain(quoted.adamw.iter().flat_map(|adamw| &adamw.claims));
    claims.cloned().try_for_each(|claim| answer.claim(claim))?;
    if quoted.attention.is_compiled() {
        answer.claim(quoted.compilation.claim.clone())?;
        answer.figure("attention-gain", quoted.attention.figure(&cases.attention))?;
    }
    for (id, figure) in bars.into_iter().flatten() {
        answer.figure(id, figure)?;
    }
    tables::main(&mut answer, main, &cases)?;
    if let (Some(_), Some(cpu)) = (records.gpu(), records.cpu()) {
        tables::appendix(&mut answer, cpu, &Cases::of(&cpu.cases::<TorchCompile>()?))?;
    }
    Ok(answer)
}

/// "Python 3.12.3, PyTorch 2.11.0, Triton none".
fn software(of: &Software) -> String {
    let Software { python, torch, triton, .. } = of;
    format::markdown(&format!("Python {python}, PyTorch {torch}, Triton {}", triton.as_deref().unwrap_or("none")))
}

impl Compilation {
    fn of(cases: &Cases) -> Self {
        let attention = cases.attention.iter().filter_map(|case| case.row?.compile.as_ref());
        let models = cases.models.iter().filter_map(|case| case.row?.compile.as_ref());
        let compiled: Vec<&Compile> = attention.chain(models).collect();
        let sum = |count: fn(&Compile) -> u64| compiled.iter().map(|compile| count(compile)).sum::<u64>();
        let [functions, graphs] = [sum(|compile| compile.functions), sum(|compile| compile.graphs)];
        let [breaks, hits] = [sum(|compile| compile.graph_breaks), sum(|compile| compile.cache_hits)];
        let whole = functions > 0 && graphs == functions && breaks == 0 && hits == 0;
        let first_calls = cases.attention.iter().filter_map(|case| case.first_calls(case.row?.compile.as_ref()?, true));
        let range = Range::of(first_calls);
        Self {
            functions,
            compiling: range.map(|Range { low, high }| format::range(low.value(), high.value(), Style::Sec, 1)),
            claim: Claim::new("one-graph-a-function", whole)
                .operand_text("functions", functions.to_string())
                .operand_text("graphs", graphs.to_string())
                .operand_text("breaks", breaks.to_string())
                .operand_text("cache hits", hits.to_string()),
        }
    }
}

/// A range of ratios of times: "1.02 to 1.35".
fn times(Range { low, high }: &Range) -> String {
    format::range(low.value(), high.value(), Style::Fixed, 2)
}

/// The largest ratio of Rust eager to Python eager is at most 1.03; `at` names its pass.
fn not_slower(id: &str, ratio: &Quantity, at: String) -> Claim {
    let claim = Claim::new(id, ratio.value() <= 1.03).operand("largest ratio", ratio);
    claim.operand_text("wanted", "at most 1.03").operand_text("of", at)
}

#[cfg(test)]
mod tests;
