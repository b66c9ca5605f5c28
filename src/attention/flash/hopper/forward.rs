//! The launch of Hopper's forward pass.

use anyhow::Result;
use tch::{Kind, Tensor};

use super::rows_config;
use super::splits::TileSplits;
use super::tile_config::{ForwardConfig, TileSize, columns, heads_at_a_time};
use crate::attention::flash::launch::{Inputs, int};
use crate::attention::flash::params::flash_forward::{Combine, Forward, Output, Parts, Problem, SplitForward};
use crate::attention::flash::schedule::{self, SplitsCache};
use crate::cuda::{
    self, Address, Cache, DependentLaunches, Kernel, LaunchConfig, TensorMap, multiprocessors, take_clear,
};

/// Writes `o` and `lse` with tiles of this size, or of the faster one.
pub(super) fn launch(tile_size: Option<TileSize>, inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
    let (sizes, device) = (&inputs.sizes, inputs.device());
    let variant = inputs.variant;
    let fastest = || TileSize::fastest(variant.d, sizes.n_queries, sizes.n_keys, sizes.all_heads());
    let config =
        ForwardConfig { group_size: sizes.group_size, ..ForwardConfig::of(variant, tile_size.unwrap_or_else(fastest)) };
    let steps = config.steps(sizes.n_queries, sizes.n_keys);
    let resident_ctas = config.resident() * multiprocessors(device)?;
    static SPLITS: SplitsCache<ForwardConfig, Option<TileSplits>> = Cache::new();
    let search = || TileSplits::of(&steps, sizes.all_heads(), resident_ctas);
    let splits = schedule::cached(&SPLITS, config, inputs, resident_ctas, search)?;
    let tiles = sizes.for_all_heads(steps.len() as u64)?;
    // Where each CTA has one tile, nothing is counted.
    let is_counted = splits.is_none() && tiles > resident_ctas;
    let zeros = || Ok::<_, anyhow::Error>(Tensor::f_zeros([1], (Kind::Int, device))?);
    let tile_counter = is_counted.then(|| take_clear(device)?.map_or_else(zeros, Ok)).transpose()?;
    // The query heads of a group share them.
    let head_bytes = (4 * u64::from(sizes.n_keys) * u64::from(variant.d)).div_ceil(sizes.group_size.into());
    let problem = Problem {
        n_queries: int(sizes.n_queries)?,
        n_keys: int(sizes.n_keys)?,
        heads: int(sizes.heads)?,
        batch: int(sizes.batch)?,
        d: int(sizes.d)?,
        scale_log2: sizes.scale_log2(),
        heads_at_a_time: int(heads_at_a_time(sizes.all_heads(), head_bytes))?,
        group_size: int(sizes.group_size)?,
        lse: Address::of(lse),
        taken: tile_counter.as_ref().map_or(Address::NULL, Address::of),
    };
    let map = |t: &Tensor, rows| TensorMap::of(t, rows, columns(variant));
    let [q, k, v] = [(&inputs.q, config.rows()), (&inputs.k, config.keys), (&inputs.v, config.keys)];
    let params = Forward { q: map(q.0, q.1)?, k: map(k.0, k.1)?, v: map(v.0, v.1)?, o: map(o, 64)?, problem };
    if let Some(splits) = &*splits {
        return launch_split(ForwardConfig { is_split: true, ..config }, inputs, splits, resident_ctas, &params, o);
    }
    static WHOLE: Cache<ForwardConfig, Kernel<Forward>> = Cache::new();
    let load = || cuda::load(device, &config.program())?.kernel()?.allow_shared(config.shared_bytes());
    WHOLE.get(device, config, load)?.launch(launch_config(config, tiles.min(resident_ctas)), &params)
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
    static SPLIT: Cache<ForwardConfig, (Kernel<SplitForward>, Kernel<Combine>)> = Cache::new();
    let kernels = SPLIT.get(inputs.device(), config, || {
        let module = cuda::load(inputs.device(), &config.program())?;
        Ok((module.kernel()?.allow_shared(config.shared_bytes())?, module.kernel()?))
    })?;
    let (forward, combine) = &*kernels;
    let sizes = &inputs.sizes;
    let split_o = inputs.float(&[splits.most, sizes.batch, sizes.heads, sizes.n_queries, config.variant.d])?;
    let split_lse = inputs.float(&[splits.most, sizes.batch, sizes.heads, sizes.n_queries])?;
    let (count, blocks, items) = (splits.count(), int(splits.steps)?, splits.table());
    let parts = Parts { count, blocks, o: Address::of(&split_o), lse: Address::of(&split_lse), items };
    let &Forward { q, k, v, o: o_map, problem } = whole;
    let ctas = sizes.for_all_heads(splits.items.len() as u64)?.min(resident_ctas);
    let mut launches = DependentLaunches::default();
    let split = SplitForward { q, k, v, o: o_map, problem, parts };
    launches.launch(forward, launch_config(config, ctas), &split)?;
    let rows = rows_config(inputs, sizes.heads, sizes.n_queries);
    let output = Output { base: Address::of(o), strides: std::array::from_fn(|i| o.stride()[i]) };
    launches.launch(combine, rows, &Combine { problem, parts, o: output })?;
    launches.finish()
}

fn launch_config(config: ForwardConfig, ctas: u32) -> LaunchConfig {
    LaunchConfig { shared_bytes: config.shared_bytes(), ..LaunchConfig::line(ctas, config.threads()) }
}
