//! FlashAttention-3's published times beside ours, and what the power limit does where 16 heads fill the GPU.

use anyhow::Result;
use serde::Serialize;

use super::cells::{CellPass, only, title};
use super::tables::time;
use crate::attention::implementations::by_name;
use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass::{self, Backward, Both, Forward};
use crate::harness::answer::format;
use crate::harness::answer::{Column, Quantity, Range, Table, Unit};
use crate::harness::conditions::Throttle;
use crate::harness::stats::{max, min};

/// Medians in milliseconds of causal attention in bfloat16, 16 heads of 16,384. No record holds them: all were measured
/// within an hour on one H200, not on that of the records.
struct Published {
    d: i64,
    pass: AttentionPass,
    /// FlashAttention-3 (commit 0251105a, CUDA 13.0), resting before each call.
    rested: f64,
    /// The same, call after call.
    sustained: f64,
    /// Ours (commit c5e1fba), call after call, in turns with others: the least and the largest median of several runs.
    ours: [f64; 2],
}

const HEADS: i64 = 16;
const SEQ: i64 = 16_384;

#[rustfmt::skip]
const FLASH_ATTENTION_3: [Published; 6] = [
    Published { d: 64, pass: Forward, rested: 0.975, sustained: 1.032, ours: [0.986, 0.986] },
    Published { d: 64, pass: Backward, rested: 2.259, sustained: 2.542, ours: [2.489, 2.520] },
    Published { d: 64, pass: Both, rested: 3.390, sustained: 3.656, ours: [3.651, 3.717] },
    Published { d: 128, pass: Forward, rested: 1.470, sustained: 1.742, ours: [1.632, 1.632] },
    Published { d: 128, pass: Backward, rested: 4.28, sustained: 4.592, ours: [4.77, 4.81] },
    Published { d: 128, pass: Both, rested: 5.98, sustained: 6.392, ours: [6.67, 6.72] },
];

/// Our time over FlashAttention-3's, on that machine.
#[derive(Serialize)]
pub struct Beside {
    /// Of the rested ones, how much longer ours takes at most.
    rested: Quantity,
    sustained: Range,
    #[serde(skip)]
    pub table: Table,
}

/// Of the cells with 16 heads; `None` without any.
pub fn beside(heads: &[CellPass]) -> Result<Option<Beside>> {
    let (ours, cudnn) = (by_name("flash")?, by_name("sdpa_cudnn")?);
    let mut table = Table::new(vec![
        Column::right("$d$"),
        Column::text("pass"),
        Column::time("FA3, rested (ms)"),
        Column::time("FA3, sustained (ms)"),
        Column::right("ours, sustained (ms)"),
        Column::time("ours, our run (ms)"),
        Column::time("cuDNN, our run (ms)"),
    ]);
    for published in &FLASH_ATTENTION_3 {
        let is_same = |p: &&CellPass| {
            let shape = (p.cell.dtype, p.cell.d_model, p.cell.seq, p.cell.batch, p.pass);
            shape == (Dtype::Bfloat16, published.d, SEQ, HEADS, published.pass)
        };
        let Some(cell) = heads.iter().find(is_same) else { continue };
        let seconds = |ms: f64| Quantity::constant(ms * 1e-3, Unit::Seconds);
        let [low, high] = published.ours.map(|ms| format::time(ms * 1e-3));
        table.row(vec![
            published.d.to_string().into(),
            title(cell.pass).into(),
            seconds(published.rested).into(),
            seconds(published.sustained).into(),
            if low == high { low } else { format!("{low} to {high}") }.into(),
            time(cell, ours),
            time(cell, cudnn),
        ]);
    }
    if table.rows.is_empty() {
        return Ok(None);
    }
    let one = |value: f64| Quantity::constant(value, Unit::One);
    let rested = FLASH_ATTENTION_3.iter().map(|p| one(p.ours[1] / p.rested - 1.0));
    let sustained = FLASH_ATTENTION_3.iter().flat_map(|p| p.ours.map(|ours| one(ours / p.sustained)));
    let (Some(rested), Some(sustained)) = (Quantity::largest(rested), Range::of(sustained)) else { return Ok(None) };
    let table = table.captioned(
        "FlashAttention-3 (FA3) and ours: bfloat16, causal, 16 heads of 16,384; medians. The first three times were measured \
         separately on another H200, not in our run. †: unstable, the turns spread beyond 5%.",
    );
    Ok(Some(Beside { rested, sustained, table }))
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
