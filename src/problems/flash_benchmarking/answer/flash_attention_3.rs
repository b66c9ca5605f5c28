//! Ours beside FlashAttention-3's published times, and what the power limit does where 16 heads fill the GPU.

use anyhow::Result;
use serde::Serialize;

use super::super::published::{FLASH_ATTENTION_3, Published};
use super::cells::{CellPass, PASSES, title};
use super::tables::by_rounds;
use crate::attention::implementations::by_name;
use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Column, Quantity, Style, Table, Unit};
use crate::harness::conditions::Throttle;
use crate::harness::stats::{min, quantile};

/// Rows in which ours is faster than the published time, of all.
#[derive(Serialize)]
pub struct Beside {
    pub faster: usize,
    pub rows: usize,
    /// Of a cell with 16 heads.
    calls: String,
    #[serde(skip)]
    pub table: Table,
}

/// None without cells of 16 heads.
pub fn beside(heads: &[CellPass], grid: &[CellPass]) -> Result<Option<Beside>> {
    let Some(first) = heads.first() else { return Ok(None) };
    let cudnn = by_name("sdpa_cudnn")?;
    let mut table = Table::new(vec![
        Column::right("heads"),
        Column::right("$T$"),
        Column::right("$d$"),
        Column::text("pass"),
        Column::time("ours (ms)"),
        Column::number("TFLOP/s", Style::Tflops, 0),
        Column::time("cuDNN (ms)"),
        Column::number("over cuDNN", Style::Fixed, 2),
        Column::time("FlashAttention-3 (ms, quoted)"),
        Column::number("over it", Style::Fixed, 2),
    ]);
    let (mut faster, mut rows) = (0, 0);
    for published in FLASH_ATTENTION_3 {
        let cells = if published.heads > 1 { heads } else { grid };
        for (cell, quoted) in PASSES.iter().filter_map(|pass| row(published, *pass, cells)) {
            let Some((implementation, ours)) = cell.our_implementation().and_then(|e| Some((e, cell.median(&e)?)))
            else {
                continue;
            };
            let theirs = cell.median(cudnn);
            let over_cudnn = cell.over(theirs.as_ref().map(Quantity::value));
            rows += 1;
            faster += usize::from(ours.value() < quoted);
            let pass = if cell.pass == AttentionPass::Both { "both" } else { title(cell.pass) };
            table.row(vec![
                published.heads.to_string().into(),
                grouped(published.seq as f64, 0).into(),
                published.d.to_string().into(),
                pass.into(),
                ours.into(),
                cell.rate(&implementation).into(),
                theirs.into(),
                over_cudnn.into(),
                Quantity::constant(quoted, Unit::Seconds).into(),
                cell.over(Some(quoted)).into(),
            ]);
        }
    }
    Ok(Some(Beside { faster, rows, calls: by_rounds(heads, first.cell.most_repeats, "calls"), table }))
}

/// Our pass of a published time, and that time in seconds.
fn row<'a>(published: &Published, pass: AttentionPass, cells: &[CellPass<'a>]) -> Option<(CellPass<'a>, f64)> {
    let quoted = match pass {
        AttentionPass::Forward => Some(published.forward),
        AttentionPass::Backward => Some(published.backward),
        AttentionPass::Both => published.both,
        AttentionPass::Summed => None,
    };
    let same = |p: &&CellPass| {
        let shape = (p.cell.dtype, p.cell.d_model, p.cell.seq, p.cell.batch);
        p.pass == pass && shape == (Dtype::Bfloat16, published.d, published.seq, published.heads)
    };
    Some((*cells.iter().find(same)?, quoted?))
}

/// The lowest clock under the power limit, and the passes of ours that it spread the most.
#[derive(Serialize)]
pub struct PowerCap {
    clock: Quantity,
    d: i64,
    best: Quantity,
    /// 99th percentile.
    worst: Quantity,
}

/// None where the clock was not held down by the power limit, or nobody looked.
pub fn power_cap(heads: &[CellPass]) -> Result<Option<PowerCap>> {
    let ours = by_name("flash")?;
    let capped = |pass: &&CellPass| {
        let during = pass.case.conditions.as_ref()?.during.as_ref()?;
        during.throttle.contains(&Throttle::SwPowerCap).then_some(during.sm_clock_hz.min)
    };
    let (mut clocks, mut widest) = (Vec::new(), None::<(f64, CellPass, Quantity, Quantity)>);
    for pass in heads.iter().filter(|p| p.pass == AttentionPass::Both) {
        let Some(clock) = capped(&pass) else { continue };
        clocks.push(pass.case.quantity(clock, Unit::Hertz));
        let Some(samples) = pass.samples(ours) else { continue };
        let best = pass.case.statistic(samples, min);
        let worst = pass.case.statistic(samples, |samples| quantile(samples, 0.99));
        let spread = worst.value() / best.value();
        if widest.as_ref().is_none_or(|(widest, ..)| spread > *widest) {
            widest = Some((spread, *pass, best, worst));
        }
    }
    let (Some(clock), Some((_, pass, best, worst))) = (Quantity::smallest(&clocks).cloned(), widest) else {
        return Ok(None);
    };
    Ok(Some(PowerCap { clock, d: pass.cell.d_model, best, worst }))
}
