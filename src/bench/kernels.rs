//! Reads kernel names: the class of a kernel, the units of its products, and a short name for tables.

use serde::{Deserialize, Serialize};

use crate::torch::trace::{Event, Source};

/// Kernels, and the time that they take together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tally {
    pub count: u64,
    pub seconds: f64,
}

/// The class of a kernel, copy or operator. Without a matching rule it is [`Class::Other`], which tables list too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    Matmul,
    /// The second kernel of a product that is split along its inner dimension: it sums the partial results.
    MatmulHelper,
    Softmax,
    Elementwise,
    Reduction,
    /// Copies, fills and concatenations.
    Copy,
    /// Lookups by index and their gradients, and the sorting that these need.
    Indexing,
    /// A step of a whole optimizer in one kernel.
    Optimizer,
    Other,
}

impl Class {
    pub const ALL: [Self; 9] = {
        use Class::*;
        [Matmul, MatmulHelper, Softmax, Elementwise, Reduction, Copy, Indexing, Optimizer, Other]
    };

    pub fn of(event: &Event) -> Self {
        match event.source {
            Source::Memcpy | Source::Memset => Self::Copy,
            Source::Operator => of_operator(&event.name),
            _ => of_kernel(&event.name),
        }
    }

    /// As tables name it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Matmul => "matmul",
            Self::MatmulHelper => "matmul helper",
            Self::Softmax => "softmax",
            Self::Elementwise => "elementwise",
            Self::Reduction => "reduction",
            Self::Copy => "copy",
            Self::Indexing => "indexing",
            Self::Optimizer => "optimizer",
            Self::Other => "other",
        }
    }
}

/// The class of the first rule one of whose words is in the name, in this order: a sum of a split product is no
/// product, and a copy by an elementwise kernel is a copy.
fn of_kernel(name: &str) -> Class {
    const RULES: &[(Class, &[&str])] = &[
        (Class::MatmulHelper, &["splitKreduce", "splitK_reduce", "split_k_reduce", "split_k_kernel"]),
        (Class::Matmul, &["gemm", "gemv", "nvjet", "cutlass", "xmma", "dot_kernel", "cublas"]),
        (Class::Optimizer, &["adamw", "Adam", "multi_tensor_apply"]),
        (Class::Softmax, &["softmax", "SoftMax", "Softmax"]),
        (
            Class::Indexing,
            &["embedding", "gather", "scatter", "index_", "indexSelect", "indexing", "RadixSort", "krn_partial"],
        ),
        (Class::Copy, &["copy_kernel", "copy_device", "CatArray", "FillFunctor"]),
        (Class::Reduction, &["reduce_kernel", "DeviceReduce", "DeviceScan"]),
        (Class::Elementwise, &["elementwise", "triu_tril", "arange", "distribution_"]),
    ];
    let matching = |(_, words): &&(Class, &[&str])| words.iter().any(|word| name.contains(word));
    RULES.iter().find(matching).map_or(Class::Other, |(class, _)| *class)
}

/// libtorch's operators on the CPU, where they stand in for kernels; "aten::add_" counts as "aten::add".
fn of_operator(name: &str) -> Class {
    let plain = name.strip_prefix("aten::").unwrap_or(name).trim_end_matches('_');
    match plain {
        "_softmax" | "_softmax_backward_data" => Class::Softmax,
        "mm" | "addmm" | "bmm" | "baddbmm" | "mv" | "addmv" => Class::Matmul,
        "embedding" | "embedding_dense_backward" | "gather" | "scatter" | "scatter_add" | "index" => Class::Indexing,
        "sum" | "mean" | "max" | "amax" | "logsumexp" => Class::Reduction,
        "copy" | "cat" | "stack" | "fill" | "zero" | "zeros" | "zeros_like" | "clone" => Class::Copy,
        "add" | "sub" | "rsub" | "mul" | "div" | "neg" | "exp" | "log" | "pow" | "sqrt" | "rsqrt" | "sigmoid"
        | "sigmoid_backward" | "lt" | "le" | "eq" | "where" | "masked_fill" | "lerp" | "addcmul" | "addcdiv"
        | "arange" | "random" => Class::Elementwise,
        _ => Class::Other,
    }
}

/// Whether an operator is one matrix product; `aten::linear` and `aten::matmul` call one that is.
pub fn is_matmul_operator(event: &Event) -> bool {
    event.source == Source::Operator && of_operator(&event.name) == Class::Matmul
}

/// The units on which a matrix product runs, if its name shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Units {
    /// Float32 multiply-adds in full precision.
    CudaCores,
    /// Of float32 operands that is TF32, or a sum of narrower products.
    TensorCores,
    Unknown,
}

impl Units {
    /// By the words of cuBLAS's and CUTLASS's names: `s1688` and `16816` are shapes of tensor-core instructions, and
    /// `nvjet` kernels are built on Hopper's; `simt` and `ffma` say one multiply-add a thread, as do `sgemm` without any
    /// of the former and the kernels for vectors and small matrices.
    pub fn of(kernel: &str) -> Self {
        const TENSOR: &[&str] =
            &["tf32", "tensorop", "s1688", "h1688", "16816", "s884", "h884", "nvjet", "gmma", "hmma", "bf16", "f16f16"];
        const CORES: &[&str] = &["simt", "ffma", "sgemm", "gemv", "gemmSN", "gemmk1", "dot_kernel"];
        let has = |words: &[&str]| words.iter().any(|word| kernel.contains(word));
        match (has(TENSOR), has(CORES)) {
            (true, _) => Self::TensorCores,
            (false, true) => Self::CudaCores,
            (false, false) => Self::Unknown,
        }
    }
}

/// The name without return type, namespaces, parameters and template arguments; for libtorch's loops over elements with
/// what they compute: `vectorized_elementwise_kernel (mul)`.
pub fn short_name(name: &str) -> String {
    // "Memcpy DtoD (Device -> Device)" is no C++.
    if name.starts_with("Memcpy ") || name.starts_with("Memset ") {
        return name.split(" (").next().unwrap_or(name).into();
    }
    let (base, arguments) = declarator(name);
    // CUTLASS's entry points are called Kernel and Kernel2, and say what they are in their argument.
    if matches!(base, "Kernel" | "Kernel2") && !arguments.is_empty() {
        return declarator(arguments).0.to_string();
    }
    if base == "kernel" && name.contains("gemvx::") {
        return "gemvx::kernel".into();
    }
    let is_generic = ["elementwise", "reduce_kernel", "multi_tensor_apply"].iter().any(|word| base.contains(word));
    match computed(arguments).filter(|_| is_generic) {
        Some(what) => format!("{base} ({what})"),
        None => short_xmma(base).unwrap_or_else(|| base.to_string()),
    }
}

/// `sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize256x128x8_stage3_..` is "sm80_xmma_gemm_f32_tn_256x128x8": the types once
/// where all are the same, the layouts of the operands, the tile, and whether it is the kernel that adds up the parts of
/// products that were split along their inner dimension.
fn short_xmma(base: &str) -> Option<String> {
    let (family, rest) = base.split_once("_xmma_gemm_")?;
    let (types, rest) = rest.split_at_checked(rest.find("_tn_").or(rest.find("_nn_")).or(rest.find("_nt_"))?)?;
    let layout = rest.get(1..3)?;
    let tile = rest.split('_').find_map(|word| word.strip_prefix("tilesize"))?;
    let first = types.split('_').next()?;
    let kind = first.get(..first.len() / 2)?;
    let uniform = types.replace('_', "").replace(kind, "").is_empty();
    let what = if base.contains("split_k_kernel") { "_split_k" } else { "" };
    Some(format!("{family}_xmma_gemm_{}_{layout}_{tile}{what}", if uniform { kind } else { types }))
}

/// Of `void a::(anonymous namespace)::kernel<float, 4>(float*)`, "kernel" and "float, 4".
fn declarator(name: &str) -> (&str, &str) {
    const ANONYMOUS: &str = "(anonymous namespace)";
    let (mut depth, mut end) = (0, name.len());
    for (i, c) in name.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            '(' if depth == 0 && !name[i..].starts_with(ANONYMOUS) => {
                end = i;
                break;
            }
            // A list of arguments is read as one: CUTLASS's begins with the kernel's own name.
            ',' if depth == 0 => {
                end = i;
                break;
            }
            _ => {}
        }
    }
    let head = &name[..end];
    let (path, arguments) = match head.strip_suffix('>') {
        Some(inner) => {
            let open = last_at_depth_zero(inner, |c| c == '<').unwrap_or(0);
            (&inner[..open], inner.get(open + 1..).unwrap_or_default())
        }
        None => (head, ""),
    };
    let start = last_at_depth_zero(path, |c| matches!(c, ':' | ' ' | ')')).map_or(0, |at| at + 1);
    (&path[start..], arguments)
}

/// The last position outside of angle brackets that `wanted` accepts; an opening bracket of the level itself counts.
fn last_at_depth_zero(text: &str, wanted: impl Fn(char) -> bool) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in text.char_indices().rev() {
        if depth == 0 && wanted(c) {
            return Some(i);
        }
        match c {
            '>' => depth += 1,
            '<' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// What a generic kernel of libtorch computes, from the functor or the function among its template arguments.
fn computed(arguments: &str) -> Option<String> {
    // They take the operation as an argument of their own.
    const WRAPPERS: &[&str] = &["Unary", "AUnary", "BUnary", "Binary", "gpu", "PointwiseOpScalarList"];
    const FUNCTIONS: &[&str] =
        &["_kernel_cuda", "_cuda_kernel", "_kernel_impl", "_cuda_impl", "_cuda_out", "_kernel", "_functor"];
    let words = arguments.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let operations = words.filter_map(|word| {
        let functor = word.strip_suffix("Functor").or(word.strip_suffix("Ops"));
        let add = word.strip_prefix("CUDAFunctor_").or(word.strip_prefix("CUDAFunctorOnSelf_"));
        functor.or(add).or_else(|| FUNCTIONS.iter().find_map(|suffix| word.strip_suffix(suffix)))
    });
    let mut named = operations.filter(|name| !name.is_empty() && !WRAPPERS.contains(name));
    named.next().map(str::to_ascii_lowercase)
}

#[cfg(test)]
mod tests;
