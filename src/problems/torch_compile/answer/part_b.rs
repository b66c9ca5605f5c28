//! Part (b): what compiling a whole model gains for its forward pass and its training step.

use anyhow::Result;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::transformer::{Params, Passes, Row};
use super::cases::{ColumnOf, ModelCase, PassOf, ratios};
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

const DTYPES: [Precision; 2] = [Precision::Float32, Precision::Bfloat16];

/// What the sentences quote of whole models; ranges are over the stable passes alone.
#[derive(Serialize)]
pub struct Models {
    /// "5 turns of 4 passes, each after 3 untimed (small)".
    protocol: String,
    /// PyTorch eager over torch.compile: "1.06 to 1.84".
    forward: Option<String>,
    step: Option<String>,
    /// The same over both: "1.06 to 1.22 in float32 and 1.62 to 1.84 in bfloat16".
    dtypes: String,
    /// The models with unstable times of PyTorch's: "small in bfloat16 and xl in bfloat16"; none where all are stable.
    unstable: Option<String>,
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
        let gain = |passes: &[PassOf<Passes>], dtype: Option<Precision>| {
            let of_dtype = cases.iter().filter(|case| dtype.is_none_or(|dtype| case.params.dtype == dtype));
            ratios(of_dtype, [PYTHON, COMPILED], passes)
        };
        let (forward, step) = (gain(&[FORWARD], None), gain(&[STEP], None));
        let of_dtype =
            |dtype: &Precision| Some(format!("{} in {}", times(&gain(&[FORWARD, STEP], Some(*dtype))?), dtype.name()));
        let claim = forward.as_ref().zip(step.as_ref()).map(|(Range { low: forward, .. }, Range { low: step, .. })| {
            let claim = Claim::new("models-gain", forward.value() > 1.0 && step.value() > 1.0);
            claim.operand("least gain of a forward pass", forward).operand("of a step", step)
        });
        let unstable: Vec<String> = cases.iter().filter(|case| is_unstable(case)).map(|c| named(c.params)).collect();
        let beside = cases.iter().find_map(|case| alone.beside(case));
        Self {
            protocol: protocol(cases),
            forward: forward.as_ref().map(times),
            step: step.as_ref().map(times),
            dtypes: listed(&DTYPES.iter().filter_map(of_dtype).collect::<Vec<_>>()),
            unstable: (!unstable.is_empty()).then(|| listed(&unstable)),
            eager: ratios(cases, [RUST, PYTHON], &[FORWARD, STEP]).as_ref().map(times),
            errors: DTYPES.into_iter().filter_map(|dtype| Some((dtype, error(cases, dtype)?))).collect(),
            beside,
            claim,
        }
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
