//! The cases of each measure, and ratios between the columns of a case.

use std::collections::BTreeSet;

use super::super::measure::{Params, Row};
use super::super::{adamw, attention, transformer};
use crate::bench::interleave::ColumnOutcome as Timed;
use crate::bench::peer::{Compile, Software};
use crate::harness::answer::format::markdown;
use crate::harness::answer::{Case, Cell, Quantity, Range, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats;

pub type AttentionCase<'a> = MeasureCase<'a, attention::Params, attention::Row>;
pub type ModelCase<'a> = MeasureCase<'a, transformer::Params, transformer::Row>;
pub type UpdateCase<'a> = MeasureCase<'a, adamw::Params, adamw::Row>;

/// How a column is read from a row.
pub type ColumnOf<R, T> = fn(&R) -> &Timed<T>;
/// How the samples of a pass are read from a column.
pub type PassOf<T> = fn(&T) -> &Samples;

/// A case of one measure; without a row where it was not measured.
pub struct MeasureCase<'a, P, R> {
    pub case: &'a Case<Params, Row>,
    pub params: &'a P,
    pub row: Option<&'a R>,
}

#[derive(Default)]
pub struct Cases<'a> {
    pub attention: Vec<AttentionCase<'a>>,
    pub models: Vec<ModelCase<'a>>,
    pub updates: Vec<UpdateCase<'a>>,
}

impl<'a> Cases<'a> {
    pub fn of(all: &'a [Case<Params, Row>]) -> Self {
        let mut cases = Self::default();
        for case in all {
            match &case.params {
                Params::Attention(params) => {
                    let row = if let Some(Row::Attention(row)) = case.row() { Some(row) } else { None };
                    cases.attention.push(MeasureCase { case, params, row });
                }
                Params::Transformer(params) => {
                    let row = if let Some(Row::Transformer(row)) = case.row() { Some(row) } else { None };
                    cases.models.push(MeasureCase { case, params, row });
                }
                Params::Adamw(params) => {
                    let row = if let Some(Row::Adamw(row)) = case.row() { Some(row) } else { None };
                    cases.updates.push(MeasureCase { case, params, row });
                }
            }
        }
        cases
    }

    /// The reasons of compiled columns that were not run, each once, in Markdown; none where there are none.
    pub fn not_compiled(&self) -> Option<String> {
        fn reason<T>(column: &Timed<T>) -> Option<String> {
            if let Timed::NotRun { reason } = column { Some(markdown(reason)) } else { None }
        }
        let attention = self.attention.iter().filter_map(|case| reason(&case.row?.python_compiled));
        let models = self.models.iter().filter_map(|case| reason(&case.row?.python_compiled));
        let reasons: BTreeSet<String> = attention.chain(models).collect();
        (!reasons.is_empty()).then(|| reasons.into_iter().collect::<Vec<_>>().join("; "))
    }
}

impl Row {
    pub fn software(&self) -> &Software {
        match self {
            Self::Attention(row) => &row.software,
            Self::Transformer(row) => &row.software,
            Self::Adamw(row) => &row.software,
        }
    }
}

impl<P, R> MeasureCase<'_, P, R> {
    /// A statistic of a pass; none unless its column was measured.
    pub fn statistic<T>(
        &self,
        column: ColumnOf<R, T>,
        pass: PassOf<T>,
        statistic: fn(&[f64]) -> f64,
    ) -> Option<Quantity> {
        Some(self.case.statistic(pass(column(self.row?).measured()?), statistic))
    }

    pub fn median<T>(&self, column: ColumnOf<R, T>, pass: PassOf<T>) -> Option<Quantity> {
        self.statistic(column, pass, stats::median)
    }

    /// The median of the first column's pass over that of the second's; none unless both were measured.
    pub fn ratio<T>(&self, columns: [ColumnOf<R, T>; 2], pass: PassOf<T>) -> Option<Quantity> {
        let [over, under] = columns.map(|column| self.median(column, pass));
        Some(self.case.quantity(over?.value() / under?.value(), Unit::One))
    }

    /// How a column, or else the whole case, ended.
    pub fn ending<T>(&self, column: ColumnOf<R, T>) -> &'static str {
        self.row.map_or(self.case.outcome.label(), |row| column(row).label())
    }

    /// The median of a column's pass, or how it ended.
    pub fn cell<T>(&self, column: ColumnOf<R, T>, pass: PassOf<T>) -> Cell {
        self.median(column, pass).map_or_else(|| self.ending(column).into(), Cell::Number)
    }

    /// The seconds of the first call of the forward pass, which compiles it, or of both; none where one was not called.
    pub fn first_calls(&self, compile: &Compile, both: bool) -> Option<Quantity> {
        let first_call = |pass: &str| Some(stats::median(&compile.first_call.get(pass)?.samples));
        let seconds = first_call("forward")? + if both { first_call("backward")? } else { 0.0 };
        Some(self.case.quantity(seconds, Unit::Seconds))
    }
}

/// The ratio of two columns' times in one pass of one case.
pub struct Ratio<'a, P, R> {
    pub case: &'a MeasureCase<'a, P, R>,
    pub pass: &'static str,
    pub value: Quantity,
}

impl<'a, P, R> Ratio<'a, P, R> {
    /// Of every pass in which both columns were measured.
    pub fn all<T>(
        cases: &'a [MeasureCase<'a, P, R>],
        columns: [ColumnOf<R, T>; 2],
        passes: &[(&'static str, PassOf<T>)],
    ) -> Vec<Self> {
        let of_case = |case: &'a MeasureCase<'a, P, R>| {
            let of_pass = move |&(pass, of): &(&'static str, PassOf<T>)| {
                Some(Self { case, pass, value: case.ratio(columns, of)? })
            };
            passes.iter().filter_map(of_pass)
        };
        cases.iter().flat_map(of_case).collect()
    }

    /// The first of those that are largest.
    pub fn largest(ratios: &[Self]) -> Option<&Self> {
        ratios.iter().reduce(|a, b| if b.value.value() > a.value.value() { b } else { a })
    }

    /// From the smallest to the largest of those that fulfil a condition; none of nothing.
    pub fn range(ratios: &[Self], of: impl Fn(&P) -> bool) -> Option<Range> {
        let ratios = ratios.iter().filter(|ratio| of(ratio.case.params));
        Range::of(ratios.map(|ratio| ratio.value.clone()))
    }
}
