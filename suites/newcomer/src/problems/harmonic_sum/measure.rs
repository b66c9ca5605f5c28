//! Measures one sum of 1 + 1/2 + ... + 1/n, added in one order.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::harness::problem::Measure;
use crate::harness::record::Profile;

/// Up to here float32 holds every whole number, so that each term is rounded once.
const MOST_TERMS: u32 = 1 << 24;

/// One sum: the terms 1 to 1/n, in one order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub n: u32,
    pub order: Order,
}

/// In which order the terms are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// The smallest term first.
    Ascending,
    /// The largest term first.
    Descending,
}

/// Plain numbers: each is the same on every machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub sum: f64,
    /// `sum` less the same sum in float64.
    pub error: f64,
}

pub struct HarmonicSum;

impl Measure for HarmonicSum {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;

    fn validate(params: &Params) -> Result<()> {
        ensure!((1..=MOST_TERMS).contains(&params.n), "n is {}; choose 1 to {MOST_TERMS}", params.n);
        Ok(())
    }

    fn measure(params: &Params, _profile: Profile) -> Result<Row> {
        let sum = f64::from(sum(params.n, params.order));
        Ok(Row { sum, error: sum - sum_in_float64(params.n) })
    }
}

/// How a sum is made; a parameter of the check, so that a test can hand it a wrong one.
pub type Sum = fn(u32, Order) -> f32;

pub fn sum(n: u32, order: Order) -> f32 {
    let term = |k: u32| 1.0 / k as f32;
    match order {
        Order::Ascending => (1..=n).rev().map(term).sum(),
        Order::Descending => (1..=n).map(term).sum(),
    }
}

/// What sums in float32 are compared with: 29 binary digits more, the smallest term first.
pub fn sum_in_float64(n: u32) -> f64 {
    (1..=n).rev().map(|k| 1.0 / f64::from(k)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_terms_are_exact_and_many_depend_on_their_order() {
        for order in [Order::Ascending, Order::Descending] {
            assert_eq!((sum(1, order), sum(2, order)), (1.0, 1.5));
        }
        assert!(sum(1000, Order::Ascending) < sum(1000, Order::Descending));
    }

    #[test]
    fn a_sum_of_no_terms_or_of_too_many_is_refused() {
        for n in [0, MOST_TERMS + 1] {
            let params = Params { n, order: Order::Ascending };
            assert!(HarmonicSum::validate(&params).unwrap_err().to_string().contains("choose 1 to 16777216"));
        }
    }
}
