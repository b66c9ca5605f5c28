//! The implementations that suites and models choose from, and which one they mean where they say nothing.

use serde::{Deserialize, Serialize};
use tch::Device;

/// Which implementation a suite or a model uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// Eq. 4-6 as tensor operations; libtorch differentiates them and keeps the probabilities.
    Naive,
    /// FlashAttention-2 in tensor operations, recomputing the probabilities in the backward pass.
    Tiled,
    /// PyTorch's own scaled_dot_product_attention.
    Sdpa,
    /// FlashAttention-2 as our own CUDA kernels: Hopper's or the portable ones, whichever suit the inputs.
    Flash,
    /// Those of our kernels whose results all repeat in every bit.
    FlashDeterministic,
}

impl Choice {
    /// What a model on `device` uses where nobody says otherwise: our own kernels on a GPU, and the handout's operations
    /// on the processor, for which there are no kernels.
    pub fn default_on(device: Device) -> Self {
        if device.is_cuda() { Self::Flash } else { Self::Naive }
    }

    /// Whether it runs kernels of ours, whose change makes a record stale.
    pub fn runs_own_kernels(self) -> bool {
        matches!(self, Self::Flash | Self::FlashDeterministic)
    }

    /// Those that need no GPU.
    pub const ON_CPU: [Self; 3] = [Self::Naive, Self::Tiled, Self::Sdpa];

    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Tiled => "tiled",
            Self::Sdpa => "sdpa",
            Self::Flash => "flash",
            Self::FlashDeterministic => "flash_deterministic",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_kernels_are_the_default_on_a_gpu() {
        let devices = [Device::Cuda(0), Device::Cuda(1), Device::Cpu];
        assert_eq!(devices.map(Choice::default_on), [Choice::Flash, Choice::Flash, Choice::Naive]);
    }
}
