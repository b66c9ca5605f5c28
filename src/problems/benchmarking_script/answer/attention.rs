//! Beyond the handout: the whole step with attention by plain operations, by PyTorch's operator and by our kernels.

use anyhow::Result;
use serde::Serialize;

use super::{StepCase, count, of_grid, ratio, sizes, total, whole_step};
use crate::attention::ImplementationName::{self, Flash, Naive, Sdpa};
use crate::bench::training_step::Params;
use crate::harness::answer::{Answer, Claim, Range, RecordSet, Table};
use crate::model::SizeName;

const GRID: &str = "flash";

#[derive(Serialize)]
pub(super) struct Attention {
    #[serde(skip)]
    pub(super) params: Params,
    /// The other attention's step over ours, of all sizes.
    over_plain: Option<Range>,
    over_sdpa: Option<Range>,
    mixed_runs: bool,
}

impl Attention {
    /// None where there is no case.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let compared = of_grid(cases, GRID);
        let first = compared.first()?;
        let over_ours = |other| {
            Range::of(sizes(&compared).into_iter().filter_map(|size| {
                let step = |attention| total(find(&compared, size, attention));
                ratio(&step(other)?, &step(Flash)?)
            }))
        };
        Some(Self {
            params: first.params.clone(),
            over_plain: over_ours(Naive),
            over_sdpa: over_ours(Sdpa),
            mixed_runs: compared.iter().any(|case| case.id.run != first.id.run),
        })
    }

    /// Adds the claim and the table.
    pub(super) fn conclude(&self, answer: &mut Answer, set: &RecordSet, cases: &[StepCase]) -> Result<()> {
        let mut claim = Claim::new("flash-shortens-the-step", false);
        if let (Some(plain), Some(sdpa)) = (&self.over_plain, &self.over_sdpa) {
            claim.held = plain.low.value() > 1.0;
            claim = claim.operand("smallest ratio of plain attention's step to ours", &plain.low);
            claim = claim.operand("of PyTorch's", &sdpa.low);
        }
        answer.claim(claim.operand_text("wanted", "the first above 1"))?;
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
            "A whole training step, eager, at context {} and batch {batch_size} in bfloat16 (autocast): medians ± standard \
             deviations in ms over {steps} steps after {warmup} warm-up steps. {}.",
            count(self.params.context_length),
            set.source()
        );
        answer.table("attention", table.captioned(caption))
    }
}

fn find<'a>(cases: &[&'a StepCase], size: SizeName, attention: ImplementationName) -> Option<&'a StepCase> {
    cases.iter().copied().find(|case| case.params.size == size && case.params.attention == attention)
}
