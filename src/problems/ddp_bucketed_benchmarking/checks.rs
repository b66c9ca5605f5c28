//! Checks of the buckets before they are timed.

use anyhow::{Result, ensure};

use super::STRATEGY;
use crate::bench::ddp_step::Params;
use crate::checks::ddp_step::small_columns;
use crate::checks::fused_ranks::{self, Averaging};
use crate::collective::Backend;
use crate::collective::ranks::Placement;
use crate::harness::problem::Verdict;

/// From a call for nearly every parameter to one for all, the same bytes each time.
pub fn fewer_calls_in_larger_buckets() -> Result<Verdict> {
    let mut seen = Vec::new();
    for mb in [0.001, 4.0, 1000.0] {
        let column = &small_columns(&[STRATEGY], Some(mb))?[STRATEGY];
        let bytes = Params::smallest(None).gradient_bytes();
        ensure!(column.bytes == bytes, "{} bytes sent of {bytes}", column.bytes);
        seen.push(column.calls);
    }
    let falling = seen.windows(2).all(|pair| pair[0] > pair[1]);
    ensure!(falling && seen.last() == Some(&1), "calls at growing bucket sizes: {seen:?}");
    Verdict::passed(format!("{seen:?} calls at growing bucket sizes"))
}

/// Over Gloo, where nothing is captured.
pub fn fused_ranks_train_as_one_process() -> Result<Verdict> {
    let averagings = [Averaging::Buckets, Averaging::Flat, Averaging::Sharded];
    fused_ranks::train_as_one_process(Backend::Gloo, Placement::GpuPerRank, &averagings)
}
