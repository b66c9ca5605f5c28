//! The rates of the grid against length, the steps that led to the kernels, and the gain by width and length.

use super::super::implementations::columns;
use super::cells::{CellPass, only, shown, title};
use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass;
use crate::harness::answer::figure::{Figure, Heatmap, Panel, Plot, PlotKind, Series};
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Quantity, RecordSet};

const X_LABEL: &str = "sequence length T";

/// The steps from the definition to the kernels, and what the figure calls each.
const LADDER: [(&str, &str); 4] = [
    ("naive", "plain operations"),
    ("tiled", "FlashAttention-2 in tensor operations"),
    ("portable", "our kernels by mma"),
    ("flash", "ours, on Hopper by wgmma and TMA but for the shortest backward passes"),
];

/// A figure shows GFLOP/s of a CPU, and TFLOP/s of a GPU.
struct RateAxis {
    label: &'static str,
    flops_per_s: f64,
}

impl RateAxis {
    fn of(set: &RecordSet) -> Self {
        match set.is_gpu() {
            true => Self { label: "TFLOP/s", flops_per_s: 1e12 },
            false => Self { label: "GFLOP/s", flops_per_s: 1e9 },
        }
    }

    fn value(&self, rate: Option<Quantity>) -> Option<f64> {
        Some(rate?.value() / self.flops_per_s)
    }
}

/// Both passes in bfloat16 at width 64 by each of our steps; none where fewer than two were timed.
pub fn ladder(set: &RecordSet, grid: &[CellPass]) -> Option<Figure> {
    let axis = RateAxis::of(set);
    let cells = only(grid, |p| {
        (p.cell.dtype, p.pass, p.cell.d_model) == (Dtype::Bfloat16, AttentionPass::Both, 64) && p.cell.seq >= 512
    });
    let step = |(name, label): &(&str, &str)| {
        let implementation = columns().into_iter().find(|e| e.name == *name)?;
        let rates = cells.iter().map(|p| (grouped(p.cell.seq as f64, 0), axis.value(p.rate(&implementation))));
        let rates: Vec<_> = rates.collect();
        rates.iter().any(|(_, rate)| rate.is_some()).then(|| Series::over_categories(*label, rates))
    };
    let series: Vec<Series> = LADDER.iter().filter_map(step).collect();
    if series.len() < 2 {
        return None;
    }
    let names: Vec<_> = series.iter().map(|series| series.name.as_str()).collect();
    let caption = format!(
        "The ladder: {}; forward and backward together, bfloat16, $d = 64$. What each step inside a kernel brought is \
         in the notebook at the top of its file. {}.",
        names.join(", "),
        set.source()
    );
    let mut plot = Plot::new(PlotKind::Bar, X_LABEL, axis.label, series);
    plot.log_y = true;
    let alt = "Marks on a logarithmic axis for the rate of each of our rungs, one group for each sequence length.";
    Some(Figure::plot(alt, plot).captioned(caption))
}

/// Both passes against length, a figure for each type and width; with the end of its id.
pub fn rates(set: &RecordSet, grid: &[CellPass]) -> Vec<(String, Figure)> {
    let axis = RateAxis::of(set);
    let mut figures = Vec::new();
    for dtype in [Dtype::Bfloat16, Dtype::Float32] {
        let of_dtype = only(grid, |p| p.cell.dtype == dtype && p.pass == AttentionPass::Both);
        for d in distinct(of_dtype.iter().map(|p| p.cell.d_model)) {
            let cells = only(&of_dtype, |p| p.cell.d_model == d);
            let line = |e: &_| {
                let points: Vec<_> = cells.iter().map(|p| (p.cell.seq as f64, axis.value(p.rate(e)))).collect();
                points.iter().any(|(_, rate)| rate.is_some()).then(|| Series::over_numbers(e.label, points))
            };
            let series: Vec<Series> = shown(&cells).iter().filter_map(line).collect();
            if series.is_empty() {
                continue;
            }
            let mut plot = Plot::new(PlotKind::Line, X_LABEL, axis.label, series);
            (plot.log_x, plot.log_y) = (true, true);
            let name = dtype.name();
            let alt = format!(
                "Log-log plot of the rate of causal attention, forward and backward, against sequence length in {name} \
                 at width {d}, a line for each column."
            );
            let caption =
                format!("Rate of forward and backward together against length, {name}, $d = {d}$. {}.", set.source());
            figures.push((format!("{name}-{d}"), Figure::plot(alt, plot).captioned(caption)));
        }
    }
    figures
}

/// How many times as fast ours is, by width and length: three panels over PyTorch's operators, one over plain attention.
pub fn speed_ups(set: &RecordSet, grid: &[CellPass]) -> Vec<(String, Figure)> {
    let of_dtype = |dtype: Dtype| {
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
        panels.iter().flat_map(|p| &p.values).flatten().flatten().next()?;
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
        Some((name.to_string(), Figure::heatmap(alt, map).captioned(caption)))
    };
    [Dtype::Bfloat16, Dtype::Float32].into_iter().filter_map(of_dtype).collect()
}

/// Each once, in ascending order.
fn distinct(numbers: impl Iterator<Item = i64>) -> Vec<i64> {
    numbers.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}
