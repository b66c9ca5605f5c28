//! Beyond the handout: whole steps captured as CUDA graphs, and float32 with TF32, beside eager steps.

use anyhow::Result;
use serde::Serialize;

use super::{SWEEP, StepCase, of_grid, ratio, sizes, total, whole_step};
use crate::bench::training_step::Params;
use crate::harness::answer::table::TableBuilder;
use crate::harness::answer::{Answer, Claim, Quantity, Range, RecordSet, Style, Table, Unit};
use crate::model::{Precision, SizeName};

const CAPTURED: &str = "captured";

#[derive(Serialize)]
pub(super) struct Captured {
    #[serde(skip)]
    context: i64,
    /// "context 512 and batch 4, over 10 steps after 5 warm-up steps".
    #[serde(skip)]
    setting: String,
    /// The largest of all captured steps, as is the time of capturing.
    loss_error: Quantity,
    nodes: Range,
    capturing: Quantity,
    /// Eager over captured and float32 over TF32, where both steps are stable and of one run.
    gains: Option<Range>,
    tf32: Option<Range>,
}

/// One size's step in each way that there is a case of.
struct Ways<'a> {
    size: SizeName,
    /// Eager and captured.
    float32: [Option<&'a StepCase>; 2],
    bfloat16: [Option<&'a StepCase>; 2],
    tf32: Option<&'a StepCase>,
}

impl<'a> Ways<'a> {
    fn of(cases: &'a [StepCase], size: SizeName, context: i64) -> Self {
        use Precision::{Bfloat16, Float32};
        let find = |grid: &str, dtype: Precision| {
            let wanted = (size, context, dtype);
            let key = |case: &StepCase| (case.params.size, case.params.context_length, case.params.dtype);
            cases.iter().find(|case| case.grid == grid && key(case) == wanted)
        };
        Self {
            size,
            float32: [find(SWEEP, Float32), find(CAPTURED, Float32)],
            bfloat16: [find("bfloat16", Bfloat16), find(CAPTURED, Bfloat16)],
            tf32: find("tf32", Float32),
        }
    }

    fn all(cases: &'a [StepCase], context: i64) -> Vec<Self> {
        sizes(&of_grid(cases, CAPTURED)).into_iter().map(|size| Self::of(cases, size, context)).collect()
    }

    /// Eager over captured in each precision.
    fn gains(&self) -> impl Iterator<Item = Quantity> {
        [self.float32, self.bfloat16].into_iter().filter_map(|[eager, captured]| over(eager, captured))
    }
}

/// The first case's step over the second's, where both were measured in one run and are stable.
fn over(first: Option<&StepCase>, second: Option<&StepCase>) -> Option<Quantity> {
    ratio(&total(first)?, &total(second)?)
}

impl Captured {
    /// None where no captured step was measured.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let captured = of_grid(cases, CAPTURED);
        let Params { context_length: context, batch_size, steps, warmup, .. } = captured.first()?.params;
        let captures = || captured.iter().filter_map(|case| Some((case, case.row()?, case.row()?.capture.as_ref()?)));
        let ways = Ways::all(cases, context);
        let number = |case: &StepCase, x| case.quantity(x, Unit::One);
        Some(Self {
            loss_error: Quantity::largest(captures().map(|(case, _, capture)| number(case, capture.loss_error)))?,
            nodes: Range::of(captures().map(|(case, _, capture)| number(case, capture.nodes as f64)))?,
            capturing: Quantity::largest(captures().map(|(case, _, capture)| case.median(&capture.time)))?,
            gains: Range::of(ways.iter().flat_map(Ways::gains)),
            tf32: Range::of(ways.iter().filter_map(|way| over(way.float32[0], way.tf32))),
            setting: format!(
                "context {context} and batch {batch_size}, over {steps} steps after {warmup} warm-up steps"
            ),
            context,
        })
    }

    /// Adds the claim and the table.
    pub(super) fn conclude(&self, answer: &mut Answer, set: &RecordSet, cases: &[StepCase]) -> Result<()> {
        let error = &self.loss_error;
        let claim = Claim::new("replays-compute-the-same", error.value() == 0.0);
        answer.claim(claim.operand("largest relative difference of a loss", error))?;
        let caption = format!(
            "A training step, eager and replayed as one CUDA graph, and eager with TF32: mean ± standard deviation at {}, or \
             the range if unstable; {}. The ratios are eager over captured. 1.1.5 times bfloat16 in another run.",
            self.setting,
            set.machine()?
        );
        answer.table("captured", table(&Ways::all(cases, self.context)).captioned(caption))
    }
}

fn table<'a>(ways: &'a [Ways<'a>]) -> TableBuilder<&'a Ways<'a>> {
    Table::of(ways)
        .text("size", |way| way.size.size().name)
        .right("float32, eager (ms)", |way| way.float32[0].map(whole_step))
        .right("captured (ms)", |way| way.float32[1].map(whole_step))
        .number("ratio", Style::Fixed, 2, |way| over(way.float32[0], way.float32[1]))
        .right("bfloat16, eager (ms)", |way| way.bfloat16[0].map(whole_step))
        .right("captured (ms)", |way| way.bfloat16[1].map(whole_step))
        .number("ratio", Style::Fixed, 2, |way| over(way.bfloat16[0], way.bfloat16[1]))
        .right("TF32, eager (ms)", |way| way.tf32.map(whole_step))
}
