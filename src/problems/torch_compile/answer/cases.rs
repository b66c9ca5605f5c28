//! The cases of each measure, and ratios between the implementations of a case.

use std::collections::BTreeSet;

use super::super::measure::{Params, Row};
use super::super::{adamw, attention, best, classes, curve, transformer};
use crate::bench::interleave::ColumnOutcome as Timed;
use crate::bench::peer::{Compile, Software};
use crate::bench::steps_on_ranks;
use crate::harness::answer::format::markdown;
use crate::harness::answer::machines::machines_of;
use crate::harness::answer::{Case, Cell, Paired, Quantity, Range, Turns, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats;

pub type AttentionCase<'a> = MeasureCase<'a, attention::Params, attention::Row>;
pub type ModelCase<'a> = MeasureCase<'a, transformer::Params, transformer::Row>;
pub type BestCase<'a> = MeasureCase<'a, best::Params, best::Row>;
pub type ClassesCase<'a> = MeasureCase<'a, classes::Params, classes::Row>;
pub type CurveCase<'a> = MeasureCase<'a, curve::Params, curve::Row>;
pub type RanksCase<'a> = MeasureCase<'a, steps_on_ranks::Params, steps_on_ranks::Row>;
pub type UpdateCase<'a> = MeasureCase<'a, adamw::Params, adamw::Row>;

/// How an implementation's outcome is read from a row.
pub type ColumnOf<R, T> = fn(&R) -> &Timed<T>;
/// How the samples of a pass are read from an outcome.
pub type PassOf<T> = fn(&T) -> &Samples;

/// A case of one measure; without a row where it was not measured.
pub struct MeasureCase<'a, P, R> {
    pub case: &'a Case<Params, Row>,
    pub params: &'a P,
    /// Of turns.
    pub rounds: usize,
    pub row: Option<&'a R>,
}

#[derive(Default)]
pub struct Cases<'a> {
    pub attention: Vec<AttentionCase<'a>>,
    pub models: Vec<ModelCase<'a>>,
    pub updates: Vec<UpdateCase<'a>>,
    pub best: Vec<BestCase<'a>>,
    pub classes: Vec<ClassesCase<'a>>,
    pub curves: Vec<CurveCase<'a>>,
    pub ranks: Vec<RanksCase<'a>>,
}

impl<'a> Cases<'a> {
    pub fn of(all: &'a [Case<Params, Row>]) -> Self {
        let mut cases = Self::default();
        for case in all {
            match &case.params {
                Params::Attention(params) => {
                    let row = if let Some(Row::Attention(row)) = case.row() { Some(row) } else { None };
                    cases.attention.push(MeasureCase { case, params, rounds: params.rounds, row });
                }
                Params::Transformer(params) => {
                    let row = if let Some(Row::Transformer(row)) = case.row() { Some(row) } else { None };
                    cases.models.push(MeasureCase { case, params, rounds: params.rounds, row });
                }
                Params::Adamw(params) => {
                    let row = if let Some(Row::Adamw(row)) = case.row() { Some(row) } else { None };
                    cases.updates.push(MeasureCase { case, params, rounds: params.rounds, row });
                }
                Params::Best(params) => {
                    let row = if let Some(Row::Best(row)) = case.row() { Some(&**row) } else { None };
                    cases.best.push(MeasureCase { case, params, rounds: params.rounds, row });
                }
                Params::Classes(params) => {
                    let row = if let Some(Row::Classes(row)) = case.row() { Some(&**row) } else { None };
                    cases.classes.push(MeasureCase { case, params, rounds: 1, row });
                }
                Params::Curve(params) => {
                    let row = if let Some(Row::Curve(row)) = case.row() { Some(row) } else { None };
                    cases.curves.push(MeasureCase { case, params, rounds: 1, row });
                }
                Params::Ranks(params) => {
                    let row = if let Some(Row::Ranks(row)) = case.row() { Some(row) } else { None };
                    cases.ranks.push(MeasureCase { case, params, rounds: params.rounds, row });
                }
            }
        }
        cases
    }

    /// The reasons why functions were not compiled, each once, in Markdown; none where there are none.
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

/// The machines on which `cases` were measured, as captions name them: other cases of a record may come from another machine.
pub fn machines<P, R>(cases: &[MeasureCase<P, R>]) -> String {
    if cases.is_empty() { "not measured yet".into() } else { machines_of(cases.iter().map(|case| &case.case.id)) }
}

impl Row {
    /// None of a case without PyTorch's Python.
    pub fn software(&self) -> Option<&Software> {
        Some(match self {
            Self::Attention(row) => &row.software,
            Self::Transformer(row) => &row.software,
            Self::Adamw(row) => &row.software,
            Self::Best(row) => &row.software,
            Self::Classes(row) => &row.software,
            Self::Ranks(row) => &row.software,
            Self::Curve(_) => return None,
        })
    }
}

impl<P, R> MeasureCase<'_, P, R> {
    /// None unless the implementation was measured.
    pub fn turns<T>(&self, column: ColumnOf<R, T>, pass: PassOf<T>) -> Option<Turns> {
        Some(Turns::of(&pass(column(self.row?).measured()?).samples, self.rounds))
    }

    /// The median of a pass; none unless the implementation was measured and its turns agree.
    pub fn median<T>(&self, column: ColumnOf<R, T>, pass: PassOf<T>) -> Option<Quantity> {
        self.turns(column, pass).filter(Turns::is_stable)?;
        Some(self.case.median(pass(column(self.row?).measured()?)))
    }

    /// The first implementation's pass over the second's, turn by turn; none unless both were measured.
    pub fn ratio<T>(&self, columns: [ColumnOf<R, T>; 2], pass: PassOf<T>) -> Option<Paired> {
        let [over, under] = columns.map(|column| self.turns(column, pass));
        Paired::of(&self.case.id, Unit::One, [&over?, &under?], |[over, under]| over / under)
    }

    /// "12.6", "9.2–15" where the turns disagree, or how the implementation or else the whole case ended.
    pub fn text<T>(&self, column: ColumnOf<R, T>, pass: PassOf<T>) -> String {
        let ending = || self.row.map_or(self.case.outcome.label(), |row| column(row).label()).to_string();
        self.turns(column, pass).map_or_else(ending, |turns| self.case.id.mark(&turns.text()))
    }

    pub fn cell<T>(&self, column: ColumnOf<R, T>, pass: PassOf<T>) -> Cell {
        Cell::text(self.text(column, pass)).of_case(&self.case.id)
    }

    /// The seconds of the first calls of both passes, which compile them; none where one was not called.
    pub fn first_calls(&self, compile: &Compile) -> Option<Quantity> {
        let first_call = |pass: &str| Some(stats::median(&compile.first_call.get(pass)?.samples));
        Some(self.case.quantity(first_call("forward")? + first_call("backward")?, Unit::Seconds))
    }
}

/// The ratios of two implementations' times in every turn of the passes that are not stable; none of nothing.
pub fn unstable_ratios<'c, P: 'c, R: 'c, T>(
    cases: impl IntoIterator<Item = &'c MeasureCase<'c, P, R>>,
    columns: [ColumnOf<R, T>; 2],
    pass: PassOf<T>,
) -> Option<Range> {
    let ratios = cases.into_iter().filter_map(|case| case.ratio(columns, pass));
    let ends = ratios.filter(|ratio| !ratio.stable).flat_map(|ratio| [ratio.range.low, ratio.range.high]);
    Range::of(ends)
}

/// The ratios of two implementations' times, over every case and pass in which both are stable; none of nothing.
pub fn ratios<'c, P: 'c, R: 'c, T>(
    cases: impl IntoIterator<Item = &'c MeasureCase<'c, P, R>>,
    columns: [ColumnOf<R, T>; 2],
    passes: &[PassOf<T>],
) -> Option<Range> {
    let of_case = |case: &MeasureCase<P, R>| -> Vec<Quantity> {
        let ratios = passes.iter().filter_map(|pass| case.ratio(columns, *pass));
        ratios.filter(|ratio| ratio.stable).map(|ratio| ratio.all).collect()
    };
    Range::of(cases.into_iter().flat_map(of_case))
}
