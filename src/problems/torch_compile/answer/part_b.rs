//! Part (b): what compiling a whole model gains for its forward pass and its training step.

use anyhow::Result;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::transformer::{Params, Passes, Row};
use super::cases::{ColumnOf, ModelCase, PassOf, ratios, unstable_ratios};
use super::{times, turns};
use crate::harness::answer::format::{distinct, listed};
use crate::harness::answer::{Case, Claim, Quantity, Range, RecordSet, Turns, Unit};
use crate::harness::samples::Samples;
use crate::model::Precision;

pub const RUST: ColumnOf<Row, Passes> = |row| &row.rust_eager;
pub const PYTHON: ColumnOf<Row, Passes> = |row| &row.python_eager;
pub const COMPILED: ColumnOf<Row, Passes> = |row| &row.python_compiled;
pub const AGAIN: ColumnOf<Row, Passes> = |row| &row.rust_eager_again;
pub const CAPTURED: ColumnOf<Row, Passes> = |row| &row.rust_captured;

pub const FORWARD: PassOf<Passes> = |passes| &passes.forward;
pub const STEP: PassOf<Passes> = |passes| &passes.step;

/// PyTorch eager over torch.compile.
pub const GAIN: [ColumnOf<Row, Passes>; 2] = [PYTHON, COMPILED];

const DTYPES: [Precision; 2] = [Precision::Float32, Precision::Bfloat16];

/// What the sentences quote of whole models.
#[derive(Serialize)]
pub struct Models {
    /// The models of which is said that they gain: "every" or "every measured".
    which: &'static str,
    /// "5 turns of 4 passes, each after 3 untimed (small)".
    protocol: String,
    /// PyTorch eager over torch.compile, where both are stable: "1.06 to 1.84".
    forward: Option<String>,
    step: Option<String>,
    /// The same over both in all turns, stable or not: "1.06 to 1.24 in float32 and 1.60 to 4.49 in bfloat16".
    dtypes: String,
    /// None where all are stable.
    unstable: Option<Unstable>,
    /// Ours over PyTorch eager.
    #[serde(skip)]
    pub eager: Option<String>,
    /// For each dtype the largest error of all gradients as one vector against ours, relative to its norm.
    #[serde(skip)]
    pub errors: Vec<(Precision, Quantity)>,
    beside: Option<Beside>,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

/// The models with unstable times of PyTorch's, and PyTorch eager over torch.compile in their turns.
#[derive(Serialize)]
struct Unstable {
    /// "small in bfloat16 and xl in bfloat16".
    models: String,
    forward: Option<String>,
    step: Option<String>,
}

/// The first model whose forward pass, ours, is unstable beside the Python process and stable alone.
#[derive(Serialize)]
struct Beside {
    model: String,
    turns: String,
    alone: Quantity,
    /// "alone", or "alone and on another machine".
    how: &'static str,
}

impl Models {
    pub fn of(cases: &[ModelCase], alone: &Alone) -> Self {
        let [forward, step] = [FORWARD, STEP].map(|pass| ratios(cases, GAIN, &[pass]));
        let turns = |dtype: Precision| {
            let of_dtype = cases.iter().filter(move |case| case.params.dtype == dtype);
            let ratios = of_dtype.flat_map(|case| [FORWARD, STEP].map(|pass| case.ratio(GAIN, pass)));
            Range::of(ratios.flatten().flat_map(|ratio| [ratio.range.low, ratio.range.high]))
        };
        let dtypes: Vec<_> = DTYPES.into_iter().filter_map(|dtype| Some((dtype, turns(dtype)?))).collect();
        let least = Quantity::smallest(dtypes.iter().map(|(_, range)| &range.low)).cloned();
        let words: Vec<_> =
            dtypes.iter().map(|(dtype, range)| format!("{} in {}", times(range), dtype.name())).collect();
        Self {
            protocol: protocol(cases),
            forward: forward.as_ref().map(times),
            step: step.as_ref().map(times),
            dtypes: listed(&words),
            unstable: Unstable::of(cases),
            eager: ratios(cases, [RUST, PYTHON], &[FORWARD, STEP]).as_ref().map(times),
            errors: DTYPES.into_iter().filter_map(|dtype| Some((dtype, error(cases, dtype)?))).collect(),
            beside: cases.iter().find_map(|case| alone.beside(case)),
            which: if cases.iter().all(|case| case.ratio(GAIN, STEP).is_some()) { "every" } else { "every measured" },
            claim: least.map(|least| Claim::above("models-gain", "least gain in any turn of any model", &least, 1.0)),
        }
    }
}

impl Unstable {
    fn of(cases: &[ModelCase]) -> Option<Self> {
        let models: Vec<String> = cases.iter().filter(|case| is_unstable(case)).map(|c| named(c.params)).collect();
        let [forward, step] = [FORWARD, STEP].map(|pass| unstable_ratios(cases, GAIN, pass).as_ref().map(times));
        (!models.is_empty()).then(|| Self { models: listed(&models), forward, step })
    }
}

fn named(p: &Params) -> String {
    format!("{} in {}", p.size.size().name, p.dtype.name())
}

/// Whether some pass of PyTorch's two implementations differs from turn to turn.
fn is_unstable(case: &ModelCase) -> bool {
    let turns = [PYTHON, COMPILED].into_iter().flat_map(|column| [FORWARD, STEP].map(|pass| case.turns(column, pass)));
    turns.flatten().any(|turns: Turns| !turns.is_stable())
}

/// None where no gradient of this dtype was compared.
fn error(cases: &[ModelCase], dtype: Precision) -> Option<Quantity> {
    let of_dtype = cases.iter().filter(|case| case.params.dtype == dtype);
    Quantity::largest(of_dtype.filter_map(|case| {
        let largest = case.row?.errors.values().map(|errors| errors.gradients).reduce(f64::max)?;
        Some(case.case.quantity(largest, Unit::One))
    }))
}

/// How often each size was timed.
fn protocol(cases: &[ModelCase]) -> String {
    let words = cases.iter().map(|case| {
        let p = case.params;
        let same = |other: &&ModelCase| {
            let q = other.params;
            (q.rounds, q.iterations, q.warmup) == (p.rounds, p.iterations, p.warmup)
        };
        let sizes = distinct(cases.iter().filter(same).map(|case| case.params.size.size().name));
        format!("{} ({})", turns(p.rounds, p.iterations, p.warmup), listed(&sizes))
    });
    distinct(words).join("; ")
}

/// Forward passes that another problem timed in a process alone, as its records hold them.
pub struct Alone(Vec<Case<Value, Value>>);

impl Alone {
    /// Errors: records that cannot be read.
    pub fn of(set: Option<&RecordSet>) -> Result<Self> {
        Ok(Self(set.map(RecordSet::cases_as).transpose()?.unwrap_or_default()))
    }

    /// None where our forward pass is stable here, or was not measured alone, or is unstable there too.
    fn beside(&self, case: &ModelCase) -> Option<Beside> {
        let turns = case.turns(RUST, FORWARD).filter(|turns| !turns.is_stable())?;
        let p = case.params;
        let wanted = json!({"measure": "timing", "size": p.size, "dtype": p.dtype, "context_length": p.context_length,
            "batch_size": p.batch_size, "attention": "naive", "execution": "eager"});
        let same = |params: &Value| wanted.as_object().is_some_and(|keys| keys.iter().all(|(k, v)| params[k] == *v));
        let alone = self.0.iter().find(|alone| same(&alone.params))?;
        let samples: Samples = serde_json::from_value(alone.row()?["forward"].clone()).ok()?;
        Turns::single(&samples.samples).is_stable().then(|| Beside {
            model: named(p),
            turns: case.case.id.mark(&turns.text()),
            alone: alone.median(&samples),
            how: match alone.id.machine() == case.case.id.machine() {
                true => "alone",
                false => "alone and on another machine",
            },
        })
    }
}
