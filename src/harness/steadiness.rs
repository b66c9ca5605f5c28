//! Whether repeated timings agree: the spread of the medians of turns, and how the report prints those that do not.

use super::answer::format::{Style, print};
use super::stats;

/// The largest spread of a steady timing. Beyond it a median depends on which turn was asked.
pub const STEADY: f64 = 1.05;

/// From this spread on, the ends of a range have two significant digits instead of three.
const COARSE: f64 = 1.2;

/// The medians of the turns of one timing, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Turns {
    medians: Vec<f64>,
    /// Of all samples.
    median: f64,
}

impl Turns {
    /// Of samples in order, as many in each of `rounds` turns.
    pub fn of(samples: &[f64], rounds: usize) -> Self {
        let turn = samples.len().div_ceil(rounds.max(1)).max(1);
        Self { medians: samples.chunks(turn).map(stats::median).collect(), median: stats::median(samples) }
    }

    /// Of a timing without turns: every sample counts as one.
    pub fn single(samples: &[f64]) -> Self {
        Self::of(samples, samples.len())
    }

    /// The largest over the smallest.
    pub fn spread(&self) -> f64 {
        stats::max(&self.medians) / stats::min(&self.medians)
    }

    pub fn is_steady(&self) -> bool {
        self.spread() <= STEADY
    }

    /// The median of all samples in milliseconds, "12.6", or the range of the turns where they disagree, "9.2–15".
    pub fn text(&self) -> String {
        if self.is_steady() {
            return milliseconds(self.median);
        }
        let digits = if self.spread() < COARSE { 3 } else { 2 };
        let [low, high] = [stats::min(&self.medians), stats::max(&self.medians)].map(|end| significant(end, digits));
        format!("{low}–{high}")
    }

    /// The median in milliseconds, "12.6", with a mark where the turns disagree: "≈12.6".
    pub fn marked(&self) -> String {
        format!("{}{}", if self.is_steady() { "" } else { "≈" }, milliseconds(self.median))
    }
}

/// Milliseconds with three significant digits: "0.0712", "12.6", "1,014".
pub fn milliseconds(seconds: f64) -> String {
    significant(seconds, 3)
}

fn significant(seconds: f64, digits: i32) -> String {
    let before_the_point = (seconds * 1e3).log10().floor() as i32 + 1;
    print(seconds, Style::Ms, (digits - before_the_point).clamp(0, 6) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_have_three_significant_digits() {
        for (seconds, expected) in
            [(7.123e-5, "0.0712"), (1.2e-4, "0.120"), (8.379e-3, "8.38"), (0.05297, "53.0"), (1.013_58, "1,014")]
        {
            assert_eq!(milliseconds(seconds), expected);
        }
    }

    #[test]
    fn turns_that_disagree_are_printed_as_a_range() {
        // Two humps, as of a host that is shared: the median of all, 40, is a time that no sample took.
        let humped = [0.028, 0.030, 0.034, 0.046, 0.050, 0.052];
        let turns = Turns::of(&humped, 2);
        assert!(!turns.is_steady() && turns.spread() > 1.6);
        assert_eq!((turns.text().as_str(), turns.marked().as_str()), ("30–50", "≈40.0"));
    }

    #[test]
    fn a_narrow_range_has_three_digits() {
        assert_eq!(Turns::single(&[0.0163, 0.0182]).text(), "16.3–18.2");
    }

    #[test]
    fn an_outlier_within_a_turn_is_forgiven_and_without_turns_it_is_not() {
        let outlier = [0.010, 0.010, 0.020, 0.010, 0.010, 0.010];
        assert_eq!(Turns::of(&outlier, 2).text(), "10.0");
        assert_eq!(Turns::single(&outlier).text(), "10–20");
        assert!(Turns::of(&[0.010], 5).is_steady(), "one sample agrees with itself");
    }
}
