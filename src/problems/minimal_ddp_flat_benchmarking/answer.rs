//! What one call for all gradients saves against a call for each.

use anyhow::Result;
use serde::Serialize;

use crate::bench::ddp_step::link::PooledLink;
use crate::bench::ddp_step::numbers::StrategyNumbers;
use crate::bench::ddp_step::tables::{StepCase, steps_answer};
use crate::bench::ddp_step::{Row, StrategyColumn};
use crate::harness::answer::{Answer, Audience, Claim, Paired, Quantity, Records, SameRun, Turns, Unit};

/// A prediction this close to what was measured is called right.
const NEAR: f64 = 0.1;

/// What the sentences quote of the first stable case.
#[derive(Serialize)]
struct Quoted {
    dtype: &'static str,
    flat: StrategyNumbers,
    naive: StrategyNumbers,
    /// The naive step less the flat one, and the same of their communication.
    saved: Paired,
    less_communication: Paired,
    /// The step's share that is saved.
    share: Quantity,
    /// What the flat step spends between the end of the backward pass and the call: the copy into one buffer. None where nothing
    /// was saved of which it takes a part.
    copies: Option<Quantity>,
    fewer_calls: u64,
    /// What the calls that are saved cost by the fit, and that over what they do.
    by_calls: Quantity,
    priced: Quantity,
    /// The bandwidth that the one call reaches, and that over the fit's.
    bandwidth: Quantity,
    faster: Quantity,
    link: PooledLink,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let (mut answer, quoted) = steps_answer(records, Quoted::of)?;
    let Some(Quoted { saved, priced, faster, .. }) = quoted else { return Ok(answer) };
    answer.claim(
        Claim::new("flat-is-faster", saved.is_positive())
            .operand("saved at least", &saved.range.low)
            .operand("at most", &saved.range.high),
    )?;
    let near = (priced.value() - 1.0).abs() <= NEAR;
    answer.claim(
        Claim::new("calls-cost-what-the-fit-says", near)
            .operand("predicted over measured saving", &priced)
            .operand_text("wanted", format!("within {NEAR} of 1")),
    )?;
    answer.claim(Claim::above("large-calls-beat-the-fit", "bandwidth over the fit's", &faster, 1.0 + NEAR))?;
    Ok(answer)
}

impl Quoted {
    fn of(case: &StepCase, row: &Row, link: &PooledLink) -> Option<Self> {
        let [flat, naive] = ["flat", "naive"].map(|name| StrategyNumbers::of(case, row, name));
        let (flat, naive) = (flat?, naive?);
        let less = |of: fn(&StrategyColumn) -> &crate::harness::samples::Samples| {
            let [naive, flat] = ["naive", "flat"]
                .map(|name| Some(Turns::of(&of(row.strategies.get(name)?).samples, case.params.rounds)));
            Paired::difference(&case.id, &naive?, &flat?)
        };
        let saved = less(|column| &column.step.last_rank)?;
        let less_communication = less(|column| &column.communication.mean)?;
        let fewer_calls = naive.calls.saturating_sub(flat.calls);
        let by_calls = link.of_calls(fewer_calls);
        let bandwidth = case.quantity(flat.bytes.value() / flat.communication.value(), Unit::BytesPerSecond);
        Some(Self {
            dtype: case.params.dtype.name(),
            share: SameRun::of(&saved.all, &naive.step).ok()?.ratio(),
            copies: Some(SameRun::of(&flat.tail, &flat.communication).ok()?.difference())
                .filter(|copies| copies.value() > 0.0 && less_communication.is_positive()),
            priced: link.over(&by_calls, &less_communication.all),
            faster: link.over(&bandwidth, &link.bandwidth),
            link: link.clone(),
            saved,
            less_communication,
            fewer_calls,
            by_calls,
            bandwidth,
            flat,
            naive,
        })
    }
}

#[cfg(test)]
mod tests;
