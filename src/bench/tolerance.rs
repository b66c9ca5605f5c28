//! Error bounds of timed results for each operation and type, with their derivation.
//!
//! Errors are relative to the norm ([`super::errors::relative_error`]). The checks of attention use element-wise bounds:
//! `attention::error_bounds` and `attention::flash_tolerance`.

use super::dtype::Dtype;
use crate::model::Precision;

/// Bound for attention's o, dq, dk and dv.
///
/// In float32 a sum of n products errs by about sqrt(n) 2^-24, 1.5e-5 at 65,536 keys. TF32 rounds both factors of every
/// product to 11 bits, which alone gives 2e-4 to 3e-4: the bound lies between, so that a TF32 column is refused.
/// bfloat16 rounds by 2^-9 at most. Plain attention rounds scores, probabilities, their gradients and each result:
/// together about 0.01. float16 has three more bits, some of which it loses near zero.
pub fn attention(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Float32 => 1e-4,
        Dtype::Float16 => 5e-3,
        Dtype::Bfloat16 => 2e-2,
    }
}

/// Bound for the difference between the losses of a replayed CUDA graph and of the same operations launched eagerly.
///
/// The kernels are the same, so the bits are equal unless a library sums in another order. A loss is a mean over
/// thousands of tokens, which averages such roundings.
pub fn replayed_loss(dtype: Precision) -> f64 {
    match dtype {
        Precision::Float32 => 1e-5,
        Precision::Bfloat16 => 1e-3,
    }
}

/// Of a Transformer's training step; each is relative to the norm.
pub struct TransformerTolerance {
    pub loss: f64,
    pub logits: f64,
    pub gradients: f64,
    pub worst_gradient: f64,
}

/// Of PyTorch's model from ours, on the same weights and tokens.
///
/// In float32 both sides round to 2^-24 and sum thousands of terms: about 1e-6, growing with depth. TF32 (2^-11) would fail.
///
/// In bfloat16 a compiler omits roundings of 2^-9 between fused operations, about ten in each layer. Their effects add like
/// a random walk: sqrt(10 * 48) * 2^-9 is 4 % for the deepest model. Gradients of queries and keys have the largest errors,
/// as small differences of large terms. The loss is a mean over thousands of tokens.
pub fn transformer(dtype: Precision) -> TransformerTolerance {
    match dtype {
        Precision::Float32 => TransformerTolerance { loss: 1e-5, logits: 1e-4, gradients: 1e-4, worst_gradient: 1e-3 },
        Precision::Bfloat16 => TransformerTolerance { loss: 5e-3, logits: 5e-2, gradients: 1e-1, worst_gradient: 3e-1 },
    }
}

/// A step moves a parameter of order one by 1e-3 and rounds it to 2^-24; five roundings a step over three steps are left,
/// while a decay or a bias correction left out would change the end by 1e-5 and more.
pub const ADAMW: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::attention::{Attention as _, naive::Naive};
    use crate::bench::errors::relative_error;
    use crate::torch::Generator;
    use crate::torch::random::SEED;

    /// The nearest float32 with eleven significant bits, as tensor cores read a TF32 factor.
    fn tf32(t: &Tensor) -> Tensor {
        let bits = t.view_dtype(Kind::Int) + 0x1000;
        bits.bitwise_and(!0x1fff).view_dtype(Kind::Float)
    }

    #[test]
    fn float32_attention_is_within_its_bound_and_tf32_attention_beyond() {
        let generator = Generator::new(Device::Cpu, SEED).unwrap();
        let [q, k, v, d_o] = [(); 4].map(|()| generator.randn(&[256, 64], Kind::Float).unwrap());
        let wide = |t: &Tensor| t.to_kind(Kind::Double);
        let (o, lse) = Naive.forward(&wide(&q), &wide(&k), &wide(&v), true).unwrap();
        let [_, _, dv] = Naive.backward([&wide(&q), &wide(&k), &wide(&v), &o, &lse, &wide(&d_o)], true).unwrap();
        let attend = |round: fn(&Tensor) -> Tensor| {
            let scores = round(&q).matmul(&round(&k).tr()) / 8.0;
            let hidden = Tensor::ones([256, 256], (Kind::Bool, Device::Cpu)).triu(1);
            let p = round(&scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, None));
            [(p.matmul(&round(&v)), &o), (p.tr().matmul(&round(&d_o)), &dv)]
                .map(|(ours, expected)| relative_error(&ours, expected).unwrap())
        };
        let bound = attention(Dtype::Float32);
        for (name, errors, refused) in [("float32", attend(Tensor::copy), false), ("TF32", attend(tf32), true)] {
            for error in errors {
                assert_eq!(
                    error > bound,
                    refused,
                    "{name} is off by {error:.1e} of the norm, the bound is {bound:.1e}"
                );
            }
        }
    }
}
