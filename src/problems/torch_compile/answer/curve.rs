//! The loss of our fused step beside autograd's over many steps, and what other orders of the batches change.

use anyhow::Result;
use serde::Serialize;

use super::super::curve::{Params, Row};
use super::super::measure;
use super::cases::{CurveCase, machines};
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Answer, Cell, Claim, Quantity, RecordSet, Records, Style, Table, Unit};
use crate::harness::stats;

#[derive(Serialize)]
pub struct Curve {
    /// "200".
    steps: String,
    /// The most over all dtypes of what the fused step's loss differs by, as a share of the spread.
    share: Quantity,
    #[serde(skip)]
    pub claim: Claim,
}

impl CurveCase<'_> {
    fn number(&self, value: f64) -> Quantity {
        self.case.quantity(value, Unit::One)
    }

    /// The largest difference of the fused step's loss from autograd's at any step.
    fn difference(&self) -> Option<Quantity> {
        let Row { autograd, fused, .. } = self.row?;
        Some(self.number(autograd.iter().zip(fused).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)))
    }

    /// Between the least and the greatest loss of the other orders at one step, the median over the steps.
    fn spread(&self) -> Option<Quantity> {
        let row = self.row?;
        let at = |step: usize| {
            let losses: Vec<f64> = row.others.iter().filter_map(|run| Some(f64::from(*run.get(step)?))).collect();
            stats::max(&losses) - stats::min(&losses)
        };
        Some(self.number(stats::median(&(0..row.autograd.len()).map(at).collect::<Vec<_>>())))
    }

    fn share(&self) -> Option<Quantity> {
        Some(self.number(self.difference()?.value() / self.spread()?.value()))
    }

    /// The mean of the last tenth of the steps.
    fn last(&self, losses: impl Fn(&Row) -> &Vec<f32>) -> Option<Quantity> {
        let losses = losses(self.row?);
        let tail = &losses[losses.len() - losses.len().div_ceil(10)..];
        Some(self.number(stats::mean(&tail.iter().map(|loss| f64::from(*loss)).collect::<Vec<_>>())))
    }
}

impl Curve {
    /// None where no case was measured.
    pub fn of(cases: &[CurveCase]) -> Option<Self> {
        let share = Quantity::largest(cases.iter().filter_map(CurveCase::share))?;
        let claim = Claim::below("fused-loss-is-near", "largest difference / spread", &share, 1.0);
        Some(Self { steps: cases.first()?.params.steps.to_string(), share, claim })
    }
}

/// The planned cases that `set` does not hold.
pub fn unmeasured(records: &Records, set: &RecordSet) -> Vec<Params> {
    let planned = records.planned(set.profile()).filter(|(_, params)| set.file.case(params).is_none());
    let curves = planned.filter_map(|(_, params)| match serde_json::from_value(params.clone()).ok()? {
        measure::Params::Curve(params) => Some(params),
        _ => None,
    });
    curves.collect()
}

/// A line for each recorded and each planned case; no table of none.
pub fn table(answer: &mut Answer, id: &str, cases: &[CurveCase], planned: &[Params]) -> Result<()> {
    let recorded = cases.iter().map(|case| (case.params, Some(case)));
    let lines: Vec<(&Params, Option<&CurveCase>)> = recorded.chain(planned.iter().map(|p| (p, None))).collect();
    let Some((first, _)) = lines.first() else { return Ok(()) };
    let (p, machine) = (*first, machines(cases));
    let ended = |case: &Option<&CurveCase>| case.map(|case| Cell::text(case.case.outcome.label()));
    let cell = |case: &Option<&CurveCase>, of: &dyn Fn(&CurveCase) -> Option<Quantity>| {
        case.and_then(of).map(Cell::from).or_else(|| ended(case))
    };
    let least = |row: &Row| row.others_apart.iter().copied().fold(f64::INFINITY, f64::min);
    let table = Table::of(lines)
        .text("dtype", |(p, _)| p.dtype.name())
        .number("last loss, autograd", Style::Fixed, 3, |(_, c)| cell(c, &|case| case.last(|row| &row.autograd)))
        .number("fused", Style::Fixed, 3, |(_, c)| cell(c, &|case| case.last(|row| &row.fused)))
        .number("largest difference", Style::Sci, 1, |(_, c)| cell(c, &|case| case.difference()))
        .number("spread of orders", Style::Sci, 1, |(_, c)| cell(c, &|case| case.spread()))
        .number("weights apart", Style::Percent, 1, |(_, c)| cell(c, &|case| Some(case.number(case.row?.fused_apart))))
        .number("orders apart", Style::Percent, 1, |(_, c)| cell(c, &|case| Some(case.number(least(case.row?)))));
    answer.table(
        id,
        table.captioned(format!(
            "The loss over {} steps, fused and by autograd, from the same weights on the same batches: {}, context {}, batch {}, \
             vocabulary {}; {machine}. The last loss is the mean of the last tenth of the steps. The spread is that of {} runs by \
             autograd with the batches in other orders, its median over the steps. Weights are apart by the norm of their \
             difference over that of the way trained; of the orders the nearest counts.",
            p.steps,
            p.size.size().name,
            grouped(p.context_length as f64, 0),
            p.batch_size,
            grouped(p.vocab_size as f64, 0),
            p.orders
        )),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::super::{ALONE, answer};
    use crate::harness::answer::made_up::{MadeUp, printed};
    use crate::harness::answer::{Answer, Audience, Records};

    fn params(dtype: &str) -> Value {
        json!({"measure": "curve", "size": "small", "context_length": 512, "batch_size": 4, "vocab_size": 1000,
            "dtype": dtype, "attention": "flash", "steps": 3, "orders": 2})
    }

    fn row(fused: [f64; 3]) -> Value {
        json!({"autograd": [7.0, 6.0, 5.0], "fused": fused, "others": [[7.0, 6.25, 5.5], [7.5, 6.0, 5.0]],
            "fused_apart": 0.01, "others_apart": [0.5, 0.4]})
    }

    fn answered(made_up: MadeUp) -> Answer {
        let others = BTreeMap::from([(ALONE.to_string(), Records::default())]);
        answer(&Records { others, ..made_up.records() }, Audience::Ours).unwrap()
    }

    #[test]
    fn a_difference_counts_as_noise_below_the_spread_of_other_orders() {
        let gpu = || MadeUp::gpu("torch_compile").measured("curve", &params("float32"), &row([7.0, 6.125, 5.0]));
        let answer = answered(gpu());
        assert_eq!(answer.holds("fused-loss-is-near"), Some(true));
        assert_eq!(printed(&answer)["curve"]["share"]["value"], json!(0.25));
        let table = answer.tables()["curve"].markdown();
        assert!(table.contains("| float32 | 5.000 | 5.000 | "), "{table}");
        assert!(table.contains("| 1.0% | 40.0% |"), "{table}");
        let answer = answered(gpu().measured("curve", &params("bfloat16"), &row([7.0, 6.0, 5.5])));
        assert_eq!(answer.holds("fused-loss-is-near"), Some(false), "a tie is no less");
        let failed = answered(MadeUp::gpu("torch_compile").failed("curve", &params("float32")));
        assert!(printed(&failed)["curve"].is_null() && failed.tables()["curve"].markdown().contains("| failed |"));
    }
}
