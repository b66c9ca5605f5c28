//! The handout's plain algorithms as CUDA kernels to be read: Algorithm 1 (`kernels/textbook_forward.cu`) and its
//! backward pass, which goes through the scores twice (`kernels/textbook_backward.cu`).

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::{Attention, Shape, host};
use crate::cuda::{self, Arguments, Cache, Geometry, Kernel, Program, word_of};

/// Attention by the readable kernels: float32, bfloat16 and float16 from compute capability 8.0 on, d = 16, 32, 64 or
/// 128. Every result repeats in every bit.
pub struct Textbook;

impl Attention for Textbook {
    fn name(&self) -> &'static str {
        "textbook"
    }

    fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        Variant::of(kind, head_dim, false)?;
        host::require_gpu(device, "8.0 and above", |(major, _)| major >= 8)
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        let _no_graph = tch::no_grad_guard();
        let problem = Problem::of(q, k, v, is_causal)?;
        let [q3, k3, v3] = [q, k, v].map(|t| problem.rows(t));
        let (q3, k3, v3) = (q3?, k3?, v3?);
        let o = Tensor::f_empty(q3.size(), (q.kind(), q.device()))?;
        let lse = Tensor::f_empty(&q3.size()[..2], (Kind::Float, q.device()))?;
        let cut = Cut::forward(problem.variant);
        let arguments = [&q3, &k3, &v3, &o, &lse].into_iter().fold(Arguments::new(), Arguments::tensor);
        let arguments = arguments.scalar(problem.n_queries).scalar(problem.n_keys).scalar(problem.scale());
        let geometry = problem.geometry(problem.n_queries.div_ceil(cut.queries), cut.shared_bytes());
        Kernels::of(problem.variant, q.device())?.forward.launch(geometry, &arguments)?;
        Ok((o.f_reshape(q.size())?, lse.f_reshape(&q.size()[..q.dim() - 1])?))
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
        let _no_graph = tch::no_grad_guard();
        let problem = Problem::of(q, k, v, is_causal)?;
        for (name, t) in [("o", o), ("do", d_o)] {
            let (size, kind, device) = (t.size(), t.kind(), t.device());
            ensure!(
                size == q.size() && kind == q.kind() && device == q.device(),
                "{name} is {size:?}, {kind:?}, on {device:?}; it must be as q, {:?}, {:?}, on {:?}",
                q.size(),
                q.kind(),
                q.device()
            );
        }
        ensure!(
            lse.size() == q.size()[..q.dim() - 1] && lse.kind() == Kind::Float && lse.device() == q.device(),
            "lse is {:?}, {:?}; the forward pass gives one Float a row of q {:?}",
            lse.size(),
            lse.kind(),
            q.size()
        );
        let [q3, k3, v3, o3, do3] = [q, k, v, o, d_o].map(|t| problem.rows(t));
        let (q3, k3, v3, o3, do3) = (q3?, k3?, v3?, o3?, do3?);
        let lse = lse.f_contiguous()?;
        let like = |t: &Tensor| Tensor::f_empty(t.size(), (t.kind(), t.device()));
        let (dq, dk, dv, rowsums) = (like(&q3)?, like(&k3)?, like(&v3)?, like(&lse)?);
        // The kernels' `Problem`.
        let tensors = [&q3, &k3, &v3, &o3, &do3, &lse, &rowsums, &dq, &dk, &dv].map(|t| t.data_ptr() as u64);
        let sizes = [word_of(problem.n_queries, problem.n_keys), word_of(problem.scale().to_bits(), 0)];
        let arguments = Arguments::new().words(&[&tensors[..], &sizes].concat());

        let kernels = Kernels::of(problem.variant, q.device())?;
        let cut = Cut::backward(problem.variant);
        let shared = cut.shared_bytes();
        kernels.rowsums.launch(problem.geometry(problem.n_queries.div_ceil(GROUPS), 0), &arguments)?;
        kernels.keys.launch(problem.geometry(problem.n_keys.div_ceil(cut.keys), shared), &arguments)?;
        kernels.queries.launch(problem.geometry(problem.n_queries.div_ceil(cut.queries), shared), &arguments)?;
        Ok((dq.f_reshape(q.size())?, dk.f_reshape(k.size())?, dv.f_reshape(v.size())?))
    }
}

/// Groups of threads in a block, and threads in a group, as in `kernels/lib/textbook.cuh`.
const GROUPS: u32 = 16;
const LANES: u32 = 8;
/// Of a block of every kernel.
pub const THREADS: u32 = GROUPS * LANES;
/// What a block may have of shared memory on every GPU from compute capability 8.0 on, in bytes.
pub const SHARED_LIMIT: u32 = 99 * 1024;

/// What the kernels are compiled anew for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    pub d: u32,
    /// The elements' type in CUDA C++.
    pub element: &'static str,
    pub is_causal: bool,
}

impl Variant {
    fn of(kind: Kind, d: i64, is_causal: bool) -> Result<Self, String> {
        let element = match kind {
            Kind::Float => "float",
            Kind::BFloat16 => "__nv_bfloat16",
            Kind::Half => "__half",
            other => return Err(format!("its kernels take float32, bfloat16 and float16, not {other:?}")),
        };
        host::require_dimension(d)?;
        Ok(Self { d: d as u32, element, is_causal })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
        let masks = move |d| kinds.into_iter().flat_map(move |kind| [false, true].map(|mask| Self::of(kind, d, mask)));
        host::DIMENSIONS.into_iter().flat_map(masks).filter_map(Result::ok)
    }
}

/// The tiles of one file's kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    pub variant: Variant,
    pub is_backward: bool,
    /// B_q and B_k: multiples of [`GROUPS`] where they are a product's rows.
    pub queries: u32,
    pub keys: u32,
}

impl Cut {
    /// Tiles of 64 while two blocks and more fit a multiprocessor.
    pub fn forward(variant: Variant) -> Self {
        let keys = if variant.d == 128 { 32 } else { 64 };
        Self { variant, is_backward: false, queries: 64, keys }
    }

    pub fn backward(variant: Variant) -> Self {
        let (queries, keys) = match variant.d {
            128 => (32, 32),
            64 => (64, 32),
            _ => (64, 64),
        };
        Self { variant, is_backward: true, queries, keys }
    }

    pub fn program(&self) -> Program {
        let Variant { d, element, is_causal } = self.variant;
        let file = if self.is_backward { "textbook_backward.cu" } else { "textbook_forward.cu" };
        let defines = vec![
            ("TEXTBOOK_D", d.to_string()),
            ("TEXTBOOK_TYPE", element.to_string()),
            ("TEXTBOOK_CAUSAL", u32::from(is_causal).to_string()),
            ("TEXTBOOK_QUERIES", self.queries.to_string()),
            ("TEXTBOOK_KEYS", self.keys.to_string()),
            ("TEXTBOOK_SHARED", self.shared_bytes().to_string()),
        ];
        Program { file, defines }
    }

    /// Q, K, V and P; backwards also dO, and one tile for P and dS or their transposes. Rows are four floats longer
    /// than they need to be.
    pub fn shared_bytes(&self) -> u32 {
        let Self { queries, keys, .. } = *self;
        let tile = |rows, columns| 4 * rows * (columns + 4);
        let rows = |rows| tile(rows, self.variant.d);
        match self.is_backward {
            false => rows(queries) + 2 * rows(keys) + tile(queries, keys),
            true => 2 * rows(queries) + 2 * rows(keys) + tile(queries, keys).max(tile(keys, queries)),
        }
    }
}

/// The kernels of one variant on one device.
struct Kernels {
    forward: Kernel,
    rowsums: Kernel,
    keys: Kernel,
    queries: Kernel,
}

impl Kernels {
    fn of(variant: Variant, device: Device) -> Result<Arc<Self>> {
        static LOADED: Cache<Variant, Kernels> = Cache::new();
        LOADED.get(device, variant, || {
            let (forward, backward) = (Cut::forward(variant), Cut::backward(variant));
            let forwards = cuda::load(device, &forward.program())?;
            let backwards = cuda::load(device, &backward.program())?;
            let kernels = Self {
                forward: forwards.kernel("textbook_forward")?,
                rowsums: backwards.kernel("textbook_backward_rowsums")?,
                keys: backwards.kernel("textbook_backward_keys")?,
                queries: backwards.kernel("textbook_backward_queries")?,
            };
            kernels.forward.allow_shared(forward.shared_bytes())?;
            kernels.keys.allow_shared(backward.shared_bytes())?;
            kernels.queries.allow_shared(backward.shared_bytes())?;
            Ok(kernels)
        })
    }
}

/// What the kernels are told of the inputs.
struct Problem {
    variant: Variant,
    /// All leading dimensions in one.
    batch: u32,
    n_queries: u32,
    n_keys: u32,
}

impl Problem {
    fn of(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Self> {
        let shape = Shape::of(q, k, v)?;
        let variant = Variant::of(q.kind(), shape.d, is_causal).map_err(anyhow::Error::msg)?;
        Ok(Self {
            variant,
            batch: host::count("batches", shape.leading.iter().product(), 65_535)?,
            n_queries: host::count("queries", shape.n_queries, 1 << 23)?,
            n_keys: host::count("keys", shape.n_keys, 1 << 23)?,
        })
    }

    /// (batch, n, d), row after row: `t` itself if it lies so, or a copy.
    fn rows(&self, t: &Tensor) -> Result<Tensor> {
        let [.., n, d] = t.size()[..] else { anyhow::bail!("shape {:?} has no rows", t.size()) };
        let rows = t.f_reshape([i64::from(self.batch), n, d]).and_then(|t| t.f_contiguous());
        rows.with_context(|| format!("bringing a tensor of shape {:?} into rows", t.size()))
    }

    /// The handout's launch: (tiles, batch).
    fn geometry(&self, tiles: u32, shared_bytes: u32) -> Geometry {
        Geometry { grid: (tiles, self.batch, 1), block: (THREADS, 1, 1), shared_bytes }
    }

    /// The factor of Eq. 4.
    fn scale(&self) -> f32 {
        (1.0 / f64::from(self.variant.d).sqrt()) as f32
    }
}

#[cfg(test)]
mod tests;
