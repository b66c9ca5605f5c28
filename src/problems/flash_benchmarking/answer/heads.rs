//! 16 heads, which fill a GPU: ours beside cuDNN, FlashAttention-4 and FlashAttention-3 in both protocols, and their energy.

use anyhow::Result;
use serde::Serialize;

use super::cells::{CellPass, PASSES, only, title};
use super::published::flash_attention_3;
use super::speed::LONG;
use super::tables::time;
use crate::attention::implementations::{Implementation, by_name};
use crate::bench::timing::Pace;
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::Style;
use crate::harness::answer::{Cell, Claim, Column, Quantity, Range, SameRun, Table, Unit};

/// What the sentences quote. Each comparison is of one protocol.
#[derive(Serialize)]
pub struct Heads {
    sustained: Ratios,
    rested: Ratios,
    flash_attention_4: Option<Live>,
    /// A call of ours over one of cuDNN's, in joules.
    energy: Option<Range>,
    #[serde(skip)]
    pub times: Table,
    #[serde(skip)]
    pub energies: Option<Table>,
}

/// How many times as fast ours is, by the medians, over the passes.
#[derive(Serialize)]
struct Ratios {
    flash_attention_4: Option<Range>,
    flash_attention_3: Option<Range>,
}

/// FlashAttention-4 as it was measured beside us.
#[derive(Serialize)]
struct Live {
    version: String,
    /// Of one head in the long cells, forward and backward together.
    long: Option<Range>,
    /// Passes of 16 heads in which every turn of ours is faster, and all of them.
    #[serde(skip)]
    faster: [usize; 2],
    #[serde(skip)]
    least: Quantity,
}

/// The columns of its tables.
struct Columns {
    ours: &'static Implementation,
    cudnn: &'static Implementation,
    fa4: &'static Implementation,
}

impl Columns {
    fn of_the_table() -> Result<Self> {
        Ok(Self { ours: by_name("flash")?, cudnn: by_name("sdpa_cudnn")?, fa4: by_name("flash_attention_4")? })
    }

    fn all(&self) -> [&'static Implementation; 3] {
        [self.ours, self.cudnn, self.fa4]
    }
}

impl Heads {
    /// `None` without a cell.
    pub fn of(heads: &[CellPass], grid: &[CellPass], on: &str) -> Result<Option<Self>> {
        let columns = Columns::of_the_table()?;
        let Some(times) = times(heads, &columns, on) else { return Ok(None) };
        let both = heads.iter().filter_map(|pass| {
            let joules = |of| Some(pass.case.median(&pass.energy(of)?.joules));
            Some(SameRun::of(&joules(columns.ours)?, &joules(columns.cudnn)?).ok()?.ratio())
        });
        Ok(Some(Self {
            sustained: Ratios::of(heads, Pace::Sustained, &columns),
            rested: Ratios::of(heads, Pace::Rested, &columns),
            flash_attention_4: Live::of(heads, grid, columns.fa4),
            energy: Range::of(both),
            times,
            energies: energies(heads, &columns, on),
        }))
    }

    /// Whether ours is faster than FlashAttention-4 in every pass of 16 heads; `None` where that was not measured.
    pub fn claim(&self) -> Option<Claim> {
        let Live { faster: [faster, all], least, .. } = self.flash_attention_4.as_ref()?;
        let what = "passes of 16 heads in which every turn of ours is faster";
        let claim = Claim::all("faster-than-flash-attention-4", what, *faster, *all);
        Some(claim.operand("least ratio", least))
    }
}

impl Ratios {
    fn of(heads: &[CellPass], pace: Pace, columns: &Columns) -> Self {
        let passes = only(heads, |p| p.cell.pace == pace);
        // Theirs is of another machine and of no record: the ratio counts as a number of our case.
        let over_published = passes.iter().filter_map(|pass| {
            let (theirs, ours) = (flash_attention_3(pass)?, pass.median(columns.ours)?);
            Some(pass.case.quantity(theirs.value() / ours.value(), Unit::One))
        });
        Self {
            flash_attention_4: Range::of(passes.iter().filter_map(|pass| pass.over(columns.fa4))),
            flash_attention_3: Range::of(over_published),
        }
    }
}

impl Live {
    /// `None` where no pass of 16 heads has a time of both.
    fn of(heads: &[CellPass], grid: &[CellPass], fa4: &Implementation) -> Option<Self> {
        let version = heads.iter().find_map(|pass| pass.entry(fa4)?.version.clone())?;
        let turns: Vec<Range> = heads.iter().filter_map(|pass| pass.over_by_turns(fa4)).collect();
        let faster = turns.iter().filter(|ratio| ratio.low.value() > 1.0).count();
        let long = grid.iter().filter(|p| p.cell.seq >= LONG && p.pass == AttentionPass::Both);
        Some(Self {
            version,
            long: Range::of(long.filter_map(|pass| pass.over(fa4))),
            faster: [faster, turns.len()],
            least: Quantity::smallest(turns.iter().map(|ratio| &ratio.low))?.clone(),
        })
    }
}

/// In the order of the rows: by width, pass and protocol.
fn sorted<'a>(heads: &[CellPass<'a>]) -> Vec<CellPass<'a>> {
    let mut sorted = heads.to_vec();
    let place = |pass| PASSES.iter().position(|known| *known == pass);
    sorted.sort_by_key(|p| (p.cell.d_model, place(p.pass), p.cell.pace.is_sustained()));
    sorted
}

fn times(heads: &[CellPass], columns: &Columns, on: &str) -> Option<Table> {
    let has_fa4 = heads.iter().any(|pass| pass.median(columns.fa4).is_some());
    let shown = &columns.all()[..if has_fa4 { 3 } else { 2 }];
    let mut head = vec![Column::right("$d$"), Column::text("pass"), Column::text("protocol")];
    head.extend(shown.iter().map(|e| Column::time(format!("{} (ms)", e.label))));
    head.push(Column::time("FlashAttention-3, quoted (ms)"));
    let mut table = Table::new(head);
    for pass in sorted(heads) {
        let protocol = if pass.cell.pace.is_sustained() { "sustained" } else { "rested" };
        let mut row: Vec<Cell> = vec![pass.cell.d_model.to_string().into(), title(pass.pass).into(), protocol.into()];
        row.extend(shown.iter().map(|e| time(&pass, e)));
        row.push(flash_attention_3(&pass).into());
        table.row(row);
    }
    let caption = format!(
        "16 heads of 16,384 on {on}: bfloat16, causal; medians. FlashAttention-3's were measured separately on another H200, \
         by the same protocol. †: unstable, the turns spread beyond 5%."
    );
    (!table.rows.is_empty()).then(|| table.captioned(caption))
}

/// `None` where no energy was read.
fn energies(heads: &[CellPass], columns: &Columns, on: &str) -> Option<Table> {
    let rows = only(&sorted(heads), |p| columns.all().iter().any(|e| p.energy(e).is_some()));
    let shown: Vec<_> = columns.all().into_iter().filter(|e| rows.iter().any(|p| p.energy(e).is_some())).collect();
    let mut head = vec![Column::right("$d$"), Column::text("pass")];
    head.extend(shown.iter().map(|e| Column::number(format!("{} (J a call)", e.label), Style::Fixed, 2)));
    head.extend(shown.iter().map(|e| Column::number(format!("{} (MHz)", e.label), Style::Mhz, 0)));
    let mut table = Table::new(head);
    for pass in &rows {
        let mut row: Vec<Cell> = vec![pass.cell.d_model.to_string().into(), title(pass.pass).into()];
        row.extend(shown.iter().map(|e| pass.energy(e).map(|energy| pass.case.median(&energy.joules)).into()));
        row.extend(shown.iter().map(|e| pass.energy(e).map(|energy| pass.case.median(&energy.sm_clock)).into()));
        table.row(row);
    }
    let caption = format!(
        "Energy of a call, and the median SM clock meanwhile, of 16 heads of 16,384 on {on}: bfloat16, causal, calls back to \
         back."
    );
    (!table.rows.is_empty()).then(|| table.captioned(caption))
}

#[cfg(test)]
mod tests;
