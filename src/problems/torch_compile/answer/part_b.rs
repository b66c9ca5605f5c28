//! Part (b): what compiled and captured steps of whole models gain, and how much of that is launches.

use anyhow::Result;
use serde::Serialize;

use super::super::transformer::{Params, Passes, Row};
use super::cases::{ColumnOf, ModelCase, PassOf, Ratio};
use super::{Times, at_most};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::print;
use crate::harness::answer::{Answer, Claim, Quantity, Style, Unit};
use crate::model::Precision;

const RUST: ColumnOf<Row, Passes> = |row| &row.rust_eager;
const PYTHON: ColumnOf<Row, Passes> = |row| &row.python_eager;
const COMPILED: ColumnOf<Row, Passes> = |row| &row.python_compiled;
const ALONE: ColumnOf<Row, Passes> = |row| &row.rust_eager_again;
const CAPTURED: ColumnOf<Row, Passes> = |row| &row.rust_captured;
pub const COLUMNS: [(&str, ColumnOf<Row, Passes>); 5] = [
    ("Rust eager", RUST),
    ("Python eager", PYTHON),
    ("torch.compile", COMPILED),
    ("Rust eager, alone", ALONE),
    ("Rust captured", CAPTURED),
];

pub const FORWARD: (&str, PassOf<Passes>) = ("forward pass", |passes| &passes.forward);
pub const STEP: (&str, PassOf<Passes>) = ("training step", |passes| &passes.step);

/// What the sentences quote of whole models.
#[derive(Serialize)]
pub struct Models {
    /// Gains of what was compiled over Python eager.
    forward: Option<Times>,
    step: Option<Times>,
    graph: Option<Graph>,
    /// The models in which both eager columns were measured.
    covered: String,
    /// The largest ratio of Rust eager to Python eager, and where it is.
    slowest_model: Option<Quantity>,
    #[serde(skip)]
    slowest_at: String,
    /// For each arithmetic the largest error of all gradients as one vector against ours, relative to its norm.
    model_errors: String,
}

/// Captured steps against the eager ones that took turns with them.
#[derive(Serialize)]
struct Graph {
    most: Quantity,
    least: Quantity,
    #[serde(skip)]
    several: bool,
    /// The model that gains most, and its steps.
    at: String,
    captured: Quantity,
    alone: Quantity,
    beside: Quantity,
    compiled: Option<Quantity>,
    /// The largest relative difference between Rust eager alone and beside Python.
    #[serde(skip)]
    drift: Quantity,
    /// Of the models that were both captured and compiled, those whose captured step is faster; and all of them.
    #[serde(skip)]
    faster: [usize; 2],
}

fn named(p: &Params) -> String {
    format!("{} in {}", p.size.size().name, p.dtype.name())
}

impl Models {
    pub fn of(cases: &[ModelCase]) -> Self {
        let gain = |pass| Ratio::range(&Ratio::all(cases, [PYTHON, COMPILED], &[pass]), |_| true).map(Times);
        let eager = Ratio::all(cases, [RUST, PYTHON], &[FORWARD, STEP]);
        let slowest = Ratio::largest(&eager);
        let covered = Ratio::all(cases, [RUST, PYTHON], &[STEP]);
        let covered: Vec<_> = covered.iter().map(|ratio| named(ratio.case.params)).collect();
        let error = |dtype: Precision| {
            let of_dtype = cases.iter().filter(|case| case.params.dtype == dtype).filter_map(|case| case.row);
            let errors = of_dtype.flat_map(|row| row.errors.values()).map(|errors| errors.gradients);
            let error = errors.reduce(f64::max)?;
            Some(format!("{} of its norm in {}", print(error, Style::Sci, 1), dtype.name()))
        };
        let errors = [Precision::Float32, Precision::Bfloat16].into_iter().filter_map(error);
        Self {
            forward: gain(FORWARD),
            step: gain(STEP),
            graph: Graph::of(cases),
            covered: covered.join(", "),
            slowest_model: slowest.map(|ratio| ratio.value.clone()),
            slowest_at: slowest.map_or(String::new(), |r| format!("the {} of {}", r.pass, named(r.case.params))),
            model_errors: errors.collect::<Vec<_>>().join(" and "),
        }
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        if let (Some(forward), Some(step)) = (&self.forward, &self.step) {
            let [forward, step] = [forward, step].map(Times::least);
            let claim = Claim::new("compiled-models-gain", forward.value() > 1.0 && step.value() > 1.0);
            answer.claim(claim.operand("least gain of a forward pass", forward).operand("of a step", step))?;
        }
        self.graph.iter().try_for_each(|graph| graph.claims(answer))?;
        self.slowest_model.iter().try_for_each(|ratio| {
            let claim = at_most("rust-model-not-slower", "largest ratio", ratio, 1.03);
            answer.claim(claim.operand_text("of", self.slowest_at.as_str()))
        })
    }
}

impl Graph {
    /// Of the models in which Rust eager was measured both times; none where no step of them was captured.
    fn of(cases: &[ModelCase]) -> Option<Self> {
        let mut gains = Ratio::all(cases, [ALONE, CAPTURED], &[STEP]);
        gains.retain(|gain| gain.case.median(RUST, STEP.1).is_some());
        let (most, range) = (Ratio::largest(&gains)?.case, Ratio::range(&gains, |_| true)?);
        let median = |column| most.median(column, STEP.1);
        let drifts = gains.iter().filter_map(|gain| {
            let ratio = gain.case.ratio([ALONE, RUST], STEP.1)?;
            Some(gain.case.case.quantity((ratio.value() - 1.0).abs(), Unit::One))
        });
        let over_compiled = Ratio::all(cases, [CAPTURED, COMPILED], &[STEP]);
        let faster = over_compiled.iter().filter(|ratio| ratio.value.value() < 1.0).count();
        Some(Self {
            most: range.high,
            least: range.low,
            several: gains.len() > 1,
            at: named(most.params),
            captured: median(CAPTURED)?,
            alone: median(ALONE)?,
            beside: median(RUST)?,
            compiled: median(COMPILED),
            drift: Quantity::largest(&drifts.collect::<Vec<_>>())?.clone(),
            faster: [faster, over_compiled.len()],
        })
    }

    fn claims(&self, answer: &mut Answer) -> Result<()> {
        let gain = Claim::new("captured-models-gain", self.several && self.most.value() > 1.1);
        answer.claim(gain.operand("largest gain", &self.most).operand("least gain", &self.least))?;
        let [faster, both] = self.faster;
        let all = self.compiled.is_some() && faster == both;
        let beats = Claim::new("captured-step-beats-compiled", all);
        answer.claim(beats.operand_text("models whose captured step is faster", format!("{faster} of {both}")))?;
        answer.claim(Claim::below("little-drift", "largest drift", &self.drift, 0.03))
    }
}

/// Bars for each arithmetic, where in each of them steps of several models were measured beside Python eager.
pub fn figures(cases: &[ModelCase]) -> Option<[(String, Figure); 2]> {
    let figure = |dtype: Precision| {
        let of_dtype = |case: &&ModelCase| case.params.dtype == dtype && case.row.is_some();
        let cases: Vec<_> = cases.iter().filter(of_dtype).collect();
        let bars = |(name, column): (&str, ColumnOf<Row, Passes>)| {
            let gain = |case: &ModelCase| Some(case.ratio([PYTHON, column], STEP.1)?.value());
            Series::over_categories(name, cases.iter().map(|case| (case.params.size.size().name, gain(case))))
        };
        let series = [("Rust eager", RUST), ("torch.compile", COMPILED), ("Rust captured", CAPTURED)].map(bars);
        let any = |series: &Series| series.points.iter().any(|(_, gain)| gain.is_some());
        let series: Vec<Series> = series.into_iter().filter(any).collect();
        if cases.len() < 2 || series.is_empty() {
            return None;
        }
        let name = dtype.name();
        let alt = format!(
            "Bars for each model size: how many times as fast as Python eager the training step in {name} is in Rust \
             eager, by torch.compile and in Rust captured."
        );
        let plot = Plot::new(PlotKind::Bar, "size", "times as fast as Python eager", series);
        Some((format!("step-gain-{name}"), Figure::plot(alt, plot)))
    };
    Some([figure(Precision::Bfloat16)?, figure(Precision::Float32)?])
}
