//! Beyond the handout: whole steps captured as CUDA graphs, and float32 with TF32, beside eager steps.

use anyhow::Result;
use serde::Serialize;

use super::{SWEEP, StepCase, TOTAL, median, of_grid, ratio, sizes, total, whole_step};
use crate::bench::training_step::Params;
use crate::harness::answer::format::print;
use crate::harness::answer::{Answer, Claim, Quantity, Range, Style, Table, Unit};
use crate::harness::stats;
use crate::model::{Precision, SizeName};

const CAPTURED: &str = "captured";

#[derive(Serialize)]
pub(super) struct Captured {
    #[serde(skip)]
    context: i64,
    /// "context 512 and batch 4, over 10 steps after 5 warm-up steps".
    #[serde(skip)]
    pub(super) setting: String,
    /// The largest of all captured steps, as are the time of capturing and the deviation over the median.
    loss_error: Quantity,
    nodes: Range,
    capturing: Quantity,
    /// None where every case has one sample.
    captured_std: Option<Quantity>,
    /// Eager over captured, and what the least and the most are of: "small in bfloat16".
    gains: Option<Range>,
    least_at: String,
    most_at: String,
    /// Float32 over TF32.
    tf32: Option<Range>,
    /// The sizes where TF32 is faster than eager bfloat16.
    faster: Vec<&'static str>,
    /// Those of them where captured bfloat16 is faster still: "16.6 against 25.2 ms".
    bfloat16: Vec<String>,
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

    /// Eager over captured in each precision, and what it is of.
    fn gains(&self) -> impl Iterator<Item = (Quantity, String)> {
        let precisions = [(Precision::Float32, self.float32), (Precision::Bfloat16, self.bfloat16)];
        precisions.into_iter().filter_map(|(dtype, [eager, captured])| {
            Some((over(eager, captured)?, format!("{} in {}", self.size.size().name, dtype.name())))
        })
    }

    fn tf32_beats_eager(&self) -> bool {
        let [eager, _] = self.bfloat16;
        over(eager, self.tf32).is_some_and(|gain| gain.value() > 1.0)
    }

    /// The times of captured bfloat16 and of TF32, where the first is shorter.
    fn captured_beats_tf32(&self) -> Option<String> {
        let [_, captured] = self.bfloat16;
        let faster = over(self.tf32, captured)?.value() > 1.0;
        let [captured, tf32] = [total(captured)?, total(self.tf32)?].map(|time| print(time.value(), Style::Ms, 1));
        faster.then(|| format!("{captured} against {tf32} ms"))
    }
}

/// The first case's step over the second's, where both were measured.
fn over(first: Option<&StepCase>, second: Option<&StepCase>) -> Option<Quantity> {
    ratio(&total(first)?, &total(second)?)
}

impl Captured {
    /// None where no captured step was measured.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let captured = of_grid(cases, CAPTURED);
        let Params { context_length: context, batch_size, steps, warmup, .. } = captured.first()?.params;
        let captures = || captured.iter().filter_map(|case| Some((case, case.row()?, case.row()?.capture.as_ref()?)));
        let deviations = captures().filter(|(_, row, _)| row.total.samples.len() > 1).map(|(case, row, _)| {
            let samples = &row.total.samples;
            case.quantity(stats::std(samples) / stats::median(samples), Unit::One)
        });
        let ways = Ways::all(cases, context);
        let mut gains: Vec<(Quantity, String)> = ways.iter().flat_map(Ways::gains).collect();
        gains.sort_by(|a, b| a.0.value().total_cmp(&b.0.value()));
        let at = |gain: Option<&(Quantity, String)>| gain.map(|(_, at)| at.clone()).unwrap_or_default();
        let faster: Vec<&Ways> = ways.iter().filter(|way| way.tf32_beats_eager()).collect();
        let number = |case: &StepCase, x| case.quantity(x, Unit::One);
        Some(Self {
            loss_error: Quantity::largest(captures().map(|(case, _, capture)| number(case, capture.loss_error)))?,
            nodes: Range::of(captures().map(|(case, _, capture)| number(case, capture.nodes as f64)))?,
            capturing: Quantity::largest(captures().map(|(case, _, capture)| case.median(&capture.time)))?,
            captured_std: Quantity::largest(deviations),
            least_at: at(gains.first()),
            most_at: at(gains.last()),
            gains: Range::of(gains.iter().map(|(gain, _)| gain)),
            tf32: Range::of(ways.iter().filter_map(|way| over(way.float32[0], way.tf32))),
            bfloat16: faster.iter().filter_map(|way| way.captured_beats_tf32()).collect(),
            faster: faster.iter().map(|way| way.size.size().name).collect(),
            setting: format!(
                "context {context} and batch {batch_size}, over {steps} steps after {warmup} warm-up steps"
            ),
            context,
        })
    }

    /// Adds the claims and the table.
    pub(super) fn conclude(&self, answer: &mut Answer, cases: &[StepCase]) -> Result<()> {
        let error = &self.loss_error;
        let claim = Claim::new("replays-compute-the-same", error.value() == 0.0);
        answer.claim(claim.operand("largest relative difference of a loss", error))?;
        let pays = |gains: &Range| gains.low.value() > 0.99 && gains.high.value() > 1.05;
        let mut claim = Claim::new("capture-speeds-up-steps", self.gains.as_ref().is_some_and(pays));
        if let Some(Range { low, high }) = &self.gains {
            claim = claim.operand("least eager over captured", low).operand("most", high);
        }
        answer.claim(claim.operand_text("wanted", "above 0.99 and above 1.05"))?;
        if self.tf32.is_some() {
            let name = "of the sizes whose eager bfloat16 is slower than TF32, captured it is faster in";
            let (faster, of) = (self.bfloat16.len(), self.faster.len());
            answer.claim(Claim::all("captured-bfloat16-beats-tf32", name, faster, of))?;
        }
        answer.table("captured", table(&Ways::all(cases, self.context)))
    }
}

fn table(ways: &[Ways]) -> Table {
    Table::of(ways)
        .text("size", |way| way.size.size().name)
        .right("float32: eager", |way| way.float32[0].map(whole_step))
        .number("captured", Style::Ms, 1, |way| way.float32[1].map(|case| median(case, TOTAL)))
        .number("ratio", Style::Fixed, 2, |way| over(way.float32[0], way.float32[1]))
        .right("bfloat16: eager", |way| way.bfloat16[0].map(whole_step))
        .number("captured", Style::Ms, 1, |way| way.bfloat16[1].map(|case| median(case, TOTAL)))
        .number("ratio", Style::Fixed, 2, |way| over(way.bfloat16[0], way.bfloat16[1]))
        .right("TF32: eager", |way| way.tf32.map(whole_step))
        .into()
}
