//! Timings of interleaved turns as answers print them: the range of the turns' medians, and the ratios of paired turns.

use crate::harness::answer::{Case, Cell, Quantity, Range, SameRun};
use crate::harness::samples::Samples;
use crate::harness::stats;

/// The median of each turn that one variant of a case took, in order.
pub struct TurnTimes(Vec<Quantity>);

impl TurnTimes {
    /// Each turn has `turn` samples. `None` without samples.
    pub fn of<P, R>(case: &Case<P, R>, samples: &Samples, turn: usize) -> Option<Self> {
        let medians = stats::medians_of_turns(&samples.samples, turn);
        let turns: Vec<_> = medians.into_iter().map(|median| case.quantity(median, samples.unit.into())).collect();
        (!turns.is_empty()).then_some(Self(turns))
    }

    pub fn range(&self) -> Option<Range> {
        Range::of(&self.0)
    }

    /// Whether the turns agree, so that a sentence may rest on the median of all.
    pub fn is_stable(&self) -> bool {
        self.range().is_some_and(|Range { low, high }| high.value() <= stats::MOST_SPREAD * low.value())
    }

    /// `median`, that of all samples, or the `range` of the turns where they do not agree.
    pub fn cell(&self, median: &Quantity, range: impl Fn(f64, f64) -> String) -> Cell {
        match self.range() {
            Some(Range { low, high }) if !self.is_stable() => {
                low.mark(&range(low.value(), high.value())).into()
            }
            _ => median.into(),
        }
    }

    /// The ratios of this variant to `other`, turn by turn; `None` if the two are not of one run or not paired.
    pub fn over(&self, other: &Self) -> Option<Range> {
        let ratio = |(a, b)| Some(SameRun::of(a, b).ok()?.ratio());
        let ratios: Vec<_> = self.0.iter().zip(&other.0).map(ratio).collect::<Option<_>>()?;
        Range::of(&ratios).filter(|_| self.0.len() == other.0.len())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::harness::answer::made_up::MadeUp;

    fn turns(samples: &[f64], turn: usize) -> TurnTimes {
        let records = MadeUp::cpu("x").measured("a", &json!({}), &1.0).records();
        let case = records.main().unwrap().cases_as::<serde_json::Value, f64>().unwrap().remove(0);
        TurnTimes::of(&case, &Samples::seconds_unbounded(samples.to_vec()).unwrap(), turn).unwrap()
    }

    #[test]
    fn turns_that_differ_by_more_than_a_twentieth_are_unstable() {
        let steady = turns(&[1.0, 9.0, 1.0, 1.04, 1.04, 1.0], 3);
        let Range { low, high } = steady.range().unwrap();
        assert_eq!((low.value(), high.value()), (1.0, 1.04));
        assert!(steady.is_stable(), "one late sample of a turn does not count");
        let unstable = turns(&[1.0, 1.0, 1.06, 1.06], 2);
        assert!(!unstable.is_stable());
        let cell = |turns: &TurnTimes| turns.cell(&low, |low, high| format!("{low} to {high}"));
        let unstable = (cell(&unstable), Cell::text(low.mark("1 to 1.06")));
        assert_eq!((cell(&steady), unstable.0), (Cell::from(&low), unstable.1));
    }

    #[test]
    fn ratios_are_of_paired_turns() {
        // Each turn has another clock, which the ratio does not see.
        let (ours, theirs) = (turns(&[1.0, 2.0], 1), turns(&[2.0, 4.0], 1));
        let ratio = ours.over(&theirs).unwrap();
        assert_eq!((ratio.low.value(), ratio.high.value()), (0.5, 0.5));
        assert!(ours.over(&turns(&[1.0], 1)).is_none(), "a turn has no partner");
    }
}
