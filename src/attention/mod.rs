//! Scaled dot-product attention: several implementations of one trait, and the exact results and error bounds for
//! checking them.
//!
//! Shapes everywhere: `q` and `o` (..., n_queries, d), `k` and `v` (..., n_keys, d), `lse` (..., n_queries); the
//! leading dimensions are arbitrary but equal, except that q and o may have a multiple of k's heads (the last one): then
//! each head of k and v serves as many neighbouring query heads (grouped-query attention). The causal mask lets query i
//! see key j where i >= j, both counted from the start, so every query sees key 0. The scale is always 1/sqrt(d).

use std::fmt;

use anyhow::{Context as _, Result, anyhow, ensure};
use tch::{Device, Kind, Tensor};

use crate::torch::autograd;

pub mod cases;
pub mod error_bounds;
pub mod flash;
pub mod flash_tolerance;
pub mod implementations;
pub mod naive;
pub mod sdpa;
pub mod tiled;

pub use flash::FLASH_KERNELS;
pub use implementations::{IMPLEMENTATIONS, ImplementationName};

/// One way to compute attention and its gradient.
pub trait Attention: Sync {
    /// The name in suites, model options and reports.
    fn name(&self) -> &'static str;

    /// Whether inputs of this kind, device and head dimension can be handled; the error says why not.
    fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String>;

    /// `(o, lse)`: `o` in the kind of `q`, `lse` (natural logarithm, Eq. 12) in its [`accumulation_kind`].
    /// Records nothing for autograd.
    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)>;

    /// As [`Self::forward`], with `o` written to this tensor, of q's shape and kind in any layout. Returns `lse`.
    fn forward_into(&self, [q, k, v]: [&Tensor; 3], o: &Tensor, is_causal: bool) -> Result<Tensor> {
        forward_and_copy(self, [q, k, v], o, is_causal)
    }

    /// `[dq, dk, dv]` in the kind of `q` from `[q, k, v, o, lse, d_o]`: the inputs, what `forward` gave for them, and the
    /// upstream gradient.
    fn backward(&self, saved: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]>;
}

impl fmt::Debug for dyn Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `o` (..., n_queries, d) of the chosen implementation, recorded for libtorch's autograd.
///
/// # Errors
/// A dimension of zero, before libtorch's kernels divide by it.
pub fn attention(name: ImplementationName, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    refuse_empty(&[("q", q), ("k", k), ("v", v)])?;
    name.implementation()?.differentiable(q, k, v, is_causal)
}

/// Casts inputs of different kinds (autocast leaves rotated queries in float32 and values in bfloat16) to the
/// narrowest, as autocast itself does for PyTorch's scaled_dot_product_attention.
fn in_narrowest(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<[Tensor; 3]> {
    let bytes = |t: &Tensor| t.kind().elt_size_in_bytes();
    let kind = [k, v].into_iter().fold(q, |least, t| if bytes(t) < bytes(least) { t } else { least }).kind();
    // libtorch's own cast goes through its dispatcher before it finds that there is nothing to do.
    let cast = |t: &Tensor| if t.kind() == kind { Ok(t.shallow_clone()) } else { t.f_to_kind(kind) };
    Ok([cast(q)?, cast(k)?, cast(v)?])
}

/// `o` of `implementation` as one autograd node that saves q, k, v, o and lse, all in the narrowest kind of the three
/// inputs, and nothing else.
pub fn recomputing(
    implementation: &'static dyn Attention,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    is_causal: bool,
) -> Result<Tensor> {
    let inputs = in_narrowest(q, k, v)?;
    let outputs = autograd::apply(Recomputing { implementation, is_causal }, &inputs.each_ref())?;
    outputs.into_iter().next().context("the attention node gave no output")
}

struct Recomputing {
    implementation: &'static dyn Attention,
    is_causal: bool,
}

impl autograd::Function for Recomputing {
    fn forward(&mut self, inputs: &[Tensor]) -> Result<autograd::Forward> {
        let [q, k, v] = inputs else { anyhow::bail!("attention takes q, k and v, got {} tensors", inputs.len()) };
        let (o, lse) = self.implementation.forward(q, k, v, self.is_causal)?;
        let saved = [q, k, v, &o, &lse].map(Tensor::shallow_clone).into();
        Ok(autograd::Forward { outputs: vec![o], saved })
    }

    fn backward(&self, saved: &[Tensor], grad_outputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
        let ([q, k, v, o, lse], [d_o]) = (saved, grad_outputs) else {
            anyhow::bail!("attention saved 5 tensors and has 1 output, got {} and {}", saved.len(), grad_outputs.len())
        };
        let Some(d_o) = d_o else { return Ok(vec![None, None, None]) };
        let gradients = self.implementation.backward([q, k, v, o, lse, d_o], self.is_causal)?;
        Ok(gradients.map(Some).into())
    }
}

/// `o` of `attention` and `[dq, dk, dv]` for the upstream gradient `d_o`, by libtorch's autograd.
pub fn differentiate(
    inputs: [&Tensor; 3],
    d_o: &Tensor,
    attention: impl FnOnce(&[Tensor; 3]) -> Result<Tensor>,
) -> Result<(Tensor, [Tensor; 3])> {
    let leaves = inputs.map(|t| t.detach().set_requires_grad(true));
    // The gradient of sum(o * do) by o is do, exactly, in any kind.
    let (o, sum) = tch::with_grad(|| -> Result<_> {
        let o = attention(&leaves)?;
        let sum = o.f_mul(d_o)?.f_sum(None)?;
        Ok((o, sum))
    })?;
    let gradients = <[Tensor; 3]>::try_from(Tensor::f_run_backward(&[sum], &leaves, false, false)?);
    let gradients = gradients.map_err(|got| anyhow!("libtorch gave {} gradients for q, k and v", got.len()))?;
    Ok((o.detach(), gradients))
}

/// The kind in which scores, sums and `lse` are kept: float64 for float64 inputs, float32 for all others.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// The dimensions of one problem, checked against each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    pub leading: Vec<i64>,
    pub n_queries: i64,
    pub n_keys: i64,
    pub d: i64,
    /// Query heads that share a head of k and v.
    pub group_size: i64,
}

impl Shape {
    /// Reads and checks the shapes, kinds and devices of q, k and v; the error names the tensor that does not fit.
    pub fn of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        let (size_q, size_k, size_v) = (q.size(), k.size(), v.size());
        let [leading @ .., n_queries, d] = size_q.as_slice() else {
            anyhow::bail!("q has shape {size_q:?}; attention needs (..., n_queries, d)")
        };
        let [leading_k @ .., n_keys, d_k] = size_k.as_slice() else {
            anyhow::bail!("k has shape {size_k:?}; attention needs (..., n_keys, d)")
        };
        let group_size = match (leading, leading_k) {
            _ if leading == leading_k => 1,
            ([batch @ .., heads], [batch_k @ .., kv_heads]) if batch == batch_k && *kv_heads > 0 => {
                ensure!(heads % kv_heads == 0, "q has {heads} heads and k {kv_heads}; q's must be a multiple of k's");
                heads / kv_heads
            }
            _ => 0,
        };
        ensure!(group_size > 0 && d == d_k, "k has shape {size_k:?}, which does not fit q's {size_q:?}");
        ensure!(size_v == size_k, "v has shape {size_v:?}, k has {size_k:?}; they must be equal");
        refuse_empty(&[("q", q), ("k", k)])?;
        for (name, t) in [("k", k), ("v", v)] {
            let (kind, device) = (t.kind(), t.device());
            ensure!(kind == q.kind(), "{name} is {kind:?} and q is {:?}; cast them to one kind", q.kind());
            ensure!(device == q.device(), "{name} is on {device:?} and q on {:?}", q.device());
        }
        Ok(Self { leading: leading.to_vec(), n_queries: *n_queries, n_keys: *n_keys, d: *d, group_size })
    }

    /// The factor 1/sqrt(d) of Eq. 4, 10 and 11.
    pub fn scale(&self) -> f64 {
        1.0 / (self.d as f64).sqrt()
    }
}

/// Query heads that share a head of k; 1 for shapes that do not fit.
fn group_size(q: &Tensor, k: &Tensor) -> i64 {
    let heads = |t: &Tensor| t.size().iter().rev().nth(2).copied().unwrap_or(1);
    match (heads(q), heads(k)) {
        (query_heads, heads) if heads > 0 && query_heads > heads && query_heads % heads == 0 => query_heads / heads,
        _ => 1,
    }
}

/// k or v with each head repeated for every query head of its group.
fn repeat_heads(t: &Tensor, group_size: i64) -> Result<Tensor> {
    if group_size == 1 {
        return Ok(t.shallow_clone());
    }
    let size = t.size();
    let [leading @ .., heads, n, d] = &size[..] else { anyhow::bail!("shape {size:?} has no heads") };
    let grouped = [leading, &[*heads, group_size, *n, *d]].concat();
    Ok(t.f_unsqueeze(-3)?.f_expand(&grouped, false)?.f_reshape([leading, &[heads * group_size, *n, *d]].concat())?)
}

/// The gradient of k or v from that of its repeated heads.
fn sum_heads(t: &Tensor, group_size: i64) -> Result<Tensor> {
    if group_size == 1 {
        return Ok(t.shallow_clone());
    }
    let size = t.size();
    let [leading @ .., heads, n, d] = &size[..] else { anyhow::bail!("shape {size:?} has no heads") };
    let grouped = t.f_reshape([leading, &[heads / group_size, group_size, *n, *d]].concat())?;
    Ok(grouped.f_sum_dim_intlist([-3_i64].as_slice(), false, None)?)
}

/// libtorch's flash attention on the CPU divides by the sizes: a zero among them ends the process with SIGFPE.
fn refuse_empty(tensors: &[(&str, &Tensor)]) -> Result<()> {
    for (name, t) in tensors {
        ensure!(
            t.numel() > 0,
            "{name} has shape {:?}, an empty one; attention needs every dimension above 0",
            t.size()
        );
    }
    Ok(())
}

/// [`Attention::forward_into`] of an implementation whose `o` is a tensor of its own.
fn forward_and_copy(
    attention: &(impl Attention + ?Sized),
    [q, k, v]: [&Tensor; 3],
    o: &Tensor,
    is_causal: bool,
) -> Result<Tensor> {
    require_fit("o", o, &q.size(), q.kind(), q.device())?;
    let (computed, lse) = attention.forward(q, k, v, is_causal)?;
    o.shallow_clone().f_copy_(&computed)?;
    Ok(lse)
}

/// Checks that `o`, `lse` and `d_o` fit the forward pass of `q`; the error names the tensor that does not.
fn require_saved(q: &Tensor, o: &Tensor, lse: &Tensor, d_o: &Tensor) -> Result<()> {
    let (size, kind) = (q.size(), q.kind());
    require_fit("o", o, &size, kind, q.device())?;
    require_fit("do", d_o, &size, kind, q.device())?;
    require_fit("lse", lse, &size[..size.len() - 1], accumulation_kind(kind), q.device())
}

fn require_fit(name: &str, t: &Tensor, size: &[i64], kind: Kind, device: Device) -> Result<()> {
    let (is, of, on) = (t.size(), t.kind(), t.device());
    ensure!(
        is == size && of == kind && on == device,
        "{name} is {is:?}, {of:?}, on {on:?}; the forward pass of this q takes or gives {size:?}, {kind:?}, on {device:?}"
    );
    Ok(())
}

/// (queries, keys) bool, true where the causal mask hides the key; the ranges are absolute positions.
pub fn hidden(queries: std::ops::Range<i64>, keys: std::ops::Range<i64>, device: Device) -> Result<Tensor> {
    let rows = Tensor::f_arange_start(queries.start, queries.end, (Kind::Int64, device))?.f_unsqueeze(-1)?;
    let columns = Tensor::f_arange_start(keys.start, keys.end, (Kind::Int64, device))?;
    Ok(rows.f_lt_tensor(&columns)?)
}

fn supports_floating_point(kind: Kind) -> Result<(), String> {
    match kind {
        Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half => Ok(()),
        other => Err(format!("{other:?} is no floating-point kind")),
    }
}

#[cfg(test)]
mod tests;
