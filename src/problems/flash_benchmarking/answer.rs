//! Ours against plain attention, PyTorch's operators and FlashAttention-4: two regimes, all cells, 16 heads, calls, figures.

pub(super) mod cells;
pub(super) mod figures;
mod heads;
mod host;
mod published;
mod speed;
pub(super) mod tables;
#[cfg(test)]
pub(super) mod tests;

use anyhow::Result;
use serde::Serialize;

use self::cells::{CellPass, FlashCase, only, passes, shape, title};
use self::heads::{Heads, ShorterHeads};
use self::host::Host;
use self::published::{PowerCap, power_cap};
use self::speed::{Passes, Speed, Wins};
use self::tables::TileRow;
use super::checks::GRIDS;
use super::implementations::columns;
use super::measure::{FlashBenchmarking, Launch, Params};
use super::verify::{TAIL, WHOLE};
use crate::bench::dtype::Dtype;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::timing::FLUSHED_BYTES;
use crate::bench::tolerance;
use crate::bench::work::{AttentionPass, BACKWARD_OVER_FORWARD};
use crate::harness::answer::format::{grouped, markdown};
use crate::harness::answer::{Answer, Audience, CaseOutcome, Claim, Quantity, Records, Unit};

/// The grids of 16 heads, which fill a GPU: call after call, and rested.
const HEADS: [&str; 2] = ["heads", "rested"];
/// 32 heads of shorter sequences, a grid for each length.
const SHORTER_HEADS: [&str; 2] = ["heads_4096", "heads_2048"];
/// The short cells as CUDA graphs, and with warm caches.
const GRAPH: &str = "graph";
const WARM: &str = "warm";
const LEADERBOARD: &str = "leaderboard";
const CALLS: &str = "calls";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    flushed: Quantity,
    /// Operations of the backward pass over those of the forward pass.
    backward: f64,
    /// Positions up to which every element is compared, and those compared of longer sequences.
    whole: i64,
    tail: i64,
    bound_bf16: f64,
    bound_f32: f64,
    grid: Option<Grid>,
    wins: Option<Wins>,
    speed: Option<Speed>,
    passes: Option<Passes>,
    /// Of the short cells with warm caches, launched by the host.
    warm: Option<Passes>,
    tiles: Option<TileExample>,
    heads: Option<Heads>,
    shorter: Option<ShorterHeads>,
    cap: Option<PowerCap>,
    /// Of calls that the host limits.
    host: Option<Host>,
    /// What has no figure and why, a sentence for each way to end.
    endings: Vec<String>,
    board: Option<Leaderboard>,
}

/// How the grid was timed.
#[derive(Serialize)]
struct Grid {
    /// In milliseconds.
    warmup: i64,
    rep: i64,
    rounds: String,
}

/// Two sizes of tiles of one width, and the length up to which the first one is taken.
#[derive(Serialize)]
struct TileExample {
    d: i64,
    short: [u32; 2],
    until: String,
    long: [u32; 2],
}

/// What has no figure and why, each reason once.
#[derive(Default)]
struct Endings {
    missing: Vec<String>,
    not_run: Vec<String>,
    failed: Vec<String>,
    oom: Vec<String>,
}

impl Endings {
    fn sentences(&self) -> Vec<String> {
        let Self { missing, not_run, failed, oom } = self;
        let lists = [
            ("Cells without any time", missing),
            ("Not run on this machine", not_run),
            ("Refused before timing", failed),
            ("Out of memory", oom),
        ];
        let filled = lists.into_iter().filter(|(_, list)| !list.is_empty());
        filled.map(|(what, list)| format!("{what}: {}.", list.join("; "))).collect()
    }
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

impl Quoted {
    fn claims(&self) -> [Option<Claim>; 4] {
        [
            self.wins.as_ref().map(Wins::claim),
            self.passes.as_ref().map(Passes::claim),
            self.heads.as_ref().and_then(|heads| heads.claim.clone()),
            self.host.as_ref().and_then(|host| host.claim.clone()),
        ]
    }
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<FlashBenchmarking>()?;
    let all = passes(&cases);
    let grid = cells::grid(&all);
    // A CPU's grid shows the protocol alone.
    let answered: &[CellPass] = if main.is_gpu() { &grid } else { &[] };
    let of_grid = |name: &str| if main.is_gpu() { only(&all, |p| p.case.grid == name) } else { Vec::new() };
    let (graphs, warm, heads) = (of_grid(GRAPH), of_grid(WARM), HEADS.map(of_grid).concat());
    let on = main.machine()?;
    let tiles = tables::tile_rows(main, answered)?;
    let board = cases.iter().find(|case| case.grid == LEADERBOARD);
    let quoted = Quoted {
        flushed: Quantity::constant(FLUSHED_BYTES as f64, Unit::Bytes),
        backward: BACKWARD_OVER_FORWARD,
        whole: WHOLE,
        tail: TAIL,
        bound_bf16: tolerance::attention(Dtype::Bfloat16),
        bound_f32: tolerance::attention(Dtype::Float32),
        grid: how_timed(&grid),
        wins: Wins::of(answered),
        speed: Speed::of(answered, &graphs),
        passes: Passes::of(answered),
        warm: Passes::of(&only(&warm, |p| p.cell.launch == Launch::Eager)),
        tiles: tiles.as_deref().and_then(tile_example),
        heads: Heads::of(&heads, &on)?,
        shorter: ShorterHeads::of(&SHORTER_HEADS.map(of_grid).concat(), &on)?,
        cap: power_cap(&heads)?,
        host: main.is_gpu().then(|| Host::of(&cases, &on)).flatten(),
        endings: endings(&cases, &grid).sentences(),
        board: board.and_then(leaderboard),
    };
    let mut answer = Answer::of(main, &quoted)?;
    quoted.claims().into_iter().flatten().try_for_each(|claim| answer.claim(claim))?;
    let by_launch = |p: &CellPass| if p.cell.launch == Launch::Graph { "as a graph" } else { "launched" }.into();
    let by_dtype = |p: &CellPass| p.cell.dtype.name().into();
    let printed = [
        ("answer", tables::answered(answered, &on)?),
        ("full-tiles", tiles.map(|rows| tables::tiles(&rows))),
        ("full-times-bfloat16", tables::times(&of(answered, Dtype::Bfloat16), by_width, &format!("bfloat16, on {on}"))),
        ("full-times-float32", tables::times(&of(answered, Dtype::Float32), by_width, &format!("float32, on {on}"))),
        ("full-regimes", quoted.speed.map(|speed| speed.table)),
        ("full-graphs", tables::times(&graphs, by_dtype, &format!("{}, as CUDA graphs, on {on}", width(&graphs)))),
        ("full-warm", tables::times(&warm, by_launch, &format!("bfloat16, {}, warm caches, on {on}", width(&warm)))),
        ("full-heads", quoted.heads.as_ref().map(|heads| heads.times.clone())),
        ("full-shorter-heads", quoted.shorter.map(|heads| heads.table)),
        ("full-energy", quoted.heads.and_then(|heads| heads.energies)),
        ("full-errors", tables::errors(answered, &on)),
        (CALLS, quoted.host.map(|host| host.table)),
        (LEADERBOARD, board.and_then(|case| Some(tables::leaderboard(case, case.row()?.timings()?, &on)))),
    ];
    for (id, table) in printed {
        table.map_or(Ok(()), |table| answer.table(id, table))?;
    }
    figures::rates(&mut answer, answered, &on)?;
    figures::speed_ups(&mut answer, answered, &on)?;
    cpu_grid(&mut answer, records)?;
    Ok(answer)
}

fn of<'a>(grid: &[CellPass<'a>], dtype: Dtype) -> Vec<CellPass<'a>> {
    only(grid, |p| p.cell.dtype == dtype)
}

fn by_width(pass: &CellPass) -> String {
    format!("d = {}", pass.cell.d_model)
}

fn width(passes: &[CellPass]) -> String {
    passes.first().map_or_else(String::new, |pass| format!("${}$", by_width(pass)))
}

/// The small grid of a CPU, and its calls.
fn cpu_grid(answer: &mut Answer, records: &Records) -> Result<()> {
    let Some(cpu) = records.cpu() else { return Ok(()) };
    let cases = cpu.cases::<FlashBenchmarking>()?;
    let both = only(&cells::grid(&passes(&cases)), |p| p.cell.dtype == Dtype::Float32 && p.pass == AttentionPass::Both);
    let on = cpu.machine()?;
    let of = format!("float32, warm caches, on {on}, where \"tiled\" is ours");
    tables::times(&both, by_width, &of).map_or(Ok(()), |table| answer.table("cpu-times", table))?;
    Host::of(&cases, &on).map_or(Ok(()), |host| answer.table("cpu-calls", host.table))
}

fn how_timed(grid: &[CellPass]) -> Option<Grid> {
    let (first, last) = (grid.first()?.cell, grid.last()?.cell);
    let longest = grid.iter().filter(|p| p.cell.rounds == first.rounds).map(|p| p.cell.seq).max()?;
    let rounds = match first.rounds == last.rounds {
        true => first.rounds.to_string(),
        false => format!("{} up to $T = {}$ and {} beyond", first.rounds, grouped(longest as f64, 0), last.rounds),
    };
    Some(Grid { warmup: first.warmup_ms as i64, rep: first.rep_ms as i64, rounds })
}

/// The forward pass in bfloat16, of the widest heads whose tiles grow with the length.
fn tile_example(rows: &[TileRow]) -> Option<TileExample> {
    let grows = |row: &&TileRow| {
        let first = rows.iter().find(|first| (first.dtype, first.d) == (row.dtype, row.d));
        row.dtype == Dtype::Bfloat16 && first.is_some_and(|first| first.tiles.forward != row.tiles.forward)
    };
    let long = rows.iter().filter(|row| row.d == 64).find(grows)?;
    let short =
        rows.iter().rfind(|row| (row.dtype, row.d) == (long.dtype, long.d) && row.lengths[1] < long.lengths[0])?;
    let until = grouped(short.lengths[1] as f64, 0);
    Some(TileExample { d: long.d, short: short.tiles.forward, until, long: long.tiles.forward })
}

fn endings(cases: &[FlashCase], grid: &[CellPass]) -> Endings {
    let mut endings = Endings::default();
    for case in cases {
        let Some(why) = reason(&case.outcome) else { continue };
        match &case.params {
            Params::Cell(cell) if GRIDS.contains(&case.grid.as_str()) => {
                endings.missing.push(format!("{}, {} ({why})", cell.dtype.name(), shape(cell)));
            }
            Params::Calls(_) => endings.missing.push(format!("calls that the host limits ({why})")),
            Params::Cell(_) | Params::Leaderboard(_) => {}
        }
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
        other => Some(markdown(other.reason())),
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
