//! Two of libtorch's fused attention operators, called directly, so that libtorch does not choose another one.

use anyhow::Result;
use tch::Tensor;

use super::bridge::{borrow, check, ffi, share};
use super::library::cuda_index;

/// `aten::_scaled_dot_product_flash_attention`: q, k, v and o (batch, heads, n, d) on a GPU, recorded for autograd.
///
/// Errors: libtorch's, if the operator does not take the inputs; [`crate::error::Fault::NotAvailable`] on the CPU.
pub fn flash(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    cuda_index(q.device())?;
    let o = check(ffi::flash_attention(borrow(q), borrow(k), borrow(v), is_causal))?;
    Ok(share(&o))
}

/// `aten::_scaled_dot_product_cudnn_attention`, as [`flash`].
pub fn cudnn(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    cuda_index(q.device())?;
    let o = check(ffi::cudnn_attention(borrow(q), borrow(k), borrow(v), is_causal))?;
    Ok(share(&o))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn on_the_cpu_both_operators_report_what_they_need() {
        let q = Tensor::zeros([1, 1, 16, 16], (Kind::BFloat16, Device::Cpu));
        for operator in [flash, cudnn] {
            let error = operator(&q, &q, &q, true).unwrap_err();
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        }
    }
}
