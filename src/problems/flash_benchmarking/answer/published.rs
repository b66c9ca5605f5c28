//! FlashAttention-3's published times, and what the power limit does where 16 heads fill the GPU.

use anyhow::Result;
use serde::Serialize;

use super::cells::{CellPass, only};
use crate::attention::implementations::by_name;
use crate::bench::dtype::Dtype;
use crate::bench::timing::Pace;
use crate::bench::work::AttentionPass::{self, Backward, Both, Forward};
use crate::harness::answer::{Quantity, Range, Unit};
use crate::harness::conditions::Throttle;
use crate::harness::stats::{max, min};

/// Medians in milliseconds of FlashAttention-3 (commit 0251105a, CUDA 13.0): causal, bfloat16, 16 heads of 16,384. No record
/// holds them: they were measured within an hour on one H200, not on that of the records.
struct Published {
    d: i64,
    pass: AttentionPass,
    /// Resting before each call.
    rested: f64,
    /// Call after call.
    sustained: f64,
}

const HEADS: i64 = 16;
const SEQ: i64 = 16_384;

#[rustfmt::skip]
const FLASH_ATTENTION_3: [Published; 6] = [
    Published { d: 64, pass: Forward, rested: 0.975, sustained: 1.032 },
    Published { d: 64, pass: Backward, rested: 2.259, sustained: 2.542 },
    Published { d: 64, pass: Both, rested: 3.390, sustained: 3.656 },
    Published { d: 128, pass: Forward, rested: 1.470, sustained: 1.742 },
    Published { d: 128, pass: Backward, rested: 4.28, sustained: 4.592 },
    Published { d: 128, pass: Both, rested: 5.98, sustained: 6.392 },
];

/// FlashAttention-3's time for such a pass, by the same protocol; `None` where none is published.
pub fn flash_attention_3(of: &CellPass) -> Option<Quantity> {
    let cell = of.cell;
    let known = (cell.dtype, cell.seq, cell.batch) == (Dtype::Bfloat16, SEQ, HEADS);
    let published = FLASH_ATTENTION_3.iter().find(|p| known && (p.d, p.pass) == (cell.d_model, of.pass))?;
    let ms = match cell.pace {
        Pace::Rested => published.rested,
        Pace::Sustained => published.sustained,
    };
    Some(Quantity::constant(ms * 1e-3, Unit::Seconds))
}

/// The lowest clock under the power limit, and the pass of ours that it spread the most.
#[derive(Serialize)]
pub struct PowerCap {
    clock: Quantity,
    d: i64,
    times: Range,
}

/// `None` where the clock was not held down by the power limit, or nobody looked.
pub fn power_cap(heads: &[CellPass]) -> Result<Option<PowerCap>> {
    let ours = by_name("flash")?;
    let capped_clock = |pass: &CellPass| {
        if !pass.cell.pace.is_sustained() {
            return None;
        }
        let during = pass.case.conditions.as_ref()?.during.as_ref()?;
        let capped = during.throttle.contains(&Throttle::SwPowerCap);
        capped.then(|| pass.case.quantity(during.sm_clock_hz.min, Unit::Hertz))
    };
    let capped = only(heads, |p| p.pass == Both && capped_clock(p).is_some());
    let clocks: Vec<Quantity> = capped.iter().filter_map(capped_clock).collect();
    let ends = capped.iter().filter_map(|pass| {
        let end = |of: fn(&[f64]) -> f64| Some(pass.case.statistic(pass.samples(ours)?, of));
        Some((pass.cell.d_model, Range { low: end(min)?, high: end(max)? }))
    });
    let spread = |(_, times): &(i64, Range)| times.high.value() / times.low.value();
    let widest = ends.reduce(|widest, next| if spread(&next) > spread(&widest) { next } else { widest });
    let (Some(clock), Some((d, times))) = (Quantity::smallest(&clocks).cloned(), widest) else { return Ok(None) };
    Ok(Some(PowerCap { clock, d, times }))
}
