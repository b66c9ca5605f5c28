//! Timings in turns: whether the medians of the turns agree, and formulas of several timings with their range over turns.

use serde::Serialize;

use super::format::{Style, print, significant, time};
use super::quantity::{Quantity, Range, Unit};
use super::records::CaseId;
use super::table::Cell;
use crate::harness::stats::{max, median, min};

/// The largest ratio between the medians of two turns at which a median is quoted; above it a range is printed.
pub const STABLE: f64 = 1.05;

/// From this spread on, the ends of a range have two significant digits instead of three.
const COARSE: f64 = 1.2;

/// Follows a number whose turns disagree.
pub const UNSTABLE: &str = " †";

/// The medians of one timing, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Turns {
    /// Of all samples.
    all: f64,
    /// Of each turn.
    medians: Vec<f64>,
    /// Whether there is a turn for each round, and not for each sample.
    by_round: bool,
}

impl Turns {
    /// Of samples in order, as many in each of `rounds` turns. In one round, or where they do not divide, see [`Self::single`].
    pub fn of(samples: &[f64], rounds: usize) -> Self {
        let by_round = rounds > 1 && samples.len().is_multiple_of(rounds);
        let turn = if by_round { samples.len() / rounds } else { 1 };
        Self { all: median(samples), medians: samples.chunks(turn.max(1)).map(median).collect(), by_round }
    }

    /// Of a timing without turns: every sample counts as one.
    pub fn single(samples: &[f64]) -> Self {
        Self::of(samples, 1)
    }

    /// The largest over the smallest.
    pub fn spread(&self) -> f64 {
        max(&self.medians) / min(&self.medians)
    }

    pub fn is_stable(&self) -> bool {
        self.spread() <= STABLE
    }

    /// Whether the slowest turn is faster than the other's fastest.
    pub fn is_below(&self, other: &Self) -> bool {
        max(&self.medians) < min(&other.medians)
    }

    /// Milliseconds of the fastest and the slowest turn where they disagree: "16.3–18.2", "9.2–15".
    pub fn range(&self) -> Option<String> {
        let digits = if self.spread() < COARSE { 3 } else { 2 };
        let [low, high] = [min, max].map(|end| significant(end(&self.medians) * Style::Ms.scale(), digits));
        (!self.is_stable()).then(|| format!("{low}–{high}"))
    }

    /// The median, or the range.
    pub fn text(&self) -> String {
        self.range().unwrap_or_else(|| self.median())
    }

    /// The median of all samples where the turns agree, else that of the fastest turn.
    pub fn median_or_least(&self) -> f64 {
        if self.is_stable() { self.all } else { min(&self.medians) }
    }

    /// The median of all samples in milliseconds: "12.6".
    pub fn median(&self) -> String {
        time(self.all)
    }

    /// `text`, with a mark where the turns disagree: "12.6 †".
    pub fn marked(&self, text: &str) -> String {
        format!("{text}{}", if self.is_stable() { "" } else { UNSTABLE })
    }
}

/// A formula of timings: of their medians over all samples, and the range of it and of what the turns give.
///
/// Templates print it as a quantity or as a range.
#[derive(Debug, Clone, Serialize)]
pub struct Paired {
    #[serde(flatten)]
    pub all: Quantity,
    #[serde(flatten)]
    pub range: Range,
    /// Whether every timing is.
    pub stable: bool,
}

impl Paired {
    /// `None` if the formula is not finite, as a share of nothing.
    pub fn of<const N: usize>(
        case: &CaseId,
        unit: Unit,
        timings: [&Turns; N],
        formula: impl Fn([f64; N]) -> f64,
    ) -> Option<Self> {
        let all = formula(timings.map(|timing| timing.all));
        let values: Vec<f64> = paired(timings).into_iter().map(formula).chain([all]).collect();
        let quantity = |value| Quantity::new(value, unit, vec![case.clone()]);
        values.iter().all(|value| value.is_finite()).then(|| Self {
            all: quantity(all),
            range: Range { low: quantity(min(&values)), high: quantity(max(&values)) },
            stable: timings.iter().all(|timing| timing.is_stable()),
        })
    }

    /// The timing itself.
    pub fn median(case: &CaseId, timing: &Turns) -> Option<Self> {
        Self::of(case, Unit::Seconds, [timing], |[seconds]| seconds)
    }

    /// The first timing less the second.
    pub fn difference(case: &CaseId, first: &Turns, second: &Turns) -> Option<Self> {
        Self::of(case, Unit::Seconds, [first, second], |[a, b]| a - b)
    }

    /// Whether it is stable and above zero in every round.
    pub fn is_positive(&self) -> bool {
        self.stable && self.range.low.value() > 0.0
    }

    /// What a sentence says: the number of stable timings, as both ends, or else the range.
    pub fn said(&self) -> Range {
        let all = &self.all;
        if self.stable { Range { low: all.clone(), high: all.clone() } } else { self.range.clone() }
    }

    /// The number if its timings are stable and the rounds agree, else its range with each end as `print` shows it.
    pub fn cell(&self, print: impl Fn(f64) -> String) -> Cell {
        let Range { low, high } = &self.range;
        if self.is_positive() && high.value() <= STABLE * low.value() {
            return Cell::from(&self.all);
        }
        let (low, high) = (print(low.value()), print(high.value()));
        self.all.mark(&if low == high { low } else { format!("{low} to {high}") }).into()
    }

    /// [`Self::cell`] in milliseconds.
    pub fn ms(&self) -> Cell {
        let digits = usize::from(self.range.high.value() < 0.01);
        self.cell(|seconds| print(seconds, Style::Ms, digits))
    }
}

/// What the timings took in each round. Without common rounds: each combination of their fastest and slowest turns, between
/// which a formula that rises or falls with each timing has its range.
fn paired<const N: usize>(timings: [&Turns; N]) -> Vec<[f64; N]> {
    let rounds = timings.first().map_or(0, |timing| timing.medians.len());
    if timings.iter().all(|timing| timing.by_round && timing.medians.len() == rounds) {
        return (0..rounds).map(|round| timings.map(|timing| timing.medians[round])).collect();
    }
    let end = |ends: usize, at: usize| {
        let medians = &timings[at].medians;
        if ends >> at & 1 == 0 { min(medians) } else { max(medians) }
    };
    (0..1 << N).map(|ends| std::array::from_fn(|at| end(ends, at))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::made_up::{machine, source};
    use super::*;

    #[test]
    fn a_spread_is_of_the_medians_of_turns_and_of_samples_where_there_are_no_turns() {
        // Each turn has an outlier, which its median does not show.
        let stable = Turns::of(&[1.0, 1.0, 9.0, 9.0, 1.05, 1.05], 2);
        assert!((stable.spread() - 1.05).abs() < 1e-12 && stable.is_stable());
        assert!(!Turns::of(&[1.0, 1.0, 1.0, 1.06, 1.06, 1.06], 2).is_stable());
        assert!(!Turns::of(&[1.0, 1.0, 9.0], 1).is_stable());
        assert!(!Turns::of(&[1.0, 1.0, 9.0], 2).is_stable(), "three samples are not two equal turns");
        assert!(Turns::of(&[0.010], 5).is_stable(), "one sample agrees with itself");
    }

    #[test]
    fn turns_that_disagree_are_printed_as_a_range() {
        // Two humps, as of a host that is shared: the median of all, 40, is a time that no sample took.
        let humped = Turns::of(&[0.028, 0.030, 0.034, 0.046, 0.050, 0.052], 2);
        assert_eq!((humped.text().as_str(), humped.marked("40").as_str()), ("30–50", "40 †"));
        assert_eq!((humped.median_or_least(), Turns::of(&[1.0, 1.02], 2).median_or_least()), (0.030, 1.01));
        assert_eq!(Turns::single(&[0.0163, 0.0182]).text(), "16.3–18.2");
        let outlier = [0.010, 0.010, 0.020, 0.010, 0.010, 0.010];
        assert_eq!([Turns::of(&outlier, 2), Turns::single(&outlier)].map(|t| t.text()), ["10.0", "10–20"]);
    }

    #[test]
    fn a_comparison_pairs_the_turns_of_a_round() {
        let id = source("a", machine(None));
        // Both timings are slower in the second round; their difference is not.
        let (first, second) = (Turns::of(&[3.0, 3.1], 2), Turns::of(&[2.0, 2.05], 2));
        let difference = Paired::difference(&id, &first, &second).unwrap();
        assert!((difference.all.value() - 1.025).abs() < 1e-12);
        let Range { low, high } = &difference.range;
        assert!((low.value() - 1.0).abs() < 1e-12 && (high.value() - 1.05).abs() < 1e-12);
        assert!(difference.is_positive() && !Paired::difference(&id, &second, &first).unwrap().is_positive());
        assert!(Paired::of(&id, Unit::One, [&first], |[_]| f64::NAN).is_none());
    }

    #[test]
    fn timings_without_common_rounds_are_compared_by_their_extremes() {
        let id = source("a", machine(None));
        let (rounds, single) = (Turns::of(&[4.0, 8.0], 2), Turns::single(&[1.0, 2.0]));
        let Range { low, high } = Paired::of(&id, Unit::One, [&rounds, &single], |[a, b]| a / b).unwrap().range;
        assert_eq!((low.value(), high.value()), (2.0, 8.0));
    }

    #[test]
    fn what_is_unstable_is_printed_as_a_range_and_decides_nothing() {
        let id = source("a", machine(None));
        let (noisy, base) = (Turns::of(&[2.0, 3.0], 2), Turns::of(&[1.0, 1.0], 2));
        let difference = Paired::difference(&id, &noisy, &base).unwrap();
        assert!(difference.range.low.value() > 0.0 && !difference.is_positive());
        let from = |text| Cell::text(id.mark(text));
        assert_eq!(difference.ms(), from("1,000 to 2,000"));
        assert_eq!((difference.said().low.value(), difference.said().high.value()), (1.0, 2.0));
        // Both steps are stable, but their small difference is not.
        let close = Paired::difference(&id, &Turns::of(&[1.002, 1.004], 2), &base).unwrap();
        assert_eq!((close.ms(), close.is_positive()), (from("2.0 to 4.0"), true));
        let second = Quantity::new(1.0, Unit::Seconds, vec![id.clone()]);
        assert_eq!(Paired::median(&id, &base).unwrap().ms(), Cell::from(second));
    }
}
