//! The optimizer's part of a step: its rate as a share of a plain copy's, ours beside PyTorch's.

use serde::Serialize;

use super::super::adamw::{BYTES_PER_PARAMETER, Row, Update};
use super::cases::{ColumnOf, PassOf, Ratio, UpdateCase};
use crate::harness::answer::{Claim, Quantity, Unit};

const RUST: ColumnOf<Row, Update> = |row| &row.rust;
const FUSED: ColumnOf<Row, Update> = |row| &row.python_fused;
pub const COLUMNS: [ColumnOf<Row, Update>; 3] = [RUST, FUSED, |row| &row.python_foreach];
pub const STEP: PassOf<Update> = |update| &update.step;

/// The rate of our step as a share of the copy rate.
#[derive(Serialize)]
pub struct Adamw {
    least: Quantity,
    /// The size of the model that has it.
    at: &'static str,
    most: Quantity,
    #[serde(skip)]
    pub claims: [Claim; 2],
}

impl Adamw {
    /// None where our step was measured beside no copy, or nowhere beside PyTorch's fused one.
    pub fn of(cases: &[UpdateCase]) -> Option<Self> {
        let shares = || cases.iter().filter_map(|case| Some((case.share(RUST)?, case.params.size.size().name)));
        let (least, at) = shares().reduce(|a, b| if b.0.value() < a.0.value() { b } else { a })?;
        let (most, _) = shares().reduce(|a, b| if b.0.value() > a.0.value() { b } else { a })?;
        let over_fused = Ratio::all(cases, [RUST, FUSED], &[("step", STEP)]);
        let over_fused = &Ratio::largest(&over_fused)?.value;
        let near = Claim::new("adamw-near-copy", least.value() >= 0.85).operand("least share", &least);
        // Where they take the same time, neither is faster.
        let faster = Claim::below("adamw-faster", "largest ratio to the fused one", over_fused, 1.0);
        Some(Self { least, at, most, claims: [near.operand_text("wanted", "at least 0.85"), faster] })
    }
}

impl UpdateCase<'_> {
    /// The bytes that plain copies read and write, over their time.
    pub fn copy_rate(&self) -> Option<Quantity> {
        let copy = &self.row?.copy;
        let seconds = self.case.median(copy).value();
        Some(self.case.quantity(copy.work.as_ref()?.bytes / seconds, Unit::BytesPerSecond))
    }

    /// The rate at which a column moves its bytes, as a share of the copy rate.
    pub fn share(&self, column: ColumnOf<Row, Update>) -> Option<Quantity> {
        let seconds = self.median(column, STEP)?.value();
        let rate = BYTES_PER_PARAMETER * self.row?.parameters as f64 / seconds;
        Some(self.case.quantity(rate / self.copy_rate()?.value(), Unit::One))
    }
}
