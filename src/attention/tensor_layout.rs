//! How tensors lie in memory: the four dimensions that kernels see, and a contiguous copy of those they cannot read.

use anyhow::Result;
use tch::Tensor;

use super::Shape;

/// The leading dimensions as (batch, heads).
pub(super) fn batch_and_heads(shape: &Shape) -> (i64, i64) {
    match shape.leading[..] {
        [] => (1, 1),
        [heads] => (1, heads),
        [batch, ref heads @ ..] => (batch, heads.iter().product()),
    }
}

/// (batch, heads, n, d); all leading dimensions of other tensors become heads.
pub(super) fn in_four_dimensions(t: &Tensor) -> Result<Tensor> {
    if t.dim() == 4 {
        return Ok(t.shallow_clone());
    }
    let [leading @ .., n, d] = &t.size()[..] else { anyhow::bail!("shape {:?} has no rows", t.size()) };
    Ok(t.f_reshape([1, leading.iter().product(), *n, *d])?)
}

/// `t` in the shape `size`. libtorch is not called where `t` has that shape already: its host time shows in short calls.
pub(super) fn in_shape(t: Tensor, size: &[i64]) -> Result<Tensor> {
    if t.size() == size { Ok(t) } else { Ok(t.f_reshape(size)?) }
}

/// Whether rows are contiguous and begin at multiples of 16 bytes.
pub(super) fn rows_begin_at_16_bytes(t: &Tensor) -> bool {
    let (sizes, strides, bytes) = (t.size(), t.stride(), t.kind().elt_size_in_bytes() as i64);
    let last = sizes.len() - 1;
    (t.data_ptr() as usize).is_multiple_of(16)
        && strides[last] == 1
        && (0..last).all(|i| sizes[i] == 1 || strides[i] * bytes % 16 == 0)
}

/// A contiguous copy in memory of its own, which begins where the allocator's blocks do.
pub(super) fn contiguous_copy(t: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(t.size(), (t.kind(), t.device()))?;
    copy.f_copy_(t)?;
    Ok(copy)
}
