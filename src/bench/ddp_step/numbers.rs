//! The quantities of one strategy in one case, as answers quote them.

use serde::Serialize;

use super::timeline::PHASES;
use super::{Params, Row, StrategyColumn, WITHOUT_OVERLAP};
use crate::bench::all_reduce::RankTimes;
use crate::harness::answer::{Case, Paired, Quantity, Turns, Unit};

/// The strategy that the others' hidden share refers to.
pub const NAIVE: &str = "naive";

#[derive(Serialize)]
pub struct StrategyNumbers {
    pub step: Quantity,
    /// The step without communication, and PyTorch's DDP.
    pub single: Quantity,
    pub pytorch: Option<Quantity>,
    /// The step less that without communication; the same of PyTorch's DDP, which has our step taken off.
    pub beyond_single: Paired,
    pub pytorch_beyond: Option<Paired>,
    /// The share of what the naive step takes beyond the one without communication that this step does not take. `None`
    /// without naive steps in the case, of [`WITHOUT_OVERLAP`], and where a column is not stable.
    pub hidden: Option<Paired>,
    /// What the step takes beyond single although nothing waits: it less the tail.
    pub slowdown: Paired,
    pub communication: Quantity,
    pub tail: Quantity,
    /// One minus tail over communication, by the communication stream alone.
    pub stream_overlap: Quantity,
    pub bytes: Quantity,
    pub bus_bytes: Quantity,
    pub calls: u64,
    /// The backward pass in the last step of rank 0.
    pub backward: Option<Quantity>,
    /// Whether the step and the one without communication are.
    pub stable: bool,
}

impl StrategyNumbers {
    /// `None` if the case, whose row holds `steps`, did not measure the strategy.
    pub fn of<R>(case: &Case<Params, R>, steps: &Row, strategy: &str) -> Option<Self> {
        let column = steps.strategies.get(strategy)?;
        let turns = |times: &RankTimes| times.turns(case.params.rounds);
        let (step, single) = (turns(&column.step), turns(&steps.single));
        let tail = Turns::of(&column.tail.mean.samples, case.params.rounds);
        let pytorch = steps.pytorch_ddp.as_ref();
        Some(Self {
            step: case.median(&column.step.last_rank),
            single: case.median(&steps.single.last_rank),
            pytorch: pytorch.map(|theirs| case.median(&theirs.last_rank)),
            beyond_single: Paired::difference(&case.id, &step, &single)?,
            pytorch_beyond: pytorch.and_then(|theirs| Paired::difference(&case.id, &turns(theirs), &single)),
            hidden: hidden(case, steps, &column.step).filter(|_| !WITHOUT_OVERLAP.contains(&strategy)),
            slowdown: Paired::of(&case.id, Unit::Seconds, [&step, &single, &tail], |[step, single, tail]| {
                step - single - tail
            })?,
            communication: case.median(&column.communication.mean),
            tail: case.median(&column.tail.mean),
            stream_overlap: case.quantity(column.overlap, Unit::One),
            bytes: case.quantity(column.bytes as f64, Unit::Bytes),
            bus_bytes: case.quantity(column.bus_bytes, Unit::Bytes),
            calls: column.calls,
            backward: backward_s(column).map(|seconds| case.quantity(seconds, Unit::Seconds)),
            stable: step.is_stable() && single.is_stable(),
        })
    }
}

/// 1 - (step - single) / (naive step - single), all of one case; `None` where one of the three is not stable.
pub fn hidden<R>(case: &Case<Params, R>, steps: &Row, times: &RankTimes) -> Option<Paired> {
    let turns = |times: &RankTimes| times.turns(case.params.rounds);
    let columns = [&turns(times), &turns(&steps.single), &turns(&steps.strategies.get(NAIVE)?.step)];
    let share =
        Paired::of(&case.id, Unit::One, columns, |[step, single, naive]| 1.0 - (step - single) / (naive - single));
    share.filter(|share| share.stable)
}

/// Whether every column of the case is stable.
pub fn is_stable<R>(case: &Case<Params, R>, steps: &Row) -> bool {
    let ours = steps.strategies.values().map(|column| &column.step);
    let times = [&steps.single].into_iter().chain(ours).chain(&steps.pytorch_ddp);
    times.map(|times| times.turns(case.params.rounds)).all(|turns| turns.is_stable())
}

fn backward_s(column: &StrategyColumn) -> Option<f64> {
    let span = column.timeline.compute.iter().find(|span| span.name == PHASES[1])?;
    Some(span.end_s - span.start_s)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::made_up::{params, row};
    use super::super::tables::StepCase;
    use super::*;
    use crate::harness::answer::made_up::{MadeUp, seconds};
    use crate::model::Precision;

    #[test]
    fn what_is_hidden_is_told_by_the_step_and_not_by_the_stream() {
        // The stream communicates for 2 s beside the backward pass and leaves no tail, yet the step is 0.1 s longer.
        let steps = row(&[("naive", 1.4, 0.4, 0.4), ("overlap_bucketed", 1.1, 2.0, 0.02)], Some(1.2));
        let records = MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps).records();
        let cases: Vec<StepCase> = records.main().unwrap().cases_as().unwrap();
        let steps = cases[0].row().unwrap().steps();
        let of = |name| StrategyNumbers::of(&cases[0], steps, name).unwrap();
        let numbers = of("overlap_bucketed");
        assert!((numbers.hidden.unwrap().all.value() - 0.75).abs() < 1e-12);
        assert!((numbers.stream_overlap.value() - 0.99).abs() < 1e-12);
        assert!((numbers.slowdown.all.value() - 0.08).abs() < 1e-12);
        assert!((numbers.pytorch_beyond.unwrap().all.value() - 0.2).abs() < 1e-12);
        assert!(of("naive").hidden.is_none() && StrategyNumbers::of(&cases[0], steps, "flat").is_none());
    }

    #[test]
    fn a_case_with_an_unstable_column_is_unstable_and_hides_nothing() {
        let mut steps = row(&[("naive", 1.4, 0.4, 0.4), ("overlap_bucketed", 1.2, 0.2, 0.2)], None);
        steps["single"]["last_rank"] = seconds(&[1.0, 1.1]);
        let params = super::Params { rounds: 2, ..params(Precision::Bfloat16, None) };
        let records = MadeUp::gpu("x").measured("a", &json!(params), &steps).records();
        let cases: Vec<StepCase> = records.main().unwrap().cases_as().unwrap();
        let steps = cases[0].row().unwrap().steps();
        let overlap = StrategyNumbers::of(&cases[0], steps, "overlap_bucketed").unwrap();
        assert!(!is_stable(&cases[0], steps) && !overlap.stable && overlap.hidden.is_none());
    }

    #[test]
    fn communication_after_the_backward_pass_hides_nothing_however_short_it_is() {
        let steps = row(&[("naive", 1.4, 0.4, 0.4), ("flat", 1.2, 0.2, 0.2)], None);
        let records = MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps).records();
        let cases: Vec<StepCase> = records.main().unwrap().cases_as().unwrap();
        let flat = StrategyNumbers::of(&cases[0], cases[0].row().unwrap().steps(), "flat").unwrap();
        assert!(flat.stable && flat.hidden.is_none());
    }
}
