//! What a step costs when each gradient is averaged by itself, and what its communication is made of.

use anyhow::Result;
use serde::Serialize;

use crate::bench::ddp_step::Row;
use crate::bench::ddp_step::tables::{StepCase, StrategyNumbers, steps_answer};
use crate::harness::answer::{Answer, Audience, Claim, Quantity, Records, SameRun, Unit};

/// What the sentences quote of the first measured case.
#[derive(Serialize)]
struct Quoted {
    dtype: &'static str,
    #[serde(flatten)]
    naive: StrategyNumbers,
    /// Communication over the step.
    share: Quantity,
    /// The time of the bytes, and of the calls, by the fit.
    by_bytes: Quantity,
    by_calls: Quantity,
    overhead: Quantity,
    bandwidth: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let (mut answer, quoted) = steps_answer(records, Quoted::of)?;
    let Some(Quoted { naive, by_calls, by_bytes, .. }) = quoted else { return Ok(answer) };
    answer.claim(Claim::below("naive-ddp-hides-nothing", "hidden", &naive.hidden, 0.05))?;
    answer.claim(Claim::greater("calls-outweigh-bytes", ("calls", &by_calls), ("bytes", &by_bytes)))?;
    if let Some(pytorch) = &naive.pytorch {
        answer.claim(Claim::less("pytorch-is-faster", ("PyTorch's DDP", pytorch), ("naive", &naive.step)))?;
    }
    Ok(answer)
}

impl Quoted {
    fn of(case: &StepCase, row: &Row) -> Option<Self> {
        let naive = StrategyNumbers::of(case, row, "naive")?;
        let seconds = |x| case.quantity(x, Unit::Seconds);
        Some(Self {
            dtype: case.params.dtype.name(),
            share: SameRun::of(&naive.communication, &naive.step).ok()?.ratio(),
            by_bytes: seconds(naive.bytes.value() / row.link.bytes_per_s),
            by_calls: seconds(naive.calls as f64 * row.link.overhead_s),
            overhead: seconds(row.link.overhead_s),
            bandwidth: case.quantity(row.link.bytes_per_s, Unit::BytesPerSecond),
            naive,
        })
    }
}

#[cfg(test)]
mod tests;
