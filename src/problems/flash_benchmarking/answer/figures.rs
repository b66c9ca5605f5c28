//! The rates of the grid against length, and the gain by width and length.

use anyhow::Result;

use super::cells::{CellPass, only, shown, title};
use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass;
use crate::harness::answer::figure::{Figure, Heatmap, Panel, Plot, PlotKind, Series};
use crate::harness::answer::{Answer, Quantity, Style};

const X_LABEL: &str = "sequence length T";
/// A part of ours, which the tables have.
const NOT_DRAWN: &str = "portable";

/// Both passes against length, a figure for each type and width.
pub fn rates(answer: &mut Answer, grid: &[CellPass]) -> Result<()> {
    for dtype in [Dtype::Bfloat16, Dtype::Float32] {
        let of_dtype = only(grid, |p| p.cell.dtype == dtype && p.pass == AttentionPass::Both);
        for d in distinct(of_dtype.iter().map(|p| p.cell.d_model)) {
            let cells = only(&of_dtype, |p| p.cell.d_model == d);
            let line = |e: &_| {
                let rate = |p: &CellPass| Some(p.rate(e)?.value() * Style::Tflops.scale());
                let points: Vec<_> = cells.iter().map(|p| (p.cell.seq as f64, rate(p))).collect();
                points.iter().any(|(_, rate)| rate.is_some()).then(|| Series::over_numbers(e.label, points))
            };
            let series: Vec<Series> = shown(&cells).iter().filter(|e| e.name != NOT_DRAWN).filter_map(line).collect();
            if series.is_empty() {
                continue;
            }
            let plot = Plot { log_x: true, log_y: true, ..Plot::new(PlotKind::Line, X_LABEL, "TFLOP/s", series) };
            let name = dtype.name();
            let alt = format!(
                "Log-log plot of the rate of causal attention, forward and backward, against sequence length in {name} \
                 at width {d}, a line for each column."
            );
            let caption = format!("Rate of forward and backward together, {name}, $d = {d}$.");
            answer.figure(format!("rate-{name}-{d}"), Figure::plot(alt, plot).captioned(caption))?;
        }
    }
    Ok(())
}

/// How many times as fast ours is, by width and length: three panels over PyTorch's fastest, one over plain attention.
pub fn speed_ups(answer: &mut Answer, grid: &[CellPass]) -> Result<()> {
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
        let best = |pass| panel(pass, "PyTorch's fastest", |p| p.over_pytorch());
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
            "Heat map of our speed-up by width and length in {name}: three panels over PyTorch's fastest, one over plain \
             attention."
        );
        let caption = format!(
            "How many times as fast ours is, {name}: over PyTorch's fastest (plain attention or a fused operator), and over \
             plain attention. Below 1 it is slower. Short passes include their launches."
        );
        answer.figure(format!("speed-up-{name}"), Figure::heatmap(alt, map).captioned(caption))?;
    }
    Ok(())
}

/// Each once, in ascending order.
fn distinct(numbers: impl Iterator<Item = i64>) -> Vec<i64> {
    numbers.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}
