//! Beyond the handout: the step written out in our kernels, beside one by autograd and the floor.

use anyhow::Result;
use serde::Serialize;

use super::{StepCase, count, mixed, of_grid, whole_step};
use crate::attention::ImplementationName;
use crate::bench::training_step::{Params, part_works};
use crate::cuda::Choice;
use crate::harness::answer::{Answer, Quantity, Range, RecordSet, Style, Table, Unit};
use crate::harness::record::Peaks;
use crate::harness::samples::Work;

const GRIDS: [&str; 4] = ["fused", "fused_long", "fused_float32", "fused_float32_heads_of_80"];

#[derive(Serialize)]
pub(super) struct Fused {
    #[serde(skip)]
    params: Params,
    /// Of all fused steps: the largest difference from an eager forward pass's loss, relative.
    fused_loss_error: Quantity,
    /// What timing gained over cuBLASLt's first choice, the most over all products.
    search_gain: Option<Quantity>,
    own_products: Option<OwnProducts>,
}

/// Forward products by our kernels beside the library's, over all fused steps.
#[derive(Serialize)]
struct OwnProducts {
    /// How many run ours, of how many.
    faster: usize,
    all: usize,
    /// Our time over the library's, of products that SwiGLU belongs to and of the others.
    gated: Range,
    plain: Range,
}

/// A fused step, and the same step another way.
struct Pair<'a> {
    fused: &'a StepCase,
    other: Option<&'a StepCase>,
    floor_s: Option<f64>,
}

impl<'a> Pair<'a> {
    fn all(cases: &'a [StepCase], peaks: &Peaks) -> Vec<Self> {
        let fused = GRIDS.iter().flat_map(|grid| of_grid(cases, grid));
        let pair = |fused: &'a StepCase| Self {
            fused,
            other: cases.iter().find(|case| is_other(fused, case)),
            floor_s: floor(&fused.params, peaks),
        };
        fused.map(pair).collect()
    }

    /// The least time over the median one.
    fn share(&self) -> Option<Quantity> {
        let row = self.fused.row()?;
        let median = self.fused.median(&row.total);
        Some(Quantity::new(self.floor_s? / median.value(), Unit::One, median.sources().to_vec()))
    }
}

/// The captured step with plain attention, or, where none was measured, the eager one with our attention.
fn is_other(fused: &StepCase, case: &StepCase) -> bool {
    let key = |case: &StepCase| (case.params.size, case.params.context_length, case.params.dtype);
    let is_counterpart = match case.grid.as_str() {
        "captured" => true,
        "flash" => case.params.attention == ImplementationName::Flash,
        _ => false,
    };
    is_counterpart && key(case) == key(fused)
}

/// Every part of the step at the peaks of the GPU's data sheet, in seconds; none where a peak is not known.
fn floor(params: &Params, peaks: &Peaks) -> Option<f64> {
    let of_part = |work: &Work| {
        let products = work.flops / peaks.flops_per_s.get(&work.precision)?;
        Some(products.max(work.bytes / peaks.bytes_per_s))
    };
    part_works(params).iter().map(of_part).sum()
}

impl Fused {
    /// None where no fused step was measured.
    pub(super) fn of(cases: &[StepCase], set: &RecordSet) -> Result<Option<Self>> {
        let pairs = Pair::all(cases, &set.newest_run()?.peaks);
        let measured = || pairs.iter().filter_map(|pair| Some((pair.fused, pair.fused.row()?.capture.as_ref()?)));
        let errors = measured().map(|(case, capture)| case.quantity(capture.loss_error, Unit::One));
        let (Some(first), Some(fused_loss_error)) = (pairs.first(), Quantity::largest(errors)) else { return Ok(None) };
        let searched = measured().flat_map(|(case, capture)| {
            let gain = |choice: &Choice| case.quantity(choice.first_s / choice.best_s - 1.0, Unit::One);
            capture.products.iter().map(gain)
        });
        Ok(Some(Self {
            params: first.fused.params.clone(),
            fused_loss_error,
            search_gain: Quantity::largest(searched),
            own_products: OwnProducts::of(cases),
        }))
    }

    /// Adds the table.
    pub(super) fn conclude(&self, answer: &mut Answer, set: &RecordSet, cases: &[StepCase]) -> Result<()> {
        let Params { batch_size, steps, warmup, .. } = self.params;
        let pairs = Pair::all(cases, &set.newest_run()?.peaks);
        let table = Table::of(&pairs)
            .text("size", |pair| pair.fused.params.size.size().name)
            .number("context", Style::Grouped, 0, |pair| pair.fused.params.context_length as f64)
            .text("dtype", |pair| pair.fused.params.dtype.name())
            .right("by autograd (ms)", |pair| pair.other.map(whole_step))
            .right("fused (ms)", |pair| whole_step(pair.fused))
            .number("floor (ms)", Style::Fixed, 1, |pair| Some(1e3 * pair.floor_s?))
            .number("floor over fused", Style::Percent, 0, |pair| pair.share());
        let caption = format!(
            "The fused step beside one by autograd: captured with plain attention at context {}, eager with our attention at \
             the longer context. Batch {batch_size}; mean ± standard deviation over {steps} steps after {warmup} warm-up steps, \
             or the range if unstable; {}. The floor takes every part at the peaks of the data sheet.{}",
            count(self.params.context_length),
            set.machine()?,
            mixed(pairs.iter().flat_map(|pair| [Some(pair.fused), pair.other]).flatten())
        );
        answer.table("fused", table.captioned(caption))
    }
}

impl OwnProducts {
    /// None where no product was timed by both.
    fn of(cases: &[StepCase]) -> Option<Self> {
        let choices = || {
            let captures = cases.iter().filter_map(|case| Some((case, case.row()?.capture.as_ref()?)));
            captures.flat_map(|(case, capture)| capture.own_products.iter().map(move |choice| (case, choice)))
        };
        let ratios = |is_gated| {
            let of_kind = choices().filter(|(_, choice)| choice.is_gated == is_gated);
            Range::of(of_kind.map(|(case, choice)| case.quantity(choice.own_s / choice.library_s, Unit::One)))
        };
        Some(Self {
            faster: choices().filter(|(_, choice)| choice.is_faster()).count(),
            all: choices().count(),
            gated: ratios(true)?,
            plain: ratios(false)?,
        })
    }
}

#[cfg(test)]
mod tests;
