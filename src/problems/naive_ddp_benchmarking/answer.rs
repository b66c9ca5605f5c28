//! What a step costs when each gradient is averaged by itself, and what its communication is made of.

use anyhow::Result;
use serde::Serialize;

use super::NaiveDdp;
use crate::bench::ddp_step::tables::{StepSetting, StrategyNumbers, steps_table};
use crate::bench::ddp_step::{Params, Row, Steps};
use crate::harness::answer::{Answer, Audience, Case, Claim, Quantity, Records, SameRun, Unit};

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    gpu: bool,
    machine: String,
    #[serde(flatten)]
    setting: Option<StepSetting>,
    /// Whether a case was measured; then the numbers of the first one follow.
    measured: bool,
    #[serde(flatten)]
    step: Option<Step>,
}

/// The first measured case.
#[derive(Clone, Serialize)]
struct Step {
    dtype: &'static str,
    time: Quantity,
    sent: Quantity,
    share: Quantity,
    bytes: Quantity,
    calls: u64,
    single: Quantity,
    /// The time of the bytes, and of the calls, by the fit.
    bytes_time: Quantity,
    calls_time: Quantity,
    overhead: Quantity,
    bandwidth: Quantity,
    pytorch: Option<Quantity>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<Steps<NaiveDdp>>()?;
    let first = cases.iter().find_map(|case| Some((case, case.row()?)));
    let step = first.map(|(case, row)| step(case, row)).transpose()?.flatten();
    let mut answer = Answer::new(&Quoted {
        gpu: main.is_gpu(),
        machine: main.machine()?,
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        measured: step.is_some(),
        step: step.as_ref().map(|(step, _)| step.clone()),
    })?;
    if let Some((step, hidden)) = step {
        answer.claim(Claim::below("naive-ddp-hides-nothing", "hidden", &hidden, 0.05))?;
        answer.claim(
            Claim::new("calls-outweigh-bytes", step.calls_time.value() > step.bytes_time.value())
                .operand("calls", &step.calls_time)
                .operand("bytes", &step.bytes_time),
        )?;
        if let Some(pytorch) = &step.pytorch {
            let held = pytorch.value() < step.time.value();
            let claim = Claim::new("pytorch-is-faster", held).operand("PyTorch's DDP", pytorch);
            answer.claim(claim.operand("naive", &step.time))?;
        }
    }
    for set in records.sets() {
        let cases = set.cases::<Steps<NaiveDdp>>()?;
        let table = steps_table(set, "arithmetic", &cases.iter().collect::<Vec<_>>(), |p| p.dtype.name().into());
        answer.table(format!("steps-{}", set.profile()), table)?;
    }
    Ok(answer)
}

/// The sentences' numbers, and the share that was hidden.
fn step(case: &Case<Params, Row>, row: &Row) -> Result<Option<(Step, Quantity)>> {
    let Some(column) = row.strategies.get("naive") else { return Ok(None) };
    let numbers = StrategyNumbers::of(case, column);
    let link = &row.link;
    let seconds = |x| case.quantity(x, Unit::Seconds);
    let step = Step {
        dtype: case.params.dtype.name(),
        share: SameRun::of(&numbers.communication, &numbers.step)?.ratio(),
        time: numbers.step,
        sent: numbers.communication,
        calls: numbers.calls,
        single: case.median(&row.single.last_rank),
        bytes_time: seconds(numbers.bytes.value() / link.bytes_per_s),
        calls_time: seconds(numbers.calls as f64 * link.overhead_s),
        overhead: seconds(link.overhead_s),
        bandwidth: case.quantity(link.bytes_per_s, Unit::BytesPerSecond),
        pytorch: row.pytorch_ddp.as_ref().map(|theirs| case.median(&theirs.last_rank)),
        bytes: numbers.bytes,
    };
    Ok(Some((step, numbers.hidden)))
}

#[cfg(test)]
mod tests;
