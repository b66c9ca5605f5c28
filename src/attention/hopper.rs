//! FlashAttention-2 as CUDA kernels for Hopper: `kernels/flash_forward.cu` and `kernels/flash_backward.cu`.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::{Attention, Shape, host};
use crate::cuda::{self, Arguments, Cache, Geometry, Kernel, Pass, TensorMap, multiprocessors, word_of};

pub mod tile;

use tile::{Backward, Forward, Parts, Size, Variant};

/// Attention by our own kernels: bfloat16 and float16 on compute capability 9.0, d a multiple of 8 up to 128.
///
/// The kernels are compiled for d of 16, 32, 64 and 128. Rows of another d run in the next of these: the copy engine fills
/// tiles up with zeros, and writes no more than there is.
///
/// Tensors of the processor go through [`crate::cuda::emulator`], which `supports` does not offer: it is for tests.
///
/// `o`, `lse`, `dk` and `dv` repeat in every bit; the parts of `dq` are added in any order, so that its last bits vary.
pub struct Hopper {
    /// Of the forward pass's tiles; none for the faster of each shape.
    size: Option<Size>,
}

/// One cut's kernels of the forward pass on one device.
struct Forwards {
    forward: Kernel,
    combine: Option<Kernel>,
}

impl Forwards {
    fn of(shape: Forward, device: Device) -> Result<Arc<Self>> {
        static LOADED: Cache<Forward, Forwards> = Cache::new();
        LOADED.get(device, shape, || {
            let module = cuda::load(device, &shape.program())?;
            let forward = module.kernel("flash_forward")?;
            forward.allow_shared(shape.shared_bytes())?;
            let combine = shape.is_split.then(|| module.kernel("flash_forward_combine")).transpose()?;
            Ok(Self { forward, combine })
        })
    }
}

/// And of the backward pass.
struct Backwards {
    prepare: Kernel,
    backward: Kernel,
    finish: Kernel,
    combine: Option<Kernel>,
}

impl Backwards {
    fn of(shape: Backward, device: Device) -> Result<Arc<Self>> {
        static LOADED: Cache<Backward, Backwards> = Cache::new();
        LOADED.get(device, shape, || {
            let module = cuda::load(device, &shape.program())?;
            let backward = module.kernel("flash_backward")?;
            backward.allow_shared(shape.shared_bytes())?;
            let combine = shape.is_split.then(|| module.kernel("flash_backward_combine")).transpose()?;
            let (prepare, finish) = (module.kernel("flash_backward_prepare")?, module.kernel("flash_backward_finish")?);
            Ok(Self { prepare, backward, finish, combine })
        })
    }
}

/// How each shape's tiles are cut, by the pass's cut, lengths, heads and the blocks that the device holds at a time.
type Cuts<S> = Cache<(S, [u32; 4]), Option<Parts>>;

impl Hopper {
    pub const DEFAULT: Self = Self { size: None };
    /// Both sizes of tiles, whatever the shape: for trials.
    pub const SIZES: [&'static dyn Attention; 2] =
        [&Self { size: Some(Size::Small) }, &Self { size: Some(Size::Large) }];

    /// The d of the kernels for these inputs, wherever they run.
    fn takes(kind: Kind, head_dim: i64) -> Result<u32, String> {
        if !matches!(kind, Kind::BFloat16 | Kind::Half) {
            return Err(format!("its kernels take bfloat16 and float16, not {kind:?}"));
        }
        tile::kernel_dimension(head_dim)
    }
}

impl Attention for Hopper {
    fn name(&self) -> &'static str {
        match self.size {
            None => "hopper",
            Some(Size::Small) => "hopper_small",
            Some(Size::Large) => "hopper_large",
        }
    }

    fn supports(&self, kind: Kind, device: Device, head_dim: i64) -> Result<(), String> {
        Self::takes(kind, head_dim)?;
        host::require_gpu(device, "9.0", |capability| capability == (9, 0))
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
        let _no_graph = tch::no_grad_guard();
        let problem = Problem::of(q, k, v, is_causal)?;
        let [q4, k4, v4] = [q, k, v].map(|t| problem.readable(t));
        let (q4, k4, v4) = (q4?, k4?, v4?);
        let o = Tensor::f_empty(q4.size(), (q.kind(), q.device()))?;
        let lse = Tensor::f_empty(&q4.size()[..3], (Kind::Float, q.device()))?;

        static CUTS: Cuts<Forward> = Cache::new();
        let fastest = || Size::fastest(problem.variant.d, problem.n_queries, problem.n_keys, problem.all_heads());
        let whole = Forward::of(problem.variant, self.size.unwrap_or_else(fastest));
        let steps = whole.steps(problem.n_queries, problem.n_keys);
        let places = whole.resident() * multiprocessors(q.device())?;
        let parts = problem.cut(&CUTS, whole, &steps, places, q.device())?;
        let shape = Forward { is_split: parts.is_some(), ..whole };
        let kernels = Forwards::of(shape, q.device())?;
        let columns = shape.columns();
        let head_bytes = 4 * u64::from(problem.n_keys) * u64::from(problem.d);
        let heads_at_a_time = tile::heads_at_a_time(problem.all_heads(), head_bytes);
        // Where blocks have one tile each, or parts, nothing is counted.
        let is_counted = parts.is_none() && steps.len() as u32 * problem.all_heads() > places;
        let taken = is_counted.then(|| Tensor::f_zeros([1], (Kind::Int, q.device()))).transpose()?;
        let words = [
            word_of(problem.n_queries, problem.n_keys),
            word_of(problem.heads, problem.batch),
            word_of(problem.d, problem.scale_log2().to_bits()),
            word_of(heads_at_a_time, 0),
            lse.data_ptr() as u64,
            taken.as_ref().map_or(0, |taken| taken.data_ptr() as u64),
        ];
        let arguments = Arguments::new()
            .map(&TensorMap::of(&q4, shape.rows(), columns)?)
            .map(&TensorMap::of(&k4, shape.keys, columns)?)
            .map(&TensorMap::of(&v4, shape.keys, columns)?)
            .map(&TensorMap::of(&o, 64, columns)?)
            .words(&words);
        let mut pass = Pass::default();
        let mut launch = |items: usize, arguments: &Arguments| {
            let blocks = (items as u32 * problem.all_heads()).min(places);
            let geometry =
                Geometry { grid: (blocks, 1, 1), block: (shape.threads(), 1, 1), shared_bytes: shape.shared_bytes() };
            pass.launch(&kernels.forward, geometry, arguments)
        };
        match (&*parts, &kernels.combine) {
            (Some(parts), Some(combine)) => {
                let sums = problem.parts(parts.most, problem.n_queries, q.device())?;
                let lses = Tensor::f_empty(&sums.size()[..4], (Kind::Float, q.device()))?;
                let parts_words = parts.words([sums.data_ptr() as u64, lses.data_ptr() as u64]);
                launch(parts.items.len(), &arguments.words(&parts_words))?;
                let arguments = Arguments::new().words(&words).words(&parts_words).tensor(&o);
                pass.launch(combine, problem.rows_geometry(problem.n_queries), &arguments)?;
                pass.keep([sums, lses]);
            }
            _ => launch(steps.len(), &arguments)?,
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

        static CUTS: Cuts<Backward> = Cache::new();
        let whole = Backward::of(problem.variant);
        let steps = whole.steps(problem.n_queries, problem.n_keys);
        let parts = problem.cut(&CUTS, whole, &steps, multiprocessors(q.device())?, q.device())?;
        let shape = Backward { is_split: parts.is_some(), ..whole };
        let kernels = Backwards::of(shape, q.device())?;
        let (columns, blocks) = (shape.columns(), problem.n_queries.div_ceil(shape.queries));
        let float = |elements: u32| {
            let rows = [problem.batch, problem.heads, blocks, elements].map(i64::from);
            Tensor::f_empty(rows, (Kind::Float, q.device()))
        };
        let (lse_log2, delta) = (float(shape.queries)?, float(shape.queries)?);
        let dq_sums = float(shape.queries * problem.variant.d)?;
        let words = [
            word_of(problem.n_queries, problem.n_keys),
            word_of(problem.heads, problem.batch),
            word_of(problem.d, problem.scale().to_bits()),
            word_of(problem.scale_log2().to_bits(), 0),
            lse_log2.data_ptr() as u64,
            delta.data_ptr() as u64,
            dq_sums.data_ptr() as u64,
        ];
        let strides = |t: &Tensor| t.stride()[..3].iter().map(|&stride| stride as u64).collect::<Vec<_>>();
        let addresses = [&o4, &do4, &lse].map(|t| t.data_ptr() as u64);
        let outputs = [&addresses[..], &strides(&o4), &strides(&do4)].concat();
        let grid = |blocks| (blocks, problem.heads, problem.batch);
        let small = Geometry { grid: grid(blocks), block: (256, 1, 1), shared_bytes: 0 };
        let mut pass = Pass::default();
        pass.launch(&kernels.prepare, small, &Arguments::new().words(&words).words(&outputs))?;
        let (query_box, key_box) = (shape.queries, Backward::KEYS);
        let arguments = Arguments::new()
            .map(&TensorMap::of(&q4, query_box, columns)?)
            .map(&TensorMap::of(&k4, key_box, columns)?)
            .map(&TensorMap::of(&v4, key_box, columns)?)
            .map(&TensorMap::of(&do4, query_box, columns)?)
            .map(&TensorMap::of(&dk, 64, columns)?)
            .map(&TensorMap::of(&dv, 64, columns)?)
            .words(&words);
        let mut launch = |items: usize, arguments: &Arguments| {
            let (block, shared_bytes) = ((Backward::THREADS, 1, 1), shape.shared_bytes());
            pass.launch(&kernels.backward, Geometry { grid: grid(items as u32), block, shared_bytes }, arguments)
        };
        match (&*parts, &kernels.combine) {
            (Some(parts), Some(combine)) => {
                let [dks, dvs] = [(); 2].map(|()| problem.parts(parts.most, problem.n_keys, q.device()));
                let (dks, dvs) = (dks?, dvs?);
                let parts_words = parts.words([dks.data_ptr() as u64, dvs.data_ptr() as u64]);
                launch(parts.items.len(), &arguments.words(&parts_words))?;
                let arguments = Arguments::new().words(&words).words(&parts_words).tensor(&dk).tensor(&dv);
                pass.launch(combine, problem.rows_geometry(problem.n_keys), &arguments)?;
                pass.keep([dks, dvs]);
            }
            _ => launch(steps.len(), &arguments)?,
        }
        pass.launch(&kernels.finish, small, &Arguments::new().words(&words).tensor(&dq))?;
        pass.end()?;
        let in_shape = |gradient, t: &Tensor| host::in_shape(gradient, &t.size());
        Ok((in_shape(dq, q)?, in_shape(dk, k)?, in_shape(dv, v)?))
    }
}

/// What the kernels are told of the inputs.
struct Problem {
    variant: Variant,
    /// Elements of a row: the variant's d or fewer.
    d: u32,
    batch: u32,
    heads: u32,
    n_queries: u32,
    n_keys: u32,
}

impl Problem {
    fn of(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Self> {
        let shape = Shape::of(q, k, v)?;
        let kernel_d = Hopper::takes(q.kind(), shape.d).map_err(anyhow::Error::msg)?;
        if q.device() != Device::Cpu {
            Hopper::DEFAULT.supports(q.kind(), q.device(), shape.d).map_err(anyhow::Error::msg)?;
        }
        let (batch, heads) = host::batch_and_heads(&shape);
        Ok(Self {
            variant: Variant { d: kernel_d, is_half: q.kind() == Kind::Half, is_causal },
            d: u32::try_from(shape.d)?,
            batch: host::count("batches", batch, 65_535)?,
            heads: host::count("heads", heads, 65_535)?,
            n_queries: host::count("queries", shape.n_queries, 1 << 30)?,
            n_keys: host::count("keys", shape.n_keys, 1 << 30)?,
        })
    }

    /// (batch, heads, n, d) of a tensor of q's, k's or v's shape, as it lies if the copy engine can read it so.
    fn readable(&self, t: &Tensor) -> Result<Tensor> {
        let [.., n, d] = t.size()[..] else { anyhow::bail!("shape {:?} has no rows", t.size()) };
        let four = host::in_shape(t.shallow_clone(), &[self.batch.into(), self.heads.into(), n, d])?;
        match TensorMap::fits(&four) {
            Ok(()) => Ok(four),
            // Its rows are of a multiple of 16 bytes.
            Err(_) => host::dense_copy(&four).context("copying an input whose layout the copy engine cannot read"),
        }
    }

    fn all_heads(&self) -> u32 {
        self.batch * self.heads
    }

    /// How tiles of so many `steps` are cut, searched for the first time and then found among `cuts`.
    fn cut<S: Ord + Copy>(
        &self,
        cuts: &Cuts<S>,
        shape: S,
        steps: &[u32],
        places: u32,
        device: Device,
    ) -> Result<Arc<Option<Parts>>> {
        let heads = self.all_heads();
        let key = (shape, [self.n_queries, self.n_keys, heads, places]);
        cuts.get(device, key, || Ok(Parts::of(steps, heads, places)))
    }

    /// (parts, batch, heads, n, the kernel's d) in float32, to be written.
    fn parts(&self, most: u32, n: u32, device: Device) -> Result<Tensor> {
        let size = [most, self.batch, self.heads, n, self.variant.d].map(i64::from);
        Ok(Tensor::f_empty(size, (Kind::Float, device))?)
    }

    /// A thread for each four of the kernel's columns of each of `n` rows a head, 256 threads a block.
    fn rows_geometry(&self, n: u32) -> Geometry {
        let rows = 256 / (self.variant.d / 4);
        Geometry { grid: (n.div_ceil(rows), self.heads, self.batch), block: (256, 1, 1), shared_bytes: 0 }
    }

    /// The factor of Eq. 4.
    fn scale(&self) -> f32 {
        (1.0 / f64::from(self.d).sqrt()) as f32
    }

    /// The same for scores to base 2.
    fn scale_log2(&self) -> f32 {
        (std::f64::consts::LOG2_E / f64::from(self.d).sqrt()) as f32
    }
}

#[cfg(test)]
mod tests;
