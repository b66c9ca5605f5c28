//! Ours beside FlashAttention-3's published times, and what the power limit does where 16 heads fill the GPU.

use anyhow::Result;
use serde::Serialize;

use super::cells::{CellPass, only, title};
use super::tables::by_rounds;
use crate::attention::implementations::by_name;
use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass::{self, Backward, Both, Forward};
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Column, Quantity, Style, Table, Unit};
use crate::harness::conditions::Throttle;
use crate::harness::stats::{min, quantile};

/// A median of `do_bench`, of causal attention in bfloat16.
struct Published {
    heads: i64,
    seq: i64,
    d: i64,
    pass: AttentionPass,
    seconds: f64,
}

/// FlashAttention-3 (commit 0251105a, built with CUDA 13.0) as bare operators, on an H200 at another time: it is not part
/// of PyTorch, whose operators are timed beside ours.
const FLASH_ATTENTION_3: &[Published] = &[
    Published { heads: 16, seq: 16_384, d: 64, pass: Forward, seconds: 1.067e-3 },
    Published { heads: 16, seq: 16_384, d: 64, pass: Backward, seconds: 2.599e-3 },
    Published { heads: 16, seq: 16_384, d: 64, pass: Both, seconds: 3.664e-3 },
    Published { heads: 16, seq: 16_384, d: 128, pass: Forward, seconds: 1.704e-3 },
    Published { heads: 16, seq: 16_384, d: 128, pass: Backward, seconds: 4.771e-3 },
    Published { heads: 16, seq: 16_384, d: 128, pass: Both, seconds: 6.444e-3 },
    Published { heads: 1, seq: 8192, d: 64, pass: Forward, seconds: 0.097e-3 },
    Published { heads: 1, seq: 8192, d: 64, pass: Backward, seconds: 0.149e-3 },
    Published { heads: 1, seq: 65_536, d: 64, pass: Forward, seconds: 1.104e-3 },
    Published { heads: 1, seq: 65_536, d: 64, pass: Backward, seconds: 2.527e-3 },
    Published { heads: 1, seq: 8192, d: 128, pass: Forward, seconds: 0.093e-3 },
    Published { heads: 1, seq: 8192, d: 128, pass: Backward, seconds: 0.254e-3 },
    Published { heads: 1, seq: 65_536, d: 128, pass: Forward, seconds: 1.644e-3 },
    Published { heads: 1, seq: 65_536, d: 128, pass: Backward, seconds: 4.597e-3 },
];

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
        let same = |p: &&CellPass| {
            let shape = (p.cell.dtype, p.cell.d_model, p.cell.seq, p.cell.batch);
            p.pass == published.pass && shape == (Dtype::Bfloat16, published.d, published.seq, published.heads)
        };
        let Some(cell) = cells.iter().find(same) else { continue };
        let (Some(ours), Some(implementation)) = (cell.ours(), cell.our_implementation()) else { continue };
        let cudnn = cell.median(cudnn);
        let quoted = Quantity::constant(published.seconds, Unit::Seconds);
        rows += 1;
        faster += usize::from(ours.value() < quoted.value());
        table.row(vec![
            published.heads.to_string().into(),
            grouped(published.seq as f64, 0).into(),
            published.d.to_string().into(),
            if cell.pass == AttentionPass::Both { "both" } else { title(cell.pass) }.into(),
            ours.into(),
            cell.rate(&implementation).into(),
            cudnn.clone().into(),
            cudnn.and_then(|time| cell.over(&time)).into(),
            (&quoted).into(),
            cell.over(&quoted).into(),
        ]);
    }
    Ok(Some(Beside { faster, rows, calls: by_rounds(heads, first.cell.most_repeats, "calls"), table }))
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
    let capped_clock = |pass: &CellPass| {
        let during = pass.case.conditions.as_ref()?.during.as_ref()?;
        let capped = during.throttle.contains(&Throttle::SwPowerCap);
        capped.then(|| pass.case.quantity(during.sm_clock_hz.min, Unit::Hertz))
    };
    let capped = only(heads, |p| p.pass == AttentionPass::Both && capped_clock(p).is_some());
    let clocks: Vec<Quantity> = capped.iter().filter_map(capped_clock).collect();
    let ends = capped.iter().filter_map(|pass| {
        let end = |of: fn(&[f64]) -> f64| Some(pass.case.statistic(pass.samples(ours)?, of));
        Some((pass.cell.d_model, end(min)?, end(|samples| quantile(samples, 0.99))?))
    });
    let spread = |(_, best, worst): &(i64, Quantity, Quantity)| worst.value() / best.value();
    let widest = ends.reduce(|widest, next| if spread(&next) > spread(&widest) { next } else { widest });
    let (Some(clock), Some((d, best, worst))) = (Quantity::smallest(&clocks).cloned(), widest) else { return Ok(None) };
    Ok(Some(PowerCap { clock, d, best, worst }))
}
