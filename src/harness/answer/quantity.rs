//! Quantities: numbers with a unit and the cases that they come from, compared only where the comparison means something.

use std::borrow::Borrow;

use serde::Serialize;

use super::format::{Style, print};
use super::mark;
use super::records::CaseId;
use crate::harness::samples;

/// Base units; prefixes are made when a number is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    Bytes,
    BytesPerSecond,
    FlopsPerSecond,
    Hertz,
    Watts,
    Joules,
    /// A ratio, a share, a count or a value of a tensor.
    One,
}

impl Unit {
    pub const ALL: [Self; 8] = [
        Self::Seconds,
        Self::Bytes,
        Self::BytesPerSecond,
        Self::FlopsPerSecond,
        Self::Hertz,
        Self::Watts,
        Self::Joules,
        Self::One,
    ];

    /// The serialised form: "s", "B", .., "1" for a number without a unit.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Bytes => "B",
            Self::BytesPerSecond => "B/s",
            Self::FlopsPerSecond => "FLOP/s",
            Self::Hertz => "Hz",
            Self::Watts => "W",
            Self::Joules => "J",
            Self::One => "1",
        }
    }
}

impl Serialize for Unit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.symbol())
    }
}

impl From<samples::Unit> for Unit {
    fn from(unit: samples::Unit) -> Self {
        match unit {
            samples::Unit::Seconds => Self::Seconds,
            samples::Unit::Bytes => Self::Bytes,
            samples::Unit::Joules => Self::Joules,
            samples::Unit::Hertz => Self::Hertz,
        }
    }
}

/// A number with its unit and its sources.
///
/// It has no arithmetic operators: a ratio or a difference goes through [`super::SameRun`] or [`super::SameMachine`], which refuse
/// figures that must not be compared.
///
/// ```compile_fail
/// # use cs336::harness::answer::Quantity;
/// fn ratio(ours: Quantity, theirs: Quantity) -> Quantity {
///     theirs / ours
/// }
/// ```
///
/// ```no_run
/// # use cs336::harness::answer::{Quantity, SameRun};
/// fn ratio(ours: Quantity, theirs: Quantity) -> anyhow::Result<Quantity> {
///     Ok(SameRun::of(&theirs, &ours)?.ratio())
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Quantity {
    value: f64,
    unit: Unit,
    #[serde(rename = "cases", serialize_with = "mark::serialize", skip_serializing_if = "Vec::is_empty")]
    sources: Vec<CaseId>,
}

impl Quantity {
    /// A number of these cases, in base units. Within one case any formula is fine; across cases use [`super::SameRun`].
    pub fn new(value: f64, unit: Unit, sources: Vec<CaseId>) -> Self {
        Self { value, unit, sources }
    }

    /// A number that no record holds: a constant of the handout or of the hardware.
    pub fn constant(value: f64, unit: Unit) -> Self {
        Self::new(value, unit, Vec::new())
    }

    pub fn value(&self) -> f64 {
        self.value
    }

    pub fn unit(&self) -> Unit {
        self.unit
    }

    pub fn sources(&self) -> &[CaseId] {
        &self.sources
    }

    /// `text`, which prints this quantity, with the mark of its cases.
    pub fn mark(&self, text: &str) -> String {
        mark::marked(text, &mark::key(&self.sources))
    }

    /// The number as a sentence says it, with the mark of its cases.
    pub fn text(&self, style: Style, digits: usize) -> String {
        self.mark(&print(self.value, style, digits))
    }

    /// The short form in the list of claims: "0.986 ms", "1.54".
    pub fn short(&self) -> String {
        let magnitude = self.value.abs();
        let style = match self.unit {
            Unit::Seconds if magnitude >= 10.0 => (Style::Sec, " s"),
            Unit::Seconds => (Style::Ms, " ms"),
            Unit::Bytes if magnitude >= crate::units::GIB => (Style::Gib, " GiB"),
            Unit::Bytes => (Style::Mib, " MiB"),
            Unit::BytesPerSecond => (Style::Gb, " GB/s"),
            Unit::FlopsPerSecond => (Style::Gflops, " GFLOP/s"),
            Unit::Hertz => (Style::Mhz, " MHz"),
            Unit::Watts => (Style::Fixed, " W"),
            Unit::Joules => (Style::Fixed, " J"),
            Unit::One => (Style::Fixed, ""),
        };
        let scaled = magnitude * style.0.scale();
        let (style, digits) = match scaled {
            x if x == 0.0 || (x >= 100.0 && x.fract() == 0.0) => (style, 0),
            x if x >= 100.0 => (style, 1),
            x if x >= 0.01 => (style, 3),
            _ => ((Style::Sci, ""), 2),
        };
        let number = print(self.value, style.0, digits);
        let trimmed = match number.contains('.') && !number.contains('$') {
            true => number.trim_end_matches('0').trim_end_matches('.').to_string(),
            false => number,
        };
        match (style.0, self.unit) {
            (Style::Sci, Unit::One) => trimmed,
            (Style::Sci, unit) => format!("{trimmed} {}", unit.symbol()),
            _ => format!("{trimmed}{}", style.1),
        }
    }

    /// The smallest of several quantities of one unit, with its own sources; `None` of none.
    pub fn smallest<Q: Borrow<Self>>(of: impl IntoIterator<Item = Q>) -> Option<Q> {
        of.into_iter().min_by(|a, b| a.borrow().value.total_cmp(&b.borrow().value))
    }

    /// The largest of several quantities of one unit, with its own sources; `None` of none.
    pub fn largest<Q: Borrow<Self>>(of: impl IntoIterator<Item = Q>) -> Option<Q> {
        of.into_iter().max_by(|a, b| a.borrow().value.total_cmp(&b.borrow().value))
    }
}

/// The smallest and the largest of several quantities: "1.02 to 1.35".
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Range {
    pub low: Quantity,
    pub high: Quantity,
}

impl Range {
    /// `None` of no quantity.
    pub fn of<Q: Borrow<Quantity>>(quantities: impl IntoIterator<Item = Q>) -> Option<Self> {
        let all: Vec<Quantity> = quantities.into_iter().map(|quantity| quantity.borrow().clone()).collect();
        Some(Self { low: Quantity::smallest(&all)?.clone(), high: Quantity::largest(&all)?.clone() })
    }

    /// "1.02 to 1.35", each with the mark of its cases, or "1.02" where both print alike.
    pub fn text(&self, style: Style, digits: usize) -> String {
        let [low, high] = [&self.low, &self.high].map(|end| print(end.value, style, digits));
        let first = self.low.mark(&low);
        if low == high { first } else { format!("{first} to {}", self.high.mark(&high)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::{machine, source};
    use super::*;

    #[test]
    fn a_range_holds_the_smallest_and_the_largest_quantity() {
        let ratio = |x| Quantity::constant(x, Unit::One);
        let range = Range::of(&[ratio(2.0), ratio(1.0), ratio(2.0)]).unwrap();
        assert_eq!((range.low.value(), range.high.value()), (1.0, 2.0));
        assert_eq!(Range::of::<Quantity>([]), None);
    }

    #[test]
    fn a_range_says_each_end_with_its_cases() {
        let measured = |x| Quantity::new(x, Unit::One, vec![source("a", machine(None))]);
        let range = |low, high| Range { low: measured(low), high: measured(high) }.text(Style::Fixed, 1);
        let mark = |text| mark::marked(text, "made_up.cpu.0");
        assert_eq!(range(1.0, 2.0), format!("{} to {}", mark("1.0"), mark("2.0")));
        assert_eq!(range(1.0, 1.01), mark("1.0"));
    }

    #[test]
    fn a_short_form_has_a_unit_and_no_trailing_zeros() {
        for (value, unit, expected) in [
            (0.000_986_4, Unit::Seconds, "0.986 ms"),
            (0.5, Unit::Seconds, "500 ms"),
            (12.0, Unit::Seconds, "12 s"),
            (2e-9, Unit::Seconds, "$2.00 \\times 10^{-9}$ s"),
            (1.5, Unit::One, "1.5"),
            (40.0, Unit::One, "40"),
            (0.0, Unit::One, "0"),
            (1234.0, Unit::One, "1,234"),
            (3.0 * 1024.0 * 1024.0, Unit::Bytes, "3 MiB"),
        ] {
            assert_eq!(Quantity::constant(value, unit).short(), expected);
        }
    }
}
