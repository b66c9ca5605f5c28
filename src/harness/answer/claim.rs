//! Claims: statements that sentences make, each decided by operands that the report lists beside it.

use super::format::markdown;
use super::mark;
use super::quantity::Quantity;

/// A statement about the records, and whether it holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    /// Unique within its problem; what the template and the report's list call it.
    pub id: String,
    pub held: bool,
    /// What decided it, in reading order.
    pub operands: Vec<Operand>,
}

/// One value that decided a claim: its name, and its formatted value.
#[derive(Debug, Clone, PartialEq)]
pub struct Operand {
    pub name: String,
    /// In Markdown.
    pub value: String,
    /// The key of the cases that the value comes from; empty for a count.
    pub cases: String,
}

impl Claim {
    /// A claim. Add the values that decided it with [`Self::operand`] and [`Self::count`].
    pub fn new(id: impl Into<String>, held: bool) -> Self {
        Self { id: id.into(), held, operands: Vec::new() }
    }

    /// `value` is above `threshold`.
    pub fn above(id: impl Into<String>, name: &str, value: &Quantity, threshold: f64) -> Self {
        Self::new(id, value.value() > threshold).operand(name, value).bound("above", threshold)
    }

    /// `value` is below `threshold`.
    pub fn below(id: impl Into<String>, name: &str, value: &Quantity, threshold: f64) -> Self {
        Self::new(id, value.value() < threshold).operand(name, value).bound("below", threshold)
    }

    /// `value` is at most `bound`.
    pub fn at_most(id: impl Into<String>, name: &str, value: &Quantity, bound: f64) -> Self {
        Self::new(id, value.value() <= bound).operand(name, value).bound("at most", bound)
    }

    /// The first of two named quantities is below the second.
    pub fn less(id: impl Into<String>, first: (&str, &Quantity), second: (&str, &Quantity)) -> Self {
        Self::new(id, first.1.value() < second.1.value()).operand(first.0, first.1).operand(second.0, second.1)
    }

    /// The first of two named quantities is above the second.
    pub fn greater(id: impl Into<String>, first: (&str, &Quantity), second: (&str, &Quantity)) -> Self {
        Self::new(id, first.1.value() > second.1.value()).operand(first.0, first.1).operand(second.0, second.1)
    }

    /// All of several cases fulfil a condition, and there is at least one.
    pub fn all(id: impl Into<String>, name: &str, fulfil: usize, of: usize) -> Self {
        Self::new(id, of > 0 && fulfil == of).operand_text(name, format!("{fulfil} of {of}"))
    }

    pub fn operand(self, name: &str, value: &Quantity) -> Self {
        self.push(name, value.short(), mark::key(value.sources()))
    }

    pub fn count(self, name: &str, count: usize) -> Self {
        self.operand_text(name, count.to_string())
    }

    pub fn operand_text(self, name: &str, value: impl Into<String>) -> Self {
        self.push(name, markdown(&value.into()), String::new())
    }

    /// The id as words, in Markdown: "flat is faster".
    pub fn words(&self) -> String {
        markdown(&self.id.replace('-', " "))
    }

    /// "ours 1.2; PyTorch 1.5", in Markdown.
    pub fn decided_by(&self) -> String {
        let operand = |o: &Operand| format!("{} {}", markdown(&o.name), mark::marked(&o.value, &o.cases));
        self.operands.iter().map(operand).collect::<Vec<_>>().join("; ")
    }

    fn push(mut self, name: &str, value: String, cases: String) -> Self {
        self.operands.push(Operand { name: name.into(), value, cases });
        self
    }

    fn bound(self, side: &str, threshold: f64) -> Self {
        self.operand_text("wanted", format!("{side} {threshold}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::quantity::Unit;
    use super::*;

    #[test]
    fn a_claim_names_what_decided_it() {
        let ratio = Quantity::constant(1.5, Unit::One);
        let claim = Claim::above("faster", "PyTorch / ours", &ratio, 1.0);
        assert!(claim.held);
        let words: Vec<_> = claim.operands.iter().map(|o| format!("{} {}", o.name, o.value)).collect();
        assert_eq!(words, ["PyTorch / ours 1.5", "wanted above 1"]);
        assert!(!Claim::below("slower", "ratio", &ratio, 1.5).held, "a tie does not hold");
        assert!(!Claim::above("faster", "ratio", &ratio, 1.5).held, "a tie does not hold");
        assert!(Claim::at_most("slower", "ratio", &ratio, 1.5).held, "a tie holds");
    }

    #[test]
    fn two_quantities_are_compared_strictly() {
        let [one, two] = [1.0, 2.0].map(|x| Quantity::constant(x, Unit::One));
        let (one, two) = (("one", &one), ("two", &two));
        assert!(Claim::less("less", one, two).held && Claim::greater("greater", two, one).held);
        assert!(
            !Claim::less("less", one, one).held && !Claim::greater("greater", one, one).held,
            "a tie does not hold"
        );
        assert_eq!(
            Claim::greater("greater", two, one).operands.iter().map(|o| &o.name).collect::<Vec<_>>(),
            ["two", "one"]
        );
    }

    #[test]
    fn all_of_nothing_does_not_hold() {
        assert!(Claim::all("all", "cells", 3, 3).held);
        assert!(!Claim::all("all", "cells", 2, 3).held);
        assert!(!Claim::all("all", "cells", 0, 0).held);
    }
}
