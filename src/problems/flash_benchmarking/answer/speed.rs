//! Ours beside plain attention and PyTorch's fastest, where launches bound the time and where kernels do.

use serde::Serialize;

use super::cells::{CellPass, PASSES, only, shape, title};
use crate::attention::implementations::by_name;
use crate::bench::dtype::Dtype;
use crate::bench::timing::Cache;
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::{Style, grouped};
use crate::harness::answer::{Claim, Column, Quantity, Range, SameRun, Table};

/// Up to this length a pass of plain attention waits for its launches; cells are compared as CUDA graphs.
const SHORT: i64 = 1024;
/// From this length kernels take all of the time.
const LONG: i64 = 16_384;

/// Of forward and backward together, over the cells of a regime and their turns.
#[derive(Serialize)]
struct Ratios {
    plain: Range,
    pytorch: Range,
}

/// Cells that are alike in what bounds them.
#[derive(Serialize)]
pub struct Regime {
    seq: String,
    bf16: Ratios,
    f32: Ratios,
}

#[derive(Serialize)]
pub struct Speed {
    short: Regime,
    long: Regime,
    /// Of the short cells.
    d: i64,
    /// Plain attention launched by the host over the same as a graph.
    launched: Option<Range>,
    #[serde(skip)]
    pub table: Table,
}

impl Speed {
    /// `None` where a regime has no cell with ours, plain attention and one of PyTorch's operators in either type.
    pub fn of(grid: &[CellPass], graphs: &[CellPass]) -> Option<Self> {
        let short = only(graphs, |p| p.cell.seq <= SHORT && p.cell.cache == Cache::Cold);
        let long = only(grid, |p| p.cell.seq >= LONG);
        let mut table = Table::new(vec![
            Column::text("cells"),
            Column::text("pass"),
            Column::number("over plain: least", Style::Fixed, 2),
            Column::number("most", Style::Fixed, 2),
            Column::number("over PyTorch's fastest: least", Style::Fixed, 2),
            Column::number("most", Style::Fixed, 2),
        ]);
        for (cells, name) in [(&short, "as graphs"), (&long, "long")] {
            for dtype in [Dtype::Bfloat16, Dtype::Float32] {
                for pass in PASSES {
                    let Some(Ratios { plain, pytorch }) = ratios(cells, dtype, pass) else { continue };
                    let mut row = vec![format!("{name}, {}", dtype.name()).into(), title(pass).into()];
                    row.extend([plain.low, plain.high, pytorch.low, pytorch.high].map(Into::into));
                    table.row(row);
                }
            }
        }
        let d = short.first()?.cell.d_model;
        let table = table.captioned(format!(
            "How many times as fast ours is, over the cells of a regime and their turns: as CUDA graphs up to $T = {}$ at $d \
             = {d}$, and launched from $T = {}$ on at every $d$ (\"long\"). PyTorch's fastest may be plain attention.",
            grouped(SHORT as f64, 0),
            grouped(LONG as f64, 0)
        ));
        let regime = |cells: &[CellPass], seq: i64| {
            let of = |dtype| ratios(cells, dtype, AttentionPass::Both);
            let (bf16, f32) = (of(Dtype::Bfloat16)?, of(Dtype::Float32)?);
            Some(Regime { seq: grouped(seq as f64, 0), bf16, f32 })
        };
        let launched = launched(grid, &short);
        Some(Self { short: regime(&short, SHORT)?, long: regime(&long, LONG)?, d, launched, table })
    }
}

fn ratios(cells: &[CellPass], dtype: Dtype, pass: AttentionPass) -> Option<Ratios> {
    let cells = only(cells, |p| (p.cell.dtype, p.pass) == (dtype, pass));
    let over = |ratio: fn(&CellPass) -> Option<Range>| {
        let ranges: Vec<Range> = cells.iter().filter_map(ratio).collect();
        Range::of(ranges.iter().flat_map(|range| [&range.low, &range.high]))
    };
    Some(Ratios { plain: over(|p| p.over_plain_by_turns())?, pytorch: over(|p| p.over_pytorch_by_turns())? })
}

/// What launches add to plain attention: the ends of what turns of both kinds give, forward and backward together.
fn launched(grid: &[CellPass], graphs: &[CellPass]) -> Option<Range> {
    let plain = by_name("naive").ok()?;
    let of_cell = |graph: &CellPass| {
        let base = grid.iter().find(|base| base.is_like(graph))?;
        let (launched, captured) = (base.span(plain)?, graph.span(plain)?);
        let ratio = |a: &Quantity, b: &Quantity| Some(SameRun::of(a, b).ok()?.ratio());
        Some([ratio(&launched.low, &captured.high)?, ratio(&launched.high, &captured.low)?])
    };
    Range::of(graphs.iter().filter(|p| p.pass == AttentionPass::Both).filter_map(of_cell).flatten())
}

/// Cells in which ours is faster than plain attention in every turn, forward and backward together.
#[derive(Serialize)]
pub struct Wins {
    pub faster: usize,
    pub cells: usize,
    /// Of all turns.
    pub least: Quantity,
}

impl Wins {
    pub fn of(grid: &[CellPass]) -> Option<Self> {
        let both = grid.iter().filter(|p| p.pass == AttentionPass::Both);
        let ratios: Vec<Range> = both.filter_map(CellPass::over_plain_by_turns).collect();
        let faster = ratios.iter().filter(|ratio| ratio.low.value() > 1.0).count();
        let least = Quantity::smallest(ratios.iter().map(|ratio| &ratio.low))?.clone();
        Some(Self { faster, cells: ratios.len(), least })
    }

    pub fn claim(&self) -> Claim {
        Claim::all(
            "faster-than-plain-attention",
            "cells in which every turn of ours is faster",
            self.faster,
            self.cells,
        )
        .operand("least ratio", &self.least)
    }
}

/// Forward and backward passes, each against the fastest that PyTorch has.
#[derive(Serialize)]
pub struct Passes {
    passes: usize,
    /// Those in which ours is slower in every turn: "float32, backward, $d = 128$, $T = 32,768$ (0.95)".
    slower: Vec<String>,
    #[serde(skip)]
    least: Quantity,
}

impl Passes {
    pub fn of(grid: &[CellPass]) -> Option<Self> {
        let alone = grid.iter().filter(|p| p.pass != AttentionPass::Both);
        let ratios: Vec<_> = alone.filter_map(|p| Some((p, p.over_pytorch_by_turns()?))).collect();
        let slower = ratios.iter().filter(|(_, ratio)| ratio.high.value() < 1.0).map(|(pass, _)| {
            let ratio = pass.over_pytorch().map_or(String::new(), |ratio| ratio.text(Style::Fixed, 2));
            format!("{}, {}, {} ({ratio})", pass.cell.dtype.name(), title(pass.pass), shape(pass.cell))
        });
        let least = Quantity::smallest(ratios.iter().map(|(_, ratio)| &ratio.low))?.clone();
        Some(Self { passes: ratios.len(), slower: slower.collect(), least })
    }

    pub fn claim(&self) -> Claim {
        Claim::new("no-pass-slower-than-pytorch", self.slower.is_empty())
            .count("passes slower in every turn", self.slower.len())
            .operand("least ratio", &self.least)
    }
}
