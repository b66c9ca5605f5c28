//! The launch of Hopper's forward pass.

use std::sync::Arc;

use anyhow::Result;
use tch::{Device, Kind, Tensor};

use super::rows_config;
use super::splits::{self, SplitsCache, TileSplits};
use super::tile_config::{ForwardConfig, TileSize, Variant, heads_at_a_time};
use crate::attention::flash::launch::{Inputs, int};
use crate::attention::flash::params::flash_forward::{Combine, Forward, Parts, Problem, SplitForward};
use crate::cuda::{self, Address, Cache, DependentLaunches, Kernel, LaunchConfig, TensorMap, multiprocessors};

/// The kernels of split tiles.
struct SplitKernels {
    forward: Kernel<SplitForward<'static>>,
    combine: Kernel<Combine<'static>>,
}

/// Writes `o` and `lse` with tiles of this size, or of the faster one.
pub(super) fn launch(tile_size: Option<TileSize>, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
    let (sizes, device) = (&inputs.sizes, inputs.device());
    let variant = Variant::of(inputs)?;
    let fastest = || TileSize::fastest(variant.d, sizes.n_queries, sizes.n_keys, sizes.all_heads());
    let config = ForwardConfig::of(variant, tile_size.unwrap_or_else(fastest));
    let steps = config.steps(sizes.n_queries, sizes.n_keys);
    let resident_ctas = config.resident() * multiprocessors(device)?;
    static SPLITS: SplitsCache<ForwardConfig> = Cache::new();
    let splits = splits::cached(&SPLITS, config, inputs, &steps, resident_ctas)?;
    let tiles = sizes.for_all_heads(steps.len() as u64)?;
    // Where each CTA has one tile, nothing is counted.
    let is_counted = splits.is_none() && tiles > resident_ctas;
    let tile_counter = is_counted.then(|| Tensor::f_zeros([1], (Kind::Int, device))).transpose()?;
    let head_bytes = 4 * u64::from(sizes.n_keys) * u64::from(variant.d);
    let problem = Problem {
        n_queries: int(sizes.n_queries)?,
        n_keys: int(sizes.n_keys)?,
        heads: int(sizes.heads)?,
        batch: int(sizes.batch)?,
        d: int(sizes.d)?,
        scale_log2: sizes.scale_log2(),
        heads_at_a_time: int(heads_at_a_time(sizes.all_heads(), head_bytes))?,
        lse: Address::of(lse),
        taken: tile_counter.as_ref().map_or(Address::NULL, Address::of),
    };
    let map = |t: &Tensor, rows| TensorMap::of(t, rows, config.columns());
    let [q, k, v] = [(&inputs.q, config.rows()), (&inputs.k, config.keys), (&inputs.v, config.keys)];
    let params = Forward { q: map(q.0, q.1)?, k: map(k.0, k.1)?, v: map(v.0, v.1)?, o: map(o, 64)?, problem };
    match &*splits {
        None => whole_kernel(config, device)?.launch(launch_config(config, tiles.min(resident_ctas)), &params),
        Some(splits) => {
            launch_split(ForwardConfig { is_split: true, ..config }, inputs, splits, resident_ctas, &params, o)
        }
    }
}

/// As `whole`, with tiles in `splits` whose results `flash_forward_combine` adds up.
fn launch_split(
    config: ForwardConfig,
    inputs: &Inputs,
    splits: &TileSplits,
    resident_ctas: u32,
    whole: &Forward,
    o: &Tensor,
) -> Result<()> {
    let (sizes, d) = (&inputs.sizes, config.variant.d);
    let kernels = split_kernels(config, inputs.device())?;
    let split_o = inputs.float(&[splits.most, sizes.batch, sizes.heads, sizes.n_queries, d])?;
    let split_lse = inputs.float(&[splits.most, sizes.batch, sizes.heads, sizes.n_queries])?;
    let parts = Parts {
        count: splits.count(),
        blocks: int(splits.steps)?,
        o: Address::of(&split_o),
        lse: Address::of(&split_lse),
        items: splits.table(),
    };
    let &Forward { q, k, v, o: o_map, problem } = whole;
    let ctas = sizes.for_all_heads(splits.items.len() as u64)?.min(resident_ctas);
    let mut launches = DependentLaunches::default();
    let split = SplitForward { q, k, v, o: o_map, problem, parts };
    launches.launch(&kernels.forward, launch_config(config, ctas), &split)?;
    let rows = rows_config(sizes, sizes.n_queries, config.variant);
    launches.launch(&kernels.combine, rows, &Combine { problem, parts, o: Address::of(o) })?;
    launches.finish()
}

fn launch_config(config: ForwardConfig, ctas: u32) -> LaunchConfig {
    LaunchConfig { shared_bytes: config.shared_bytes(), ..LaunchConfig::line(ctas, config.threads()) }
}

fn whole_kernel(config: ForwardConfig, device: Device) -> Result<Arc<Kernel<Forward<'static>>>> {
    static LOADED: Cache<ForwardConfig, Kernel<Forward<'static>>> = Cache::new();
    LOADED.get(device, config, || {
        let kernel = cuda::load(device, &config.program())?.kernel()?;
        kernel.allow_shared(config.shared_bytes())?;
        Ok(kernel)
    })
}

fn split_kernels(config: ForwardConfig, device: Device) -> Result<Arc<SplitKernels>> {
    static LOADED: Cache<ForwardConfig, SplitKernels> = Cache::new();
    LOADED.get(device, config, || {
        let module = cuda::load(device, &config.program())?;
        let kernels = SplitKernels { forward: module.kernel()?, combine: module.kernel()? };
        kernels.forward.allow_shared(config.shared_bytes())?;
        Ok(kernels)
    })
}
