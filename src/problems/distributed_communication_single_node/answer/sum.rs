//! One measured all-reduce, with the range of its turns.

use super::super::measure::{Params, Row};
use crate::collective::Backend;
use crate::harness::answer::{Case, Paired, Quantity, Range, SameMachine, Unit};

pub type SumCase = Case<Params, Row>;

/// One GPU's NVLink in one direction, in bytes per second: 18 links of 25 GB/s (data sheets of the H100 SXM and the H200).
pub const NVLINK: f64 = 450e9;
const GPUS_WITH_NVLINK: [&str; 2] = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"];

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
        let gpus = &self.case.id.machine().gpus;
        self.params.backend == Backend::Nccl && gpus.iter().all(|gpu| GPUS_WITH_NVLINK.contains(&gpu.name.as_str()))
    }

    /// The bus bandwidth over that of the link.
    pub fn of_link(&self) -> Option<Quantity> {
        let share = self.busbw.all.value() / NVLINK;
        (self.has_nvlink() && self.busbw.stable).then(|| self.case.quantity(share, Unit::One))
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
