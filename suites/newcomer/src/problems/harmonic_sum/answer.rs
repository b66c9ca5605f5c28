//! What the sums show: the error of each order, and which order errs less.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::measure::{HarmonicSum, Order, Params, Row};
use crate::harness::answer::format::distinct;
use crate::harness::answer::{Answer, Audience, Case, Claim, Quantity, Records, Style, Table, Unit};

type Sum = Case<Params, Row>;

/// What the sentences quote, of the longest sums.
#[derive(Serialize)]
struct Quoted {
    terms: u32,
    ascending_error: Quantity,
    descending_error: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let set = records.main()?;
    let sums = set.cases::<HarmonicSum>()?;
    let terms = sums.iter().map(|case| case.params.n).max().context("no sum is recorded")?;
    let quoted = Quoted {
        terms,
        ascending_error: error(&sums, terms, Order::Ascending)?,
        descending_error: error(&sums, terms, Order::Descending)?,
    };
    let mut answer = Answer::of(set, &quoted)?;
    let ascending = ("error, small terms first", &quoted.ascending_error);
    let descending = ("error, large terms first", &quoted.descending_error);
    answer.claim(Claim::less("small-terms-first-errs-less", ascending, descending))?;
    answer.table("sums", table(&sums))?;
    Ok(answer)
}

fn find(sums: &[Sum], n: u32, order: Order) -> Option<(&Sum, &Row)> {
    sums.iter().find(|case| case.params == Params { n, order })?.measured()
}

/// The size of one sum's error.
fn error(sums: &[Sum], n: u32, order: Order) -> Result<Quantity> {
    let found = find(sums, n, order);
    let (case, row) = found.with_context(|| format!("no sum of {n} terms in the order {order:?} was measured"))?;
    Ok(case.quantity(row.error.abs(), Unit::One))
}

/// A line for each number of terms, both orders side by side.
fn table(sums: &[Sum]) -> Table {
    let number = |order, of: fn(&Row) -> f64| {
        move |n: &u32| find(sums, *n, order).map(|(case, row)| case.quantity(of(row), Unit::One))
    };
    Table::of(distinct(sums.iter().map(|case| case.params.n)))
        .text("Terms", |n| n.to_string())
        .number("Sum, small terms first", Style::Fixed, 6, number(Order::Ascending, |row| row.sum))
        .number("Error", Style::Fixed, 6, number(Order::Ascending, |row| row.error))
        .number("Sum, large terms first", Style::Fixed, 6, number(Order::Descending, |row| row.sum))
        .number("Error", Style::Fixed, 6, number(Order::Descending, |row| row.error))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::made_up::MadeUp;

    /// Sums of ten terms; `ascending` is the error of the first.
    fn records(ascending: f64) -> Records {
        let params = |order| Params { n: 10, order };
        let row = |error: f64| Row { sum: 3.0 + error, error };
        MadeUp::cpu("harmonic_sum")
            .measured("orders", &params(Order::Ascending), &row(ascending))
            .measured("orders", &params(Order::Descending), &row(0.25))
            .records()
    }

    #[test]
    fn the_claim_and_the_quoted_errors_follow_the_sums() {
        for (error, holds) in [(-0.125, true), (-0.25, false), (0.5, false)] {
            let answer = answer(&records(error), Audience::Ours).unwrap();
            assert_eq!(answer.holds("small-terms-first-errs-less"), Some(holds), "{error}");
            assert_eq!(answer.quoted()["ascending_error"]["value"], error.abs());
            assert_eq!(answer.quoted()["terms"], 10);
        }
    }

    #[test]
    fn the_table_shows_both_orders_and_the_sign_of_the_error() {
        let markdown = answer(&records(-0.125), Audience::Ours).unwrap().tables()["sums"].markdown();
        assert!(markdown.contains("| 10 | 2.875000 | −0.125000 | 3.250000 | 0.250000 |"), "{markdown}");
    }

    #[test]
    fn a_failed_or_missing_sum_is_named() {
        let params = Params { n: 10, order: Order::Ascending };
        let failed = MadeUp::cpu("harmonic_sum").failed("orders", &params).records();
        let error = format!("{:#}", answer(&failed, Audience::Ours).unwrap_err());
        assert!(error.contains("no sum of 10 terms in the order Ascending was measured"), "{error}");
        assert!(format!("{:#}", answer(&Records::default(), Audience::Ours).unwrap_err()).contains("cs336 measure"));
    }
}
