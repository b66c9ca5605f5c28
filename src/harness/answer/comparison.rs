//! Comparisons between quantities: ratios and differences, refused where the conditions of the two differ.

use anyhow::{Context as _, Result, bail, ensure};

use super::quantity::{Quantity, Unit};
use super::records::CaseId;

/// Compares quantities of one run: the machine, its clocks and the build were the same.
pub struct SameRun;

/// Compares quantities measured on the same kind of machine, possibly in two runs.
///
/// Records hold no host name. Two machines with the same processors, memory and GPUs therefore count as one.
pub struct SameMachine;

/// Two quantities that may be compared.
#[derive(Debug, Clone, Copy)]
pub struct Comparable<'a>(&'a Quantity, &'a Quantity);

impl SameRun {
    /// Errors: the two come from different runs, from no record, or have different units.
    pub fn of<'a>(first: &'a Quantity, second: &'a Quantity) -> Result<Comparable<'a>> {
        Comparable::of(first, second, "run", |source| (source.profile, source.run.clone()))
    }
}

impl SameMachine {
    /// Errors: the two come from different machines, from no record, or have different units.
    pub fn of<'a>(first: &'a Quantity, second: &'a Quantity) -> Result<Comparable<'a>> {
        Comparable::of(first, second, "machine", |source| (source.profile, source.machine().clone()))
    }
}

impl<'a> Comparable<'a> {
    /// Errors: the two have different units, or are not of one `place`, which `key` identifies.
    fn of<K: PartialEq>(
        first: &'a Quantity,
        second: &'a Quantity,
        place: &str,
        key: impl Fn(&CaseId) -> K,
    ) -> Result<Self> {
        let ((a, b), (x, y)) = ((first.unit(), second.unit()), (first.short(), second.short()));
        ensure!(a == b, "{x} and {y} cannot be compared: {a:?} and {b:?} are different units");
        same(first, second, key)
            .with_context(|| format!("{x} and {y} cannot be compared: they are not of one {place}"))?;
        Ok(Self(first, second))
    }

    /// The first over the second.
    pub fn ratio(self) -> Quantity {
        Quantity::new(self.0.value() / self.1.value(), Unit::One, self.sources())
    }

    /// The first less the second.
    pub fn difference(self) -> Quantity {
        Quantity::new(self.0.value() - self.1.value(), self.0.unit(), self.sources())
    }

    fn sources(&self) -> Vec<CaseId> {
        let (first, second) = (self.0.sources(), self.1.sources());
        first.iter().chain(second.iter().filter(|source| !first.contains(source))).cloned().collect()
    }
}

/// Both quantities have sources, and all sources have the same key.
fn same<K: PartialEq>(first: &Quantity, second: &Quantity, key: impl Fn(&CaseId) -> K) -> Result<()> {
    for (quantity, other) in [(first, second), (second, first)] {
        let source = quantity.sources().first();
        let source = source.with_context(|| format!("{} comes from no record", quantity.short()))?;
        let known = key(source);
        let odd = quantity.sources().iter().chain(other.sources()).find(|source| key(source) != known);
        if let Some(odd) = odd {
            bail!("one is of {}, the other of {}", source.place(), odd.place());
        }
    }
    Ok(())
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
}
