//! PyTorch's attention: scaled_dot_product_attention, and each of the fused operators that it chooses from.

use anyhow::{Result, bail};
use tch::{Device, Kind, Tensor};

use super::{Attention, Shape, accumulation_kind, differentiate, group_size, repeat_heads, supports_floating_point};
use crate::torch::fused_attention;

/// `o` by libtorch's scaled_dot_product_attention, which picks its own back end and records its own backward.
///
/// The fused back ends take (batch, heads, n, d) only; for another shape libtorch would silently choose the one that
/// stores P.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    let [q4, k4, v4] = in_four_dimensions(q, k, v)?;
    let o = Tensor::f_scaled_dot_product_attention(&q4, &k4, &v4, None::<&Tensor>, 0.0, is_causal, None, false)?;
    Ok(o.f_reshape(q.size())?)
}

/// As [`four_dimensions`], with as many heads of k and v as of q: not every back end takes grouped heads.
fn in_four_dimensions(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<[Tensor; 3]> {
    let group_size = group_size(q, k);
    let repeated = |t: &Tensor| four_dimensions(&repeat_heads(t, group_size)?);
    Ok([four_dimensions(q)?, repeated(k)?, repeated(v)?])
}

/// (batch, heads, n, d); all leading dimensions of other tensors become heads.
fn four_dimensions(t: &Tensor) -> Result<Tensor> {
    if t.dim() == 4 {
        return Ok(t.shallow_clone());
    }
    let [leading @ .., n, d] = &t.size()[..] else { bail!("shape {:?} has no rows", t.size()) };
    Ok(t.f_reshape([1, leading.iter().product(), *n, *d])?)
}

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
        let [q4, k4, v4] = in_four_dimensions(q, k, v)?;
        let o = match (self, q.device()) {
            (Self::Flash, Device::Cpu) => with_lse(&q4, &k4, &v4, is_causal)?.0,
            (_, Device::Cpu) => bail!("{self:?} attention is for GPUs only"),
            (Self::Flash, _) => fused_attention::flash(&q4, &k4, &v4, is_causal)?,
            (Self::Cudnn, _) => fused_attention::cudnn(&q4, &k4, &v4, is_causal)?,
            (Self::Efficient, _) => with_lse(&q4, &k4, &v4, is_causal)?.0,
        };
        if q.dim() == 4 { Ok(o) } else { Ok(o.f_reshape(q.size())?) }
    }
}

/// `(o, lse)` of the operator that returns the logsumexp: flash attention on the CPU, memory-efficient attention on CUDA,
/// which pads the rows of its logsumexp to a multiple of 32. All inputs are (batch, heads, n, d).
fn with_lse(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
    let mask = None::<&Tensor>;
    Ok(match q.device() {
        Device::Cpu => {
            Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, mask, None)?
        }
        _ => {
            let results =
                Tensor::f_internal_scaled_dot_product_efficient_attention(q, k, v, mask, true, 0.0, is_causal, None)?;
            (results.0, results.1)
        }
    })
}

/// The operator that returns the logsumexp, with a backward pass by [`attention`].
///
/// On the CPU bfloat16 and float16 are widened to float32 and the results rounded: the backward pass there sums dk and
/// dv over the blocks of queries in the narrow kind, which is too inaccurate for comparisons. [`attention`], which
/// models and timings use, is libtorch's own in the kind of its inputs.
pub struct Sdpa;

impl Attention for Sdpa {
    fn name(&self) -> &'static str {
        "sdpa"
    }

    fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        supports_floating_point(kind)?;
        match (device, kind) {
            (Device::Cpu, _) => Ok(()),
            (Device::Cuda(_), Kind::Double) => Err("the memory-efficient back end takes no float64".into()),
            // Its vector loads are 16 bytes wide.
            (Device::Cuda(_), _) if !(head_dim as usize * kind.elt_size_in_bytes()).is_multiple_of(16) => {
                Err(format!("the memory-efficient back end needs rows of a multiple of 16 bytes, d is {head_dim}"))
            }
            (Device::Cuda(_), _) => Ok(()),
            (other, _) => Err(format!("no back end for {other:?}")),
        }
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        let _no_graph = tch::no_grad_guard();
        let shape = Shape::of(q, k, v)?;
        let working = working_kind(q);
        let wide = |t: &Tensor| t.f_to_kind(working);
        let [q4, k4, v4] = in_four_dimensions(&wide(q)?, &wide(k)?, &wide(v)?)?;
        let (o, lse) = with_lse(&q4, &k4, &v4, is_causal)?;
        let lse = lse.f_narrow(-1, 0, shape.n_queries)?.f_reshape(&q.size()[..q.dim() - 1])?;
        Ok((o.f_reshape(q.size())?.f_to_kind(q.kind())?, lse))
    }

    /// libtorch's autograd over [`attention`]; `o` and `lse` are not used.
    fn backward(&self, [q, k, v, _, _, d_o]: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
        Shape::of(q, k, v)?;
        let working = working_kind(q);
        let wide = |t: &Tensor| t.f_to_kind(working);
        let inputs = [&wide(q)?, &wide(k)?, &wide(v)?];
        let (_, [dq, dk, dv]) = differentiate(inputs, &wide(d_o)?, |[q, k, v]| attention(q, k, v, is_causal))?;
        Ok([dq.f_to_kind(q.kind())?, dk.f_to_kind(q.kind())?, dv.f_to_kind(q.kind())?])
    }
}

/// The kind in which the back end of this device computes; CUDA's sums in float32 by itself.
fn working_kind(q: &Tensor) -> Kind {
    if q.device() == Device::Cpu { accumulation_kind(q.kind()) } else { q.kind() }
}

#[cfg(test)]
mod tests {
    use super::super::naive::Naive;
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
            let gradients = Naive.backward([&q, &k, &v, &expected, &lse, &d_o], true).unwrap();
            assert!(o.detach().allclose(&expected, 1e-4, 1e-5, false));
            for (leaf, expected) in leaves.iter().zip(gradients) {
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
