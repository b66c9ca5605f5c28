//! What a step costs when each gradient is averaged by itself, and what a model of the link says of its communication.

use anyhow::Result;
use serde::Serialize;

use crate::bench::ddp_step::Row;
use crate::bench::ddp_step::link::PooledLink;
use crate::bench::ddp_step::numbers::StrategyNumbers;
use crate::bench::ddp_step::tables::{StepCase, steps_answer};
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Records, SameRun, Unit};

/// What the sentences quote of the first stable case.
#[derive(Serialize)]
struct Quoted {
    dtype: &'static str,
    #[serde(flatten)]
    naive: StrategyNumbers,
    /// Communication over the step.
    share: Quantity,
    link: PooledLink,
    /// The time of the bytes, of the calls, and of both by the fit; and what that is over the measured communication.
    by_bytes: Quantity,
    by_calls: Quantity,
    predicted: Quantity,
    overstated: Quantity,
    /// How far the prediction lies from the measured communication.
    off: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let (mut answer, quoted) = steps_answer(records, Quoted::of)?;
    let Some(Quoted { naive, overstated, .. }) = quoted else { return Ok(answer) };
    answer.claim(Claim::above("the-fit-overstates", "predicted over measured", &overstated, 1.05))?;
    let least = &naive.beyond_single.range.low;
    let most = naive.pytorch_beyond.as_ref().map(|beyond| &beyond.range.high);
    let claim = Claim::new("pytorch-is-faster", most.is_some_and(|most| most.value() < least.value()));
    let claim = claim.operand("naive above single, at least", least);
    answer.claim(match most {
        Some(most) => claim.operand("PyTorch's DDP, at most", most),
        None => claim,
    })?;
    Ok(answer)
}

impl Quoted {
    fn of(case: &StepCase, row: &Row, link: &PooledLink) -> Option<Self> {
        let naive = StrategyNumbers::of(case, row, "naive")?;
        let (by_bytes, by_calls) = (link.of_bytes(naive.bytes.value()), link.of_calls(naive.calls));
        let predicted = link.seconds(by_bytes.value() + by_calls.value());
        Some(Self {
            dtype: case.params.dtype.name(),
            share: SameRun::of(&naive.communication, &naive.step).ok()?.ratio(),
            overstated: link.over(&predicted, &naive.communication),
            off: case.quantity((predicted.value() - naive.communication.value()).abs(), Unit::Seconds),
            link: link.clone(),
            by_bytes,
            by_calls,
            predicted,
            naive,
        })
    }
}

#[cfg(test)]
mod tests;
