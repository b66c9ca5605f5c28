//! Columns that took turns: their medians in each round, how steady they are, and comparisons of columns round by round.

use serde::Serialize;

use crate::harness::answer::format::range;
use crate::harness::answer::{CaseId, Cell, Quantity, Range, Style, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats::{max, median, min};

/// The largest ratio between the medians of two turns at which a median is quoted; above it a range is printed.
pub const STEADY: f64 = 1.05;

/// One column's medians: of all samples, and of each round's turn. In a single round every sample counts as a turn.
#[derive(Debug, Clone)]
pub struct Rounds {
    all: f64,
    turns: Vec<f64>,
}

impl Rounds {
    pub fn of(samples: &Samples, rounds: usize) -> Self {
        let samples = &samples.samples;
        let turn = if rounds > 1 { samples.len().div_ceil(rounds).max(1) } else { 1 };
        Self { all: median(samples), turns: samples.chunks(turn).map(median).collect() }
    }

    /// The largest median of a turn over the smallest.
    pub fn spread(&self) -> f64 {
        max(&self.turns) / min(&self.turns)
    }

    pub fn is_steady(&self) -> bool {
        self.spread() <= STEADY
    }
}

/// A formula of columns that took turns: of their medians over all samples, and its range over the rounds.
///
/// Templates print it as a quantity or as a range.
#[derive(Debug, Clone, Serialize)]
pub struct Paired {
    #[serde(flatten)]
    pub all: Quantity,
    #[serde(flatten)]
    pub range: Range,
    /// Whether every column is.
    pub steady: bool,
}

impl Paired {
    /// `None` if the formula is not finite, as a share of nothing.
    pub fn of<const N: usize>(
        case: &CaseId,
        unit: Unit,
        columns: [&Rounds; N],
        formula: impl Fn([f64; N]) -> f64,
    ) -> Option<Self> {
        let all = formula(columns.map(|column| column.all));
        let rounds = columns.iter().map(|column| column.turns.len()).min().unwrap_or(0);
        let turns = (0..rounds).map(|round| formula(columns.map(|column| column.turns[round])));
        let values: Vec<f64> = turns.chain([all]).collect();
        let quantity = |value| Quantity::new(value, unit, vec![case.clone()]);
        values.iter().all(|value| value.is_finite()).then(|| Self {
            all: quantity(all),
            range: Range { low: quantity(min(&values)), high: quantity(max(&values)) },
            steady: columns.iter().all(|column| column.is_steady()),
        })
    }

    /// The quantity itself.
    pub fn median(case: &CaseId, column: &Rounds) -> Option<Self> {
        Self::of(case, Unit::Seconds, [column], |[seconds]| seconds)
    }

    /// The first column less the second.
    pub fn difference(case: &CaseId, first: &Rounds, second: &Rounds) -> Option<Self> {
        Self::of(case, Unit::Seconds, [first, second], |[a, b]| a - b)
    }

    /// Whether it is steady and above zero in every round.
    pub fn is_positive(&self) -> bool {
        self.steady && self.range.low.value() > 0.0
    }

    /// Milliseconds: the number if its columns are steady and the rounds agree, else its range.
    pub fn ms(&self) -> Cell {
        let [low, high] = [&self.range.low, &self.range.high].map(Quantity::value);
        match self.steady && low > 0.0 && high <= STEADY * low {
            true => Cell::from(&self.all),
            false => self.all.mark(&range(low, high, Style::Ms, if high < 0.01 { 1 } else { 0 })).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::made_up::{machine, source};

    fn rounds(samples: &[f64], rounds: usize) -> Rounds {
        Rounds::of(&Samples::seconds_unbounded(samples.to_vec()).unwrap(), rounds)
    }

    #[test]
    fn a_spread_is_of_the_medians_of_turns_and_of_samples_where_there_are_no_turns() {
        // Each turn has an outlier, which its median does not show.
        let steady = rounds(&[1.0, 1.0, 9.0, 9.0, 1.05, 1.05], 2);
        assert!((steady.spread() - 1.05).abs() < 1e-12 && steady.is_steady());
        assert!(!rounds(&[1.0, 1.0, 1.0, 1.06, 1.06, 1.06], 2).is_steady());
        assert!(!rounds(&[1.0, 1.0, 9.0], 1).is_steady());
    }

    #[test]
    fn a_comparison_pairs_the_turns_of_a_round() {
        let id = source("a", machine(None));
        // Both columns are slower in the second round; their difference is not.
        let (first, second) = (rounds(&[3.0, 3.1], 2), rounds(&[2.0, 2.05], 2));
        let difference = Paired::difference(&id, &first, &second).unwrap();
        assert!((difference.all.value() - 1.025).abs() < 1e-12);
        let Range { low, high } = &difference.range;
        assert!((low.value() - 1.0).abs() < 1e-12 && (high.value() - 1.05).abs() < 1e-12);
        assert!(difference.is_positive());
        let other_way = Paired::difference(&id, &second, &first).unwrap();
        assert!(!other_way.is_positive());
        assert!(Paired::of(&id, Unit::One, [&first], |[_]| f64::NAN).is_none());
    }

    #[test]
    fn what_is_not_steady_is_printed_as_a_range_and_decides_nothing() {
        let id = source("a", machine(None));
        let (noisy, base) = (rounds(&[2.0, 3.0], 2), rounds(&[1.0, 1.0], 2));
        let difference = Paired::difference(&id, &noisy, &base).unwrap();
        assert!(difference.range.low.value() > 0.0 && !difference.is_positive());
        assert_eq!(difference.ms(), Cell::text(id.mark("1,000 to 2,000")));
        // Both steps are steady, but their small difference is not.
        let close = Paired::difference(&id, &rounds(&[1.002, 1.004], 2), &base).unwrap();
        assert_eq!((close.ms(), close.is_positive()), (Cell::text(id.mark("2.0 to 4.0")), true));
        assert_eq!(Paired::median(&id, &base).unwrap().ms(), Cell::from(Quantity::new(1.0, Unit::Seconds, vec![id])));
    }
}
