//! Part (a): what compiled passes of attention gain at the lengths whose times are steady.

use serde::Serialize;

use super::super::attention::{Params, Passes, Row};
use super::cases::{AttentionCase, ColumnOf, PassOf, ratios};
use crate::bench::dtype::Dtype;
use crate::bench::tolerance;
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Claim, Quantity, Range, Unit};
use crate::harness::steadiness::Turns;

pub const RUST: ColumnOf<Row, Passes> = |row| &row.rust_eager;
pub const PYTHON: ColumnOf<Row, Passes> = |row| &row.python_eager;
pub const COMPILED: ColumnOf<Row, Passes> = |row| &row.python_compiled;
pub const CAPTURED: ColumnOf<Row, Passes> = |row| &row.rust_captured;

pub const PASSES: [(&str, PassOf<Passes>); 2] = [("forward", |p| &p.forward), ("backward", |p| &p.backward)];
const BOTH: [PassOf<Passes>; 2] = [PASSES[0].1, PASSES[1].1];

/// What the sentences quote of attention.
#[derive(Serialize)]
pub struct Attention {
    batch: i64,
    rounds: usize,
    warmup: usize,
    iterations: usize,
    /// PyTorch eager over torch.compile, over both passes of every cell from this length on: from it on all are steady.
    gain: Option<Range>,
    from: String,
    /// Whether shorter lengths were measured, some of whose times are unsteady.
    shorter: bool,
    /// Ours over PyTorch eager, over all steady passes.
    eager: Option<Range>,
    /// The largest error of outputs and gradients against ours, relative to their norm.
    error: Option<Quantity>,
    tolerance: f64,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

impl Attention {
    /// None without cases.
    pub fn of(cases: &[AttentionCase]) -> Option<Self> {
        let Params { batch, rounds, warmup, iterations, .. } = *cases.first()?.params;
        let unsteady = cases.iter().filter(|case| is_unsteady(case)).map(|case| case.params.seq).max();
        let steady = || cases.iter().filter(|case| Some(case.params.seq) > unsteady);
        let gain = ratios(steady(), [PYTHON, COMPILED], &BOTH);
        let errors = cases.iter().flat_map(|case| {
            let errors = case.row.into_iter().flat_map(|row| row.errors.values());
            errors.map(|errors| case.case.quantity(errors.largest(), Unit::One))
        });
        Some(Self {
            batch,
            rounds,
            warmup,
            iterations,
            from: grouped(steady().map(|case| case.params.seq).min().unwrap_or_default() as f64, 0),
            shorter: unsteady.is_some(),
            eager: ratios(cases, [RUST, PYTHON], &BOTH),
            error: Quantity::largest(errors),
            tolerance: tolerance::attention(Dtype::Float32),
            claim: gain.as_ref().map(|gain| {
                Claim::above("compiled-attention-gains", "least PyTorch eager / torch.compile", &gain.low, 1.0)
            }),
            gain,
        })
    }
}

/// Whether some pass of PyTorch's two implementations differs from turn to turn.
fn is_unsteady(case: &AttentionCase) -> bool {
    let turns = [PYTHON, COMPILED].into_iter().flat_map(|column| BOTH.map(|pass| case.turns(column, pass)));
    turns.flatten().any(|turns: Turns| !turns.is_steady())
}
