//! The memory that causal attention by its definition needs, by formula: what a case that runs out of it lacked.

use tch::Device;

use crate::bench::dtype::Dtype;
use crate::bench::work::AttentionPass;

/// Bytes of tensors at the peak of one pass of [`crate::attention::naive::masked_attention`], inputs and mask included.
///
/// With M one score tensor, R one of b h T d elements, and a mask of T^2 bytes made before: forward holds q, k, v, dO, the
/// mask, two score tensors (quotient and masked, masked and P) and o. Backward holds P, dP and dS inside the backward of
/// the softmax, beside o and dV, and on CUDA dP P as a tensor of its own (`softmax_backward_cuda_out`).
pub fn peak_bytes(shape: [i64; 4], dtype: Dtype, pass: AttentionPass, device: Device) -> u64 {
    let [batch, heads, seq, d] = shape.map(|n| n.unsigned_abs());
    let element = dtype.kind().elt_size_in_bytes() as u64;
    let (mask, scores, row) = (seq * seq, batch * heads * seq * seq * element, batch * heads * seq * d * element);
    let forward = 4 * row + mask + 2 * scores + row;
    let in_backward = if device == Device::Cpu { 3 } else { 4 };
    let backward = 4 * row + mask + (in_backward * scores + 2 * row).max(5 * row);
    match pass {
        AttentionPass::Forward => forward,
        AttentionPass::Backward | AttentionPass::Both | AttentionPass::Summed => forward.max(backward),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_cell_in_float32_needs_four_score_matrices_and_the_mask() {
        let of = |pass| peak_bytes([1, 1, 65536, 64], Dtype::Float32, pass, Device::Cuda(0));
        let (m, r, mask) = (1u64 << 34, 1u64 << 24, 1u64 << 32);
        assert_eq!(of(AttentionPass::Forward), 2 * m + mask + 5 * r);
        assert_eq!(of(AttentionPass::Backward), 4 * m + mask + 6 * r);
        assert_eq!(of(AttentionPass::Both), of(AttentionPass::Backward));
    }
}
