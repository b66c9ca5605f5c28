//! Part (a): what compiled and captured passes of attention gain, and from which length on.

use std::collections::BTreeSet;

use serde::Serialize;

use super::super::attention::{Params, Passes, Row};
use super::cases::{AttentionCase, ColumnOf, PassOf, Ratio};
use super::{not_slower, times};
use crate::bench::dtype::Dtype;
use crate::bench::tolerance;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{grouped, listed};
use crate::harness::answer::{Claim, Quantity, Range, Unit};

/// From this length on the score matrices outweigh the launches.
const LONG_FROM: i64 = 4096;
/// The width of the figure's cells, where some of them were compiled.
const FIGURE_D: i64 = 64;

const RUST: ColumnOf<Row, Passes> = |row| &row.rust_eager;
const PYTHON: ColumnOf<Row, Passes> = |row| &row.python_eager;
const COMPILED: ColumnOf<Row, Passes> = |row| &row.python_compiled;
const CAPTURED: ColumnOf<Row, Passes> = |row| &row.rust_captured;
pub const COLUMNS: [(&str, ColumnOf<Row, Passes>); 4] =
    [("Rust eager", RUST), ("Python eager", PYTHON), ("torch.compile", COMPILED), ("Rust captured", CAPTURED)];

pub const PASSES: [(&str, PassOf<Passes>); 2] = [("forward", |p| &p.forward), ("backward", |p| &p.backward)];

/// What the sentences quote of attention; gains are ratios of times over both passes of cells.
#[derive(Serialize)]
pub struct Attention {
    /// Of compiled passes over Python eager, and the lengths that it is of: the long ones where there are any.
    gain: Option<String>,
    lengths: String,
    /// How many of the passes at the shorter lengths became slower: "15 of 16".
    slower: String,
    /// The width of the figure's cells.
    d: i64,
    captured: Option<Captured>,
    /// The largest ratio of Rust eager to Python eager.
    slowest: Option<Quantity>,
    /// The largest of outputs and gradients against Rust eager's, relative to their norm.
    error: Option<Quantity>,
    tolerance: f64,
    #[serde(skip)]
    pub claims: Vec<Claim>,
}

/// Gains of captured passes over Rust eager.
#[derive(Serialize)]
struct Captured {
    /// A phrase for each of the shorter lengths.
    short: String,
    long: Option<String>,
    #[serde(skip)]
    claim: Claim,
}

fn is_long(p: &Params) -> bool {
    p.seq >= LONG_FROM
}

fn cell(p: &Params) -> String {
    format!("T = {}, d = {}", grouped(p.seq as f64, 0), p.d_model)
}

impl Attention {
    pub fn of(cases: &[AttentionCase]) -> Self {
        let gains = Ratio::all(cases, [PYTHON, COMPILED], &PASSES);
        let (long, all) = (Ratio::range(&gains, is_long), Ratio::range(&gains, |_| true));
        let lengths = match long {
            Some(_) => format!("at $T \\ge {}$", grouped(LONG_FROM as f64, 0)),
            None => "at all lengths".into(),
        };
        let short = || gains.iter().filter(|gain| !is_long(gain.case.params));
        let (losing, shorter) = (short().filter(|gain| gain.value.value() < 1.0).count(), short().count());
        let (gain, slower) = (long.or(all), format!("{losing} of {shorter}"));
        let mut claims = Vec::new();
        if let Some(gain) = &gain {
            let gains = Claim::above("compiled-attention-gains", "least gain", &gain.low, 1.0);
            let loses = Claim::new("compiled-short-attention-loses", losing * 2 > shorter);
            claims.push(gains.operand_text("passes", lengths.as_str()));
            claims.push(loses.operand_text("slower passes", slower.as_str()));
        }
        let captured = Captured::of(&Ratio::all(cases, [RUST, CAPTURED], &PASSES));
        claims.extend(captured.as_ref().map(|captured| captured.claim.clone()));
        let eager = Ratio::all(cases, [RUST, PYTHON], &PASSES);
        let slowest = Ratio::largest(&eager);
        claims.extend(slowest.map(|Ratio { case, pass, value }| {
            not_slower("rust-attention-not-slower", value, format!("the {pass} pass at {}", cell(case.params)))
        }));
        let widths = || gains.iter().map(|gain| gain.case.params.d_model);
        let errors = cases.iter().flat_map(|case| {
            let errors = case.row.into_iter().flat_map(|row| row.errors.values());
            errors.map(|errors| case.case.quantity(errors.largest(), Unit::One))
        });
        Self {
            gain: gain.as_ref().map(times),
            lengths,
            slower,
            d: widths().find(|d| *d == FIGURE_D).or(widths().next()).unwrap_or(FIGURE_D),
            captured,
            slowest: slowest.map(|ratio| ratio.value.clone()),
            error: Quantity::largest(&errors.collect::<Vec<_>>()).cloned(),
            tolerance: tolerance::attention(Dtype::Float32),
            claims,
        }
    }

    pub fn is_compiled(&self) -> bool {
        self.gain.is_some()
    }

    /// Gains over Python eager against the length; there is one where a cell was compiled.
    pub fn figure(&self, cases: &[AttentionCase]) -> Figure {
        let cases: Vec<_> = cases.iter().filter(|case| case.params.d_model == self.d && case.row.is_some()).collect();
        let curve = |name: &str, column, (pass, of): (&str, PassOf<Passes>)| {
            let gain = |case: &AttentionCase| Some(case.ratio([PYTHON, column], of)?.value());
            let points = cases.iter().map(|case| (case.params.seq as f64, gain(case)));
            Series::over_numbers(format!("{name}, {pass}"), points)
        };
        let curves = [("torch.compile", COMPILED), ("Rust captured", CAPTURED)];
        let series = curves.iter().flat_map(|(name, column)| PASSES.map(|pass| curve(name, *column, pass)));
        let series = series.filter(|series| series.points.iter().any(|(_, gain)| gain.is_some())).collect();
        let alt = format!(
            "How many times as fast as Python eager the compiled and the captured passes of attention are, against \
             sequence length, at d = {}.",
            self.d
        );
        let plot = Plot::new(PlotKind::Line, "sequence length T", "times as fast as Python eager", series);
        Figure::plot(alt, Plot { log_x: true, log_y: true, ..plot })
    }
}

impl Captured {
    /// Much at the shorter lengths and little at the longer ones; none of nothing.
    fn of(gains: &[Ratio<Params, Row>]) -> Option<Self> {
        let all_short = Ratio::range(gains, |p| !is_long(p));
        let long = Ratio::range(gains, is_long);
        let claim = match (&all_short, &long) {
            (None, None) => return None,
            (Some(Range { high: short, .. }), Some(Range { high: long, .. })) => {
                Claim::new("captured-attention-gains", short.value() > 1.5 && long.value() < 1.1)
                    .operand("largest gain at the shorter lengths", short)
                    .operand("at the longer ones", long)
            }
            _ => Claim::new("captured-attention-gains", false).operand_text("lengths", "not both short and long ones"),
        };
        let lengths: BTreeSet<i64> =
            gains.iter().map(|gain| gain.case.params.seq).filter(|seq| *seq < LONG_FROM).collect();
        let phrase = |seq: &i64| {
            let gain = Ratio::range(gains, |p| p.seq == *seq)?;
            Some(format!("{} times at $T = {}$", times(&gain), grouped(*seq as f64, 0)))
        };
        let short = listed(&lengths.iter().filter_map(phrase).collect::<Vec<_>>());
        Some(Self { short, long: long.as_ref().map(times), claim })
    }
}
