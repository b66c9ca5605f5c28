//! The rates of the grid against length, the steps that led to the kernels, and the gain by width and length.

use anyhow::Result;

use super::super::implementations::columns;
use super::cells::{CellPass, only, shown, title};
use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass;
use crate::harness::answer::figure::{Figure, Heatmap, Panel, Plot, PlotKind, Series};
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Answer, Quantity, RecordSet, Style};

const X_LABEL: &str = "sequence length T";

/// The steps from the definition to the kernels, and what the figure calls each.
const LADDER: [(&str, &str); 4] = [
    ("naive", "plain operations"),
    ("tiled", "FlashAttention-2 in tensor operations"),
    ("portable", "our kernels by mma"),
    ("flash", "ours, on Hopper by wgmma and TMA but for the shortest backward passes"),
];

/// The unit of rates: GFLOP/s of a CPU, and TFLOP/s of a GPU.
fn rate_unit(set: &RecordSet) -> (&'static str, Style) {
    if set.is_gpu() { ("TFLOP/s", Style::Tflops) } else { ("GFLOP/s", Style::Gflops) }
}

/// Both passes in bfloat16 at width 64 by each of our steps, where at least two were timed.
pub fn ladder(answer: &mut Answer, set: &RecordSet, grid: &[CellPass]) -> Result<()> {
    let (unit, style) = rate_unit(set);
    let cells = only(grid, |p| {
        (p.cell.dtype, p.pass, p.cell.d_model) == (Dtype::Bfloat16, AttentionPass::Both, 64) && p.cell.seq >= 512
    });
    let step = |(name, label): &(&str, &str)| {
        let implementation = columns().into_iter().find(|e| e.name == *name)?;
        let rate = |p: &CellPass| Some(p.rate(&implementation)?.value() * style.scale());
        let rates: Vec<_> = cells.iter().map(|p| (grouped(p.cell.seq as f64, 0), rate(p))).collect();
        rates.iter().any(|(_, rate)| rate.is_some()).then(|| Series::over_categories(*label, rates))
    };
    let series: Vec<Series> = LADDER.iter().filter_map(step).collect();
    if series.len() < 2 {
        return Ok(());
    }
    let names: Vec<_> = series.iter().map(|series| series.name.as_str()).collect();
    let caption = format!(
        "The ladder: {}; forward and backward together, bfloat16, $d = 64$. What each step inside a kernel brought is \
         in the notebook at the top of its file. {}.",
        names.join(", "),
        set.source()
    );
    let plot = Plot { log_y: true, ..Plot::new(PlotKind::Bar, X_LABEL, unit, series) };
    let alt = "Marks on a logarithmic axis for the rate of each of our rungs, one group for each sequence length.";
    answer.figure("ladder", Figure::plot(alt, plot).captioned(caption))
}

/// Both passes against length, a figure for each type and width.
pub fn rates(answer: &mut Answer, set: &RecordSet, grid: &[CellPass]) -> Result<()> {
    let (unit, style) = rate_unit(set);
    for dtype in [Dtype::Bfloat16, Dtype::Float32] {
        let of_dtype = only(grid, |p| p.cell.dtype == dtype && p.pass == AttentionPass::Both);
        for d in distinct(of_dtype.iter().map(|p| p.cell.d_model)) {
            let cells = only(&of_dtype, |p| p.cell.d_model == d);
            let line = |e: &_| {
                let rate = |p: &CellPass| Some(p.rate(e)?.value() * style.scale());
                let points: Vec<_> = cells.iter().map(|p| (p.cell.seq as f64, rate(p))).collect();
                points.iter().any(|(_, rate)| rate.is_some()).then(|| Series::over_numbers(e.label, points))
            };
            let series: Vec<Series> = shown(&cells).iter().filter_map(line).collect();
            if series.is_empty() {
                continue;
            }
            let plot = Plot { log_x: true, log_y: true, ..Plot::new(PlotKind::Line, X_LABEL, unit, series) };
            let name = dtype.name();
            let alt = format!(
                "Log-log plot of the rate of causal attention, forward and backward, against sequence length in {name} \
                 at width {d}, a line for each column."
            );
            let caption =
                format!("Rate of forward and backward together against length, {name}, $d = {d}$. {}.", set.source());
            answer.figure(format!("rate-{name}-{d}"), Figure::plot(alt, plot).captioned(caption))?;
        }
    }
    Ok(())
}

/// How many times as fast ours is, by width and length: three panels over PyTorch's operators, one over plain attention.
pub fn speed_ups(answer: &mut Answer, set: &RecordSet, grid: &[CellPass]) -> Result<()> {
    for dtype in [Dtype::Bfloat16, Dtype::Float32] {
        let cells = only(grid, |p| p.cell.dtype == dtype);
        let lengths = distinct(cells.iter().map(|p| p.cell.seq));
        let widths = distinct(cells.iter().map(|p| p.cell.d_model));
        let panel = |pass: AttentionPass, over: &str, ratio: fn(&CellPass) -> Option<Quantity>| {
            let at = |d: i64, seq: i64| {
                let cell = cells.iter().find(|p| (p.pass, p.cell.d_model, p.cell.seq) == (pass, d, seq))?;
                Some(ratio(cell)?.value())
            };
            let values = widths.iter().map(|d| lengths.iter().map(|seq| at(*d, *seq)).collect()).collect();
            Panel { name: format!("{}, over {over}", title(pass)), values }
        };
        let best = |pass| panel(pass, "the best of PyTorch", |p| p.over_pytorch());
        let plain = panel(AttentionPass::Both, "plain attention", |p| p.over_plain());
        use AttentionPass::{Backward, Both, Forward};
        let panels = vec![best(Forward), best(Backward), best(Both), plain];
        if panels.iter().flat_map(|p| &p.values).flatten().flatten().next().is_none() {
            continue;
        }
        let name = dtype.name();
        let [x, y] = [&lengths, &widths].map(|numbers| numbers.iter().map(i64::to_string).collect());
        let map = Heatmap { x_label: X_LABEL.into(), y_label: "d".into(), x, y, panels };
        let alt = format!(
            "Heat map of our speed-up by width and length in {name}: three panels over the best of PyTorch's \
             operators, one over plain attention."
        );
        let caption = format!(
            "How many times as fast as the best of PyTorch's operators, and as plain attention, ours is, {name}; \
             below 1 it is slower. {}.",
            set.source()
        );
        answer.figure(format!("speed-up-{name}"), Figure::heatmap(alt, map).captioned(caption))?;
    }
    Ok(())
}

/// Each once, in ascending order.
fn distinct(numbers: impl Iterator<Item = i64>) -> Vec<i64> {
    numbers.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}
