//! Quantities: numbers with a unit and the cases that they come from, compared only where the comparison means something.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::format::{Style, print};
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
    /// A ratio, a share, a count or a value of a tensor.
    One,
}

impl Unit {
    pub const ALL: [Self; 7] =
        [Self::Seconds, Self::Bytes, Self::BytesPerSecond, Self::FlopsPerSecond, Self::Hertz, Self::Watts, Self::One];

    /// As it is serialised: "s", "B", .., "1" for a number without a unit.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Bytes => "B",
            Self::BytesPerSecond => "B/s",
            Self::FlopsPerSecond => "FLOP/s",
            Self::Hertz => "Hz",
            Self::Watts => "W",
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
        }
    }
}

/// A number with its unit and its sources.
///
/// It has no arithmetic operators: a ratio or a difference goes through [`SameRun`] or [`SameMachine`], which refuse
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
    #[serde(skip)]
    sources: Vec<CaseId>,
}

impl Quantity {
    /// A number of these cases, in base units. Within one case any formula is fine; across cases use [`SameRun`].
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

    /// For the list of claims: "0.986 ms", "1.54".
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

    /// The smallest of several quantities of one unit, with its own sources; none of nothing.
    pub fn smallest(of: &[Self]) -> Option<&Self> {
        of.iter().min_by(|a, b| a.value.total_cmp(&b.value))
    }

    /// The largest of several quantities of one unit, with its own sources; none of nothing.
    pub fn largest(of: &[Self]) -> Option<&Self> {
        of.iter().max_by(|a, b| a.value.total_cmp(&b.value))
    }

    /// The geometric mean of ratios, with the sources of all.
    ///
    /// Errors: no ratio, one that is not above zero, a quantity with a unit.
    pub fn geometric_mean(of: &[Self]) -> Result<Self> {
        ensure!(!of.is_empty(), "a geometric mean of no ratio");
        for ratio in of {
            ensure!(ratio.unit == Unit::One && ratio.value > 0.0, "a geometric mean of {}", ratio.short());
        }
        let mean = of.iter().map(|ratio| ratio.value.ln()).sum::<f64>() / of.len() as f64;
        let sources = of.iter().flat_map(|ratio| ratio.sources.iter().cloned()).collect();
        Ok(Self::new(mean.exp(), Unit::One, sources))
    }
}

/// The smallest and the largest of several quantities: "1.02 to 1.35".
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Range {
    pub low: Quantity,
    pub high: Quantity,
}

impl Range {
    /// None of nothing.
    pub fn of(quantities: &[Quantity]) -> Option<Self> {
        let (low, high) = (Quantity::smallest(quantities)?, Quantity::largest(quantities)?);
        Some(Self { low: low.clone(), high: high.clone() })
    }
}

/// Two quantities of one run: the machine, its clocks and the build were the same.
#[derive(Debug, Clone, Copy)]
pub struct SameRun<'a>(&'a Quantity, &'a Quantity);

/// Two quantities of one kind of machine, perhaps of two runs.
///
/// Records name no host, so that two machines with the same processors, memory and GPUs count as one.
#[derive(Debug, Clone, Copy)]
pub struct SameMachine<'a>(&'a Quantity, &'a Quantity);

impl<'a> SameRun<'a> {
    /// Errors: the two come from different runs, from no record, or have different units.
    pub fn of(first: &'a Quantity, second: &'a Quantity) -> Result<Self> {
        same_unit(first, second)?;
        same(first, second, |source| (source.profile, source.run.clone())).with_context(|| {
            format!("{} and {} cannot be compared: they are not of one run", first.short(), second.short())
        })?;
        Ok(Self(first, second))
    }

    /// The first over the second.
    pub fn ratio(self) -> Quantity {
        ratio(self.0, self.1)
    }

    /// The first less the second.
    pub fn difference(self) -> Quantity {
        difference(self.0, self.1)
    }
}

impl<'a> SameMachine<'a> {
    /// Errors: the two come from different machines, from no record, or have different units.
    pub fn of(first: &'a Quantity, second: &'a Quantity) -> Result<Self> {
        same_unit(first, second)?;
        same(first, second, |source| (source.profile, source.machine().clone())).with_context(|| {
            format!("{} and {} cannot be compared: they are not of one machine", first.short(), second.short())
        })?;
        Ok(Self(first, second))
    }

    /// The first over the second.
    pub fn ratio(self) -> Quantity {
        ratio(self.0, self.1)
    }

    /// The first less the second.
    pub fn difference(self) -> Quantity {
        difference(self.0, self.1)
    }
}

fn same_unit(first: &Quantity, second: &Quantity) -> Result<()> {
    let (a, b) = (first.unit, second.unit);
    ensure!(a == b, "{} and {} cannot be compared: {a:?} and {b:?} are different units", first.short(), second.short());
    Ok(())
}

/// Every source of both has the same key, and there is one.
fn same<K: PartialEq>(first: &Quantity, second: &Quantity, key: impl Fn(&CaseId) -> K) -> Result<()> {
    for (quantity, other) in [(first, second), (second, first)] {
        let source = quantity.sources.first();
        let source = source.with_context(|| format!("{} comes from no record", quantity.short()))?;
        let known = key(source);
        let odd = quantity.sources.iter().chain(&other.sources).find(|source| key(source) != known);
        if let Some(odd) = odd {
            anyhow::bail!("one is of {}, the other of {}", source.place(), odd.place());
        }
    }
    Ok(())
}

fn ratio(first: &Quantity, second: &Quantity) -> Quantity {
    Quantity::new(first.value / second.value, Unit::One, union(first, second))
}

fn difference(first: &Quantity, second: &Quantity) -> Quantity {
    Quantity::new(first.value - second.value, first.unit, union(first, second))
}

fn union(first: &Quantity, second: &Quantity) -> Vec<CaseId> {
    let mut sources = first.sources.clone();
    sources.extend(second.sources.iter().filter(|source| !first.sources.contains(source)).cloned());
    sources
}

/// A cheap clone of a text that many sources share.
pub(super) fn shared(text: &str) -> Arc<str> {
    Arc::from(text)
}

#[cfg(test)]
mod tests {
    use super::super::made_up::{machine, source};
    use super::*;

    fn seconds(value: f64, run: &str, gpu: Option<&str>) -> Quantity {
        Quantity::new(value, Unit::Seconds, vec![source(run, machine(gpu))])
    }

    #[test]
    fn figures_of_one_run_have_a_ratio_and_a_difference_with_both_sources() {
        let (ours, theirs) = (seconds(2.0, "a", None), seconds(3.0, "a", None));
        let pair = SameRun::of(&theirs, &ours).unwrap();
        assert_eq!(pair.ratio().value(), 1.5);
        assert_eq!(pair.ratio().unit(), Unit::One);
        assert_eq!(pair.difference().value(), 1.0);
        assert_eq!(pair.ratio().sources().len(), 1, "one case is one source");
    }

    #[test]
    fn figures_of_two_runs_are_compared_by_machine_alone() {
        let (a, b) = (seconds(2.0, "a", Some("H200")), seconds(3.0, "b", Some("H200")));
        let refused = format!("{:#}", SameRun::of(&a, &b).unwrap_err());
        assert!(
            refused.contains("not of one run") && refused.contains("run a") && refused.contains("run b"),
            "{refused}"
        );
        assert_eq!(SameMachine::of(&b, &a).unwrap().ratio().value(), 1.5);
    }

    #[test]
    fn figures_of_two_machines_cannot_be_compared() {
        let (a, b) = (seconds(2.0, "a", Some("H200")), seconds(3.0, "b", Some("H100")));
        let refused = format!("{:#}", SameMachine::of(&a, &b).unwrap_err());
        assert!(refused.contains("not of one machine") && refused.contains("H100"), "{refused}");
        assert!(SameRun::of(&a, &b).is_err());
    }

    #[test]
    fn a_number_without_a_record_and_one_of_another_unit_are_refused() {
        let a = seconds(2.0, "a", None);
        let constant = Quantity::constant(1.0, Unit::Seconds);
        assert!(format!("{:#}", SameRun::of(&a, &constant).unwrap_err()).contains("comes from no record"));
        let bytes = Quantity::new(1.0, Unit::Bytes, a.sources().to_vec());
        assert!(format!("{:#}", SameRun::of(&a, &bytes).unwrap_err()).contains("different units"));
    }

    #[test]
    fn a_ratio_of_ratios_of_two_machines_is_refused_too() {
        let (a, b) = (seconds(2.0, "a", Some("H200")), seconds(3.0, "b", Some("H100")));
        let own = |q: &Quantity| SameRun::of(q, q).unwrap().ratio();
        assert!(SameMachine::of(&own(&a), &own(&b)).is_err());
    }

    #[test]
    fn a_geometric_mean_is_of_positive_ratios() {
        let ratio = |x| Quantity::constant(x, Unit::One);
        assert!((Quantity::geometric_mean(&[ratio(2.0), ratio(8.0)]).unwrap().value() - 4.0).abs() < 1e-12);
        assert!(Quantity::geometric_mean(&[]).is_err());
        assert!(Quantity::geometric_mean(&[ratio(0.0)]).is_err());
        assert!(Quantity::geometric_mean(&[Quantity::constant(1.0, Unit::Seconds)]).is_err());
    }

    #[test]
    fn a_range_keeps_the_ends_of_which_ties_are_one() {
        let ratio = |x| Quantity::constant(x, Unit::One);
        let range = Range::of(&[ratio(2.0), ratio(1.0), ratio(2.0)]).unwrap();
        assert_eq!((range.low.value(), range.high.value()), (1.0, 2.0));
        assert_eq!(Range::of(&[]), None);
    }

    #[test]
    fn a_short_form_has_a_unit_and_no_idle_digits() {
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
