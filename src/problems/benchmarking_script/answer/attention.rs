//! Beyond the handout: the whole step with attention by plain operations, by PyTorch's operator and by our kernels.

use anyhow::Result;
use serde::Serialize;

use super::{StepCase, count, mixed, of_grid, ratio, sizes, total, whole_step};
use crate::attention::ImplementationName::{self, Flash, Naive, Sdpa};
use crate::bench::training_step::Params;
use crate::harness::answer::{Answer, Range, RecordSet, Table};
use crate::model::SizeName;

const GRID: &str = "flash";

#[derive(Serialize)]
pub(super) struct Attention {
    #[serde(skip)]
    params: Params,
    /// Plain attention's step over that with PyTorch's operator and with our kernels, where both are of one run.
    over_sdpa: Option<Range>,
    over_flash: Option<Range>,
}

impl Attention {
    /// None where there is no case.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let compared = of_grid(cases, GRID);
        let first = compared.first()?;
        let plain_over = |other| {
            Range::of(sizes(&compared).into_iter().filter_map(|size| {
                let step = |attention| total(find(&compared, size, attention));
                ratio(&step(Naive)?, &step(other)?)
            }))
        };
        Some(Self { params: first.params.clone(), over_sdpa: plain_over(Sdpa), over_flash: plain_over(Flash) })
    }

    /// Adds the table.
    pub(super) fn conclude(&self, answer: &mut Answer, set: &RecordSet, cases: &[StepCase]) -> Result<()> {
        let Params { batch_size, steps, warmup, .. } = self.params;
        let compared = of_grid(cases, GRID);
        let time = |attention| {
            let compared = &compared;
            move |size: &SizeName| find(compared, *size, attention).map(whole_step)
        };
        let table = Table::of(sizes(&compared))
            .text("size", |size| size.size().name)
            .right("plain (ms)", time(Naive))
            .right("PyTorch's (ms)", time(Sdpa))
            .right("ours (ms)", time(Flash));
        let caption = format!(
            "A training step with each attention, bfloat16 autocast, context {}, batch {batch_size}: mean ± standard \
             deviation over {steps} steps after {warmup} warm-up steps, or the range if unstable; {}.{}",
            count(self.params.context_length),
            set.machine()?,
            mixed(compared.iter().copied())
        );
        answer.table("attention", table.captioned(caption))
    }
}

fn find<'a>(cases: &[&'a StepCase], size: SizeName, attention: ImplementationName) -> Option<&'a StepCase> {
    cases.iter().copied().find(|case| case.params.size == size && case.params.attention == attention)
}
