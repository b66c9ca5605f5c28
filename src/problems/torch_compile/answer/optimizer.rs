//! The optimizer's part of a step: its rate as a share of a plain copy's, ours beside PyTorch's.

use serde::Serialize;

use super::super::adamw::{BYTES_PER_PARAMETER, Row, Update};
use super::cases::{ColumnOf, PassOf, UpdateCase};
use crate::harness::answer::{Quantity, Range, Style, Unit};

pub const RUST: ColumnOf<Row, Update> = |row| &row.rust;
pub const FUSED: ColumnOf<Row, Update> = |row| &row.python_fused;
pub const FOREACH: ColumnOf<Row, Update> = |row| &row.python_foreach;
pub const STEP: PassOf<Update> = |update| &update.step;

/// Rates of one step as shares of the copy rate, over all models: "96% to 98%".
#[derive(Serialize)]
pub struct Adamw {
    ours: String,
    fused: String,
}

impl Adamw {
    /// None where ours or PyTorch's fused one was measured nowhere.
    pub fn of(cases: &[UpdateCase]) -> Option<Self> {
        let shares =
            |column| Some(Range::of(cases.iter().filter_map(|case| case.share(column)))?.text(Style::Percent, 0));
        Some(Self { ours: shares(RUST)?, fused: shares(FUSED)? })
    }
}

impl UpdateCase<'_> {
    /// The bytes that plain copies read and write, over their time.
    pub fn copy_rate(&self) -> Option<Quantity> {
        let copy = &self.row?.copy;
        let seconds = self.case.median(copy).value();
        Some(self.case.quantity(copy.work.as_ref()?.bytes / seconds, Unit::BytesPerSecond))
    }

    /// The rate at which an implementation moves its bytes, as a share of the copy rate; none of unstable times.
    pub fn share(&self, column: ColumnOf<Row, Update>) -> Option<Quantity> {
        let seconds = self.median(column, STEP)?.value();
        let rate = BYTES_PER_PARAMETER * self.row?.parameters as f64 / seconds;
        Some(self.case.quantity(rate / self.copy_rate()?.value(), Unit::One))
    }
}
