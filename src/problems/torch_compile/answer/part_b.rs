//! Part (b): what compiled and captured steps of whole models gain, and how much of that is launches.

use serde::Serialize;

use super::super::transformer::{Params, Passes, Row};
use super::cases::{ColumnOf, ModelCase, PassOf, Ratio};
use super::{not_slower, times};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::print;
use crate::harness::answer::{Claim, Quantity, Range, Style, Unit};
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
    forward: Option<String>,
    step: Option<String>,
    graph: Option<Graph>,
    /// The models in which both eager columns were measured.
    covered: String,
    /// The largest ratio of Rust eager to Python eager.
    slowest_model: Option<Quantity>,
    /// For each arithmetic the largest error of all gradients as one vector against ours, relative to its norm.
    model_errors: String,
    #[serde(skip)]
    pub claims: Vec<Claim>,
}

/// Captured steps against the eager ones that took turns with them.
#[derive(Serialize)]
struct Graph {
    most: Quantity,
    least: Quantity,
    /// The model that gains most, and its steps.
    at: String,
    captured: Quantity,
    alone: Quantity,
    beside: Quantity,
    compiled: Option<Quantity>,
    #[serde(skip)]
    claims: [Claim; 3],
}

fn named(p: &Params) -> String {
    format!("{} in {}", p.size.size().name, p.dtype.name())
}

impl Models {
    pub fn of(cases: &[ModelCase]) -> Self {
        let gain = |pass| Ratio::range(&Ratio::all(cases, [PYTHON, COMPILED], &[pass]), |_| true);
        let (forward, step, graph) = (gain(FORWARD), gain(STEP), Graph::of(cases));
        let mut claims = Vec::new();
        if let (Some(Range { low: forward, .. }), Some(Range { low: step, .. })) = (&forward, &step) {
            let claim = Claim::new("compiled-models-gain", forward.value() > 1.0 && step.value() > 1.0);
            claims.push(claim.operand("least gain of a forward pass", forward).operand("of a step", step));
        }
        claims.extend(graph.iter().flat_map(|graph| graph.claims.clone()));
        let eager = Ratio::all(cases, [RUST, PYTHON], &[FORWARD, STEP]);
        let slowest = Ratio::largest(&eager);
        claims.extend(slowest.map(|Ratio { case, pass, value }| {
            not_slower("rust-model-not-slower", value, format!("the {pass} of {}", named(case.params)))
        }));
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
            forward: forward.as_ref().map(times),
            step: step.as_ref().map(times),
            graph,
            covered: covered.join(", "),
            slowest_model: slowest.map(|ratio| ratio.value.clone()),
            model_errors: errors.collect::<Vec<_>>().join(" and "),
            claims,
        }
    }
}

impl Graph {
    /// Of the models in which Rust eager was measured both times; none where no step of them was captured.
    fn of(cases: &[ModelCase]) -> Option<Self> {
        let mut gains = Ratio::all(cases, [ALONE, CAPTURED], &[STEP]);
        gains.retain(|gain| gain.case.median(RUST, STEP.1).is_some());
        let (model, Range { low: least, high: most }) = (Ratio::largest(&gains)?.case, Ratio::range(&gains, |_| true)?);
        let median = |column| model.median(column, STEP.1);
        let compiled = median(COMPILED);
        let over_compiled = Ratio::all(cases, [CAPTURED, COMPILED], &[STEP]);
        let (faster, both) = (over_compiled.iter().filter(|r| r.value.value() < 1.0).count(), over_compiled.len());
        // Between Rust eager alone and beside Python.
        let drifts = gains.iter().filter_map(|gain| {
            let ratio = gain.case.ratio([ALONE, RUST], STEP.1)?;
            Some(gain.case.case.quantity((ratio.value() - 1.0).abs(), Unit::One))
        });
        let claims = [
            Claim::new("captured-models-gain", gains.len() > 1 && most.value() > 1.1)
                .operand("largest gain", &most)
                .operand("least gain", &least),
            Claim::new("captured-step-beats-compiled", compiled.is_some() && faster == both)
                .operand_text("models whose captured step is faster", format!("{faster} of {both}")),
            Claim::below("little-drift", "largest drift", Quantity::largest(&drifts.collect::<Vec<_>>())?, 0.03),
        ];
        Some(Self {
            most,
            least,
            at: named(model.params),
            captured: median(CAPTURED)?,
            alone: median(ALONE)?,
            beside: median(RUST)?,
            compiled,
            claims,
        })
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
