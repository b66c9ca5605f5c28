//! PyTorch's own scaled_dot_product_attention, for comparison and as an option of the model.

use anyhow::Result;
use tch::{Device, Kind, Tensor};

use super::tensor_layout::in_four_dimensions;
use super::{Attention, Shape, accumulation_kind, supports_floating_point};

/// `o` by libtorch's scaled_dot_product_attention, which picks its own back end and records its own backward.
///
/// The fused back ends take (batch, heads, n, d) only; for another shape libtorch would silently choose the one that
/// stores P.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    let [q4, k4, v4] = [in_four_dimensions(q)?, in_four_dimensions(k)?, in_four_dimensions(v)?];
    let o = Tensor::f_scaled_dot_product_attention(&q4, &k4, &v4, None::<&Tensor>, 0.0, is_causal, None, false)?;
    Ok(o.f_reshape(q.size())?)
}

/// libtorch's back end that returns the logsumexp: flash attention on the CPU, memory-efficient attention on CUDA.
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
        let four = |t: &Tensor| in_four_dimensions(&t.f_to_kind(working)?);
        let [q4, k4, v4] = [four(q)?, four(k)?, four(v)?];
        let (o, lse) = match q.device() {
            Device::Cpu => Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                &q4,
                &k4,
                &v4,
                0.0,
                is_causal,
                None::<&Tensor>,
                None,
            )?,
            _ => {
                let (o, lse, _seed, _offset) = Tensor::f_internal_scaled_dot_product_efficient_attention(
                    &q4,
                    &k4,
                    &v4,
                    None::<&Tensor>,
                    true,
                    0.0,
                    is_causal,
                    None,
                )?;
                (o, lse)
            }
        };
        // The CUDA back end pads the rows of its logsumexp to a multiple of 32.
        let lse = lse.f_narrow(-1, 0, shape.n_queries)?.f_reshape(&q.size()[..q.dim() - 1])?;
        Ok((o.f_reshape(q.size())?.f_to_kind(q.kind())?, lse))
    }

    /// libtorch's autograd over [`attention`]; `o` and `lse` are not used.
    fn backward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _o: &Tensor,
        _lse: &Tensor,
        d_o: &Tensor,
        is_causal: bool,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        Shape::of(q, k, v)?;
        let (narrow, working) = (q.kind(), working_kind(q));
        let leaf = |t: &Tensor| -> Result<Tensor> { Ok(t.f_to_kind(working)?.f_detach()?.f_set_requires_grad(true)?) };
        let leaves = [leaf(q)?, leaf(k)?, leaf(v)?];
        let weighted = tch::with_grad(|| -> Result<Tensor> {
            let o = attention(&leaves[0], &leaves[1], &leaves[2], is_causal)?;
            // The gradient of sum(o * do) by o is do, exactly, in any kind.
            Ok(o.f_mul(&d_o.f_to_kind(working)?)?.f_sum(None)?)
        })?;
        let [dq, dk, dv] = <[Tensor; 3]>::try_from(Tensor::f_run_backward(&[weighted], &leaves, false, false)?)
            .map_err(|got| anyhow::anyhow!("libtorch gave {} gradients for q, k and v", got.len()))?;
        Ok((dq.f_to_kind(narrow)?, dk.f_to_kind(narrow)?, dv.f_to_kind(narrow)?))
    }
}

/// The kind in which the back end of this device computes; CUDA's sums in float32 by itself.
fn working_kind(q: &Tensor) -> Kind {
    match q.device() {
        Device::Cpu => accumulation_kind(q.kind()),
        _ => q.kind(),
    }
}
