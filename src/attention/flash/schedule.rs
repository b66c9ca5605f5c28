//! The time that a list of work items takes on a GPU where each free CTA takes the next item.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

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
