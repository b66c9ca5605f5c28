//! The handout's plain algorithms as readable CUDA kernels: Algorithm 1 (`kernels/textbook_forward.cu`) and its
//! backward pass, which goes through the scores twice (`kernels/textbook_backward.cu`).

use std::sync::Arc;

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use super::launch::{Gradients, Inputs, KernelSet, Saved, int, require_gpu};
use super::params::textbook_backward::{Keys, Problem, Queries, Rowsums};
use super::params::textbook_forward::Forward;
use super::{DIMENSIONS, require_dimension, tile_sizes};
use crate::cuda::{self, Address, Arch, Cache, Kernel, LaunchConfig, Program};

/// Attention by the readable kernels: float32, bfloat16 and float16 from compute capability 8.0 on, d = 16, 32, 64 or
/// 128. Every result is bitwise reproducible.
pub struct Textbook;

impl KernelSet for Textbook {
    fn name(&self) -> &'static str {
        "textbook"
    }

    fn takes(&self, kind: Kind, head_dim: i64) -> Result<(), String> {
        Variant::of(kind, head_dim, false).map(drop)
    }

    fn runs_on(&self, device: Device) -> Result<(), String> {
        require_gpu(device, "8.0 and above", |arch| arch >= Arch::AMPERE)
    }

    fn reads(&self, t: &Tensor) -> bool {
        t.is_contiguous()
    }

    fn launch_forward(&self, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
        let variant = variant(inputs)?;
        let tiles = TileConfig::forward(variant);
        let params = Forward {
            q: Address::of(&inputs.q),
            k: Address::of(&inputs.k),
            v: Address::of(&inputs.v),
            o: Address::of(o),
            lse: Address::of(lse),
            n_queries: int(inputs.sizes.n_queries)?,
            n_keys: int(inputs.sizes.n_keys)?,
            scale: inputs.sizes.scale(),
        };
        let grid = grid(inputs, inputs.sizes.n_queries.div_ceil(tiles.queries), tiles.shared_bytes());
        Kernels::of(variant, inputs.device())?.forward.launch(grid, &params)
    }

    fn launch_backward(&self, inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
        let sizes = &inputs.sizes;
        let rowsums = inputs.float(&[sizes.batch, sizes.heads, sizes.n_queries])?;
        let problem = Problem {
            q: Address::of(&inputs.q),
            k: Address::of(&inputs.k),
            v: Address::of(&inputs.v),
            o: Address::of(&saved.o),
            d_o: Address::of(&saved.d_o),
            lse: Address::of(&saved.lse),
            rowsums: Address::of(&rowsums),
            dq: Address::of(&gradients.dq),
            dk: Address::of(&gradients.dk),
            dv: Address::of(&gradients.dv),
            n_queries: int(sizes.n_queries)?,
            n_keys: int(sizes.n_keys)?,
            scale: sizes.scale(),
            unused: 0,
        };
        let variant = variant(inputs)?;
        let kernels = Kernels::of(variant, inputs.device())?;
        let tiles = TileConfig::backward(variant);
        let shared = tiles.shared_bytes();
        let tiles_of_queries = sizes.n_queries.div_ceil(tiles.queries);
        kernels.rowsums.launch(grid(inputs, sizes.n_queries.div_ceil(GROUPS), 0), &Rowsums { problem })?;
        kernels.keys.launch(grid(inputs, sizes.n_keys.div_ceil(tiles.keys), shared), &Keys { problem })?;
        kernels.queries.launch(grid(inputs, tiles_of_queries, shared), &Queries { problem })
    }
}

/// The kernels for these inputs. Errors: more rows than their 32-bit indices reach.
fn variant(inputs: &Inputs) -> Result<Variant> {
    const MOST_ROWS: u32 = 1 << 23;
    let rows = inputs.sizes.n_queries.max(inputs.sizes.n_keys);
    ensure!(rows <= MOST_ROWS, "{rows} rows of a head are more than the {MOST_ROWS} that the kernels take");
    Variant::of(inputs.kind(), inputs.sizes.d.into(), inputs.is_causal).map_err(anyhow::Error::msg)
}

/// The handout's launch: (tiles, batch), where the batch is all heads.
fn grid(inputs: &Inputs, tiles: u32, shared_bytes: u32) -> LaunchConfig {
    LaunchConfig { grid: (tiles, inputs.sizes.all_heads(), 1), block: (THREADS, 1, 1), shared_bytes }
}

/// Groups of threads in a block, and threads in a group, as in `kernels/lib/textbook.cuh`.
pub const GROUPS: u32 = 16;
const LANES: u32 = 8;
/// Threads of a block of every kernel.
pub const THREADS: u32 = GROUPS * LANES;
/// The shared memory that a block may have on every GPU from compute capability 8.0 on, in bytes.
pub const SHARED_LIMIT: u32 = 99 * 1024;

/// What the kernels are compiled for, each variant on its own.
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
        require_dimension(d)?;
        Ok(Self { d: d as u32, element, is_causal })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
        let masks = move |d| kinds.into_iter().flat_map(move |kind| [false, true].map(|mask| Self::of(kind, d, mask)));
        DIMENSIONS.into_iter().flat_map(masks).filter_map(Result::ok)
    }
}

/// The tiles of one file's kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileConfig {
    pub variant: Variant,
    pub is_backward: bool,
    /// B_q and B_k: multiples of [`GROUPS`] where they are a product's rows.
    pub queries: u32,
    pub keys: u32,
}

impl TileConfig {
    pub fn forward(variant: Variant) -> Self {
        let [queries, keys] = tile_sizes::textbook_forward(variant.d);
        Self { variant, is_backward: false, queries, keys }
    }

    pub fn backward(variant: Variant) -> Self {
        let [queries, keys] = tile_sizes::textbook_backward(variant.d);
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

    /// Q, K, V and P; in the backward pass also dO, and one tile for P and dS or their transposes. Rows are padded by
    /// four floats.
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
    forward: Kernel<Forward<'static>>,
    rowsums: Kernel<Rowsums<'static>>,
    keys: Kernel<Keys<'static>>,
    queries: Kernel<Queries<'static>>,
}

impl Kernels {
    fn of(variant: Variant, device: Device) -> Result<Arc<Self>> {
        static LOADED: Cache<Variant, Kernels> = Cache::new();
        LOADED.get(device, variant, || {
            let (forward, backward) = (TileConfig::forward(variant), TileConfig::backward(variant));
            let forwards = cuda::load(device, &forward.program())?;
            let backwards = cuda::load(device, &backward.program())?;
            let kernels = Self {
                forward: forwards.kernel()?,
                rowsums: backwards.kernel()?,
                keys: backwards.kernel()?,
                queries: backwards.kernel()?,
            };
            kernels.forward.allow_shared(forward.shared_bytes())?;
            kernels.keys.allow_shared(backward.shared_bytes())?;
            kernels.queries.allow_shared(backward.shared_bytes())?;
            Ok(kernels)
        })
    }
}

#[cfg(test)]
mod tests;
