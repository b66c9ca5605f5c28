//! What attention by its definition costs: its time, the memory that grows with the square of the length, and what
//! recomputing saves.

use anyhow::Result;
use serde::Serialize;

use self::clocks::Clocks;
use self::memory::{Exhausted, Growth};
use super::measure::{Params, PytorchAttention, Row, accounting_of};
use crate::attention::ImplementationName::{self, Naive, Sdpa, Tiled};
use crate::bench::attention_memory::Accounting;
use crate::bench::dtype::Dtype;
use crate::harness::answer::format::{grouped, listed, print};
use crate::harness::answer::{Answer, Audience, Case, Claim, Quantity, RecordSet, Records, SameMachine, Style, Unit};

mod clocks;
mod figures;
mod memory;
mod tables;

type AttentionCase = Case<Params, Row>;

/// The width at which the implementations are compared.
const WIDTH: u32 = 64;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    gpu: bool,
    source: String,
    /// Of the CPU's smaller grid, where the answer is a GPU's.
    cpu: Option<String>,
    /// Whether enough cases ran for an answer; then the numbers follow.
    enough: bool,
    /// Whether a case ran out of memory, and whether the device has a clock of its own.
    oom: bool,
    clock: bool,
    #[serde(flatten)]
    numbers: Option<Numbers>,
}

#[derive(Serialize)]
struct Numbers {
    batch: u32,
    dtype: Dtype,
    warmup: u32,
    timed: u32,
    /// Of each case, in the handout's grid, in the longer cases and in the others.
    passes: String,
    beyond: String,
    /// None where no such case is recorded.
    recompute: Option<String>,
    /// Cells of the handout's grid: "18 of 20".
    ran: String,
    #[serde(flatten)]
    exhausted: Option<Exhausted>,
    /// The largest difference of counted bytes from the accounting, as a share.
    off: Quantity,
    #[serde(flatten)]
    clocks: Option<Clocks>,
    #[serde(flatten)]
    growth: Growth,
    /// The others at the greatest length; both or none.
    tiled: Option<Recomputing>,
    sdpa: Option<Recomputing>,
    #[serde(skip)]
    claims: Vec<Claim>,
}

/// An implementation that keeps no score matrix.
#[derive(Serialize)]
struct Recomputing {
    saved: Quantity,
    /// What plain attention saves, over that.
    less: Quantity,
    /// Forward and backward: times over plain attention's, for PyTorch's operator plain attention's over its own.
    times: String,
    #[serde(skip)]
    factors: [Quantity; 2],
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = records.main()?;
    let all = set.cases::<PytorchAttention>()?;
    let cases = Cases::of(&all);
    let small = records.cpu().filter(|_| set.is_gpu());
    let numbers = Numbers::of(set, &cases)?;
    let quoted = Quoted {
        gpu: set.is_gpu(),
        source: set.source(),
        cpu: small.map(RecordSet::source),
        enough: numbers.is_some(),
        oom: numbers.as_ref().is_some_and(|numbers| numbers.exhausted.is_some()),
        clock: numbers.as_ref().is_some_and(|numbers| numbers.clocks.is_some()),
        numbers,
    };
    let mut answer = Answer::new(&quoted)?;
    answer.table("grid", tables::times(set, &cases.grid)?)?;
    if let Some(numbers) = &quoted.numbers {
        numbers.claims.iter().try_for_each(|claim| answer.claim(claim.clone()))?;
        if numbers.exhausted.is_some() {
            answer.table("beyond", tables::times(set, &cases.beyond)?)?;
        }
        if numbers.recompute.is_some() {
            answer.table("recompute", tables::implementations(&cases.recompute))?;
        }
        answer.figure("scaling", figures::scaling(&cases.fitting))?;
        answer.figure("kept", figures::kept(&cases.wide, &cases.others))?;
    }
    if let Some(cpu) = small {
        let all = cpu.cases::<PytorchAttention>()?;
        let Cases { grid, beyond, .. } = Cases::of(&all);
        answer.table("cpu", tables::times(cpu, &[grid, beyond].concat())?)?;
    }
    Ok(answer)
}

/// A case that was measured.
#[derive(Clone, Copy)]
struct Ran<'a> {
    case: &'a AttentionCase,
    row: &'a Row,
}

/// A record's cases by the suite's grids, and those that were measured.
struct Cases<'a> {
    /// The handout's, longer ones, and the same shapes by the other implementations.
    grid: Vec<&'a AttentionCase>,
    beyond: Vec<&'a AttentionCase>,
    recompute: Vec<&'a AttentionCase>,
    /// Plain attention of every grid.
    plain: Vec<&'a AttentionCase>,
    /// Of the handout's grid by length; of these, those of [`WIDTH`].
    fitting: Vec<Ran<'a>>,
    wide: Vec<Ran<'a>>,
    others: Vec<Ran<'a>>,
}

impl<'a> Cases<'a> {
    fn of(all: &'a [AttentionCase]) -> Self {
        let of_grid = |grid: &str| -> Vec<_> { all.iter().filter(|case| case.grid == grid).collect() };
        let [grid, beyond, recompute] = ["attention", "out_of_memory", "recompute"].map(of_grid);
        let fitting = ran(&grid);
        Self {
            plain: all.iter().filter(|case| case.params.implementation == Naive).collect(),
            wide: fitting.iter().filter(|ran| ran.case.params.d_model == WIDTH).copied().collect(),
            others: ran(&recompute),
            fitting,
            grid,
            beyond,
            recompute,
        }
    }
}

/// Those that were measured, by length; those of one length stay in order.
fn ran<'a>(cases: &[&'a AttentionCase]) -> Vec<Ran<'a>> {
    let mut ran: Vec<Ran> = cases.iter().filter_map(|&case| Some(Ran { case, row: case.row()? })).collect();
    ran.sort_by_key(Ran::seq);
    ran
}

impl Ran<'_> {
    fn seq(&self) -> u32 {
        self.case.params.seq
    }

    fn forward(&self) -> Quantity {
        self.case.median(&self.row.forward)
    }

    fn backward(&self) -> Quantity {
        self.case.median(&self.row.backward)
    }

    fn saved(&self) -> Quantity {
        self.bytes(self.row.saved_bytes)
    }

    fn before_backward(&self) -> Quantity {
        self.bytes(self.row.before_backward_bytes)
    }

    fn bytes(&self, bytes: u64) -> Quantity {
        self.case.quantity(bytes as f64, Unit::Bytes)
    }

    /// What the definition needs for this shape.
    fn needs(&self) -> Accounting {
        accounting_of(&self.case.params, self.case.id.profile)
    }
}

impl Numbers {
    /// None where fewer than two lengths ran at [`WIDTH`], or none at the width of the smallest case that ran out of memory.
    fn of(set: &RecordSet, cases: &Cases) -> Result<Option<Self>> {
        let (Some(first), [.., shorter, longest]) = (cases.fitting.first(), &cases.wide[..]) else { return Ok(None) };
        let plain = ran(&cases.plain);
        let exhausted = memory::smallest_exhausted(&cases.plain);
        let exhausted = match exhausted.map(|case| Exhausted::of(set, case, &plain)).transpose()? {
            Some(None) => return Ok(None),
            exhausted => exhausted.flatten(),
        };
        let Some((off, accounting)) = memory::accounting_error(&plain) else { return Ok(None) };
        let (growth, clocks) = (Growth::of(shorter, longest)?, Clocks::of(&cases.fitting));
        let tiled = recomputing(&cases.others, longest, Tiled)?;
        let others = tiled.zip(recomputing(&cases.others, longest, Sdpa)?);

        let slower = plain.iter().filter(|ran| ran.backward().value() > ran.forward().value()).count();
        let fits = if exhausted.is_some() { "grid-fits" } else { "none-ran-out" };
        let mut claims = vec![
            Claim::all(fits, "cells that ran", cases.fitting.len(), cases.grid.len()),
            Claim::all("backward-slower", "cells", slower, plain.len()),
            accounting,
            growth.claim.clone(),
            recomputing_ones_coincide(&cases.others)?,
        ];
        claims.extend(exhausted.iter().flat_map(|exhausted| exhausted.claims.clone()));
        claims.extend(clocks.iter().flat_map(|clocks| clocks.claims.clone()));
        claims.extend(others.iter().flat_map(|(tiled, sdpa)| recomputing_claims(tiled, sdpa, longest)));

        let (tiled, sdpa) = others.unzip();
        let Params { batch, dtype, warmup, iterations, .. } = first.case.params;
        Ok(Some(Self {
            batch,
            dtype,
            warmup,
            timed: iterations,
            passes: passes(&cases.grid),
            beyond: passes(&cases.beyond),
            recompute: (!cases.recompute.is_empty()).then(|| passes(&cases.recompute)),
            ran: format!("{} of {}", cases.fitting.len(), cases.grid.len()),
            exhausted,
            off,
            clocks,
            growth,
            tiled,
            sdpa,
            claims,
        }))
    }
}

/// "100 passes after 5 warm-up".
fn passes(cases: &[&AttentionCase]) -> String {
    let Some(Params { warmup, iterations, .. }) = cases.first().map(|case| &case.params) else {
        return "no pass".into();
    };
    format!("{iterations} pass{} after {warmup} warm-up", if *iterations == 1 { "" } else { "es" })
}

/// None where the implementation was not measured at the length of `plain`.
fn recomputing(others: &[Ran], plain: &Ran, implementation: ImplementationName) -> Result<Option<Recomputing>> {
    let same = |ran: &&Ran| ran.case.params.implementation == implementation && ran.seq() == plain.seq();
    let Some(other) = others.iter().find(same) else { return Ok(None) };
    let (slow, fast, digits) = if implementation == Sdpa { (plain, other, 2) } else { (other, plain, 0) };
    let factors = [
        SameMachine::of(&slow.forward(), &fast.forward())?.ratio(),
        SameMachine::of(&slow.backward(), &fast.backward())?.ratio(),
    ];
    Ok(Some(Recomputing {
        saved: other.saved(),
        less: SameMachine::of(&plain.saved(), &other.saved())?.ratio(),
        times: both(&factors, Style::Fixed, digits),
        factors,
    }))
}

/// "89 and 63".
fn both(pair: &[Quantity; 2], style: Style, digits: usize) -> String {
    listed(&pair.each_ref().map(|quantity| print(quantity.value(), style, digits)))
}

/// "16,384".
fn length(seq: u32) -> String {
    grouped(f64::from(seq), 0)
}

fn recomputing_claims(tiled: &Recomputing, sdpa: &Recomputing, plain: &Ran) -> [Claim; 4] {
    let above_one = |id: &str, ratio: &str, [forward, backward]: &[Quantity; 2]| {
        Claim::new(id, forward.value() > 1.0 && backward.value() > 1.0)
            .operand(&format!("{ratio}, forward"), forward)
            .operand(&format!("{ratio}, backward"), backward)
    };
    let scores = plain.bytes(plain.needs().score_bytes);
    [
        Claim::above("tiled-keeps-less", "plain / tiled", &tiled.less, 4.0),
        above_one("tiled-slower", "tiled / plain", &tiled.factors),
        Claim::new("sdpa-keeps-less", sdpa.saved.value() < scores.value())
            .operand("saved", &sdpa.saved)
            .operand("score matrices", &scores),
        above_one("sdpa-faster", "plain / PyTorch's operator", &sdpa.factors),
    ]
}

/// The two that recompute have as much memory in use before the backward pass, at every length that both have.
fn recomputing_ones_coincide(others: &[Ran]) -> Result<Claim> {
    let of = |implementation| others.iter().filter(move |ran| ran.case.params.implementation == implementation);
    let mut shares = Vec::new();
    for tiled in of(Tiled) {
        for sdpa in of(Sdpa).filter(|sdpa| sdpa.seq() == tiled.seq()) {
            let ratio = SameMachine::of(&tiled.before_backward(), &sdpa.before_backward())?.ratio();
            shares.push(Quantity::new((ratio.value() - 1.0).abs(), Unit::One, ratio.sources().to_vec()));
        }
    }
    let id = "recomputing-ones-coincide";
    Ok(match Quantity::largest(&shares) {
        Some(apart) => Claim::below(id, "largest difference, as a share", apart, 0.02),
        None => Claim::new(id, false).operand_text("lengths that both have", "none"),
    })
}

#[cfg(test)]
mod tests;
