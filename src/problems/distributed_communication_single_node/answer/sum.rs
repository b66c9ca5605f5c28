//! One measured all-reduce, with the range of its turns.

use super::super::measure::{Params, Row};
use crate::bench::turns::TurnTimes;
use crate::collective::Backend;
use crate::harness::answer::{Case, Cell, Quantity, Range, SameMachine, Style, Unit, format};

pub type SumCase = Case<Params, Row>;

/// One GPU's NVLink in one direction, in bytes per second: 18 links of 25 GB/s (data sheets of the H100 SXM and the H200).
pub const NVLINK: f64 = 450e9;
const GPUS_WITH_NVLINK: [&str; 2] = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"];

/// A case that was measured.
pub struct Sum<'a> {
    pub case: &'a SumCase,
    pub params: &'a Params,
    pub time: Quantity,
    pub turns: TurnTimes,
    /// Of the turns' medians.
    pub range: Range,
    /// Bytes that each link carries.
    bus_bytes: f64,
    pub pytorch: Quantity,
    pub pytorch_turns: TurnTimes,
    pub over_pytorch: Option<Range>,
}

impl<'a> Sum<'a> {
    pub fn of(case: &'a SumCase) -> Option<Self> {
        let row = case.row()?;
        let (ours, theirs) = (&row.ours.last_rank, &row.c10d.last_rank);
        let turns = |samples| TurnTimes::of(case, samples, case.params.iterations);
        let (turns, pytorch_turns) = (turns(ours)?, turns(theirs)?);
        Some(Self {
            case,
            params: &case.params,
            time: case.median(ours),
            range: turns.range()?,
            bus_bytes: row.bus_factor * row.bytes as f64,
            pytorch: case.median(theirs),
            over_pytorch: turns.over(&pytorch_turns),
            turns,
            pytorch_turns,
        })
    }

    pub fn rate(&self, time: &Quantity) -> Quantity {
        self.case.quantity(self.bus_bytes / time.value(), Unit::BytesPerSecond)
    }

    /// Over the turns.
    pub fn busbw(&self) -> Range {
        Range { low: self.rate(&self.range.high), high: self.rate(&self.range.low) }
    }

    pub fn has_nvlink(&self) -> bool {
        let gpus = &self.case.id.machine().gpus;
        self.params.backend == Backend::Nccl && gpus.iter().all(|gpu| GPUS_WITH_NVLINK.contains(&gpu.name.as_str()))
    }

    /// The bus bandwidth over that of the link.
    pub fn of_link(&self) -> Option<Quantity> {
        let share = self.rate(&self.time).value() / NVLINK;
        (self.has_nvlink() && self.turns.is_stable()).then(|| self.case.quantity(share, Unit::One))
    }

    /// What a sentence says: the median, or the range of unstable turns.
    pub fn said_time(&self) -> Range {
        match self.turns.is_stable() {
            true => Range { low: self.time.clone(), high: self.time.clone() },
            false => self.range.clone(),
        }
    }

    pub fn said_busbw(&self) -> Range {
        let Range { low, high } = self.said_time();
        Range { low: self.rate(&high), high: self.rate(&low) }
    }

    pub fn busbw_cell(&self, digits: usize) -> Cell {
        let Range { low, high } = self.said_busbw();
        match self.turns.is_stable() {
            true => low.into(),
            false => format::range(low.value(), high.value(), Style::Gb, digits).into(),
        }
    }
}

pub fn ends(range: Range) -> [Quantity; 2] {
    [range.low, range.high]
}

/// Every ratio of a value in `first` to one in `second` lies in this range; `None` of two machines.
pub fn ratio(first: &Range, second: &Range) -> Option<Range> {
    let of = |a, b| Some(SameMachine::of(a, b).ok()?.ratio());
    Some(Range { low: of(&first.low, &second.high)?, high: of(&first.high, &second.low)? })
}

/// Sums on two processes by size.
pub fn on_two<'a, 'b>(sums: &'b [Sum<'a>]) -> Vec<&'b Sum<'a>> {
    let mut pair: Vec<_> = sums.iter().filter(|sum| sum.params.world_size == 2).collect();
    pair.sort_by_key(|sum| sum.params.size_mb);
    pair
}

pub fn of_size<'a, 'b>(sums: &'b [Sum<'a>], like: &Sum) -> impl Iterator<Item = &'b Sum<'a>> {
    let size_mb = like.params.size_mb;
    sums.iter().filter(move |sum| sum.params.size_mb == size_mb)
}
