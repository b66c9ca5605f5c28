//! FlashAttention-2 as CUDA kernels for every GPU from compute capability 8.0 on, in float32 too:
//! `kernels/portable_forward.cu` and `kernels/portable_backward.cu`.

use anyhow::Result;
use tch::Tensor;

use super::launch::{Gradients, Inputs, KernelSet, Saved, Sizes, int};
use super::params::portable_forward as params;
use crate::cuda::{self, Address};

mod backward;
mod forward;
pub mod splits;
pub mod tile_config;

use tile_config::BackwardConfig;

/// Attention by our own kernels: bfloat16, float16 and float32, d = 16, 32, 64 or 128, on any GPU from 8.0 on.
///
/// Every result is bitwise reproducible.
pub struct Portable;

impl KernelSet for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn reads(&self, t: &Tensor) -> bool {
        // Rows must be contiguous and begin at multiples of 16 bytes.
        let (sizes, strides, bytes) = (t.size(), t.stride(), t.kind().elt_size_in_bytes() as i64);
        let is_aligned = |i: usize| sizes[i] == 1 || strides[i] * bytes % 16 == 0;
        (t.data_ptr() as usize).is_multiple_of(16) && strides[3] == 1 && (0..3).all(is_aligned)
    }

    fn launch_forward(&self, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
        forward::launch(inputs, o, lse)
    }

    fn launch_backward(&self, inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
        let Sizes { n_queries, n_keys, .. } = inputs.sizes;
        let scores = u64::from(n_queries) * u64::from(n_keys) * u64::from(inputs.sizes.all_heads());
        let shared_limit = cuda::most_shared_bytes(inputs.device())?;
        backward::launch(BackwardConfig::for_scores(inputs.variant, scores, shared_limit), inputs, saved, gradients)
    }
}

/// [`Portable`], with the backward pass of long sequences for every length: for tests.
pub struct Fused;

impl KernelSet for Fused {
    fn name(&self) -> &'static str {
        "portable_fused"
    }

    fn reads(&self, t: &Tensor) -> bool {
        Portable.reads(t)
    }

    fn launch_forward(&self, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
        forward::launch(inputs, o, lse)
    }

    fn launch_backward(&self, inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
        let shared_limit = cuda::most_shared_bytes(inputs.device())?;
        backward::launch(BackwardConfig::for_scores(inputs.variant, u64::MAX, shared_limit), inputs, saved, gradients)
    }
}

/// K and V of a section of heads, or Q and dO, are to stay in an L2 cache, of which an A100 has 40 MB.
const SECTION_BYTES: u64 = 24 << 20;

/// How many heads are worked on at a time, before the tiles of the next heads.
fn heads_at_a_time(inputs: &Inputs) -> Result<i32> {
    let sizes = &inputs.sizes;
    let n = u64::from(sizes.n_queries.max(sizes.n_keys));
    let head_bytes = 2 * n * u64::from(inputs.variant.row_bytes());
    int((SECTION_BYTES / head_bytes).clamp(1, sizes.all_heads().into()) as u32)
}

/// An input as the kernels read it.
fn input(t: &Tensor) -> params::Tensor<'_> {
    let stride = t.stride();
    params::Tensor { base: Address::of(t), strides: [stride[0], stride[1], stride[2]] }
}

#[cfg(test)]
mod tests;
