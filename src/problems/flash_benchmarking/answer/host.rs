//! What a call of attention costs the host: ours through Rust and through the wheel, beside others in Python.

use anyhow::Result;
use serde::Serialize;

use super::super::calls::{IN_PYTHON, PASSES, RUST, WHEEL};
use super::super::measure::Params;
use super::cells::{FlashCase, title};
use crate::attention::implementations::by_name;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::Style;
use crate::harness::answer::{Cell, Claim, Column, Quantity, SameRun, Table};

/// What Python and PyTorch's dispatcher may add to a call.
const MOST_ADDED_S: f64 = 5e-6;

/// What the sentences quote.
#[derive(Serialize)]
pub struct HostCost {
    /// Of a forward pass: through Rust, and what the wheel adds.
    rust: Quantity,
    added: Quantity,
    #[serde(skip)]
    pub claim: Claim,
}

fn time(case: &FlashCase, column: &str, pass: AttentionPass) -> Option<Quantity> {
    Some(case.median(case.row()?.columns.get(column)?.passes.get(&pass)?.measured()?))
}

impl HostCost {
    /// `None` where no case has a time of both.
    pub fn of(case: &FlashCase) -> Option<Self> {
        let added = |pass| {
            let (wheel, rust) = (time(case, WHEEL, pass)?, time(case, RUST, pass)?);
            Some(SameRun::of(&wheel, &rust).ok()?.difference())
        };
        let all: Vec<Quantity> = PASSES.into_iter().filter_map(added).collect();
        let (rust, of_forward) = (time(case, RUST, AttentionPass::Forward)?, added(AttentionPass::Forward)?);
        let few = all.iter().filter(|added| added.value() < MOST_ADDED_S).count();
        let what = "passes to which the wheel adds less than 5 microseconds of the host's time";
        let claim = Claim::all("wheel-adds-little", what, few, all.len());
        let claim = claim.operand("most added", Quantity::largest(all.iter())?);
        Some(Self { rust, added: of_forward, claim })
    }
}

/// `None` without a measured case.
pub fn table(case: &FlashCase, on: &str) -> Result<Option<Table>> {
    let (Params::Calls(p), Some(row)) = (&case.params, case.row()) else { return Ok(None) };
    let mut head = vec![Column::text("called")];
    head.extend(PASSES.map(|pass| Column::number(format!("{} (µs)", title(pass)), Style::Us, 1)));
    let mut table = Table::new(head);
    for name in [RUST].into_iter().chain(IN_PYTHON) {
        let label = match name {
            RUST => "ours, through Rust".to_string(),
            WHEEL => "ours, the wheel in Python".to_string(),
            "sdpa" => "`scaled_dot_product_attention` in Python".to_string(),
            other => format!("{} in Python", by_name(other)?.label),
        };
        let mut cells: Vec<Cell> = vec![label.into()];
        for pass in PASSES {
            let outcome = row.columns.get(name).and_then(|column| column.passes.get(&pass));
            cells.push(match outcome {
                Some(ColumnOutcome::Measured { row }) => case.median(row).into(),
                Some(other) => other.label().into(),
                None => "–".into(),
            });
        }
        table.row(cells);
    }
    let caption = format!(
        "The host's time for a call on {on}: {} heads of {} positions, d = {}, {}, causal; medians of batches of {} calls, \
         which do not wait for the device.",
        p.n_heads,
        p.seq,
        p.d_head,
        p.dtype.name(),
        p.calls
    );
    Ok(Some(table.captioned(caption)))
}
