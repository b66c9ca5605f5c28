//! PyTorch's fused attention operators, each called directly; scaled_dot_product_attention chooses one of them.

use anyhow::{Result, bail};
use tch::{Device, Kind, Tensor};

use super::tensor_layout::in_four_dimensions;
use crate::torch::fused_attention;

/// One operator with its own backward operator, both in libtorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// FlashAttention-2; on the CPU libtorch's own blocked kernel of that name.
    Flash,
    /// NVIDIA's cuDNN.
    Cudnn,
    /// The memory-efficient kernels (CUTLASS), the only fused ones that take float32 on a GPU.
    Efficient,
}

impl Backend {
    /// Whether the operator takes such inputs; the error says why not.
    pub fn supports(self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        let half = matches!(kind, Kind::BFloat16 | Kind::Half);
        match (self, device) {
            (Self::Flash, Device::Cpu) => Ok(()),
            (_, Device::Cpu) => Err("the operator is for GPUs only".into()),
            (Self::Flash | Self::Cudnn, _) if !half => {
                Err(format!("the operator takes bfloat16 and float16, not {kind:?}"))
            }
            (Self::Efficient, _) if !half && kind != Kind::Float => {
                Err(format!("the operator takes float32, bfloat16 and float16, not {kind:?}"))
            }
            (_, _) if head_dim % 8 != 0 => Err(format!("the operator needs d in multiples of 8, not {head_dim}")),
            (Self::Cudnn, _) if head_dim > 128 => Err(format!("the operator takes d up to 128, not {head_dim}")),
            (_, _) => Ok(()),
        }
    }

    /// `o` in the shape of `q`, recorded for libtorch's autograd.
    pub fn attention(self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
        let [q4, k4, v4] = [in_four_dimensions(q)?, in_four_dimensions(k)?, in_four_dimensions(v)?];
        let none = None::<&Tensor>;
        let o = match (self, q.device()) {
            (Self::Flash, Device::Cpu) => {
                let outputs = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                    &q4, &k4, &v4, 0.0, is_causal, none, None,
                );
                outputs?.0
            }
            (_, Device::Cpu) => bail!("{self:?} attention is for GPUs only"),
            (Self::Flash, _) => fused_attention::flash(&q4, &k4, &v4, is_causal)?,
            (Self::Cudnn, _) => fused_attention::cudnn(&q4, &k4, &v4, is_causal)?,
            (Self::Efficient, _) => {
                // With the logsumexp, which the backward pass reads.
                let outputs = Tensor::f_internal_scaled_dot_product_efficient_attention(
                    &q4, &k4, &v4, none, true, 0.0, is_causal, None,
                );
                outputs?.0
            }
        };
        if q.dim() == 4 { Ok(o) } else { Ok(o.f_reshape(q.size())?) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Attention as _, naive::Naive};
    use super::*;
    use crate::torch::Generator;
    use crate::torch::autograd::backward_from;

    #[test]
    fn the_operator_of_the_cpu_is_recorded_and_agrees_with_the_definition() {
        let generator = Generator::new(Device::Cpu, 3).unwrap();
        let draw = |shape: &[i64]| generator.randn(shape, Kind::Float).unwrap();
        for shape in [&[2, 3, 40, 16][..], &[3, 40, 16]] {
            let (q, k, v, d_o) = (draw(shape), draw(shape), draw(shape), draw(shape));
            let leaves = [&q, &k, &v].map(|t| t.copy().set_requires_grad(true));
            let o = Backend::Flash.attention(&leaves[0], &leaves[1], &leaves[2], true).unwrap();
            backward_from(&o, &d_o, false).unwrap();
            let (expected, lse) = Naive.forward(&q, &k, &v, true).unwrap();
            let gradients = Naive.backward(&q, &k, &v, &expected, &lse, &d_o, true).unwrap();
            assert!(o.detach().allclose(&expected, 1e-4, 1e-5, false));
            for (leaf, expected) in leaves.iter().zip([gradients.0, gradients.1, gradients.2]) {
                assert!(leaf.grad().allclose(&expected, 1e-4, 1e-5, false));
            }
        }
    }

    #[test]
    fn inputs_that_an_operator_does_not_take_are_refused_before_the_call() {
        let refusal = |backend: Backend, kind, device, d| backend.supports(kind, device, d).unwrap_err();
        assert!(refusal(Backend::Cudnn, Kind::BFloat16, Device::Cpu, 64).contains("GPUs only"));
        assert!(refusal(Backend::Flash, Kind::Float, Device::Cuda(0), 64).contains("not Float"));
        assert!(refusal(Backend::Efficient, Kind::Double, Device::Cuda(0), 64).contains("not Double"));
        assert!(refusal(Backend::Efficient, Kind::Float, Device::Cuda(0), 12).contains("multiples of 8"));
        assert!(refusal(Backend::Cudnn, Kind::Half, Device::Cuda(0), 256).contains("up to 128"));
        for d in [16, 32, 64, 128] {
            for backend in [Backend::Flash, Backend::Cudnn, Backend::Efficient] {
                assert_eq!(backend.supports(Kind::BFloat16, Device::Cuda(0), d), Ok(()));
            }
            assert_eq!(Backend::Efficient.supports(Kind::Float, Device::Cuda(0), d), Ok(()));
        }
    }
}
