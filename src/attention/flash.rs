//! Our CUDA kernels as one implementation, which chooses Hopper's or the portable kernels for each pass.

use anyhow::{Result, anyhow};
use tch::{Device, Kind, Tensor};

use self::hopper::Hopper;
use self::portable::Portable;
use super::{Attention, Shape};

pub mod hopper;
mod launch;
mod params;
pub mod portable;
mod schedule;
pub mod textbook;
pub mod tiles;
pub mod variant;

/// Head dimensions that all kernels are compiled for.
pub const DIMENSIONS: [i64; 4] = [16, 32, 64, 128];

/// Attention by [`Hopper`] or [`Portable`], on any GPU that one of them supports. Either reads the other's `lse`.
pub struct Flash {
    is_deterministic: bool,
}

/// The files of `kernels/` that [`Flash`] runs, over all GPUs.
pub const FLASH_KERNELS: &[&str] =
    &["flash_forward.cu", "flash_backward.cu", "portable_forward.cu", "portable_backward.cu"];

/// The most scores, masked ones included, with which a backward pass of d = 16, 32 or 64 uses the portable kernels.
///
/// Measured on an H200 as CUDA graphs from cold caches, d = 64, in us, portable and Hopper's: one head of 256 12.5 and
/// 18.1, of 1024 16.5 and 19.8; 16 heads of 256 17.0 and 19.7; 4 heads of 1024 25.7 and 23.5; one head of 2048 25.9 and
/// 23.4. At d = 128 the portable kernels gain 7 percent at one head of 256, nothing at 1024, and lose with more heads.
const FEW_SCORES: i64 = 1 << 20;

impl Flash {
    /// [`Hopper`] for both passes where it takes the inputs. A backward pass of few scores uses [`Portable`], which launches
    /// fewer kernels.
    pub const FASTEST: Self = Self { is_deterministic: false };
    /// Every result is bitwise reproducible. The backward pass is always [`Portable`]'s, which computes scores twice, or adds
    /// to `dq` in a fixed order; [`Hopper`] adds to `dq` in any order.
    pub const DETERMINISTIC: Self = Self { is_deterministic: true };

    /// Hopper's kernels if they support such inputs, else the portable ones; the error says why neither does.
    fn choose(kind: Kind, device: Device, d: i64) -> Result<&'static dyn Attention, String> {
        let Err(hopper) = Hopper::DEFAULT.supports(kind, device, d) else { return Ok(&Hopper::DEFAULT) };
        let Err(portable) = Portable.supports(kind, device, d) else { return Ok(&Portable) };
        Err(format!("Hopper's kernels: {hopper}; the portable ones: {portable}; sdpa and naive attention take any d"))
    }

    fn forward_by(q: &Tensor) -> Result<&'static dyn Attention> {
        let (kind, device, d) = (q.kind(), q.device(), q.size().last().copied().unwrap_or_default());
        Self::choose(kind, device, d)
            .map_err(|both| anyhow!("flash attention of {kind:?} with d = {d} on {device:?}: {both}"))
    }

    fn backward_by(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<&'static dyn Attention> {
        let shape = Shape::of(q, k, v)?;
        let is_taken = || Portable.supports(q.kind(), q.device(), shape.d).is_ok();
        let uses_portable = self.is_deterministic || (prefers_portable(&shape) && is_taken());
        if uses_portable { Ok(&Portable) } else { Self::forward_by(q) }
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

    fn forward_into(&self, [q, k, v]: [&Tensor; 3], o: &Tensor, is_causal: bool) -> Result<Tensor> {
        Self::forward_by(q)?.forward_into([q, k, v], o, is_causal)
    }

    fn backward(&self, saved: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
        let [q, k, v, ..] = saved;
        self.backward_by(q, k, v)?.backward(saved, is_causal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::flash_tolerance;

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

        fn backward(&self, saved: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
            Portable.backward(saved, is_causal)
        }
    }

    #[test]
    fn the_portable_backward_pass_reads_hoppers_forward_results() {
        for case in flash_tolerance::adversarial(Device::Cpu, 64, Kind::BFloat16).unwrap() {
            case.check_each(&[&Mixed], flash_tolerance::Passes::Both).unwrap();
        }
    }

    #[test]
    fn a_deterministic_backward_pass_always_uses_the_portable_kernels() {
        for n in [1, 4096] {
            let q = Tensor::zeros([2, n, 128], (Kind::BFloat16, Device::Cpu));
            assert_eq!(Flash::DETERMINISTIC.backward_by(&q, &q, &q).unwrap().name(), "portable");
        }
        assert_eq!([Flash::FASTEST, Flash::DETERMINISTIC].map(|f| f.name()), ["flash", "flash_deterministic"]);
    }

    #[test]
    fn short_backward_passes_use_the_portable_kernels() {
        for (leading, n_queries, n_keys, d, expected) in [
            (&[][..], 1024, 1024, 64, true),
            (&[2], 1024, 1024, 64, false),
            (&[4, 4], 256, 256, 16, true),
            (&[4, 4], 256, 257, 16, false),
            (&[1], 16, 65_536, 32, true),
            (&[i64::MAX, 4], 256, 256, 16, false),
            (&[1], 128, 128, 128, false),
        ] {
            let shape = Shape { leading: leading.into(), n_queries, n_keys, d, group_size: 1 };
            assert_eq!(prefers_portable(&shape), expected, "{shape:?}");
        }
    }

    #[test]
    fn wider_rows_are_refused_with_the_limit_and_what_takes_them() {
        for flash in [Flash::FASTEST, Flash::DETERMINISTIC] {
            let supports = flash.supports(Kind::BFloat16, Device::Cuda(0), 256).unwrap_err();
            let q = Tensor::zeros([2, 5, 256], (Kind::BFloat16, Device::Cpu));
            let forward = format!("{:#}", flash.forward(&q, &q, &q, true).unwrap_err());
            for error in [supports, forward] {
                assert!(error.contains("up to 128, not 256") && error.contains("sdpa"), "{error}");
            }
        }
    }

    #[test]
    fn without_a_gpu_the_error_says_what_both_kernel_sets_need() {
        let q = Tensor::zeros([2, 5, 64], (Kind::BFloat16, Device::Cpu));
        let flash = Flash::FASTEST;
        let forward = format!("{:#}", flash.forward(&q, &q, &q, true).unwrap_err());
        let backward = format!("{:#}", flash.backward([&q; 6], true).unwrap_err());
        let supports = flash.supports(Kind::BFloat16, Device::Cpu, 64).unwrap_err();
        for error in [forward, backward, supports] {
            assert_eq!(error.matches("need a GPU").count(), 2, "{error}");
        }
    }
}
