//! The one table of attention implementations: models choose from it, and grading and benchmarks each filter it.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::flash::hopper::Hopper;
use super::flash::portable::Portable;
use super::flash::{FLASH_KERNELS, Flash};
use super::sdpa::Backend;
use super::tiled::Tiled;
use super::{Attention, hidden, naive, recomputing, sdpa};

/// One way to compute attention. Its serialized form is what tables show.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Implementation {
    /// In suites, model options, records and templates.
    pub name: &'static str,
    /// For readers of a table.
    pub label: &'static str,
    pub group: Group,
    /// The units that may multiply its float32, which bound its speed.
    pub float32: Units,
    /// Its kernels' files, whose change makes a record stale.
    pub kernels: &'static [&'static str],
    #[serde(skip)]
    pub run: Run,
    #[serde(skip)]
    pub timed: Timed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// The definition as tensor operations, which the handout compares with.
    Plain,
    Ours,
    Pytorch,
    /// Of another library, which is not part of PyTorch.
    Library,
    /// Somebody else's, measured beside all of these.
    Subject,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Units {
    Vector,
    /// Directly (TF32), or in three products that give float32's accuracy back.
    Tensor,
}

/// How it runs.
#[derive(Debug, Clone, Copy)]
pub enum Run {
    /// Eq. 4-6, which libtorch differentiates.
    Definition,
    /// PyTorch's scaled_dot_product_attention, which picks one of the operators.
    Sdpa,
    /// A forward and a backward pass of ours as one autograd node.
    Own(&'static dyn Attention),
    /// One fused operator of PyTorch, which gives `o` and does not return its logsumexp.
    Operator(Backend),
    /// A library of Python's, which the Python peer runs and times.
    InPeer,
    /// A function of somebody else's, which runs in a process of its own.
    InSubject,
}

/// Which comparisons of speed have a column for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timed {
    Everywhere,
    /// A loop of small operations; on a GPU kernels take its place.
    OnCpu,
    /// It is a part of another entry, and in float32 all of it.
    InSixteenBits,
    /// Another entry stands for it.
    Nowhere,
}

const PORTABLE_KERNELS: &[&str] = &["portable_forward.cu", "portable_backward.cu"];
const HOPPER_KERNELS: &[&str] = &["flash_forward.cu", "flash_backward.cu"];

/// All of them, in the order of the tables. A new one is a file and a line here, and an [`ImplementationName`] if models are to use it.
#[rustfmt::skip]
pub const IMPLEMENTATIONS: &[Implementation] = &[
    entry("naive", "plain", Group::Plain, Units::Vector, &[], Run::Definition, Timed::Everywhere),
    entry("tiled", "tiled", Group::Ours, Units::Vector, &[], Run::Own(&Tiled::DEFAULT), Timed::OnCpu),
    entry("sdpa", "SDPA", Group::Pytorch, Units::Tensor, &[], Run::Sdpa, Timed::Nowhere),
    entry("flash", "ours", Group::Ours, Units::Tensor, FLASH_KERNELS, Run::Own(&Flash::FASTEST), Timed::Everywhere),
    entry("flash_deterministic", "ours, deterministic", Group::Ours, Units::Tensor, FLASH_KERNELS, Run::Own(&Flash::DETERMINISTIC), Timed::Nowhere),
    entry("hopper", "Hopper", Group::Ours, Units::Tensor, HOPPER_KERNELS, Run::Own(&Hopper::DEFAULT), Timed::Nowhere),
    entry("portable", "portable", Group::Ours, Units::Tensor, PORTABLE_KERNELS, Run::Own(&Portable), Timed::InSixteenBits),
    entry("sdpa_flash", "SDPA flash", Group::Pytorch, Units::Vector, &[], Run::Operator(Backend::Flash), Timed::Everywhere),
    entry("sdpa_cudnn", "cuDNN", Group::Pytorch, Units::Tensor, &[], Run::Operator(Backend::Cudnn), Timed::Everywhere),
    entry("sdpa_efficient", "efficient", Group::Pytorch, Units::Tensor, &[], Run::Operator(Backend::Efficient), Timed::Everywhere),
    entry("flash_attention_4", "FlashAttention-4", Group::Library, Units::Vector, &[], Run::InPeer, Timed::Everywhere),
];

const fn entry(
    name: &'static str,
    label: &'static str,
    group: Group,
    float32: Units,
    kernels: &'static [&'static str],
    run: Run,
    timed: Timed,
) -> Implementation {
    Implementation { name, label, group, float32, kernels, run, timed }
}

/// The implementation called `name`; the error lists the known ones.
pub fn by_name(name: &str) -> Result<&'static Implementation> {
    IMPLEMENTATIONS.iter().find(|implementation| implementation.name == name).with_context(|| {
        let known: Vec<_> = IMPLEMENTATIONS.iter().map(|implementation| implementation.name).collect();
        format!("no attention implementation is called {name:?} (known: {})", known.join(", "))
    })
}

/// Attention on inputs of one shape, ready to be timed: causal, recorded for autograd.
pub type Prepared = Box<dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>>;

impl Implementation {
    /// Its two passes, if it returns the logsumexp; `None` for a single operator.
    pub fn as_attention(&self) -> Option<&'static dyn Attention> {
        match self.run {
            Run::Definition => Some(&naive::Naive),
            Run::Sdpa => Some(&sdpa::Sdpa),
            Run::Own(own) => Some(own),
            Run::Operator(_) | Run::InPeer | Run::InSubject => None,
        }
    }

    /// Whether inputs of this kind, device and head dimension can be handled; the error says why not.
    pub fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        match self.run {
            Run::Definition => naive::Naive.supports(kind, device, head_dim),
            Run::Sdpa => sdpa::Sdpa.supports(kind, device, head_dim),
            Run::Own(own) => own.supports(kind, device, head_dim),
            Run::Operator(operator) => operator.supports(kind, device, head_dim),
            Run::InPeer => Err("it runs in the Python peer".into()),
            Run::InSubject => Err("it runs in the subject's process".into()),
        }
    }

    /// `o` in the shape of `q`, recorded for libtorch's autograd.
    pub fn differentiable(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
        match self.run {
            Run::Definition => naive::attention(q, k, v, is_causal),
            Run::Sdpa => sdpa::attention(q, k, v, is_causal),
            Run::Own(own) => recomputing(own, q, k, v, is_causal),
            Run::Operator(operator) => operator.attention(q, k, v, is_causal),
            Run::InPeer | Run::InSubject => bail!("{} runs in a process of Python only", self.name),
        }
    }

    /// Prepares what must not be timed: the definition's mask, for sequences of `seq`.
    pub fn prepare_causal(&self, seq: i64, device: Device) -> Result<Prepared> {
        if let Run::Definition = self.run {
            let mask = hidden(0..seq, 0..seq, device)?;
            return Ok(Box::new(move |q, k, v| naive::masked_attention(q, k, v, Some(&mask))));
        }
        let implementation = *self;
        Ok(Box::new(move |q, k, v| implementation.differentiable(q, k, v, true)))
    }

    /// Whether it keeps score matrices, and so has a memory formula.
    pub fn keeps_scores(&self) -> bool {
        matches!(self.run, Run::Definition)
    }
}

/// The implementations that suites and models may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ImplementationName {
    /// Eq. 4-6 as tensor operations; libtorch differentiates them and keeps the probabilities.
    Naive,
    /// FlashAttention-2 in tensor operations, recomputing the probabilities in the backward pass.
    Tiled,
    /// PyTorch's own scaled_dot_product_attention.
    Sdpa,
    /// FlashAttention-2 as our own CUDA kernels: Hopper's or the portable ones, whichever suit the inputs.
    Flash,
    /// Our kernels whose results are all bitwise reproducible.
    FlashDeterministic,
}

impl ImplementationName {
    /// The default of a model on `device`: our own kernels on a GPU, and the handout's operations on the processor, for
    /// which there are no kernels.
    pub fn default_on(device: Device) -> Self {
        if device.is_cuda() { Self::Flash } else { Self::Naive }
    }

    /// Whether it runs kernels of ours, whose change makes a record stale.
    pub fn runs_own_kernels(self) -> bool {
        matches!(self, Self::Flash | Self::FlashDeterministic)
    }

    /// Those that need no GPU.
    pub const ON_CPU: [Self; 3] = [Self::Naive, Self::Tiled, Self::Sdpa];

    /// Its entry in the table.
    pub fn implementation(self) -> Result<&'static Implementation> {
        by_name(self.name())
    }

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
    use std::collections::BTreeSet;

    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn names_and_labels_are_unique_and_name_what_runs() {
        let names: BTreeSet<_> = IMPLEMENTATIONS.iter().map(|i| i.name).collect();
        let labels: BTreeSet<_> = IMPLEMENTATIONS.iter().map(|i| i.label).collect();
        assert_eq!((names.len(), labels.len()), (IMPLEMENTATIONS.len(), IMPLEMENTATIONS.len()));
        for implementation in IMPLEMENTATIONS {
            let own = implementation.as_attention().map_or(implementation.name, |attention| attention.name());
            assert_eq!(own, implementation.name);
        }
        let error = by_name("flash9").unwrap_err().to_string();
        assert!(error.contains("flash9") && error.contains("naive, tiled, sdpa, flash, "), "{error}");
    }

    #[test]
    fn every_name_is_in_the_table_and_those_without_a_gpu_run_on_the_cpu() {
        for name in ImplementationName::value_variants() {
            let kernels = name.implementation().unwrap().kernels;
            assert_eq!(name.runs_own_kernels(), !kernels.is_empty(), "{name:?}");
        }
        let graded = IMPLEMENTATIONS.iter().filter(|i| i.as_attention().is_some());
        let without_gpu = graded.filter(|i| i.supports(Kind::Float, Device::Cpu, 64).is_ok());
        assert_eq!(
            without_gpu.map(|i| i.name).collect::<Vec<_>>(),
            ImplementationName::ON_CPU.map(ImplementationName::name)
        );
    }

    #[test]
    fn our_kernels_are_the_default_on_a_gpu() {
        let devices = [Device::Cuda(0), Device::Cuda(1), Device::Cpu];
        assert_eq!(
            devices.map(ImplementationName::default_on),
            [ImplementationName::Flash, ImplementationName::Flash, ImplementationName::Naive]
        );
    }
}
