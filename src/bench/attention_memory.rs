//! The memory of plain attention, by formula: what measured bytes are held against, and what a CPU refuses by.

use anyhow::Result;
use serde::Serialize;

use crate::error::Fault;
use crate::harness::provenance::available_memory_bytes;
use crate::harness::record::Profile;
use crate::units::human_bytes;

/// CUDA's caching allocator rounds every tensor up to this.
const CUDA_BLOCK: u64 = 512;

/// The bytes that [`crate::attention::naive::attention`] needs, tensor by tensor.
///
/// With one score tensor of b T^2 elements and one row tensor of b T d: inputs are q, k, v and the upstream gradient.
/// Forward allocates Q K^T and its quotient by sqrt(d), frees the first, adds P, frees the second, adds o: at most two
/// score tensors and o at once. The graph keeps P. Backward is at its peak inside the backward of the softmax, beside o
/// and dv. On the CPU it holds P, dP and dS there. On CUDA one score tensor more: `softmax_backward_cuda_out`
/// (ATen/native/cuda/SoftMax.cu) allocates the result dS and then `tmp = grad * output`, the product of dP and P, before
/// its kernel runs. Where T is shorter than d the end is higher instead: o, dv, dq, dk, and dk once more on its way
/// into k's own layout.
///
/// What the allocator must get from the driver for this is more again, see `held_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Accounting {
    pub batch: u64,
    pub seq: u64,
    pub d_model: u64,
    pub element_bytes: u64,
    pub score_bytes: u64,
    pub row_bytes: u64,
    pub input_bytes: u64,
    pub forward_peak_bytes: u64,
    pub saved_bytes: u64,
    pub before_backward_bytes: u64,
    /// How many score tensors the backward of the softmax holds.
    pub scores_in_backward: u64,
    pub backward_peak_bytes: u64,
    /// On CUDA, the least that the caching allocator holds once the score tensors are its largest by far: o and dv are
    /// carved out of the block that the quotient freed, so that no score tensor fits there and a fifth block is needed.
    pub held_bytes: Option<u64>,
}

impl Accounting {
    pub fn of(batch: u64, seq: u64, d_model: u64, element_bytes: u64, profile: Profile) -> Self {
        let (block, scores_in_backward) = match profile {
            Profile::Cpu => (1, 3),
            Profile::Gpu => (CUDA_BLOCK, 4),
        };
        let score_bytes = (batch * seq * seq * element_bytes).next_multiple_of(block);
        let row_bytes = (batch * seq * d_model * element_bytes).next_multiple_of(block);
        let input_bytes = 4 * row_bytes;
        Self {
            batch,
            seq,
            d_model,
            element_bytes,
            score_bytes,
            row_bytes,
            input_bytes,
            forward_peak_bytes: input_bytes + 2 * score_bytes + row_bytes,
            saved_bytes: score_bytes + row_bytes,
            before_backward_bytes: input_bytes + score_bytes + row_bytes,
            scores_in_backward,
            backward_peak_bytes: input_bytes + (scores_in_backward * score_bytes + 2 * row_bytes).max(5 * row_bytes),
            held_bytes: (profile == Profile::Gpu).then_some(5 * score_bytes + input_bytes),
        }
    }

    /// What the device must have: the peak, or what the allocator may have to hold for it.
    pub fn needed_bytes(&self) -> u64 {
        self.held_bytes.unwrap_or(0).max(self.peak_bytes())
    }

    pub fn peak_bytes(&self) -> u64 {
        self.forward_peak_bytes.max(self.backward_peak_bytes)
    }
}

/// The fault of a case on a CPU that is predicted to need `bytes`, if it has less.
///
/// A CPU overcommits memory: the allocation would succeed, and the operating system would kill a process later. On a GPU the
/// allocator refuses the case.
pub fn refused_by_prediction(bytes: u64) -> Result<Option<Fault>> {
    let available = available_memory_bytes()?;
    let (needed, has) = (human_bytes(bytes), human_bytes(available));
    let message = format!("refused by prediction, before allocating: it needs {needed}, {has} of memory are available");
    Ok((bytes > available).then_some(Fault::OutOfMemory { requested_bytes: Some(bytes), message }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_tensors_have_the_published_sizes() {
        // 2, 32, 512, 2048 and 8192 MiB at batch 8 in float32, and 256 MiB of q, k, v and o at d = 128, T = 16384.
        for (seq, mib) in [(256, 2), (1024, 32), (4096, 512), (8192, 2048), (16384, 8192)] {
            assert_eq!(Accounting::of(8, seq, 64, 4, Profile::Cpu).score_bytes, mib << 20);
        }
        assert_eq!(Accounting::of(8, 16384, 128, 4, Profile::Cpu).input_bytes, 256 << 20);
    }

    #[test]
    fn cuda_holds_the_bytes_that_an_h200_counted() {
        // (d, T): before backward, forward peak, backward peak, from the caching allocator's statistics (torch 2.11.0).
        for ((d, t), counted) in [
            ((16, 256), [2_752_512, 4_849_664, 9_175_040]),
            ((128, 256), [7_340_032, 9_437_184, 14_680_064]),
            ((64, 4096), [578_813_952, 1_115_684_864, 2_197_815_296]),
            ((128, 16384), [8_925_478_912, 17_515_413_504, 34_762_391_552]),
            ((16, 32768), [34_443_624_448, 68_803_362_816, 137_539_616_768]),
        ] {
            let a = Accounting::of(8, t, d, 4, Profile::Gpu);
            assert_eq!([a.before_backward_bytes, a.forward_peak_bytes, a.backward_peak_bytes], counted, "d {d}, T {t}");
        }
        assert_eq!(Accounting::of(3, 30, 100, 4, Profile::Gpu).score_bytes, 11_264, "10800 in blocks of 512");
    }
}
