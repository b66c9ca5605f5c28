//! Part (a): what compiled and captured passes of attention gain, and from which length on.

use anyhow::Result;
use serde::Serialize;

use super::super::attention::{Params, Passes, Row};
use super::cases::{AttentionCase, ColumnOf, PassOf, Ratio};
use super::{Times, at_most};
use crate::bench::dtype::Dtype;
use crate::bench::tolerance;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{grouped, listed};
use crate::harness::answer::{Answer, Claim, Quantity, Unit};

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
    gain: Option<Times>,
    lengths: String,
    /// How many of the passes at the shorter lengths became slower: "15 of 16".
    slower: String,
    #[serde(skip)]
    short: [usize; 2],
    /// The width of the figure's cells.
    d: i64,
    captured: Option<Captured>,
    /// The largest ratio of Rust eager to Python eager, and where it is.
    slowest: Option<Quantity>,
    #[serde(skip)]
    slowest_at: String,
    /// The largest of outputs and gradients against Rust eager's, relative to their norm.
    error: Option<Quantity>,
    tolerance: f64,
}

/// Gains of captured passes over Rust eager.
#[derive(Serialize)]
struct Captured {
    /// A phrase for each of the shorter lengths.
    short: String,
    long: Option<Times>,
    #[serde(skip)]
    most_at_short: Option<Quantity>,
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
        let (slower, shorter) = (short().filter(|gain| gain.value.value() < 1.0).count(), short().count());
        let widths = || gains.iter().map(|gain| gain.case.params.d_model);
        let errors = cases.iter().flat_map(|case| {
            let errors = case.row.into_iter().flat_map(|row| row.errors.values());
            errors.map(|errors| case.case.quantity(errors.largest(), Unit::One))
        });
        let eager = Ratio::all(cases, [RUST, PYTHON], &PASSES);
        let slowest = Ratio::largest(&eager);
        Self {
            gain: long.or(all).map(Times),
            lengths,
            slower: format!("{slower} of {shorter}"),
            short: [slower, shorter],
            d: widths().find(|d| *d == FIGURE_D).or(widths().next()).unwrap_or(FIGURE_D),
            captured: Captured::of(&Ratio::all(cases, [RUST, CAPTURED], &PASSES)),
            slowest: slowest.map(|ratio| ratio.value.clone()),
            slowest_at: slowest.map_or(String::new(), |r| format!("the {} pass at {}", r.pass, cell(r.case.params))),
            error: Quantity::largest(&errors.collect::<Vec<_>>()).cloned(),
            tolerance: tolerance::attention(Dtype::Float32),
        }
    }

    pub fn is_compiled(&self) -> bool {
        self.gain.is_some()
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        if let Some(gain) = &self.gain {
            let claim = Claim::above("compiled-attention-gains", "least gain", gain.least(), 1.0);
            answer.claim(claim.operand_text("passes", self.lengths.as_str()))?;
            let [slower, shorter] = self.short;
            let claim = Claim::new("compiled-short-attention-loses", slower * 2 > shorter);
            answer.claim(claim.operand_text("slower passes", self.slower.as_str()))?;
        }
        self.captured.iter().try_for_each(|captured| answer.claim(captured.claim()))?;
        self.slowest.iter().try_for_each(|ratio| {
            let claim = at_most("rust-attention-not-slower", "largest ratio", ratio, 1.03);
            answer.claim(claim.operand_text("of", self.slowest_at.as_str()))
        })
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
    /// None of nothing.
    fn of(gains: &[Ratio<Params, Row>]) -> Option<Self> {
        let mut lengths: Vec<i64> = gains.iter().map(|gain| gain.case.params.seq).collect();
        lengths.retain(|seq| *seq < LONG_FROM);
        lengths.sort_unstable();
        lengths.dedup();
        let phrase = |seq: &i64| {
            let times = Times(Ratio::range(gains, |p| p.seq == *seq)?).words();
            Some(format!("{times} times at $T = {}$", grouped(*seq as f64, 0)))
        };
        (!gains.is_empty()).then(|| Self {
            short: listed(&lengths.iter().filter_map(phrase).collect::<Vec<_>>()),
            long: Ratio::range(gains, is_long).map(Times),
            most_at_short: Ratio::range(gains, |p| !is_long(p)).map(|range| range.high),
        })
    }

    /// Much at the shorter lengths and little at the longer ones.
    fn claim(&self) -> Claim {
        let id = "captured-attention-gains";
        match (&self.most_at_short, &self.long) {
            (Some(short), Some(long)) => Claim::new(id, short.value() > 1.5 && long.most().value() < 1.1)
                .operand("largest gain at the shorter lengths", short)
                .operand("at the longer ones", long.most()),
            _ => Claim::new(id, false).operand_text("lengths", "not both short and long ones"),
        }
    }
}
