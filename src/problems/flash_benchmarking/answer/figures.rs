//! The rates of the grid against length, and the gain by width and length.

use anyhow::Result;

use super::super::flash_attention_4;
use super::cells::{CellPass, only, shown, title};
use crate::attention::implementations::{Implementation, by_name};
use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass::{self, Backward, Both, Forward};
use crate::harness::answer::figure::{Figure, Heatmap, Panel, Plot, PlotKind, Series};
use crate::harness::answer::{Answer, Quantity, Style};

const DTYPES: [Dtype; 2] = [Dtype::Bfloat16, Dtype::Float32];
pub const X_LABEL: &str = "sequence length T (tokens)";
/// Of the rates; below it all of them are near zero.
const LEAST_SEQ: i64 = 1024;
/// A part of ours, which the tables have.
const NOT_DRAWN: &str = "portable";

/// The implementations that have a line in a figure of these cells.
pub fn drawn(cells: &[CellPass]) -> Vec<Implementation> {
    shown(cells).into_iter().filter(|e| e.name != NOT_DRAWN).collect()
}

/// Both passes against length: a row of panels for each type, a panel for each width.
pub fn rates(answer: &mut Answer, grid: &[CellPass], on: &str) -> Result<()> {
    let mut plots = Vec::new();
    for dtype in DTYPES {
        let of_dtype = only(grid, |p| p.cell.dtype == dtype && p.pass == Both && p.cell.seq >= LEAST_SEQ);
        for d in widths(&of_dtype) {
            let cells = only(&of_dtype, |p| p.cell.d_model == d);
            let line = |e: &_| {
                let rate = |p: &CellPass| Some(p.rate(e)?.value() * Style::Tflops.scale());
                let points: Vec<_> = cells.iter().map(|p| (p.cell.seq as f64, rate(p))).collect();
                points.iter().any(|(_, rate)| rate.is_some()).then(|| Series::over_numbers(e.label, points))
            };
            let series: Vec<Series> = drawn(&cells).iter().filter_map(line).collect();
            if !series.is_empty() {
                let plot = Plot { log_x: true, ..Plot::new(PlotKind::Line, X_LABEL, "throughput (TFLOP/s)", series) };
                plots.push((format!("{}, d = {d}", dtype.name()), plot));
            }
        }
    }
    if plots.is_empty() {
        return Ok(());
    }
    let alt = "Lines of TFLOP/s of causal attention, forward and backward, against sequence length: a row of panels for each \
               type, a panel for each width, a line for each implementation.";
    let caption =
        format!("Rate of forward and backward together, one causal head on {on}; masked scores count as no work.");
    answer.figure("full-rates", Figure::small_multiples(alt, 4, plots).captioned(caption))
}

/// How many times as fast ours is, by width and length: both passes in bfloat16 in one figure, all else in another.
pub fn speed_ups(answer: &mut Answer, grid: &[CellPass], on: &str) -> Result<()> {
    let first = [(Dtype::Bfloat16, Both, OVER_PLAIN), (Dtype::Bfloat16, Both, OVER_PYTORCH)];
    let alone = DTYPES.map(|dtype| [(dtype, Forward, OVER_PYTORCH), (dtype, Backward, OVER_PYTORCH)]).concat();
    let float32 = [(Dtype::Float32, Both, OVER_PLAIN), (Dtype::Float32, Both, OVER_PYTORCH)];
    for (id, panels) in [("speed-up", first.to_vec()), ("full-speed-up", [alone, float32.to_vec()].concat())] {
        let Some(map) = heatmap(grid, &panels) else { continue };
        let alt = "Heat map of our speed-up by width and length: a panel for each type, pass and peer.";
        let beside = if has_short_cells_beside_fa4(grid)? { BESIDE_FA4 } else { "" };
        let caption = format!(
            "How many times as fast ours is, by the medians of all cells on {on}; below 1 it is slower. \"PyTorch's fastest\" may \
             be plain attention. Short passes include their launches.{beside}"
        );
        answer.figure(id, Figure::heatmap(alt, map).captioned(caption))?;
    }
    Ok(())
}

const BESIDE_FA4: &str = " Up to T = 4,096 at d = 64 and 128, FlashAttention-4's process took turns in bfloat16, and launches took longer than before.";

/// Whether the records have cells that wait for launches, in which FlashAttention-4 took turns.
fn has_short_cells_beside_fa4(grid: &[CellPass]) -> Result<bool> {
    let fa4 = by_name("flash_attention_4")?;
    Ok(grid.iter().any(|pass| pass.cell.seq < flash_attention_4::LEAST_SEQ && pass.median(fa4).is_some()))
}

type Ratio = (&'static str, fn(&CellPass) -> Option<Quantity>);

const OVER_PLAIN: Ratio = ("plain attention", |pass| pass.over_plain());
const OVER_PYTORCH: Ratio = ("PyTorch's fastest", |pass| pass.over_pytorch());

/// `None` where no panel has a ratio.
fn heatmap(grid: &[CellPass], panels: &[(Dtype, AttentionPass, Ratio)]) -> Option<Heatmap> {
    let (widths, lengths) = (widths(grid), distinct(grid.iter().map(|p| p.cell.seq)));
    let panels = panels.iter().map(|(dtype, pass, (peer, ratio))| {
        let at = |d: i64, seq: i64| {
            let key = (*dtype, *pass, d, seq);
            let cell = grid.iter().find(|p| (p.cell.dtype, p.pass, p.cell.d_model, p.cell.seq) == key)?;
            Some(ratio(cell)?.value())
        };
        let values: Vec<Vec<_>> = widths.iter().map(|d| lengths.iter().map(|seq| at(*d, *seq)).collect()).collect();
        Panel { name: format!("{}, {}, over {peer}", dtype.name(), title(*pass)), values }
    });
    let panels: Vec<Panel> = panels.filter(|panel| panel.values.iter().flatten().any(Option::is_some)).collect();
    let [x, y] = [&lengths, &widths].map(|numbers| numbers.iter().map(i64::to_string).collect());
    (!panels.is_empty()).then(|| Heatmap { x_label: X_LABEL.into(), y_label: "d".into(), x, y, panels })
}

pub fn widths(cells: &[CellPass]) -> Vec<i64> {
    distinct(cells.iter().map(|p| p.cell.d_model))
}

/// Each once, in ascending order.
fn distinct(numbers: impl Iterator<Item = i64>) -> Vec<i64> {
    numbers.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}
