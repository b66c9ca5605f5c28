//! Part (b): what compiling a whole model gains for its forward pass and its training step.

use anyhow::Result;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::transformer::{Params, Passes, Row};
use super::cases::{ColumnOf, ModelCase, PassOf, ratios};
use crate::harness::answer::format::{distinct, listed, print};
use crate::harness::answer::{Case, Claim, Quantity, Range, RecordSet, Style};
use crate::harness::samples::Samples;
use crate::harness::steadiness::Turns;
use crate::model::Precision;

pub const RUST: ColumnOf<Row, Passes> = |row| &row.rust_eager;
pub const PYTHON: ColumnOf<Row, Passes> = |row| &row.python_eager;
pub const COMPILED: ColumnOf<Row, Passes> = |row| &row.python_compiled;
pub const AGAIN: ColumnOf<Row, Passes> = |row| &row.rust_eager_again;
pub const CAPTURED: ColumnOf<Row, Passes> = |row| &row.rust_captured;

pub const FORWARD: PassOf<Passes> = |passes| &passes.forward;
pub const STEP: PassOf<Passes> = |passes| &passes.step;

/// What the sentences quote of whole models; ranges are over the steady passes alone.
#[derive(Serialize)]
pub struct Models {
    context: i64,
    batch: i64,
    /// "small: 5 turns of 4 passes, each after 3 untimed".
    protocol: String,
    /// PyTorch eager over torch.compile.
    forward: Option<Range>,
    step: Option<Range>,
    /// The same over both, for each dtype.
    float32: Option<Range>,
    bfloat16: Option<Range>,
    /// The models with unsteady times of PyTorch's: "small in bfloat16 and xl in bfloat16"; none where all are steady.
    unsteady: Option<String>,
    /// Ours over PyTorch eager.
    eager: Option<Range>,
    /// For each dtype the largest error of all gradients as one vector against ours, relative to its norm.
    errors: String,
    beside: Option<Beside>,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

/// The first model whose forward pass, ours, is unsteady beside the Python process and steady alone.
#[derive(Serialize)]
struct Beside {
    model: String,
    turns: String,
    alone: Quantity,
    /// Whether both were timed on one machine.
    same_machine: bool,
}

impl Models {
    /// None without cases.
    pub fn of(cases: &[ModelCase], alone: &Alone) -> Option<Self> {
        let Params { context_length, batch_size, .. } = *cases.first()?.params;
        let gain = |passes: &[PassOf<Passes>], dtype: Option<Precision>| {
            let of_dtype = cases.iter().filter(|case| dtype.is_none_or(|dtype| case.params.dtype == dtype));
            ratios(of_dtype, [PYTHON, COMPILED], passes)
        };
        let (forward, step) = (gain(&[FORWARD], None), gain(&[STEP], None));
        let of_dtype = |dtype| gain(&[FORWARD, STEP], Some(dtype));
        let claim = forward.as_ref().zip(step.as_ref()).map(|(Range { low: forward, .. }, Range { low: step, .. })| {
            let claim = Claim::new("compiled-models-gain", forward.value() > 1.0 && step.value() > 1.0);
            claim.operand("least gain of a forward pass", forward).operand("of a step", step)
        });
        let unsteady: Vec<String> = cases.iter().filter(|case| is_unsteady(case)).map(|c| named(c.params)).collect();
        let beside = cases.iter().find_map(|case| alone.beside(case));
        Some(Self {
            context: context_length,
            batch: batch_size,
            protocol: protocol(cases),
            forward,
            step,
            float32: of_dtype(Precision::Float32),
            bfloat16: of_dtype(Precision::Bfloat16),
            unsteady: (!unsteady.is_empty()).then(|| listed(&unsteady)),
            eager: ratios(cases, [RUST, PYTHON], &[FORWARD, STEP]),
            errors: listed(&[Precision::Float32, Precision::Bfloat16].map(|dtype| error(cases, dtype)).concat()),
            beside,
            claim,
        })
    }
}

fn named(p: &Params) -> String {
    format!("{} in {}", p.size.size().name, p.dtype.name())
}

/// Whether some pass of PyTorch's two implementations differs from turn to turn.
fn is_unsteady(case: &ModelCase) -> bool {
    let turns = [PYTHON, COMPILED].into_iter().flat_map(|column| [FORWARD, STEP].map(|pass| case.turns(column, pass)));
    turns.flatten().any(|turns: Turns| !turns.is_steady())
}

/// One word, or none where no gradient of this dtype was compared.
fn error(cases: &[ModelCase], dtype: Precision) -> Vec<String> {
    let of_dtype = cases.iter().filter(|case| case.params.dtype == dtype).filter_map(|case| case.row);
    let errors = of_dtype.flat_map(|row| row.errors.values()).map(|errors| errors.gradients);
    errors
        .reduce(f64::max)
        .map(|error| format!("{} in {}", print(error, Style::Sci, 1), dtype.name()))
        .into_iter()
        .collect()
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
        format!("{} turns of {} passes, each after {} untimed ({})", p.rounds, p.iterations, p.warmup, listed(&sizes))
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

    /// None where our forward pass is steady here, or was not measured alone, or is unsteady there too.
    fn beside(&self, case: &ModelCase) -> Option<Beside> {
        let turns = case.turns(RUST, FORWARD).filter(|turns| !turns.is_steady())?;
        let p = case.params;
        let wanted = json!({"measure": "timing", "size": p.size, "dtype": p.dtype, "context_length": p.context_length,
            "batch_size": p.batch_size, "attention": "naive", "execution": "eager"});
        let same = |params: &Value| wanted.as_object().is_some_and(|keys| keys.iter().all(|(k, v)| params[k] == *v));
        let alone = self.0.iter().find(|alone| same(&alone.params))?;
        let samples: Samples = serde_json::from_value(alone.row()?["forward"].clone()).ok()?;
        Turns::single(&samples.samples).is_steady().then(|| Beside {
            model: named(p),
            turns: turns.text(),
            alone: alone.median(&samples),
            same_machine: alone.id.machine() == case.case.id.machine(),
        })
    }
}
