//! What one call for all gradients saves against a call for each.

use anyhow::Result;
use serde::Serialize;

use crate::bench::ddp_step::Row;
use crate::bench::ddp_step::tables::{StepCase, StrategyNumbers, steps_answer};
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Records, SameRun, Unit};

/// What the sentences quote of the first measured case.
#[derive(Serialize)]
struct Quoted {
    dtype: &'static str,
    flat: StrategyNumbers,
    naive: StrategyNumbers,
    /// How much shorter the flat step is, or longer, and the share of the naive one that it saves.
    difference: Quantity,
    share: Quantity,
    /// What the calls that are saved cost by the fit.
    by_calls: Quantity,
    overhead: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let (mut answer, quoted) = steps_answer(records, Quoted::of)?;
    let Some(Quoted { flat, naive, .. }) = quoted else { return Ok(answer) };
    let less = |id, flat, naive| Claim::less(id, ("one call", flat), ("a call each", naive));
    answer.claim(less("flat-communicates-faster", &flat.communication, &naive.communication))?;
    answer.claim(less("flat-step-is-faster", &flat.step, &naive.step))?;
    answer.claim(Claim::below("the-flat-call-hides-no-communication", "hidden", &flat.hidden, 0.05))?;
    Ok(answer)
}

impl Quoted {
    fn of(case: &StepCase, row: &Row) -> Option<Self> {
        let [flat, naive] = ["flat", "naive"].map(|name| StrategyNumbers::of(case, row, name));
        let (flat, naive) = (flat?, naive?);
        let saved = SameRun::of(&naive.step, &flat.step).ok()?.difference();
        let seconds = |x| case.quantity(x, Unit::Seconds);
        Some(Self {
            dtype: case.params.dtype.name(),
            difference: seconds(saved.value().abs()),
            share: SameRun::of(&saved, &naive.step).ok()?.ratio(),
            by_calls: seconds(naive.calls.saturating_sub(flat.calls) as f64 * row.link.overhead_s),
            overhead: seconds(row.link.overhead_s),
            flat,
            naive,
        })
    }
}

#[cfg(test)]
mod tests;
