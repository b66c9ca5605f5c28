//! What the hosts of our CUDA kernels share: which inputs they take, how they count them, and a copy to read instead.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use anyhow::{Result, ensure};
use tch::{Device, Tensor};

use super::Shape;
use crate::cuda;

/// Head dimensions that kernels are compiled for.
pub const DIMENSIONS: [i64; 4] = [16, 32, 64, 128];

/// That kernels which take no other rows are compiled for `head_dim`.
pub(super) fn require_dimension(head_dim: i64) -> Result<(), String> {
    if DIMENSIONS.contains(&head_dim) {
        return Ok(());
    }
    Err(format!("its kernels are made for d of 16, 32, 64 and 128, not {head_dim}"))
}

/// That `device` is a GPU whose compute capability `fits`, which errors call `wanted`.
pub(super) fn require_gpu(device: Device, wanted: &str, fits: fn((i32, i32)) -> bool) -> Result<(), String> {
    let Device::Cuda(index) = device else { return Err(format!("its kernels need a GPU, not {device:?}")) };
    match cuda::compute_capability(index) {
        Ok(capability) if fits(capability) => Ok(()),
        Ok((major, minor)) => {
            Err(format!("its kernels are made for compute capability {wanted}, this is {major}.{minor}"))
        }
        Err(error) => Err(format!("{error:#}")),
    }
}

/// The leading dimensions as (batch, heads).
pub(super) fn batch_and_heads(shape: &Shape) -> (i64, i64) {
    match shape.leading[..] {
        [] => (1, 1),
        [heads] => (1, heads),
        [batch, ref heads @ ..] => (batch, heads.iter().product()),
    }
}

/// `n` as the kernels count it: rows of one head, heads and batches, in fewer bits than a tensor may have.
pub(super) fn count(what: &str, n: i64, most: i64) -> Result<u32> {
    ensure!(n <= most, "{n} {what} are more than the {most} that the kernels take");
    Ok(u32::try_from(n)?)
}

/// When the last of `blocks` is done with items that take so long each, in their unit: whichever is free takes the next.
pub(super) fn makespan(items: impl IntoIterator<Item = u64>, blocks: u32) -> u64 {
    let mut free_at: BinaryHeap<Reverse<u64>> = (0..blocks).map(|_| Reverse(0)).collect();
    for item in items {
        if let Some(mut first) = free_at.peek_mut() {
            first.0 += item;
        }
    }
    free_at.into_iter().map(|Reverse(time)| time).max().unwrap_or_default()
}

/// The same values in memory of their own, row after row; it begins where the allocator's blocks do.
pub(super) fn dense_copy(t: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(t.size(), (t.kind(), t.device()))?;
    copy.f_copy_(t)?;
    Ok(copy)
}

/// `t` in the shape `size`. Where it has that shape already it is not asked of libtorch, whose host time for it counts in
/// short calls.
pub(super) fn in_shape(t: Tensor, size: &[i64]) -> Result<Tensor> {
    if t.size() == size { Ok(t) } else { Ok(t.f_reshape(size)?) }
}
