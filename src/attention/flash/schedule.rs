//! How work items are spread over a GPU's CTAs: the time that they take, and the splits that are found once a shape.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use anyhow::Result;

use super::launch::Inputs;
use crate::cuda::Cache;

/// Splits by the kernel's configuration, the lengths, the heads of all batches, and the CTAs that share the work.
pub(super) type SplitsCache<C, S> = Cache<(C, [u32; 4]), S>;

/// The splits for `inputs` on `ctas`, which `search` finds at the first call.
pub(super) fn cached<C: Ord, S>(
    cache: &SplitsCache<C, S>,
    config: C,
    inputs: &Inputs,
    ctas: u32,
    search: impl FnOnce() -> S,
) -> Result<Arc<S>> {
    let sizes = &inputs.sizes;
    let key = (config, [sizes.n_queries, sizes.n_keys, sizes.all_heads(), ctas]);
    cache.get(inputs.device(), key, || Ok(search()))
}

/// When the last of `ctas` ends if each free CTA takes the next item; `items` are their times.
pub(super) fn makespan(items: impl IntoIterator<Item = u64>, ctas: u32) -> u64 {
    let mut free_at: BinaryHeap<Reverse<u64>> = (0..ctas).map(|_| Reverse(0)).collect();
    for item in items {
        if let Some(mut first) = free_at.peek_mut() {
            first.0 += item;
        }
    }
    free_at.into_iter().map(|Reverse(time)| time).max().unwrap_or_default()
}
