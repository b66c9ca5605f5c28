//! Beyond the handout: whole steps captured as CUDA graphs, and float32 with TF32, beside eager steps.

use anyhow::Result;
use serde::Serialize;

use super::{SWEEP, StepCase, TOTAL, cell, median, of_grid, ratio, sizes, total, whole_step};
use crate::bench::training_step::Params;
use crate::harness::answer::format::print;
use crate::harness::answer::{Answer, Cell, Claim, Column, Quantity, Range, Style, Table, Unit};
use crate::harness::stats;
use crate::model::{Precision, SizeName};

const CAPTURED: &str = "captured";

#[derive(Serialize)]
pub(super) struct Captured {
    #[serde(skip)]
    params: Params,
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
        let (mut errors, mut nodes, mut times, mut deviations) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for case in &captured {
            let Some((row, capture)) = case.row().and_then(|row| Some((row, row.capture.as_ref()?))) else { continue };
            errors.push(case.quantity(capture.loss_error, Unit::One));
            nodes.push(case.quantity(capture.nodes as f64, Unit::One));
            times.push(case.median(&capture.time));
            let samples = &row.total.samples;
            if samples.len() > 1 {
                deviations.push(case.quantity(stats::std(samples) / stats::median(samples), Unit::One));
            }
        }
        let params = captured.first()?.params.clone();
        let ways = Ways::all(cases, params.context_length);
        let mut gains: Vec<(Quantity, String)> = ways.iter().flat_map(Ways::gains).collect();
        gains.sort_by(|a, b| a.0.value().total_cmp(&b.0.value()));
        let at = |gain: Option<&(Quantity, String)>| gain.map(|(_, at)| at.clone()).unwrap_or_default();
        let (least_at, most_at) = (at(gains.first()), at(gains.last()));
        let gains: Vec<Quantity> = gains.into_iter().map(|(gain, _)| gain).collect();
        let tf32: Vec<Quantity> = ways.iter().filter_map(|way| over(way.float32[0], way.tf32)).collect();
        let faster: Vec<&Ways> = ways.iter().filter(|way| way.tf32_beats_eager()).collect();
        Some(Self {
            params,
            loss_error: Quantity::largest(&errors)?.clone(),
            nodes: Range::of(&nodes)?,
            capturing: Quantity::largest(&times)?.clone(),
            captured_std: Quantity::largest(&deviations).cloned(),
            gains: Range::of(&gains),
            least_at,
            most_at,
            tf32: Range::of(&tf32),
            bfloat16: faster.iter().filter_map(|way| way.captured_beats_tf32()).collect(),
            faster: faster.iter().map(|way| way.size.size().name).collect(),
        })
    }

    /// "context 512 and batch 4, over 10 steps after 5 warm-up steps".
    pub(super) fn setting(&self) -> String {
        let Params { context_length, batch_size, steps, warmup, .. } = self.params;
        format!("context {context_length} and batch {batch_size}, over {steps} steps after {warmup} warm-up steps")
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
        answer.table("captured", table(&Ways::all(cases, self.params.context_length)))
    }
}

fn table(ways: &[Ways]) -> Table {
    let time = |head: &str| Column::number(head, Style::Ms, 1);
    let gain = || Column::number("ratio", Style::Fixed, 2);
    let mut table = Table::new(vec![
        Column::text("size"),
        Column::right("float32: eager"),
        time("captured"),
        gain(),
        Column::right("bfloat16: eager"),
        time("captured"),
        gain(),
        Column::right("TF32: eager"),
    ]);
    for way in ways {
        let mut row: Vec<Cell> = vec![way.size.size().name.into()];
        for [eager, captured] in [way.float32, way.bfloat16] {
            row.extend([whole_step(eager), cell(captured, TOTAL, median), over(eager, captured).into()]);
        }
        row.push(whole_step(way.tf32));
        table.row(row);
    }
    table
}
