//! A training step's time by class of kernel, from Kineto's trace of one step: of our steps and of PyTorch's by the same rules.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::kernels::{Class, Tally, short_name};
use super::work::{self, AttentionPass};
use crate::harness::samples::Samples;
use crate::model::{Config, Precision};
use crate::torch::trace::ranges::Ranges;
use crate::torch::trace::{Event, Source, Trace};

/// What a kernel of a step does. Without a matching rule it is [`StepClass::Other`], which tables list too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepClass {
    /// Matrix products.
    Products,
    /// Fused attention. Plain attention is products and elementwise kernels.
    Attention,
    /// Elementwise operations, norms, softmax, the loss and look-ups, fused or not.
    Elementwise,
    Optimizer,
    /// Copies, fills and changes of type alone.
    Copies,
    Other,
}

impl StepClass {
    pub const ALL: [Self; 6] =
        [Self::Products, Self::Attention, Self::Elementwise, Self::Optimizer, Self::Copies, Self::Other];

    /// As tables and figures name it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Products => "products",
            Self::Attention => "attention",
            Self::Elementwise => "elementwise",
            Self::Optimizer => "optimizer",
            Self::Copies => "casts and copies",
            Self::Other => "other",
        }
    }

    pub fn of(event: &Event) -> Self {
        let named = match event.source {
            Source::Kernel => of_kernel(&event.name),
            Source::Operator if event.name.contains("scaled_dot_product") => Some(Self::Attention),
            _ => None,
        };
        named.unwrap_or_else(|| match Class::of(event) {
            Class::Matmul | Class::MatmulHelper => Self::Products,
            Class::Softmax | Class::Elementwise | Class::Reduction | Class::Indexing => Self::Elementwise,
            Class::Copy => Self::Copies,
            Class::Optimizer => Self::Optimizer,
            // On a CPU the loops that TorchInductor fused are the own time of the compiled function.
            Class::Other if event.source == Source::Operator && event.name.contains("Compiled") => Self::Elementwise,
            Class::Other => Self::Other,
        })
    }
}

/// The kernels that [`Class`] does not tell apart: TorchInductor's by Triton, fused attention, and our fused step's.
fn of_kernel(name: &str) -> Option<StepClass> {
    /// Before the words of products, since some of these are built on CUTLASS; cuDNN's last two prepare and end its backward pass.
    const ATTENTION: &[&str] = &["flash", "portable_", "textbook_", "sdpa", "fmha", "dot_do_o", "convert_dq"];
    const ELEMENTWISE: &[&str] = &["rms_norm", "rope_", "swiglu_", "cross_entropy", "nll_loss"];
    /// Ours, with SwiGLU in the gates'.
    const PRODUCT: &str = "product";
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    // Names of Triton's kernels list the operators whose results they use, attention among them.
    match name.strip_prefix("triton_") {
        Some(rest) => Some(of_triton(rest)),
        None if name == PRODUCT => Some(StepClass::Products),
        None if has(ATTENTION) => Some(StepClass::Attention),
        None if has(ELEMENTWISE) => Some(StepClass::Elementwise),
        None => None,
    }
}

/// "poi_fused__to_copy_t_3" (pointwise), "red_fused_..", "per_fused_..", or "tem_fused_mm_1" (a product's template).
fn of_triton(rest: &str) -> StepClass {
    const LAYOUT: &[&str] = &[
        "to",
        "copy",
        "clone",
        "t",
        "view",
        "unsafe",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "split",
        "cat",
        "detach",
        "convert",
        "element",
        "type",
        "prims",
    ];
    if rest.starts_with("tem_") {
        return StepClass::Products;
    }
    let operators = rest.split_once("_fused_").map_or("", |(_, operators)| operators);
    let mut words = operators.split('_').filter(|word| !word.is_empty() && word.parse::<u32>().is_err()).peekable();
    let only_moves = words.peek().is_some() && words.all(|word| LAYOUT.contains(&word));
    if only_moves { StepClass::Copies } else { StepClass::Elementwise }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelTime {
    /// As [`short_name`] gives it.
    pub name: String,
    pub class: StepClass,
    pub count: u64,
    pub seconds: f64,
}

/// One profiled step. Where kernels overlap, the time that they share is that of the one that started first, so that the classes
/// add up to the time in which any kernel ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepProfile {
    /// On the host's clock, under the profiler.
    pub host_s: f64,
    /// In which at least one kernel ran; of operators on a CPU, the sum of their own times.
    pub busy_s: f64,
    /// Every class, those without a kernel too.
    pub classes: BTreeMap<StepClass, Tally>,
    /// Those that take the most time, in falling order.
    pub kernels: Vec<KernelTime>,
}

/// How many kernels a profile lists by name.
const LISTED: usize = 12;

impl StepProfile {
    /// Of a trace in which all GPU work, or on a CPU all operators, are one step's.
    ///
    /// Errors: a trace without any.
    pub fn of(trace: &Trace, host_s: f64) -> Result<Self> {
        let pieces =
            if trace.events.iter().any(|event| event.source.is_gpu()) { gpu_work(trace) } else { operators(trace)? };
        ensure!(!pieces.is_empty(), "the trace of a step holds neither kernels nor operators");
        let mut classes: BTreeMap<StepClass, Tally> = StepClass::ALL.map(|class| (class, Tally::default())).into();
        let mut names = BTreeMap::<(String, StepClass), Tally>::new();
        for (event, own_ns) in pieces {
            let (class, seconds) = (StepClass::of(event), own_ns as f64 / 1e9);
            for sum in [classes.entry(class).or_default(), names.entry((short_name(&event.name), class)).or_default()] {
                *sum = Tally { count: sum.count + 1, seconds: sum.seconds + seconds };
            }
        }
        let kernel = |((name, class), Tally { count, seconds })| KernelTime { name, class, count, seconds };
        let mut kernels: Vec<KernelTime> = names.into_iter().map(kernel).collect();
        kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        kernels.truncate(LISTED);
        Ok(Self { host_s, busy_s: classes.values().map(|tally| tally.seconds).sum(), classes, kernels })
    }

    pub fn count(&self) -> u64 {
        self.classes.values().map(|tally| tally.count).sum()
    }
}

/// Each kernel, copy and fill, with the nanoseconds in which none that started before it still ran.
fn gpu_work(trace: &Trace) -> Vec<(&Event, i64)> {
    let mut work: Vec<&Event> = trace.events.iter().filter(|event| event.source.is_gpu()).collect();
    work.sort_by_key(|event| (event.start_ns, event.end_ns()));
    let mut until = i64::MIN;
    let own = |event: &Event| {
        let own_ns = (event.end_ns() - event.start_ns.max(until)).max(0);
        until = until.max(event.end_ns());
        own_ns
    };
    let owned: Vec<i64> = work.iter().copied().map(own).collect();
    work.into_iter().zip(owned).collect()
}

/// Each operator of the CPU, with its time without those that it called.
fn operators(trace: &Trace) -> Result<Vec<(&Event, i64)>> {
    // Ranges of Python's libraries open on any thread; no operator needs one here.
    let none = Ranges::of(&Trace::default())?;
    Ok(none.place_operators(trace).into_iter().map(|placed| (placed.event, placed.own_ns)).collect())
}

/// The least time of a step's classes; those that are not here take none where they are fused into others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFloor {
    pub products_s: f64,
    pub attention_s: f64,
    pub optimizer_s: f64,
}

impl StepFloor {
    /// The work of each class at the fastest measured rates: `product` of matrix products in `dtype`, `copy` of the device's
    /// memory. Products are 6 operations a token and multiplied parameter, AdamW 28 bytes a parameter; attention is causal and
    /// recomputes its scores. The two bounds of attention are not added.
    pub fn of(config: &Config, batch: i64, dtype: Precision, product: &Samples, copy: &Samples) -> Option<Self> {
        let fastest = |samples: &Samples| samples.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let flops_per_s = product.work.as_ref()?.flops / fastest(product);
        let bytes_per_s = copy.work.as_ref()?.bytes / fastest(copy);
        let tokens = (batch * config.context_length) as f64;
        let shape = [batch, config.num_heads, config.context_length, config.d_head()];
        let attention = work::of(shape, dtype.into(), AttentionPass::Both, dtype.name());
        let attention_s = (attention.flops / flops_per_s).max(attention.bytes / bytes_per_s);
        Some(Self {
            products_s: 6.0 * tokens * config.num_matmul_parameters() as f64 / flops_per_s,
            attention_s: config.num_layers as f64 * attention_s,
            optimizer_s: 28.0 * config.num_parameters() as f64 / bytes_per_s,
        })
    }

    /// None of a class without a floor of its own.
    pub fn of_class(&self, class: StepClass) -> Option<f64> {
        match class {
            StepClass::Products => Some(self.products_s),
            StepClass::Attention => Some(self.attention_s),
            StepClass::Optimizer => Some(self.optimizer_s),
            StepClass::Elementwise | StepClass::Copies | StepClass::Other => None,
        }
    }

    pub fn total_s(&self) -> f64 {
        self.products_s + self.attention_s + self.optimizer_s
    }
}

#[cfg(test)]
mod tests;
