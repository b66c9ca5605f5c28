//! What plain attention costs: its time, the memory that grows with the square of the length, and what recomputing saves.

use anyhow::Result;
use serde::Serialize;

use self::memory::{Exhausted, Growth};
use super::measure::{Params, PytorchAttention, Row, accounting_of};
use crate::attention::ImplementationName::{self, Naive, Sdpa, Tiled};
use crate::bench::attention_memory::Accounting;
use crate::bench::dtype::Dtype;
use crate::harness::answer::format::grouped;
use crate::harness::answer::turns::STABLE;
use crate::harness::answer::{
    Answer, Audience, Case, Claim, Quantity, RecordSet, Records, SameMachine, Style, Turns, Unit,
};
use crate::harness::samples::Samples;

mod memory;
mod tables;

type AttentionCase = Case<Params, Row>;

/// The width at which the implementations are compared.
const WIDTH: u32 = 64;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Of the CPU's smaller grid, where the answer is a GPU's.
    cpu: Option<String>,
    /// The largest spread of a stable time.
    stable: f64,
    /// Whether enough cases ran for an answer; then the numbers follow.
    enough: bool,
    #[serde(flatten)]
    numbers: Option<Numbers>,
}

#[derive(Serialize)]
struct Numbers {
    batch: u32,
    dtype: Dtype,
    /// Of each case in the handout's grid, of the longer ones and of the other implementations: "10 passes after 1 warm-up".
    passes: String,
    beyond: String,
    recompute: Option<String>,
    /// Cells of the handout's grid: "18 of 20".
    ran: String,
    /// None where no case ran out of memory.
    oom: Option<Exhausted>,
    /// The largest difference of counted bytes from the accounting, as a share, and what the claim allows in bytes.
    off: Quantity,
    slack: u64,
    #[serde(flatten)]
    growth: Growth,
    /// The others at the greatest length; both or none.
    tiled: Option<Recomputing>,
    sdpa: Option<Recomputing>,
    #[serde(skip)]
    grid_fits: Claim,
    /// Stated of the case that runs out of memory.
    #[serde(skip)]
    accounting: Claim,
}

/// An implementation that keeps no score matrix.
#[derive(Serialize)]
struct Recomputing {
    saved: Quantity,
    /// Plain attention's time over its own, forward and backward: "1.51 and 1.14"; none of unstable times.
    times: Option<String>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = records.main()?;
    let all = set.cases::<PytorchAttention>()?;
    let cases = Cases::of(&all);
    let small = records.cpu().filter(|_| set.is_gpu());
    let numbers = Numbers::of(set, &cases)?;
    let cpu = small.map(RecordSet::machine).transpose()?;
    let quoted = Quoted { cpu, stable: STABLE, enough: numbers.is_some(), numbers };
    let mut answer = Answer::of(set, &quoted)?;
    answer.table("times", tables::times(set, &cases.plain)?)?;
    if let Some(numbers) = &quoted.numbers {
        answer.table("cells", tables::cells(&cases.plain))?;
        let oom = numbers.oom.iter().flat_map(|oom| oom.claims.iter().chain([&numbers.accounting]));
        [&numbers.grid_fits].into_iter().chain(oom).try_for_each(|claim| answer.claim(claim.clone()))?;
        if numbers.recompute.is_some() {
            answer.table("recompute", tables::implementations(&cases.recompute))?;
        }
    }
    if let Some(cpu) = small {
        answer.table("cpu", tables::times(cpu, &Cases::of(&cpu.cases::<PytorchAttention>()?).plain)?)?;
    }
    Ok(answer)
}

/// A case that was measured.
#[derive(Clone, Copy)]
struct Ran<'a> {
    case: &'a AttentionCase,
    row: &'a Row,
}

/// A record's cases by the suite's grids.
struct Cases<'a> {
    /// The handout's, longer ones, and the same shapes by the other implementations.
    grid: Vec<&'a AttentionCase>,
    beyond: Vec<&'a AttentionCase>,
    recompute: Vec<&'a AttentionCase>,
    /// Plain attention of every grid.
    plain: Vec<&'a AttentionCase>,
}

impl<'a> Cases<'a> {
    fn of(all: &'a [AttentionCase]) -> Self {
        let of_grid = |grid: &str| -> Vec<_> { all.iter().filter(|case| case.grid == grid).collect() };
        let [grid, beyond, recompute] = ["attention", "out_of_memory", "recompute"].map(of_grid);
        let plain = all.iter().filter(|case| case.params.implementation == Naive).collect();
        Self { grid, beyond, recompute, plain }
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

    fn saved(&self) -> Quantity {
        self.bytes(self.row.saved_bytes)
    }

    fn bytes(&self, bytes: u64) -> Quantity {
        self.case.quantity(bytes as f64, Unit::Bytes)
    }

    /// What the definition needs for this shape.
    fn needs(&self) -> Accounting {
        accounting_of(&self.case.params, self.case.id.profile)
    }

    /// The median of a stable pass.
    fn stable(&self, pass: &Samples) -> Option<Quantity> {
        Turns::single(&pass.samples).is_stable().then(|| self.case.median(pass))
    }
}

impl Numbers {
    /// None where fewer than two lengths ran at [`WIDTH`].
    fn of(set: &RecordSet, cases: &Cases) -> Result<Option<Self>> {
        let (fitting, plain, others) = (ran(&cases.grid), ran(&cases.plain), ran(&cases.recompute));
        let wide: Vec<Ran> = fitting.iter().filter(|ran| ran.case.params.d_model == WIDTH).copied().collect();
        let ([.., shorter, longest], Some(first)) = (&wide[..], fitting.first()) else { return Ok(None) };
        let Some((off, accounting)) = memory::accounting_error(&plain) else { return Ok(None) };
        let exhausted = memory::smallest_exhausted(&cases.plain);
        let tiled = recomputing(&others, longest, Tiled)?;
        let (tiled, sdpa) = tiled.zip(recomputing(&others, longest, Sdpa)?).unzip();
        let Params { batch, dtype, .. } = first.case.params;
        Ok(Some(Self {
            batch,
            dtype,
            passes: passes(&cases.grid),
            beyond: passes(&cases.beyond),
            recompute: (!cases.recompute.is_empty()).then(|| passes(&cases.recompute)),
            ran: format!("{} of {}", fitting.len(), cases.grid.len()),
            oom: exhausted.map(|case| Exhausted::of(set, case, &plain)).transpose()?,
            off,
            slack: memory::SLACK_BYTES,
            growth: Growth::of(shorter, longest)?,
            tiled,
            sdpa,
            grid_fits: Claim::all("grid-fits", "cells that ran", fitting.len(), cases.grid.len()),
            accounting,
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
    let ratio = |pass: fn(&Row) -> &Samples| {
        let times = plain.stable(pass(plain.row)).zip(other.stable(pass(other.row)));
        let ratio = times.map(|(plain, other)| Ok::<_, anyhow::Error>(SameMachine::of(&plain, &other)?.ratio()));
        ratio.transpose().map(|ratio| ratio.map(|ratio| ratio.text(Style::Fixed, 2)))
    };
    let times = ratio(|row| &row.forward)?.zip(ratio(|row| &row.backward)?);
    Ok(Some(Recomputing {
        saved: other.saved(),
        times: times.map(|(forward, backward)| format!("{forward} and {backward}")),
    }))
}

/// "16,384".
fn length(seq: u32) -> String {
    grouped(f64::from(seq), 0)
}

#[cfg(test)]
mod tests;
