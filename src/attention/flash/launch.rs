//! The host code that all sets of attention kernels share: it checks inputs, copies those that kernels cannot read,
//! allocates results, and calls the set to launch its kernels.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::variant::Variant;
use crate::attention::{Attention, Shape, forward_and_copy, require_fit, require_saved};
use crate::cuda::{self, Arch, LaunchConfig};

/// Kernels of one kind for both passes. Every set is an [`Attention`], whose host code is below.
pub trait KernelSet: Sync {
    /// As [`Attention::name`].
    fn name(&self) -> &'static str;

    /// The kernels for such inputs; the error says which inputs there are kernels for.
    fn variant(&self, kind: Kind, head_dim: i64, is_causal: bool) -> Result<Variant, String> {
        Variant::of(kind, head_dim, is_causal)
    }

    /// Whether the kernels run on `device`; the error says what they need.
    fn runs_on(&self, device: Device) -> Result<(), String> {
        require_gpu(device, "8.0 and above", |arch| arch >= Arch::AMPERE)
    }

    /// Whether the kernels can read `t` (batch, heads, n, d) in its layout; they get a contiguous copy otherwise.
    fn reads(&self, t: &Tensor) -> bool;

    /// Whether the forward pass's kernels can write `o` (batch, heads, n_queries, d) in its layout.
    fn writes(&self, o: &Tensor) -> bool {
        o.is_contiguous()
    }

    /// Launches the kernels that write `o` (batch, heads, n_queries, d) and `lse` (batch, heads, n_queries).
    fn launch_forward(&self, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()>;

    /// Launches the kernels that write `dq`, `dk` and `dv`.
    fn launch_backward(&self, inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()>;
}

/// q, k and v as (batch, heads, n, d), in a layout that the kernels read; k and v may have fewer heads.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub sizes: Sizes,
    pub variant: Variant,
}

/// The other inputs of the backward pass: `o` and `d_o` as q, `lse` (batch, heads, n_queries) in float32.
pub struct Saved {
    pub o: Tensor,
    pub lse: Tensor,
    pub d_o: Tensor,
}

/// Contiguous, each in the shape of its input.
pub struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
}

/// The sizes of one call, within what kernels count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub batch: u32,
    pub heads: u32,
    pub n_queries: u32,
    pub n_keys: u32,
    /// Elements of a row, as the tensors have them.
    pub d: u32,
    /// Query heads that share a head of k and v.
    pub group_size: u32,
}

impl<S: KernelSet> Attention for S {
    fn name(&self) -> &'static str {
        KernelSet::name(self)
    }

    fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        self.variant(kind, head_dim, false)?;
        self.runs_on(device)
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        let _no_graph = tch::no_grad_guard();
        let inputs = Inputs::of(self, q, k, v, is_causal)?;
        let o = Tensor::f_empty(inputs.q.size(), (q.kind(), q.device()))?;
        let lse = write(self, &inputs, &o).with_context(|| launching(self, q, k))?;
        Ok((in_shape(o, &q.size())?, in_shape(lse, &q.size()[..q.dim() - 1])?))
    }

    fn forward_into(&self, [q, k, v]: [&Tensor; 3], o: &Tensor, is_causal: bool) -> Result<Tensor> {
        let _no_graph = tch::no_grad_guard();
        if q.dim() != 4 || !self.writes(o) {
            return forward_and_copy(self, [q, k, v], o, is_causal);
        }
        require_fit("o", o, &q.size(), q.kind(), q.device())?;
        write(self, &Inputs::of(self, q, k, v, is_causal)?, o).with_context(|| launching(self, q, k))
    }

    fn backward(&self, [q, k, v, o, lse, d_o]: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
        let _no_graph = tch::no_grad_guard();
        let inputs = Inputs::of(self, q, k, v, is_causal)?;
        require_saved(q, o, lse, d_o)?;
        let readable = |t: &Tensor| inputs.sizes.readable(self, t);
        let saved = Saved { o: readable(o)?, lse: lse.f_contiguous()?, d_o: readable(d_o)? };
        let like = |t: &Tensor| Tensor::f_empty(t.size(), (t.kind(), t.device()));
        let gradients = Gradients { dq: like(&inputs.q)?, dk: like(&inputs.k)?, dv: like(&inputs.v)? };
        self.launch_backward(&inputs, &saved, &gradients).with_context(|| launching(self, q, k))?;
        let Gradients { dq, dk, dv } = gradients;
        Ok([in_shape(dq, &q.size())?, in_shape(dk, &k.size())?, in_shape(dv, &v.size())?])
    }
}

/// Writes `o`, of the inputs' (batch, heads, n_queries, d), and returns `lse`.
fn write(set: &impl KernelSet, inputs: &Inputs, o: &Tensor) -> Result<Tensor> {
    let lse = Tensor::f_empty(&o.size()[..3], (Kind::Float, o.device()))?;
    set.launch_forward(inputs, o, &lse)?;
    Ok(lse)
}

/// `t` in the shape `size`. libtorch is not called where `t` has that shape already: its host time shows in short calls.
fn in_shape(t: Tensor, size: &[i64]) -> Result<Tensor> {
    if t.size() == size { Ok(t) } else { Ok(t.f_reshape(size)?) }
}

fn launching(set: &impl KernelSet, q: &Tensor, k: &Tensor) -> String {
    format!("{} attention of q {:?} and k {:?}", set.name(), q.size(), k.size())
}

impl Inputs {
    fn of(set: &impl KernelSet, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Self> {
        let shape = Shape::of(q, k, v)?;
        let variant = set.variant(q.kind(), shape.d, is_causal).map_err(anyhow::Error::msg)?;
        // On the CPU the kernels run in the emulator. It is for tests, so `supports` does not report it.
        if q.device() != Device::Cpu {
            set.runs_on(q.device()).map_err(anyhow::Error::msg)?;
        }
        let sizes = Sizes::of(&shape)?;
        let [q, k, v] = [q, k, v].map(|t| sizes.readable(set, t));
        Ok(Self { q: q?, k: k?, v: v?, sizes, variant })
    }

    pub fn device(&self) -> Device {
        self.q.device()
    }

    /// Uninitialised float32 of this shape, on the inputs' device.
    pub fn float(&self, shape: &[u32]) -> Result<Tensor> {
        let shape: Vec<i64> = shape.iter().copied().map(i64::from).collect();
        Ok(Tensor::f_empty(shape, (Kind::Float, self.device()))?)
    }
}

impl Sizes {
    /// Errors: which size is more than the kernels count.
    fn of(shape: &Shape) -> Result<Self> {
        let (batch, heads) = match shape.leading[..] {
            [] => (1, 1),
            [heads] => (1, heads),
            [batch, ref heads @ ..] => (batch, heads.iter().product()),
        };
        Ok(Self {
            batch: count("batches", batch, 65_535)?,
            heads: count("heads", heads, 65_535)?,
            n_queries: count("queries", shape.n_queries, 1 << 30)?,
            n_keys: count("keys", shape.n_keys, 1 << 30)?,
            d: count("columns", shape.d, 1 << 10)?,
            group_size: count("query heads of a group", shape.group_size, 65_535)?,
        })
    }

    /// A tensor of q's, k's or v's shape as (batch, heads, n, d); copied only if the kernels cannot read its layout.
    fn readable(&self, set: &impl KernelSet, t: &Tensor) -> Result<Tensor> {
        let [.., n, d] = t.size()[..] else { anyhow::bail!("shape {:?} has no rows", t.size()) };
        let heads = t.numel() as i64 / (i64::from(self.batch) * n * d);
        let four = in_shape(t.shallow_clone(), &[self.batch.into(), heads, n, d])?;
        if set.reads(&four) {
            return Ok(four);
        }
        // A copy, since the allocator aligns the start of every block.
        let mut copy = Tensor::f_empty(four.size(), (t.kind(), t.device()))?;
        copy.f_copy_(&four).context("copying an input whose layout the kernels cannot read")?;
        Ok(copy)
    }

    /// Heads of k and v.
    pub fn kv_heads(&self) -> u32 {
        self.heads / self.group_size
    }

    /// Heads of all batches; at most 65,535 squared, which 32 bits hold.
    pub fn all_heads(&self) -> u32 {
        self.batch * self.heads
    }

    /// The factor of Eq. 4.
    pub fn scale(&self) -> f32 {
        (1.0 / f64::from(self.d).sqrt()) as f32
    }

    /// The same for scores to base 2.
    pub fn scale_log2(&self) -> f32 {
        (std::f64::consts::LOG2_E / f64::from(self.d).sqrt()) as f32
    }

    /// `per_head` CTAs or tiles for each head of each batch.
    ///
    /// Errors: more of them than a grid has blocks, which kernels count in 31 bits.
    pub fn for_all_heads(&self, per_head: u64) -> Result<u32> {
        let Self { batch, heads, .. } = *self;
        let all = per_head.checked_mul(self.all_heads().into()).filter(|&all| all <= i32::MAX as u64);
        let all = all.with_context(|| {
            format!("{per_head} tiles of each of {batch} x {heads} heads are more than the 2^31 - 1 of a grid: use fewer heads")
        })?;
        Ok(u32::try_from(all)?)
    }

    /// A grid of `blocks` for each head: (blocks, heads, batches).
    pub fn grid_by_head(&self, blocks: u32, threads: u32, shared_bytes: u32) -> LaunchConfig {
        LaunchConfig { grid: (blocks, self.heads, self.batch), block: (threads, 1, 1), shared_bytes }
    }

    /// As [`Self::grid_by_head`], of the heads of k and v.
    pub fn grid_by_kv_head(&self, blocks: u32, threads: u32, shared_bytes: u32) -> LaunchConfig {
        LaunchConfig { grid: (blocks, self.kv_heads(), self.batch), block: (threads, 1, 1), shared_bytes }
    }
}

/// `n` in the 32 bits with which kernels count. Errors: more than `most`.
fn count(what: &str, n: i64, most: i64) -> Result<u32> {
    ensure!(n <= most, "{n} {what} are more than the {most} that the kernels take");
    Ok(u32::try_from(n)?)
}

/// `n` as a kernel's `int`. Errors: a number beyond its range.
pub fn int(n: u32) -> Result<i32> {
    i32::try_from(n).with_context(|| format!("{n} is more than the 2^31 - 1 that the kernels count"))
}

/// Checks that `device` is a GPU whose compute capability `fits`; errors describe it as `wanted`.
pub fn require_gpu(device: Device, wanted: &str, fits: fn(Arch) -> bool) -> Result<(), String> {
    if !device.is_cuda() {
        return Err(format!("its kernels need a GPU, not {device:?}"));
    }
    match cuda::compute_capability(device) {
        Ok(arch) if fits(arch) => Ok(()),
        Ok(Arch { major, minor }) => {
            Err(format!("its kernels need compute capability {wanted}; this GPU has {major}.{minor}"))
        }
        Err(error) => Err(format!("{error:#}")),
    }
}

#[cfg(test)]
mod tests;
