//! Who takes part: every way of computing attention that the grid compares, one line each.

use anyhow::Result;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::attention::backends::Backend;
use crate::attention::flash::Flash;
use crate::attention::portable::Portable;
use crate::attention::tiled::Tiled;
use crate::attention::{Attention, FLASH_KERNELS, hidden, naive, recomputing};
use crate::bench::dtype::Dtype;

/// One column of the tables.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Implementation {
    /// In records and templates.
    pub name: &'static str,
    /// For readers.
    pub label: &'static str,
    pub group: Group,
    /// The units that may multiply its float32, which bound its speed.
    float32: Units,
    /// Its kernels' files, whose change makes a record stale.
    pub kernels: &'static [&'static str],
    #[serde(skip)]
    way: Way,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// The definition as tensor operations, which the handout compares with.
    Plain,
    Ours,
    /// A fused operator of PyTorch.
    Pytorch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Units {
    Vector,
    /// Directly (TF32), or in three products that give float32's accuracy back.
    Tensor,
}

#[derive(Clone, Copy)]
pub(super) enum Way {
    Definition,
    /// A loop of small operations: where it is the only one of ours. Elsewhere kernels stand for it.
    CpuOnly(&'static dyn Attention),
    Own(&'static dyn Attention),
    /// Part of another's choice, and in float32 all of it.
    SixteenBits(&'static dyn Attention),
    Operator(Backend),
}

/// All of them, in the order of the tables; another is another line.
pub const IMPLEMENTATIONS: &[Implementation] = &[
    Implementation::of("naive", "plain", Group::Plain, Units::Vector, &[], Way::Definition),
    Implementation::of("tiled", "tiled", Group::Ours, Units::Vector, &[], Way::CpuOnly(&Tiled::DEFAULT)),
    Implementation::of("flash", "ours", Group::Ours, Units::Tensor, FLASH_KERNELS, Way::Own(&Flash::FASTEST)),
    Implementation::of(
        "portable",
        "portable",
        Group::Ours,
        Units::Tensor,
        &PORTABLE_KERNELS,
        Way::SixteenBits(&Portable),
    ),
    Implementation::of("sdpa_flash", "SDPA flash", Group::Pytorch, Units::Vector, &[], Way::Operator(Backend::Flash)),
    Implementation::of("sdpa_cudnn", "cuDNN", Group::Pytorch, Units::Tensor, &[], Way::Operator(Backend::Cudnn)),
    Implementation::of(
        "sdpa_efficient",
        "efficient",
        Group::Pytorch,
        Units::Tensor,
        &[],
        Way::Operator(Backend::Efficient),
    ),
];

const PORTABLE_KERNELS: [&str; 2] = ["portable_forward.cu", "portable_backward.cu"];

/// The kernels of all implementations.
pub const KERNELS: &[&str] = FLASH_KERNELS;

/// Attention by one implementation on inputs of one shape, ready to be timed: causal, recorded for autograd.
pub type Run<'a> = Box<dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor> + 'a>;

impl Implementation {
    pub(super) const fn of(
        name: &'static str,
        label: &'static str,
        group: Group,
        float32: Units,
        kernels: &'static [&'static str],
        way: Way,
    ) -> Self {
        Self { name, label, group, float32, kernels, way }
    }

    /// Whether it takes part in such a case; the error says why not.
    pub fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        match self.way {
            Way::Definition => Ok(()),
            Way::CpuOnly(_) if device != Device::Cpu => {
                Err("a loop of tensor operations, timed on the CPU only; on a GPU the kernels stand for it".into())
            }
            Way::CpuOnly(own) | Way::Own(own) => own.supports(kind, device, head_dim),
            Way::SixteenBits(own) => own.supports(kind, device, head_dim).and_then(|()| match kind {
                Kind::Float => Err("in float32 they are what the column \"ours\" runs".into()),
                _ => Ok(()),
            }),
            Way::Operator(backend) => backend.supports(kind, device, head_dim),
        }
    }

    /// Makes what no pass should pay for: the mask of the definition.
    pub fn prepare(&self, seq: i64, device: Device) -> Result<Run<'static>> {
        Ok(match self.way {
            Way::Definition => {
                let mask = hidden(0..seq, 0..seq, device)?;
                Box::new(move |q, k, v| naive::masked_attention(q, k, v, Some(&mask)))
            }
            Way::CpuOnly(own) | Way::Own(own) | Way::SixteenBits(own) => {
                Box::new(move |q, k, v| recomputing(own, q, k, v, true))
            }
            Way::Operator(backend) => Box::new(move |q, k, v| backend.attention(q, k, v, true)),
        })
    }

    /// Whether it keeps score matrices, and so has a memory formula.
    pub fn keeps_scores(&self) -> bool {
        matches!(self.way, Way::Definition)
    }

    /// The roof that its speed is held to: that of tensor cores where it may use them for float32.
    pub fn precision(&self, dtype: Dtype) -> &'static str {
        match (dtype, self.float32) {
            (Dtype::Float32, Units::Tensor) => "tf32",
            _ => dtype.name(),
        }
    }
}

impl std::fmt::Debug for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Definition => f.write_str("the definition"),
            Self::CpuOnly(own) | Self::Own(own) | Self::SixteenBits(own) => f.write_str(own.name()),
            Self::Operator(backend) => write!(f, "{backend:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_every_kernel_file_is_watched() {
        let names: BTreeSet<_> = IMPLEMENTATIONS.iter().map(|e| e.name).collect();
        let labels: BTreeSet<_> = IMPLEMENTATIONS.iter().map(|e| e.label).collect();
        assert_eq!((names.len(), labels.len()), (IMPLEMENTATIONS.len(), IMPLEMENTATIONS.len()));
        let used: BTreeSet<_> = IMPLEMENTATIONS.iter().flat_map(|e| e.kernels).collect();
        assert_eq!(used, KERNELS.iter().collect::<BTreeSet<_>>());
    }

    #[test]
    fn every_cell_has_somebody_of_each_group_on_its_device() {
        // Without a GPU our kernels refuse, so that the GPU's side is left to the check that runs there.
        for kind in [Kind::BFloat16, Kind::Float] {
            for d in [16, 32, 64, 128] {
                for group in [Group::Plain, Group::Ours, Group::Pytorch] {
                    let found =
                        IMPLEMENTATIONS.iter().any(|e| e.group == group && e.supports(kind, Device::Cpu, d).is_ok());
                    assert!(found, "{group:?} {kind:?} {d}");
                }
                for group in [Group::Plain, Group::Pytorch] {
                    let gpu = Device::Cuda(0);
                    assert!(IMPLEMENTATIONS.iter().any(|e| e.group == group && e.supports(kind, gpu, d).is_ok()));
                }
            }
        }
    }
}
