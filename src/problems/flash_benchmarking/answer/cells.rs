//! The measured cells of a record, pass by pass: what each implementation took, and ours beside the others.

use super::super::checks::GRIDS;
use super::super::implementations::{THEIRS, columns};
use super::super::measure::{Cell, ImplementationOutcome, Params, Row, Timings};
use crate::attention::implementations::{Group, Implementation};
use crate::bench::energy::Energy;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::work::AttentionPass;
use crate::harness::answer::format::grouped;
use crate::harness::answer::{Case, Paired, Quantity, Range, SameRun, Turns, Unit};
use crate::harness::samples::Samples;

pub type FlashCase = Case<Params, Row>;

/// One pass of a measured cell.
#[derive(Clone, Copy)]
pub struct CellPass<'a> {
    pub case: &'a FlashCase,
    pub cell: &'a Cell,
    pub pass: AttentionPass,
    timings: &'a Timings,
}

/// The passes of a cell, in the order of the tables.
pub const PASSES: [AttentionPass; 3] = [AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both];

pub fn title(pass: AttentionPass) -> &'static str {
    match pass {
        AttentionPass::Forward => "forward",
        AttentionPass::Backward => "backward",
        AttentionPass::Both => "forward and backward",
        AttentionPass::Summed => "the leaderboard's function",
    }
}

/// Every pass of every measured cell, in the record's order.
pub fn passes(cases: &[FlashCase]) -> Vec<CellPass<'_>> {
    let of_case = |case| {
        let case: &FlashCase = case;
        let (Params::Cell(cell), Some(timings)) = (&case.params, case.row().and_then(Row::timings)) else {
            return Vec::new();
        };
        PASSES.map(|pass| CellPass { case, cell, pass, timings }).to_vec()
    };
    cases.iter().flat_map(of_case).collect()
}

/// Those of the handout's grid, by width and then by length.
pub fn grid<'a>(passes: &[CellPass<'a>]) -> Vec<CellPass<'a>> {
    let mut grid = only(passes, |p| GRIDS.contains(&p.case.grid.as_str()));
    grid.sort_by_key(|p| (p.cell.d_model, p.cell.seq));
    grid
}

pub fn only<'a>(passes: &[CellPass<'a>], wanted: impl Fn(&CellPass) -> bool) -> Vec<CellPass<'a>> {
    passes.iter().filter(|pass| wanted(pass)).copied().collect()
}

/// The implementations that took part in any of these.
pub fn shown(passes: &[CellPass]) -> Vec<Implementation> {
    let took_part = |e: &Implementation| {
        passes.iter().any(|p| p.ended(e).is_some_and(|c| !matches!(c, ColumnOutcome::NotRun { .. })))
    };
    THEIRS.iter().map(|(theirs, _)| *theirs).chain(columns()).filter(took_part).collect()
}

/// "$d = 64$, $T = 1,024$".
pub fn shape(cell: &Cell) -> String {
    format!("$d = {}$, $T = {}$", cell.d_model, grouped(cell.seq as f64, 0))
}

impl<'a> CellPass<'a> {
    /// Whether both are the same pass over inputs of one shape and type. Their caches and launches may differ.
    pub fn is_like(&self, other: &Self) -> bool {
        let key = |p: &Self| (p.cell.dtype, p.cell.d_model, p.cell.seq, p.cell.batch, p.cell.pace, p.pass);
        key(self) == key(other)
    }

    pub fn entry(&self, of: &Implementation) -> Option<&'a ImplementationOutcome> {
        self.timings.columns.get(of.name)
    }

    pub fn ended(&self, of: &Implementation) -> Option<&'a ColumnOutcome<Samples>> {
        self.entry(of)?.passes.get(&self.pass)
    }

    pub fn samples(&self, of: &Implementation) -> Option<&'a Samples> {
        self.ended(of)?.measured()
    }

    pub fn median(&self, of: &Implementation) -> Option<Quantity> {
        Some(self.case.median(self.samples(of)?))
    }

    /// Of calls back to back.
    pub fn energy(&self, of: &Implementation) -> Option<&'a Energy> {
        self.entry(of)?.energy.get(&self.pass)
    }

    /// Operations of the convention over the median time.
    pub fn rate(&self, of: &Implementation) -> Option<Quantity> {
        let flops = self.samples(of)?.work.as_ref()?.flops;
        Some(self.case.quantity(flops / self.median(of)?.value(), Unit::FlopsPerSecond))
    }

    /// Of rounds where each had the most calls, or one; else a record does not tell the rounds apart.
    pub fn turns(&self, of: &Implementation) -> Option<Turns> {
        let (samples, rounds) = (&self.samples(of)?.samples, self.cell.rounds);
        let is_even = [1, self.cell.most_repeats].iter().any(|calls| samples.len() == calls * rounds);
        Some(Turns::of(samples, if is_even { rounds } else { 1 }))
    }

    /// The shortest and the longest turn.
    pub fn span(&self, of: &Implementation) -> Option<Range> {
        Some(Paired::median(&self.case.id, &self.turns(of)?)?.range)
    }

    /// What the program runs by itself: the first of ours that took part.
    pub fn our_implementation(&self) -> Option<Implementation> {
        let took_part =
            |e: &Implementation| self.ended(e).is_some_and(|column| !matches!(column, ColumnOutcome::NotRun { .. }));
        columns().into_iter().filter(|e| e.group == Group::Ours).find(took_part)
    }

    /// The fastest of plain attention and PyTorch's fused operators; of equally fast ones the first. `None` where no fused one has
    /// a time.
    pub fn fastest_of_pytorch(&self) -> Option<Implementation> {
        self.fastest(&[Group::Pytorch])?;
        self.fastest(&[Group::Plain, Group::Pytorch])
    }

    fn fastest(&self, groups: &[Group]) -> Option<Implementation> {
        let timed = columns().into_iter().filter(|e| groups.contains(&e.group));
        let timed = timed.filter_map(|e| Some((e, self.median(&e)?.value())));
        Some(timed.min_by(|(_, a), (_, b)| a.total_cmp(b))?.0)
    }

    /// How many times as fast as `theirs` ours is, by the medians.
    pub fn over(&self, theirs: &Implementation) -> Option<Quantity> {
        let ours = self.median(&self.our_implementation()?)?;
        Some(SameRun::of(&self.median(theirs)?, &ours).ok()?.ratio())
    }

    pub fn over_plain(&self) -> Option<Quantity> {
        self.over(&self.fastest(&[Group::Plain])?)
    }

    pub fn over_pytorch(&self) -> Option<Quantity> {
        self.over(&self.fastest_of_pytorch()?)
    }

    /// How many times as fast as `theirs` ours is, from turn to turn.
    pub fn over_by_turns(&self, theirs: &Implementation) -> Option<Range> {
        let (theirs, ours) = (self.turns(theirs)?, self.turns(&self.our_implementation()?)?);
        Some(Paired::of(&self.case.id, Unit::One, [&theirs, &ours], |[theirs, ours]| theirs / ours)?.range)
    }

    pub fn over_plain_by_turns(&self) -> Option<Range> {
        self.over_by_turns(&self.fastest(&[Group::Plain])?)
    }

    pub fn over_pytorch_by_turns(&self) -> Option<Range> {
        self.over_by_turns(&self.fastest_of_pytorch()?)
    }
}
