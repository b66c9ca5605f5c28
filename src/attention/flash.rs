//! Our CUDA kernels as one implementation: of Hopper's and the portable ones, for each pass those that suit the inputs.

use anyhow::{Result, anyhow};
use tch::{Device, Kind, Tensor};

use super::hopper::Hopper;
use super::portable::Portable;
use super::{Attention, Shape};

/// Attention by our own kernels on any GPU that either set of them takes; see [`Hopper`] and [`Portable`]. `lse` is the
/// same to both.
pub struct Flash {
    is_deterministic: bool,
}

/// The files of `kernels/` that [`Flash`] runs, on one GPU or another.
pub const FLASH_KERNELS: &[&str] =
    &["flash_forward.cu", "flash_backward.cu", "portable_forward.cu", "portable_backward.cu"];

/// The most scores of a backward pass, those counted that the mask hides, that is the portable kernels' at d of 16, 32 and
/// 64. On an H200, as CUDA graphs, cold, d 64, in us, theirs and Hopper's: one head of 256 12.5 and 18.1, of 1024 16.5 and
/// 19.8, 16 heads of 256 17.0 and 19.7; beyond, 4 heads of 1024 25.7 and 23.5, one head of 2048 25.9 and 23.4. At d 128
/// they gain 7 percent at one head of 256, nothing at 1024, and lose with more heads.
const FEW_SCORES: i64 = 1 << 20;

impl Flash {
    /// Both passes are [`Hopper`]'s where it takes the inputs, but for a backward pass of few scores, in which the launches
    /// take the time and [`Portable`] has fewer.
    pub const FASTEST: Self = Self { is_deterministic: false };
    /// Every result repeats in every bit: the backward pass is always [`Portable`]'s, which computes scores twice, where
    /// [`Hopper`] adds the parts of `dq` in any order.
    pub const DETERMINISTIC: Self = Self { is_deterministic: true };

    /// Hopper's kernels where they take such inputs; the error says why neither set does.
    fn choose(kind: Kind, device: Device, d: i64) -> Result<&'static dyn Attention, String> {
        let Err(hopper) = Hopper::DEFAULT.supports(kind, device, d) else { return Ok(&Hopper::DEFAULT) };
        let Err(portable) = Portable.supports(kind, device, d) else { return Ok(&Portable) };
        Err(format!("Hopper's kernels: {hopper}; the portable ones: {portable}"))
    }

    fn forward_by(q: &Tensor) -> Result<&'static dyn Attention> {
        let (kind, device, d) = (q.kind(), q.device(), q.size().last().copied().unwrap_or_default());
        Self::choose(kind, device, d).map_err(|both| {
            anyhow!("flash attention of {kind:?} with d = {d} on {device:?}: {both}; sdpa and naive attention take any")
        })
    }

    fn backward_by(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<&'static dyn Attention> {
        let shape = Shape::of(q, k, v)?;
        let is_taken = || Portable.supports(q.kind(), q.device(), shape.d).is_ok();
        let is_portables = self.is_deterministic || (prefers_portable(&shape) && is_taken());
        if is_portables { Ok(&Portable) } else { Self::forward_by(q) }
    }
}

/// Whether a backward pass of this shape is faster in the portable kernels where both take it.
fn prefers_portable(shape: &Shape) -> bool {
    let sizes = shape.leading.iter().chain([&shape.n_queries, &shape.n_keys]);
    shape.d <= 64 && sizes.fold(1, |scores: i64, &size| scores.saturating_mul(size)) <= FEW_SCORES
}

impl Attention for Flash {
    fn name(&self) -> &'static str {
        if self.is_deterministic { "flash_deterministic" } else { "flash" }
    }

    fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        Self::choose(kind, device, head_dim)?;
        if self.is_deterministic { Portable.supports(kind, device, head_dim) } else { Ok(()) }
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        Self::forward_by(q)?.forward(q, k, v, is_causal)
    }

    fn backward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        lse: &Tensor,
        d_o: &Tensor,
        is_causal: bool,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        self.backward_by(q, k, v)?.backward(q, k, v, o, lse, d_o, is_causal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::rule;

    /// Hopper's forward pass and the portable backward pass, on tensors of the processor too.
    struct Mixed;

    impl Attention for Mixed {
        fn name(&self) -> &'static str {
            "mixed"
        }

        fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
            Hopper::DEFAULT.supports(kind, device, head_dim)
        }

        fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
            Hopper::DEFAULT.forward(q, k, v, is_causal)
        }

        fn backward(
            &self,
            q: &Tensor,
            k: &Tensor,
            v: &Tensor,
            o: &Tensor,
            lse: &Tensor,
            d_o: &Tensor,
            is_causal: bool,
        ) -> Result<(Tensor, Tensor, Tensor)> {
            Portable.backward(q, k, v, o, lse, d_o, is_causal)
        }
    }

    #[test]
    fn one_sets_forward_pass_serves_the_others_backward_pass() {
        for case in rule::adversarial(Device::Cpu, 64, Kind::BFloat16).unwrap() {
            case.hold(&Mixed).unwrap();
        }
    }

    #[test]
    fn a_deterministic_backward_pass_is_the_portable_kernels_however_long() {
        for n in [1, 4096] {
            let q = Tensor::zeros([2, n, 128], (Kind::BFloat16, Device::Cpu));
            assert_eq!(Flash::DETERMINISTIC.backward_by(&q, &q, &q).unwrap().name(), "portable");
        }
        assert_eq!([Flash::FASTEST, Flash::DETERMINISTIC].map(|f| f.name()), ["flash", "flash_deterministic"]);
    }

    #[test]
    fn short_backward_passes_are_the_portable_kernels() {
        for (leading, n_queries, n_keys, d, expected) in [
            (&[][..], 1024, 1024, 64, true),
            (&[2], 1024, 1024, 64, false),
            (&[4, 4], 256, 256, 16, true),
            (&[4, 4], 256, 257, 16, false),
            (&[1], 16, 65_536, 32, true),
            (&[i64::MAX, 4], 256, 256, 16, false),
            (&[1], 128, 128, 128, false),
        ] {
            let shape = Shape { leading: leading.into(), n_queries, n_keys, d };
            assert_eq!(prefers_portable(&shape), expected, "{shape:?}");
        }
    }

    #[test]
    fn without_a_gpu_it_says_what_both_need() {
        let q = Tensor::zeros([2, 5, 64], (Kind::BFloat16, Device::Cpu));
        let flash = Flash::FASTEST;
        let forward = format!("{:#}", flash.forward(&q, &q, &q, true).unwrap_err());
        let backward = format!("{:#}", flash.backward(&q, &q, &q, &q, &q, &q, true).unwrap_err());
        let supports = flash.supports(Kind::BFloat16, Device::Cpu, 64).unwrap_err();
        for error in [forward, backward, supports] {
            assert_eq!(error.matches("need a GPU").count(), 2, "{error}");
        }
    }
}
