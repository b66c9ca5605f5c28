//! One measured all-reduce, with the range of its turns.

use super::super::measure::{Params, Row};
use crate::bench::nvlink::{NVLINK, is_over_nvlink};
use crate::harness::answer::{Case, Paired, Quantity, Range, SameMachine, Unit};

pub type SumCase = Case<Params, Row>;

/// A case that was measured.
pub struct Sum<'a> {
    pub case: &'a SumCase,
    pub params: &'a Params,
    pub time: Paired,
    pub busbw: Paired,
    pub pytorch: Paired,
    pub over_pytorch: Paired,
}

impl<'a> Sum<'a> {
    pub fn of(case: &'a SumCase) -> Option<Self> {
        let row = case.row()?;
        let [ours, theirs] = [&row.ours, &row.c10d].map(|times| times.turns(case.params.rounds));
        let bus_bytes = row.bus_factor * row.bytes as f64;
        Some(Self {
            case,
            params: &case.params,
            time: Paired::median(&case.id, &ours)?,
            busbw: Paired::of(&case.id, Unit::BytesPerSecond, [&ours], |[seconds]| bus_bytes / seconds)?,
            pytorch: Paired::median(&case.id, &theirs)?,
            over_pytorch: Paired::of(&case.id, Unit::One, [&ours, &theirs], |[ours, theirs]| ours / theirs)?,
        })
    }

    pub fn has_nvlink(&self) -> bool {
        is_over_nvlink(self.params.backend, self.case.id.machine())
    }

    /// The bus bandwidth over that of the link, unless the switch added: then the links carry less than a ring's do.
    pub fn of_link(&self) -> Option<Quantity> {
        let share = self.busbw.all.value() / NVLINK;
        (self.has_nvlink() && self.busbw.stable && share <= 1.0).then(|| self.case.quantity(share, Unit::One))
    }
}

/// Every ratio of a turn of `first` to one of `second` lies in this range; `None` of two machines.
pub fn ratio(first: &Paired, second: &Paired) -> Option<Range> {
    let of = |a, b| Some(SameMachine::of(a, b).ok()?.ratio());
    let (first, second) = (&first.range, &second.range);
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
