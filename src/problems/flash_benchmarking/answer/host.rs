//! The host's time of a call: ours from Rust beside the wheel, PyTorch and FlashAttention-4 from Python.

use serde::Serialize;

use super::super::calls::{CallTimes, Params, Row};
use super::super::measure;
use super::cells::FlashCase;
use crate::bench::interleave::ColumnOutcome;
use crate::harness::answer::format::markdown;
use crate::harness::answer::{Cell, Claim, Column, Emphasis, Paired, Quantity, Range, Style, Table, Turns};
use crate::harness::samples::Samples;

/// What a call of the wheel may take more than one from Rust, in seconds.
const MOST_MORE_S: f64 = 5e-6;

type Mode = fn(&CallTimes) -> &Samples;
const MODES: [Mode; 2] = [|times| &times.forward, |times| &times.recorded];

/// What the sentences quote.
#[derive(Serialize)]
pub struct Host {
    /// That follow one another.
    calls: usize,
    /// What a call of the wheel takes more than one from Rust, by the medians of both modes.
    more: Option<Range>,
    /// Why a column has no time, a sentence each.
    untimed: Vec<String>,
    #[serde(skip)]
    pub claim: Option<Claim>,
    #[serde(skip)]
    pub table: Table,
}

/// A measured case.
struct Calls<'a> {
    case: &'a FlashCase,
    params: &'a Params,
    row: &'a Row,
}

impl Host {
    /// Of the first measured case; `on` is the machine.
    pub fn of(cases: &[FlashCase], on: &str) -> Option<Self> {
        let calls = cases.iter().find_map(Calls::of)?;
        let more: Vec<Paired> = MODES.into_iter().filter_map(|mode| calls.more(mode)).collect();
        Some(Self {
            calls: calls.params.calls,
            more: Range::of(more.iter().map(|more| &more.all)),
            untimed: calls.untimed(),
            claim: claim(&more),
            table: calls.table(on),
        })
    }
}

/// Whether the wheel's calls take less than 5 us more in every round of both modes.
fn claim(more: &[Paired]) -> Option<Claim> {
    let most = Quantity::largest(more.iter().map(|more| &more.range.high)).filter(|_| more.len() == MODES.len())?;
    let claim = Claim::new("wheel-call-adds-less-than-5-us", most.value() < MOST_MORE_S);
    Some(claim.operand("largest difference of a round", most).operand_text("wanted", "below 5 µs"))
}

impl<'a> Calls<'a> {
    fn of(case: &'a FlashCase) -> Option<Self> {
        let (measure::Params::Calls(params), Some(row)) = (&case.params, case.row()?.calls()) else { return None };
        Some(Self { case, params, row })
    }

    /// In the order of the table.
    fn columns(&self) -> [(&'static str, &'a ColumnOutcome<CallTimes>); 4] {
        let Row { rust, wheel, sdpa, flash_attention_4 } = self.row;
        [("ours, from Rust", rust), ("ours, the wheel", wheel), ("SDPA", sdpa), ("FlashAttention-4", flash_attention_4)]
    }

    fn turns(&self, column: &ColumnOutcome<CallTimes>, mode: Mode) -> Option<Turns> {
        Some(Turns::of(&mode(column.measured()?).samples, self.params.rounds))
    }

    fn more(&self, mode: Mode) -> Option<Paired> {
        let [wheel, rust] = [&self.row.wheel, &self.row.rust].map(|column| self.turns(column, mode));
        Paired::difference(&self.case.id, &wheel?, &rust?)
    }

    fn cell(&self, column: &ColumnOutcome<CallTimes>, mode: Mode) -> Cell {
        match (column.measured(), self.turns(column, mode)) {
            (Some(times), Some(turns)) => {
                let emphasis = Emphasis { bold: false, unstable: !turns.is_stable() };
                Cell::Number(self.case.median(mode(times)), emphasis)
            }
            _ => column.label().into(),
        }
    }

    fn table(&self, on: &str) -> Table {
        let mut table = Table::new(vec![
            Column::text("a call of"),
            Column::number("without gradients (µs)", Style::Us, 1),
            Column::number("recorded by autograd (µs)", Style::Us, 1),
            Column::text("version"),
        ]);
        for (label, column) in self.columns() {
            let version = column.measured().and_then(|times| times.version.as_deref()).unwrap_or_default();
            let [forward, recorded] = MODES.map(|mode| self.cell(column, mode));
            table.row(vec![label.into(), forward, recorded, markdown(version).into()]);
        }
        let Params { dtype, batch, n_heads, d_head, seq, calls, .. } = self.params;
        table.captioned(format!(
            "The host's time of a forward call on {on}: batch {batch}, {n_heads} heads of {seq}, $d = {d_head}$, {}, causal; \
             medians, each sample the mean of {calls} calls. All but the first from Python. †: unstable, the turns spread beyond \
             5%.",
            dtype.name()
        ))
    }

    fn untimed(&self) -> Vec<String> {
        let sentence = |(label, column): (&str, &ColumnOutcome<CallTimes>)| {
            let why = match column {
                ColumnOutcome::Measured { .. } => return None,
                ColumnOutcome::OutOfMemory { message, .. } => message,
                ColumnOutcome::NotRun { reason } => reason,
                ColumnOutcome::Failed { error } => error,
            };
            Some(format!("No time of {label}: {}.", markdown(why)))
        };
        self.columns().into_iter().filter_map(sentence).collect()
    }
}

#[cfg(test)]
mod tests;
