//! FlashAttention-2 as CUDA kernels for every GPU from compute capability 8.0 on, in float32 too:
//! `kernels/portable_forward.cu` and `kernels/portable_backward.cu`.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::{Attention, Shape, host};
use crate::cuda::{self, Arguments, Cache, Geometry, Kernel, Pass, word_of};

pub mod tile;

use tile::{Backward, Element, Forward, Split, Variant};

/// Attention by our own kernels: bfloat16, float16 and float32, d = 16, 32, 64 or 128, on any GPU from 8.0 on.
///
/// Every result repeats in every bit.
pub struct Portable;

/// Inputs of so many heads are worked on at a time: they are to stay in the L2 cache, of which an A100 has 40 MB.
const SECTION_BYTES: u64 = 24 << 20;

/// The kernels of one variant on one device.
struct Kernels {
    forward: Kernel,
    combine: Kernel,
    prepare: Kernel,
    backward: Kernel,
    backward_combine: Kernel,
}

impl Kernels {
    fn of(variant: Variant, device: Device) -> Result<Arc<Self>> {
        static LOADED: Cache<Variant, Kernels> = Cache::new();
        LOADED.get(device, variant, || {
            let (forward, backward) = (Forward::of(variant), Backward::of(variant));
            let forwards = cuda::load(device, &forward.program())?;
            let backwards = cuda::load(device, &backward.program())?;
            let kernels = Self {
                forward: forwards.kernel("portable_forward")?,
                combine: forwards.kernel("portable_combine")?,
                prepare: backwards.kernel("portable_backward_prepare")?,
                backward: backwards.kernel("portable_backward")?,
                backward_combine: backwards.kernel("portable_backward_combine")?,
            };
            kernels.forward.allow_shared(forward.shared_bytes())?;
            kernels.backward.allow_shared(backward.most_shared_bytes())?;
            Ok(kernels)
        })
    }
}

impl Portable {
    /// The type of the kernels for these inputs, wherever they run.
    fn takes(kind: Kind, head_dim: i64) -> Result<Element, String> {
        let Some(element) = Element::of(kind) else {
            return Err(format!("its kernels take bfloat16, float16 and float32, not {kind:?}"));
        };
        host::require_dimension(head_dim)?;
        Ok(element)
    }
}

impl Attention for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        Self::takes(kind, head_dim)?;
        host::require_gpu(device, "8.0 and above", |(major, _)| major >= 8)
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        let _no_graph = tch::no_grad_guard();
        let problem = Problem::of(q, k, v, is_causal)?;
        let [q4, k4, v4] = [q, k, v].map(|t| problem.readable(t));
        let (q4, k4, v4) = (q4?, k4?, v4?);
        let o = Tensor::f_empty(q4.size(), (q.kind(), q.device()))?;
        let lse = Tensor::f_empty(&q4.size()[..3], (Kind::Float, q.device()))?;

        let kernels = Kernels::of(problem.variant, q.device())?;
        let shape = Forward::of(problem.variant);
        let multiprocessors = cuda::multiprocessors(q.device())?;
        let split = shape.split(problem.n_queries, problem.n_keys, problem.heads * problem.batch, multiprocessors);
        // Each split's own o and lse; nothing where there is only one.
        let parts = |size: &[i64]| {
            let count = if split.count == 1 { 0 } else { i64::from(split.count) };
            Tensor::f_empty([&[count][..], size].concat(), (Kind::Float, q.device()))
        };
        let (split_o, split_lse) = (parts(&q4.size())?, parts(&lse.size())?);
        let mut words = problem.words(split.count).to_vec();
        words.push(word_of(split.blocks, 0));
        words.extend([&q4, &k4, &v4].into_iter().flat_map(tensor_words));
        words.extend([&o, &lse, &split_o, &split_lse].map(|t| t.data_ptr() as u64));
        let arguments = Arguments::new().words(&words);
        let geometry = Geometry {
            grid: (problem.grid(problem.n_queries, shape.rows(), split.count)?, 1, 1),
            block: (shape.threads(), 1, 1),
            shared_bytes: shape.shared_bytes(),
        };
        let mut pass = Pass::default();
        pass.launch(&kernels.forward, geometry, &arguments)?;
        if split.count > 1 {
            // A warp a row, eight a block.
            let blocks = problem.grid(problem.n_queries, 1, 1)?.div_ceil(8);
            let geometry = Geometry { grid: (blocks, 1, 1), block: (256, 1, 1), shared_bytes: 0 };
            pass.launch(&kernels.combine, geometry, &arguments)?;
        }
        pass.end()?;
        Ok((host::in_shape(o, &q.size())?, host::in_shape(lse, &q.size()[..q.dim() - 1])?))
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
        ensure!(d_o.size() == q.size(), "do has shape {:?} and o {:?}", d_o.size(), q.size());
        let [q4, k4, v4, o4, do4] = [q, k, v, o, d_o].map(|t| problem.readable(t));
        let (q4, k4, v4, o4, do4) = (q4?, k4?, v4?, o4?, do4?);
        let lse = lse.f_contiguous()?;
        ensure!(lse.kind() == Kind::Float, "lse is {:?}, the forward pass gives Float", lse.kind());
        let like = |t: &Tensor| Tensor::f_empty(t.size(), (t.kind(), t.device()));
        let (dq, dk, dv) = (like(&q4)?, like(&k4)?, like(&v4)?);

        let kernels = Kernels::of(problem.variant, q.device())?;
        let shape = Backward::of(problem.variant);
        let blocks = problem.n_queries.div_ceil(Backward::PADDING);
        let padded = blocks * Backward::PADDING;
        let statistics = || {
            let rows = [problem.batch, problem.heads, padded].map(i64::from);
            Tensor::f_empty(rows, (Kind::Float, q.device()))
        };
        let (shift, delta) = (statistics()?, statistics()?);
        static SPLITS: Cache<(Variant, [u32; 4]), [Split; 2]> = Cache::new();
        let (heads, n_queries, n_keys) = (problem.heads * problem.batch, problem.n_queries, problem.n_keys);
        let multiprocessors = cuda::multiprocessors(q.device())?;
        let key = (problem.variant, [n_queries, n_keys, heads, multiprocessors]);
        let splits = SPLITS.get(q.device(), key, || Ok(shape.splits(n_queries, n_keys, heads, multiprocessors)))?;
        let [keys, queries] = *splits;
        // Each part's own results; nothing where a tile is whole.
        let parts = |split: Split, like: &Tensor| {
            let count = if split.count == 1 { 0 } else { i64::from(split.count) };
            Tensor::f_empty([&[count], &like.size()[..]].concat(), (Kind::Float, like.device()))
        };
        let (dq_parts, dk_parts, dv_parts) = (parts(queries, &dq)?, parts(keys, &dk)?, parts(keys, &dv)?);
        let mut words = problem.words(padded).to_vec();
        words.extend([keys, queries].map(|split| word_of(split.count, split.blocks)));
        words.extend([&q4, &k4, &v4, &o4, &do4].into_iter().flat_map(tensor_words));
        let results = [&lse, &shift, &delta, &dq, &dk, &dv, &dq_parts, &dk_parts, &dv_parts];
        words.extend(results.map(|t| t.data_ptr() as u64));
        let arguments = Arguments::new().words(&words);
        let prepare = Geometry { grid: (blocks, problem.heads, problem.batch), block: (256, 1, 1), shared_bytes: 0 };
        let mut pass = Pass::default();
        pass.launch(&kernels.prepare, prepare, &arguments)?;
        let blocks = problem.grid(problem.n_keys, shape.rows(shape.keys), keys.count)?
            + problem.grid(problem.n_queries, shape.rows(shape.queries), queries.count)?;
        ensure!(i32::try_from(blocks).is_ok(), "{blocks} tiles are more than a grid can have");
        let both =
            Geometry { grid: (blocks, 1, 1), block: (shape.threads(), 1, 1), shared_bytes: shape.most_shared_bytes() };
        pass.launch(&kernels.backward, both, &arguments)?;
        if keys.count > 1 || queries.count > 1 {
            // A thread each four columns, 256 a block; in y dq, dk and dv.
            let rows = problem.grid(problem.n_keys.max(problem.n_queries), 1, 1)?;
            let grid = (rows.div_ceil(256 / (problem.variant.d / 4)), 3, 1);
            let geometry = Geometry { grid, block: (256, 1, 1), shared_bytes: 0 };
            pass.launch(&kernels.backward_combine, geometry, &arguments)?;
        }
        pass.end()?;
        let in_shape = |gradient, t: &Tensor| host::in_shape(gradient, &t.size());
        Ok((in_shape(dq, q)?, in_shape(dk, k)?, in_shape(dv, v)?))
    }
}

/// What the kernels are told of the inputs.
struct Problem {
    variant: Variant,
    batch: u32,
    heads: u32,
    n_queries: u32,
    n_keys: u32,
}

impl Problem {
    fn of(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Self> {
        let shape = Shape::of(q, k, v)?;
        let element = Portable::takes(q.kind(), shape.d).map_err(anyhow::Error::msg)?;
        if q.device() != Device::Cpu {
            Portable.supports(q.kind(), q.device(), shape.d).map_err(anyhow::Error::msg)?;
        }
        let (batch, heads) = host::batch_and_heads(&shape);
        Ok(Self {
            variant: Variant { d: u32::try_from(shape.d)?, element, is_causal },
            batch: host::count("batches", batch, 65_535)?,
            heads: host::count("heads", heads, 65_535)?,
            n_queries: host::count("queries", shape.n_queries, 1 << 30)?,
            n_keys: host::count("keys", shape.n_keys, 1 << 30)?,
        })
    }

    /// How the parameters of both passes begin; `last` is the splits of one, the padded rows of the other.
    fn words(&self, last: u32) -> [u64; 4] {
        // Eq. 4's factor, and the same for scores to base 2.
        let scale = 1.0 / f64::from(self.variant.d).sqrt();
        let scales = [scale, std::f64::consts::LOG2_E * scale].map(|s| (s as f32).to_bits());
        let head_bytes =
            2 * u64::from(self.n_queries.max(self.n_keys)) * u64::from(self.variant.d * self.variant.element.bytes());
        let section = (SECTION_BYTES / head_bytes).clamp(1, u64::from(self.heads) * u64::from(self.batch));
        [
            word_of(self.n_queries, self.n_keys),
            word_of(self.heads, self.batch),
            word_of(scales[0], scales[1]),
            word_of(section as u32, last),
        ]
    }

    /// Thread blocks for all tiles of `rows` of `n` rows of every head, each shared by `splits`.
    fn grid(&self, n: u32, rows: u32, splits: u32) -> Result<u32> {
        let heads = u64::from(self.heads) * u64::from(self.batch);
        let blocks = u64::from(n.div_ceil(rows)) * heads * u64::from(splits);
        let fits = i32::try_from(blocks).is_ok();
        ensure!(fits, "{blocks} tiles of {rows} rows are more than a grid can have");
        Ok(blocks as u32)
    }

    /// (batch, heads, n, d) of a tensor of q's, k's or v's shape, as it lies if the kernels can read it so.
    fn readable(&self, t: &Tensor) -> Result<Tensor> {
        let [.., n, d] = t.size()[..] else { anyhow::bail!("shape {:?} has no rows", t.size()) };
        let four = host::in_shape(t.shallow_clone(), &[self.batch.into(), self.heads.into(), n, d])?;
        if lies_in_pieces(&four) {
            return Ok(four);
        }
        host::dense_copy(&four).context("copying an input whose layout the kernels cannot read")
    }
}

/// Whether a tensor's rows are contiguous and begin at multiples of the 16 bytes that the kernels copy at a time.
fn lies_in_pieces(t: &Tensor) -> bool {
    let (sizes, strides, bytes) = (t.size(), t.stride(), t.kind().elt_size_in_bytes() as i64);
    let last = sizes.len() - 1;
    (t.data_ptr() as usize).is_multiple_of(16)
        && strides[last] == 1
        && (0..last).all(|i| sizes[i] == 1 || strides[i] * bytes % 16 == 0)
}

/// The address and the strides of batches, heads and rows.
fn tensor_words(t: &Tensor) -> [u64; 4] {
    let stride = t.stride();
    [t.data_ptr() as u64, stride[0] as u64, stride[1] as u64, stride[2] as u64]
}

#[cfg(test)]
mod tests;
