//! Part (a): what compiled passes of attention gain at the lengths whose times are stable.

use std::collections::BTreeSet;

use serde::Serialize;

use super::super::attention::{Params, Passes, Row};
use super::cases::{AttentionCase, ColumnOf, PassOf, ratios};
use super::{times, turns};
use crate::bench::errors::AttentionErrors;
use crate::harness::answer::format::{grouped, listed};
use crate::harness::answer::{Claim, Quantity, Turns, Unit};

pub const RUST: ColumnOf<Row, Passes> = |row| &row.rust_eager;
pub const PYTHON: ColumnOf<Row, Passes> = |row| &row.python_eager;
pub const COMPILED: ColumnOf<Row, Passes> = |row| &row.python_compiled;
pub const CAPTURED: ColumnOf<Row, Passes> = |row| &row.rust_captured;

pub const PASSES: [(&str, PassOf<Passes>); 2] = [("forward", |p| &p.forward), ("backward", |p| &p.backward)];
const BOTH: [PassOf<Passes>; 2] = [PASSES[0].1, PASSES[1].1];

/// What the sentences quote of attention.
#[derive(Serialize)]
pub struct Attention {
    /// "5 turns of 10 passes, each after 2 untimed".
    turns: String,
    /// PyTorch eager over torch.compile, over both passes of every cell from this length on, all of them stable:
    /// "1.18 to 1.63".
    gain: Option<String>,
    from: String,
    slower: Option<Slower>,
    /// Ours over PyTorch eager, over all stable passes.
    #[serde(skip)]
    pub eager: Option<String>,
    /// The largest of outputs and gradients against ours, relative to their norm.
    #[serde(skip)]
    pub error: Option<Quantity>,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

/// The cells whose compiled forward pass is slower in every turn than the eager one in any, and their lengths.
#[derive(Serialize)]
pub struct Slower {
    /// "256 and 1,024".
    lengths: String,
    /// The slower ones of the cells at these lengths.
    cells: usize,
    of: usize,
}

impl Slower {
    fn of(cases: &[AttentionCase]) -> Option<Self> {
        let turns = |case: &AttentionCase| {
            let [eager, compiled] = [PYTHON, COMPILED].map(|column| case.turns(column, PASSES[0].1));
            eager.zip(compiled)
        };
        let is_slower = |case: &&AttentionCase| turns(case).is_some_and(|(eager, compiled)| eager.is_below(&compiled));
        let lengths: BTreeSet<i64> = cases.iter().filter(is_slower).map(|case| case.params.seq).collect();
        let at = || cases.iter().filter(|case| turns(case).is_some() && lengths.contains(&case.params.seq));
        let words: Vec<String> = lengths.iter().map(|seq| grouped(*seq as f64, 0)).collect();
        (!words.is_empty()).then(|| Self {
            lengths: listed(&words),
            cells: at().filter(is_slower).count(),
            of: at().count(),
        })
    }
}

impl Attention {
    pub fn of(cases: &[AttentionCase]) -> Self {
        let turns_of = |Params { rounds, warmup, iterations, .. }: &Params| turns(*rounds, *iterations, *warmup);
        let unstable = cases.iter().filter(|case| is_unstable(case)).map(|case| case.params.seq).max();
        let stable = || cases.iter().filter(|case| Some(case.params.seq) > unstable);
        let gain = ratios(stable(), [PYTHON, COMPILED], &BOTH);
        let errors = cases.iter().filter_map(|case| {
            let largest = case.row?.errors.values().map(AttentionErrors::largest).reduce(f64::max)?;
            Some(case.case.quantity(largest, Unit::One))
        });
        Self {
            turns: cases.first().map_or("no cases".into(), |case| turns_of(case.params)),
            from: grouped(stable().map(|case| case.params.seq).min().unwrap_or_default() as f64, 0),
            slower: Slower::of(cases),
            eager: ratios(cases, [RUST, PYTHON], &BOTH).as_ref().map(times),
            error: Quantity::largest(errors),
            gain: gain.as_ref().map(times),
            claim: gain
                .map(|gain| Claim::above("attention-gains", "least PyTorch eager / torch.compile", &gain.low, 1.0)),
        }
    }
}

/// Whether some pass of PyTorch's two implementations differs from turn to turn.
fn is_unstable(case: &AttentionCase) -> bool {
    let turns = [PYTHON, COMPILED].into_iter().flat_map(|column| BOTH.map(|pass| case.turns(column, pass)));
    turns.flatten().any(|turns: Turns| !turns.is_stable())
}
