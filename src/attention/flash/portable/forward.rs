//! The launch of the portable forward pass.

use anyhow::Result;
use tch::Tensor;

use super::tile_config::ForwardConfig;
use super::{heads_at_a_time, input};
use crate::attention::flash::launch::{Inputs, int};
use crate::attention::flash::params::portable_forward::{Combine, Forward, Problem};
use crate::attention::flash::variant::Variant;
use crate::cuda::{self, Address, Cache, DependentLaunches, Kernel, LaunchConfig};

/// Writes `o` and `lse`.
pub(super) fn launch(inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
    let (sizes, device) = (&inputs.sizes, inputs.device());
    let config = ForwardConfig { group_size: sizes.group_size, ..ForwardConfig::of(inputs.variant) };
    let multiprocessors = cuda::multiprocessors(device)?;
    let split = config.split(sizes.n_queries, sizes.n_keys, sizes.all_heads(), multiprocessors);
    // Each split's own o and lse; empty where there is only one.
    let splits = if split.count == 1 { 0 } else { split.count };
    let split_o = inputs.float(&[splits, sizes.batch, sizes.heads, sizes.n_queries, inputs.variant.d])?;
    let split_lse = inputs.float(&[splits, sizes.batch, sizes.heads, sizes.n_queries])?;
    let problem = Problem {
        n_queries: int(sizes.n_queries)?,
        n_keys: int(sizes.n_keys)?,
        heads: int(sizes.heads)?,
        batch: int(sizes.batch)?,
        scale: sizes.scale(),
        scale_log2: sizes.scale_log2(),
        heads_at_a_time: heads_at_a_time(inputs)?,
        splits: int(split.count)?,
        split_blocks: int(split.blocks)?,
        group_size: int(sizes.group_size)?,
        q: input(&inputs.q),
        k: input(&inputs.k),
        v: input(&inputs.v),
        o: Address::of(o),
        lse: Address::of(lse),
        split_o: Address::of(&split_o),
        split_lse: Address::of(&split_lse),
    };
    static LOADED: Cache<(Variant, u32), (Kernel<Forward>, Kernel<Combine>)> = Cache::new();
    let kernels = LOADED.get(device, (inputs.variant, sizes.group_size), || {
        let module = cuda::load(device, &config.program())?;
        Ok((module.kernel()?.allow_shared(config.shared_bytes())?, module.kernel()?))
    })?;
    let (forward, combine) = &*kernels;
    let tiles = u64::from(sizes.n_queries.div_ceil(config.rows())) * u64::from(split.count);
    let line = LaunchConfig::line(sizes.for_all_heads(tiles)?, config.threads());
    let mut launches = DependentLaunches::default();
    let tiles = LaunchConfig { shared_bytes: config.shared_bytes(), ..line };
    launches.launch(forward, tiles, &Forward { problem })?;
    if split.count > 1 {
        // A warp a row, eight a block.
        let rows = sizes.for_all_heads(sizes.n_queries.into())?;
        launches.launch(combine, LaunchConfig::line(rows.div_ceil(8), 256), &Combine { problem })?;
    }
    launches.finish()
}
