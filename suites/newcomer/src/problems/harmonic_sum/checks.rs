//! The sum of ten terms, which every order gives nearly, against float64.

use anyhow::{Result, ensure};

use super::measure::{Order, Sum, sum_in_float64};
use crate::harness::problem::Verdict;

const TOLERANCE: f64 = 1e-6;

pub fn check_ten_terms(sum: Sum) -> Result<Verdict> {
    let expected = sum_in_float64(10);
    let mut largest: f64 = 0.0;
    for order in [Order::Ascending, Order::Descending] {
        let error = (f64::from(sum(10, order)) - expected).abs();
        ensure!(
            error <= TOLERANCE,
            "{order:?}: ten terms miss {expected} by {error:.1e}; at most {TOLERANCE:.0e} is fine"
        );
        largest = largest.max(error);
    }
    Verdict::passed(format!("ten terms miss float64 by at most {largest:.1e}"))
}

#[cfg(test)]
mod tests {
    use super::super::measure::sum;
    use super::*;

    #[test]
    fn a_sum_that_forgets_its_last_term_is_refused() {
        check_ten_terms(sum).unwrap();
        let error = check_ten_terms(|n, order| sum(n - 1, order)).unwrap_err().to_string();
        assert!(error.contains("Ascending: ten terms miss"), "{error}");
    }
}
