//! Ours against plain attention, PyTorch's operators and FlashAttention-3: gains by cell, and what a timing depends on.

mod cells;
mod figures;
mod flash_attention_3;
mod tables;
#[cfg(test)]
mod tests;

use anyhow::Result;
use serde::Serialize;

use self::cells::{CellPass, FlashCase, only, passes, shape, title};
use self::flash_attention_3::{Beside, PowerCap, beside, power_cap};
use self::tables::by_rounds;
use super::checks::GRIDS;
use super::implementations::columns;
use super::measure::{FlashBenchmarking, Launch, Params};
use super::verify::{TAIL, WHOLE};
use crate::bench::dtype::Dtype;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::timing::{Cache, FLUSHED_BYTES};
use crate::bench::tolerance;
use crate::bench::work::{AttentionPass, BACKWARD_OVER_FORWARD};
use crate::harness::answer::format::{grouped, markdown};
use crate::harness::answer::{Answer, Audience, CaseOutcome, Claim, Quantity, Range, RecordSet, Records, Unit};
use crate::harness::stats::Summary;

/// The grid of 16 heads, which fill a GPU.
const HEADS: &str = "heads";
const LEADERBOARD: &str = "leaderboard";
/// A mean that is this close to its median tells the same.
const NEAR: f64 = 0.05;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    gpu: bool,
    source: String,
    flushed: Quantity,
    /// Operations of the backward pass over those of the forward pass.
    backward: f64,
    /// Positions up to which every element is compared, and those compared of longer sequences.
    whole: i64,
    tail: i64,
    bound_bf16: f64,
    bound_f32: f64,
    grid: Option<Grid>,
    plain: Option<Wins>,
    pytorch: Option<Wins>,
    /// The least of all gains over the fastest of everything else.
    least: Option<Quantity>,
    /// Of FlashAttention-3's times.
    beside: Option<Beside>,
    cap: Option<PowerCap>,
    #[serde(flatten)]
    endings: Endings,
    mean: Option<Mean>,
    other: Option<Conditions>,
    board: Option<Leaderboard>,
}

/// How the grid was timed.
#[derive(Serialize)]
struct Grid {
    /// In milliseconds.
    warmup: i64,
    rep: i64,
    rounds: String,
    cache: &'static str,
    launch: &'static str,
}

/// Cells in which ours is faster, of those in which both were timed.
#[derive(Serialize)]
struct Wins {
    faster: usize,
    cells: usize,
    ratios: Range,
}

/// What has no figure and why, each reason once.
#[derive(Default, Serialize)]
struct Endings {
    missing: Vec<String>,
    not_run: Vec<String>,
    failed: Vec<String>,
    oom: Vec<String>,
}

/// Of all figures, those whose mean is near their median, and how far the farthest is.
#[derive(Serialize)]
struct Mean {
    figures: usize,
    near: usize,
    farthest: Quantity,
}

#[derive(Serialize)]
struct Conditions {
    calls: String,
    d: i64,
}

#[derive(Serialize)]
struct Leaderboard {
    heads: i64,
    seq: String,
    d: i64,
    dtype: &'static str,
    /// In milliseconds.
    rep: i64,
    warmup: i64,
    measured: bool,
    /// Why it was not.
    why: String,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<FlashBenchmarking>()?;
    let all = passes(&cases);
    let grid = cells::grid(&all);
    let gains = if main.is_gpu() { tables::gains(&grid)? } else { None };
    let heads = only(&all, |p| p.case.grid == HEADS);
    let others = only(&all, |p| !GRIDS.contains(&p.case.grid.as_str()) && p.case.grid != HEADS);
    let conditions = tables::conditions(&others, &grid);
    let board = cases.iter().find(|case| case.grid == LEADERBOARD);
    let quoted = Quoted {
        gpu: main.is_gpu(),
        source: main.source(),
        flushed: Quantity::constant(FLUSHED_BYTES as f64, Unit::Bytes),
        backward: BACKWARD_OVER_FORWARD,
        whole: WHOLE,
        tail: TAIL,
        bound_bf16: tolerance::attention(Dtype::Bfloat16),
        bound_f32: tolerance::attention(Dtype::Float32),
        grid: grid.first().map(|first| how_timed(first, &grid)),
        plain: wins(&grid, |p| p.over_plain()),
        pytorch: wins(&grid, |p| p.over_pytorch()),
        least: gains.as_ref().map(|gains| gains.least.clone()),
        beside: if gains.is_some() { beside(&heads, &grid)? } else { None },
        cap: power_cap(&heads)?,
        endings: endings(&cases, &grid),
        mean: mean(&grid),
        other: conditions.as_ref().and(others.first()).map(|first| Conditions {
            calls: by_rounds(&others, first.cell.most_repeats, "calls"),
            d: first.cell.d_model,
        }),
        board: board.and_then(leaderboard),
    };
    let mut answer = Answer::new(&quoted)?;
    claims(&mut answer, &quoted)?;
    if let Some(gains) = gains {
        gains.claims.into_iter().try_for_each(|claim| answer.claim(claim))?;
        answer.table("gains", gains.table)?;
    }
    if let Some(beside) = quoted.beside {
        answer.table("flash-attention-3", beside.table)?;
    }
    times(&mut answer, main, &grid)?;
    if !grid.is_empty() {
        answer.table("errors", tables::errors(&grid))?;
    }
    if let Some(table) = conditions {
        answer.table("conditions", table)?;
    }
    if let Some((case, row)) = board.and_then(|case| Some((case, case.row()?))) {
        answer.table(LEADERBOARD, tables::leaderboard(case, row))?;
    }
    figures::ladder(&mut answer, main, &grid)?;
    figures::rates(&mut answer, main, &grid)?;
    figures::speed_ups(&mut answer, main, &grid)?;
    beside_the_gpu(&mut answer, records)?;
    Ok(answer)
}

/// A table for each type and pass.
fn times(answer: &mut Answer, main: &RecordSet, grid: &[CellPass]) -> Result<()> {
    for dtype in [Dtype::Bfloat16, Dtype::Float32] {
        for pass in cells::PASSES {
            let cells = only(grid, |p| p.cell.dtype == dtype && p.pass == pass);
            if let Some(table) = tables::times(main, &cells) {
                answer.table(format!("times-{}-{}", dtype.name(), title(pass)), table)?;
            }
        }
    }
    Ok(())
}

/// The small grid of a CPU, where a GPU's is the main one.
fn beside_the_gpu(answer: &mut Answer, records: &Records) -> Result<()> {
    let (Some(_), Some(cpu)) = (records.gpu(), records.cpu()) else { return Ok(()) };
    let cases = cpu.cases::<FlashBenchmarking>()?;
    let both = only(&cells::grid(&passes(&cases)), |p| p.cell.dtype == Dtype::Float32 && p.pass == AttentionPass::Both);
    match tables::times(cpu, &both) {
        Some(table) => answer.table("cpu-times", table),
        None => Ok(()),
    }
}

fn how_timed(first: &CellPass, grid: &[CellPass]) -> Grid {
    Grid {
        warmup: first.cell.warmup_ms as i64,
        rep: first.cell.rep_ms as i64,
        rounds: by_rounds(grid, 1, "rounds"),
        cache: if first.cell.cache == Cache::Cold { "cold" } else { "warm" },
        launch: if first.cell.launch == Launch::Eager { "by the host" } else { "as a graph" },
    }
}

/// Both passes together; none where no cell has both figures.
fn wins(grid: &[CellPass], ratio: fn(&CellPass) -> Option<Quantity>) -> Option<Wins> {
    let ratios: Vec<_> = grid.iter().filter(|p| p.pass == AttentionPass::Both).filter_map(ratio).collect();
    let faster = ratios.iter().filter(|ratio| ratio.value() > 1.0).count();
    Some(Wins { faster, cells: ratios.len(), ratios: Range::of(&ratios)? })
}

fn claims(answer: &mut Answer, quoted: &Quoted) -> Result<()> {
    for (id, wins) in [("faster-than-plain-attention", &quoted.plain), ("faster-than-pytorch", &quoted.pytorch)] {
        if let Some(wins) = wins {
            let claim = Claim::all(id, "cells in which ours is faster", wins.faster, wins.cells);
            answer.claim(claim.operand("least ratio", &wins.ratios.low))?;
        }
    }
    if let Some(Beside { faster, rows, .. }) = quoted.beside {
        answer.claim(Claim::all("faster-than-flash-attention-3", "rows in which ours is faster", faster, rows))?;
    }
    if let Some(mean) = &quoted.mean {
        let claim = Claim::all("means-are-near-medians", "figures within 5%", mean.near, mean.figures);
        answer.claim(claim.operand("farthest", &mean.farthest))?;
    }
    Ok(())
}

/// Of the mean from the median, over all figures of the grid.
fn mean(grid: &[CellPass]) -> Option<Mean> {
    let of_pass = |p: &CellPass| -> Vec<Quantity> {
        let summaries = columns().into_iter().filter_map(|e| Summary::of(&p.samples(&e)?.samples));
        summaries.map(|s| p.case.quantity((s.mean / s.median - 1.0).abs(), Unit::One)).collect()
    };
    let offs: Vec<_> = grid.iter().flat_map(of_pass).collect();
    let near = offs.iter().filter(|off| off.value() <= NEAR).count();
    Some(Mean { figures: offs.len(), near, farthest: Quantity::largest(&offs)?.clone() })
}

fn endings(cases: &[FlashCase], grid: &[CellPass]) -> Endings {
    let mut endings = Endings::default();
    for case in cases.iter().filter(|case| GRIDS.contains(&case.grid.as_str())) {
        let (Params::Cell(cell), Some(why)) = (&case.params, reason(&case.outcome)) else { continue };
        endings.missing.push(format!("{}, {} ({why})", cell.dtype.name(), shape(cell)));
    }
    for implementation in columns() {
        for pass in grid {
            let (label, dtype, at) = (implementation.label, pass.cell.dtype.name(), shape(pass.cell));
            let (list, words) = match pass.ended(&implementation) {
                Some(ColumnOutcome::NotRun { reason }) => {
                    (&mut endings.not_run, format!("{label} in {dtype} ({})", markdown(reason)))
                }
                Some(ColumnOutcome::OutOfMemory { .. }) => {
                    (&mut endings.oom, format!("{label}, {}, {dtype}, {at}", title(pass.pass)))
                }
                Some(ColumnOutcome::Failed { error }) => {
                    (&mut endings.failed, format!("{label} in {dtype} at {at}: {}", markdown(error)))
                }
                Some(ColumnOutcome::Measured { .. }) | None => continue,
            };
            if !list.contains(&words) {
                list.push(words);
            }
        }
    }
    endings
}

/// Why a case has no row, in Markdown.
fn reason<R>(outcome: &CaseOutcome<R>) -> Option<String> {
    match outcome {
        CaseOutcome::Measured(_) => None,
        CaseOutcome::OutOfMemory { message: why, .. }
        | CaseOutcome::NotRun { reason: why, .. }
        | CaseOutcome::Failed { error: why } => Some(markdown(why)),
    }
}

fn leaderboard(case: &FlashCase) -> Option<Leaderboard> {
    let Params::Leaderboard(p) = &case.params else { return None };
    let why = match &case.outcome {
        CaseOutcome::NotRun { needs, has, .. } => format!("it needs {}, and has {}", markdown(needs), markdown(has)),
        other => reason(other).unwrap_or_default(),
    };
    Some(Leaderboard {
        heads: p.n_heads,
        seq: grouped(p.seq as f64, 0),
        d: p.d_head,
        dtype: p.dtype.name(),
        rep: p.rep_ms as i64,
        warmup: p.warmup_ms as i64,
        measured: case.row().is_some(),
        why,
    })
}
