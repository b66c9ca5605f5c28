//! The launch of the portable forward pass.

use std::sync::Arc;

use anyhow::Result;
use tch::{Device, Tensor};

use super::tile_config::ForwardConfig;
use super::{heads_at_a_time, input};
use crate::attention::flash::launch::{Inputs, int};
use crate::attention::flash::params::portable_forward::{Combine, Forward, Problem};
use crate::attention::flash::variant::Variant;
use crate::cuda::{self, Address, Cache, DependentLaunches, Kernel, LaunchConfig};

struct Kernels {
    forward: Kernel<Forward<'static>>,
    combine: Kernel<Combine<'static>>,
}

/// Writes `o` and `lse`.
pub(super) fn launch(inputs: &Inputs, o: &Tensor, lse: &Tensor) -> Result<()> {
    let (sizes, device) = (&inputs.sizes, inputs.device());
    let config = ForwardConfig::of(inputs.variant);
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
        unused: 0,
        q: input(&inputs.q),
        k: input(&inputs.k),
        v: input(&inputs.v),
        o: Address::of(o),
        lse: Address::of(lse),
        split_o: Address::of(&split_o),
        split_lse: Address::of(&split_lse),
    };
    let kernels = Kernels::of(config, device)?;
    let tiles = u64::from(sizes.n_queries.div_ceil(config.rows())) * u64::from(split.count);
    let line = LaunchConfig::line(sizes.for_all_heads(tiles)?, config.threads());
    let mut launches = DependentLaunches::default();
    let tiles = LaunchConfig { shared_bytes: config.shared_bytes(), ..line };
    launches.launch(&kernels.forward, tiles, &Forward { problem })?;
    if split.count > 1 {
        // A warp a row, eight a block.
        let rows = sizes.for_all_heads(sizes.n_queries.into())?;
        launches.launch(&kernels.combine, LaunchConfig::line(rows.div_ceil(8), 256), &Combine { problem })?;
    }
    launches.finish()
}

impl Kernels {
    fn of(config: ForwardConfig, device: Device) -> Result<Arc<Self>> {
        static LOADED: Cache<Variant, Kernels> = Cache::new();
        LOADED.get(device, config.variant, || {
            let module = cuda::load(device, &config.program())?;
            let forward = module.kernel()?.allow_shared(config.shared_bytes())?;
            Ok(Self { forward, combine: module.kernel()? })
        })
    }
}
