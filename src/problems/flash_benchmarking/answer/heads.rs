//! 16 heads, which fill a GPU: ours beside cuDNN, FlashAttention-4 and FlashAttention-3 in both protocols, and their energy;
//! and 32 heads of shorter sequences.

use std::collections::BTreeSet;

use anyhow::Result;
use serde::Serialize;

use super::cells::{CellPass, PASSES, only, title};
use super::published::flash_attention_3;
use super::tables::time;
use crate::attention::implementations::{Implementation, by_name};
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::{Style, grouped};
use crate::harness::answer::{Cell, Claim, Column, Quantity, Range, SameRun, Table, Unit};

/// What the sentences quote.
#[derive(Serialize)]
pub struct Heads {
    /// How many times as fast ours is as FlashAttention-4 and -3 in the same protocol, by the medians: a range for each width.
    over_fa4: Vec<String>,
    over_fa3: Vec<String>,
    /// FlashAttention-4's, where it was measured.
    version: Option<String>,
    /// A call of ours over one of cuDNN's, in joules.
    energy: Option<Range>,
    #[serde(skip)]
    pub times: Table,
    #[serde(skip)]
    pub energies: Option<Table>,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

/// Shorter sequences of many heads.
#[derive(Serialize)]
pub struct ShorterHeads {
    /// Ours over the faster of the others, forward and backward together: "0.97 (32 heads of 4,096, d = 64)".
    ratios: Vec<String>,
    #[serde(skip)]
    pub table: Table,
}

/// The columns of the tables.
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

    /// Our time over that of the faster one of the others.
    fn over_faster(&self, pass: &CellPass) -> Option<Quantity> {
        let theirs: Vec<Quantity> = [self.cudnn, self.fa4].iter().filter_map(|e| pass.median(e)).collect();
        Some(SameRun::of(&pass.median(self.ours)?, Quantity::smallest(&theirs)?).ok()?.ratio())
    }
}

impl Heads {
    /// `None` without a cell whose shape FlashAttention-3 has times of.
    pub fn of(heads: &[CellPass], on: &str) -> Result<Option<Self>> {
        let columns = Columns::of_the_table()?;
        let heads = &only(heads, |pass| flash_attention_3(pass).is_some());
        let Some(times) = times(heads, &columns, on) else { return Ok(None) };
        let joules = |pass: &CellPass, of| Some(pass.case.median(&pass.energy(of)?.joules));
        let energy = heads.iter().filter_map(|pass| {
            Some(SameRun::of(&joules(pass, columns.ours)?, &joules(pass, columns.cudnn)?).ok()?.ratio())
        });
        // FlashAttention-3's time is of another machine and of no record: the ratio counts as a number of our case.
        let over_published = |pass: &CellPass| {
            let (theirs, ours) = (flash_attention_3(pass)?, pass.median(columns.ours)?);
            Some(pass.case.quantity(theirs.value() / ours.value(), Unit::One))
        };
        Ok(Some(Self {
            over_fa4: by_width(heads, |pass| pass.over(columns.fa4)),
            over_fa3: by_width(heads, over_published),
            version: heads.iter().find_map(|pass| pass.entry(columns.fa4)?.version.clone()),
            energy: Range::of(energy),
            times,
            energies: energies(heads, &columns, on),
            claim: claim(heads, columns.fa4),
        }))
    }
}

impl ShorterHeads {
    /// `None` where no cell has a time of ours and of another one.
    pub fn of(heads: &[CellPass], on: &str) -> Result<Option<Self>> {
        let columns = Columns::of_the_table()?;
        let mut head = vec![Column::right("heads"), Column::right("$T$"), Column::right("$d$"), Column::text("pass")];
        head.extend(columns.all().map(|e| Column::time(format!("{} (ms)", e.label))));
        head.push(Column::number("ratio", Style::Fixed, 2));
        let mut table = Table::new(head);
        for pass in sorted(heads) {
            let cell = pass.cell;
            let mut row: Vec<Cell> = [cell.batch, cell.seq, cell.d_model].map(|n| grouped(n as f64, 0).into()).to_vec();
            row.push(title(pass.pass).into());
            row.extend(columns.all().map(|e| time(&pass, e)));
            row.push(columns.over_faster(&pass).into());
            table.row(row);
        }
        let both = heads.iter().filter(|pass| pass.pass == AttentionPass::Both);
        let over_faster = both.filter_map(|pass| {
            let (ratio, cell) = (columns.over_faster(pass)?, pass.cell);
            let ratio = ratio.text(Style::Fixed, 2);
            Some(format!("{ratio} ({} heads of {}, d = {})", cell.batch, grouped(cell.seq as f64, 0), cell.d_model))
        });
        let ratios: Vec<String> = over_faster.collect();
        let caption = format!(
            "Many heads of shorter sequences on {on}: bfloat16, causal; medians. The ratio is ours over the faster of the \
             others. †: unstable, the turns spread beyond 5%."
        );
        Ok((!ratios.is_empty()).then(|| Self { ratios, table: table.captioned(caption) }))
    }
}

/// "1.02 to 1.05 (d = 64)" for each width that has a ratio.
fn by_width(heads: &[CellPass], ratio: impl Fn(&CellPass) -> Option<Quantity>) -> Vec<String> {
    let widths: BTreeSet<i64> = heads.iter().map(|pass| pass.cell.d_model).collect();
    let of = |d: i64| {
        let passes = heads.iter().filter(|pass| pass.cell.d_model == d);
        Some(format!("{} (d = {d})", Range::of(passes.filter_map(&ratio))?.text(Style::Fixed, 2)))
    };
    widths.into_iter().filter_map(of).collect()
}

/// Whether ours is faster in every turn of every pass; `None` where no pass has a time of both.
fn claim(heads: &[CellPass], fa4: &Implementation) -> Option<Claim> {
    let turns: Vec<Range> = heads.iter().filter_map(|pass| pass.over_by_turns(fa4)).collect();
    let faster = turns.iter().filter(|ratio| ratio.low.value() > 1.0).count();
    let what = "passes of 16 heads in which every turn of ours is faster";
    let claim = Claim::all("faster-than-flash-attention-4", what, faster, turns.len());
    Some(claim.operand("least ratio", Quantity::smallest(turns.iter().map(|ratio| &ratio.low))?))
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
