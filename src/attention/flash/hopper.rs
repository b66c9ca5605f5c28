//! FlashAttention-2 as CUDA kernels for Hopper: `kernels/flash_forward.cu` and `kernels/flash_backward.cu`.

use anyhow::Result;
use tch::{Device, Kind, Tensor};

use super::DIMENSIONS;
use super::launch::{Gradients, Inputs, KernelSet, Saved, require_gpu};
use super::variant::Variant;
use crate::attention::Attention;
use crate::cuda::{Arch, LaunchConfig, TensorMap};

mod backward;
mod forward;
pub mod splits;
pub mod tile_config;

use tile_config::TileSize;

/// Attention by our own kernels: bfloat16 and float16 on compute capability 9.0, d a multiple of 8 up to 128.
///
/// The kernels are compiled for d of 16, 32, 64, 80, 96 and 128. Rows of another d run in the next of these: the TMA unit
/// fills tiles up with zeros, and does not write beyond the tensor.
///
/// `o`, `lse`, `dk` and `dv` are bitwise reproducible. `dq` is summed with atomic additions in any order, so that its
/// last bits vary.
pub struct Hopper {
    /// Of the forward pass's tiles; `None` for the faster one of each shape.
    tile_size: Option<TileSize>,
}

impl Hopper {
    pub const DEFAULT: Self = Self { tile_size: None };
    /// Both sizes of tiles, whatever the shape: for tests.
    pub const SIZES: [&'static dyn Attention; 2] =
        [&Self { tile_size: Some(TileSize::Small) }, &Self { tile_size: Some(TileSize::Large) }];
}

impl KernelSet for Hopper {
    fn name(&self) -> &'static str {
        match self.tile_size {
            None => "hopper",
            Some(TileSize::Small) => "hopper_small",
            Some(TileSize::Large) => "hopper_large",
        }
    }

    fn variant(&self, kind: Kind, head_dim: i64, is_causal: bool) -> Result<Variant, String> {
        if !matches!(kind, Kind::BFloat16 | Kind::Half) {
            return Err(format!("its kernels take bfloat16 and float16, not {kind:?}"));
        }
        let d = u32::try_from(tile_config::kernel_dimension(head_dim)?).map_err(|error| error.to_string())?;
        Ok(Variant { d, ..Variant::of(kind, DIMENSIONS[0], is_causal)? })
    }

    fn runs_on(&self, device: Device) -> Result<(), String> {
        require_gpu(device, "9.0", |arch| arch == Arch::HOPPER)
    }

    fn reads(&self, t: &Tensor) -> bool {
        TensorMap::fits(t).is_ok()
    }

    fn writes(&self, o: &Tensor) -> bool {
        self.reads(o)
    }

    fn launch_forward(&self, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
        forward::launch(self.tile_size, inputs, o, lse)
    }

    fn launch_backward(&self, inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
        backward::launch(inputs, saved, gradients)
    }
}

/// A thread for each four of the kernel's columns of each of `n` rows of each of `heads`.
fn rows_config(inputs: &Inputs, heads: u32, n: u32) -> LaunchConfig {
    let lanes = inputs.variant.d / 4;
    // Lanes come in fours, so that eight rows fill whole warps.
    let rows = 256 / lanes / 8 * 8;
    LaunchConfig { grid: (n.div_ceil(rows), heads, inputs.sizes.batch), block: (rows * lanes, 1, 1), shared_bytes: 0 }
}

#[cfg(test)]
mod tests;
