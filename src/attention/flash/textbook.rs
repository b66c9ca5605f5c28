//! The handout's plain algorithms as readable CUDA kernels: Algorithm 1 (`kernels/textbook_forward.cu`) and its
//! backward pass, which goes through the scores twice (`kernels/textbook_backward.cu`).

use anyhow::{Result, ensure};
use tch::Tensor;

use super::launch::{Gradients, Inputs, KernelSet, Saved, Sizes, int};
use super::params::textbook_backward::{Keys, Problem, Queries, Rowsums};
use super::params::textbook_forward::Forward;
use super::variant::{Element, Variant};
use crate::cuda::{self, Address, Cache, Kernel, LaunchConfig, Program};

/// Attention by the readable kernels: float32, bfloat16 and float16 from compute capability 8.0 on, d = 16, 32, 64 or
/// 128. Every result is bitwise reproducible.
pub struct Textbook;

impl KernelSet for Textbook {
    fn name(&self) -> &'static str {
        "textbook"
    }

    fn reads(&self, t: &Tensor) -> bool {
        t.is_contiguous()
    }

    fn launch_forward(&self, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
        require_supported(inputs)?;
        let tiles = TileConfig::forward(inputs.variant);
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
        static LOADED: Cache<Variant, Kernel<Forward>> = Cache::new();
        let device = inputs.device();
        let load = || cuda::load(device, &tiles.program())?.kernel()?.allow_shared(tiles.shared_bytes());
        LOADED.get(device, inputs.variant, load)?.launch(grid, &params)
    }

    fn launch_backward(&self, inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
        require_supported(inputs)?;
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
        let tiles = TileConfig::backward(inputs.variant);
        let shared_bytes = tiles.shared_bytes();
        type Kernels = (Kernel<Rowsums<'static>>, Kernel<Keys<'static>>, Kernel<Queries<'static>>);
        static LOADED: Cache<Variant, Kernels> = Cache::new();
        let kernels = LOADED.get(inputs.device(), inputs.variant, || {
            let module = cuda::load(inputs.device(), &tiles.program())?;
            let (keys, queries) = (module.kernel()?, module.kernel()?);
            Ok((module.kernel()?, keys.allow_shared(shared_bytes)?, queries.allow_shared(shared_bytes)?))
        })?;
        let (rowsums, keys, queries) = &*kernels;
        let grid = |n: u32, rows: u32, shared_bytes| grid(inputs, n.div_ceil(rows), shared_bytes);
        rowsums.launch(grid(sizes.n_queries, GROUPS, 0), &Rowsums { problem })?;
        keys.launch(grid(sizes.n_keys, tiles.keys, shared_bytes), &Keys { problem })?;
        queries.launch(grid(sizes.n_queries, tiles.queries, shared_bytes), &Queries { problem })
    }
}

/// Errors: more rows than the kernels' 32-bit indices reach; heads in groups.
fn require_supported(inputs: &Inputs) -> Result<()> {
    let Sizes { heads, group_size, .. } = inputs.sizes;
    ensure!(
        group_size == 1,
        "q has {heads} heads and k {}; the readable kernels take as many of both: use flash or sdpa",
        inputs.sizes.kv_heads()
    );
    const MOST_ROWS: u32 = 1 << 23;
    let rows = inputs.sizes.n_queries.max(inputs.sizes.n_keys);
    ensure!(rows <= MOST_ROWS, "{rows} rows of a head are more than the {MOST_ROWS} that the kernels take");
    Ok(())
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
        // With these, two CTAs and more fit a multiprocessor.
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
        let c_type = match element {
            Element::BFloat16 => "__nv_bfloat16",
            Element::Half => "__half",
            Element::Float => "float",
        };
        let defines = vec![
            ("TEXTBOOK_D", d.to_string()),
            ("TEXTBOOK_TYPE", c_type.to_string()),
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

#[cfg(test)]
mod tests;
