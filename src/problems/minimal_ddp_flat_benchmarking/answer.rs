//! What one call for all gradients saves against a call for each.

use anyhow::Result;
use serde::Serialize;

use super::MinimalDdpFlat;
use crate::bench::ddp_step::tables::{StepSetting, StrategyNumbers, steps_table};
use crate::bench::ddp_step::{Params, Row, Steps};
use crate::harness::answer::{Answer, Audience, Case, Claim, Quantity, Records, SameRun, Unit};

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    gpu: bool,
    #[serde(flatten)]
    setting: Option<StepSetting>,
    /// Whether a case was measured; then the numbers of the first one follow.
    measured: bool,
    #[serde(flatten)]
    saving: Option<Saving>,
}

#[derive(Serialize)]
struct Saving {
    dtype: &'static str,
    one_call: Quantity,
    calls: u64,
    many_calls: Quantity,
    /// How much shorter the step is, or longer, and the share of it.
    step: Quantity,
    share: Quantity,
    /// What the calls that are saved cost by the fit.
    by_calls: Quantity,
    overhead: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<Steps<MinimalDdpFlat>>()?;
    let columns = cases.iter().find_map(|case| columns(case, case.row()?));
    let saving = columns.as_ref().map(saving).transpose()?;
    let mut answer = Answer::new(&Quoted {
        gpu: main.is_gpu(),
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        measured: saving.is_some(),
        saving,
    })?;
    if let Some(Columns { flat, naive, .. }) = &columns {
        for (id, flat, naive) in [
            ("flat-communicates-faster", &flat.communication, &naive.communication),
            ("flat-step-is-faster", &flat.step, &naive.step),
        ] {
            let claim = Claim::new(id, flat.value() < naive.value());
            answer.claim(claim.operand("one call", flat).operand("a call each", naive))?;
        }
        answer.claim(Claim::below("the-flat-call-hides-no-communication", "hidden", &flat.hidden, 0.05))?;
    }
    for set in records.sets() {
        let cases = set.cases::<Steps<MinimalDdpFlat>>()?;
        let table = steps_table(set, "arithmetic", &cases.iter().collect::<Vec<_>>(), |p| p.dtype.name().into());
        answer.table(format!("steps-{}", set.profile()), table)?;
    }
    Ok(answer)
}

struct Columns<'a> {
    case: &'a Case<Params, Row>,
    overhead_s: f64,
    flat: StrategyNumbers,
    naive: StrategyNumbers,
}

fn columns<'a>(case: &'a Case<Params, Row>, row: &Row) -> Option<Columns<'a>> {
    let of = |name| Some(StrategyNumbers::of(case, row.strategies.get(name)?));
    Some(Columns { case, overhead_s: row.link.overhead_s, flat: of("flat")?, naive: of("naive")? })
}

fn saving(columns: &Columns) -> Result<Saving> {
    let Columns { case, overhead_s, flat, naive } = columns;
    let saved = SameRun::of(&naive.step, &flat.step)?.difference();
    let share = SameRun::of(&saved, &naive.step)?.ratio();
    let seconds = |x| case.quantity(x, Unit::Seconds);
    Ok(Saving {
        dtype: case.params.dtype.name(),
        one_call: flat.communication.clone(),
        calls: naive.calls,
        many_calls: naive.communication.clone(),
        step: seconds(saved.value().abs()),
        share,
        by_calls: seconds(naive.calls.saturating_sub(flat.calls) as f64 * overhead_s),
        overhead: seconds(*overhead_s),
    })
}

#[cfg(test)]
mod tests;
