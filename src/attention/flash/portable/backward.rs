//! The launches of the portable backward pass.

use anyhow::{Context as _, Result};
use tch::{Kind, Tensor};

use super::splits::Split;
use super::tile_config::BackwardConfig;
use super::{heads_at_a_time, input};
use crate::attention::flash::launch::{Gradients, Inputs, Saved, int};
use crate::attention::flash::params::portable_backward::{self as params, Backward, Combine, Prepare, Problem};
use crate::attention::flash::schedule::{self, SplitsCache};
use crate::attention::flash::variant::Variant;
use crate::cuda::{self, Address, Cache, DependentLaunches, Kernel, LaunchConfig};

/// Writes the gradients: D and lse as they are read; then dk and dv by tiles of keys and dq by tiles of queries, or all by
/// tiles of keys; then the sums of their splits, and the scaled sums of dq.
pub(super) fn launch(config: BackwardConfig, inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
    let (sizes, device) = (&inputs.sizes, inputs.device());
    let config = BackwardConfig { group_size: sizes.group_size, ..config };
    let blocks = sizes.n_queries.div_ceil(BackwardConfig::PADDING);
    static SPLITS: SplitsCache<(Variant, u32, bool), [Split; 2]> = Cache::new();
    let multiprocessors = cuda::multiprocessors(device)?;
    let key = (inputs.variant, sizes.group_size, config.is_fused);
    let search = || config.splits(sizes.n_queries, sizes.n_keys, sizes.all_heads(), multiprocessors);
    let [keys, queries] = *schedule::cached(&SPLITS, key, inputs, multiprocessors, search)?;
    let scratch = scratch(&config, inputs, gradients, [keys, queries])?;
    let problem = problem(inputs, saved, gradients, &scratch, [keys, queries])?;
    type Kernels = (Kernel<Prepare<'static>>, Kernel<Backward<'static>>, Kernel<Combine<'static>>);
    static LOADED: Cache<(Variant, u32, bool), Kernels> = Cache::new();
    let kernels = LOADED.get(device, key, || {
        let module = cuda::load(device, &config.program())?;
        let backward = module.kernel()?.allow_shared(config.most_shared_bytes())?;
        Ok((module.kernel()?, backward, module.kernel()?))
    })?;
    let (prepare, backward, combine) = &*kernels;
    let mut launches = DependentLaunches::default();
    launches.launch(prepare, sizes.grid_by_head(blocks, 256, 0), &Prepare { problem })?;
    let tiles = |n: u32, rows: u32, split: Split| u64::from(n.div_ceil(rows)) * u64::from(split.count);
    let key_tiles = tiles(sizes.n_keys, config.rows(config.keys), keys);
    let query_tiles = if config.is_fused { 0 } else { tiles(sizes.n_queries, config.rows(config.queries), queries) };
    // As if each query head had its own tiles of keys; a group has them once.
    sizes.for_all_heads(key_tiles + query_tiles)?;
    let of_keys = key_tiles * u64::from(sizes.batch * sizes.kv_heads());
    let ctas = of_keys + query_tiles * u64::from(sizes.all_heads());
    let line = LaunchConfig::line(u32::try_from(ctas)?, config.threads());
    let both = LaunchConfig { shared_bytes: config.most_shared_bytes(), ..line };
    launches.launch(backward, both, &Backward { problem })?;
    if keys.count > 1 || queries.count > 1 || config.is_fused {
        // A thread each four columns, 256 a block; in y dq, dk and dv.
        let padded_queries = blocks * BackwardConfig::PADDING;
        let rows = sizes.for_all_heads(sizes.n_keys.max(padded_queries).into())?;
        let grid = (rows.div_ceil(256 / (inputs.variant.d / 4)), 3, 1);
        let sums = LaunchConfig { grid, block: (256, 1, 1), shared_bytes: 0 };
        launches.launch(combine, sums, &Combine { problem })?;
    }
    launches.finish()
}

/// What the kernels hand to one another: lse and D, a row for each query, padded to whole blocks; each split's own dq, dk and
/// dv, empty where a tile is whole; and dq's sums and the turns of their blocks, empty where tiles of queries make dq.
fn scratch(
    config: &BackwardConfig,
    inputs: &Inputs,
    gradients: &Gradients,
    [keys, queries]: [Split; 2],
) -> Result<[Tensor; 7]> {
    let padded = inputs.sizes.n_queries.next_multiple_of(BackwardConfig::PADDING);
    let rows = [inputs.sizes.batch, inputs.sizes.heads, padded];
    let all_rows: i64 = rows.iter().copied().map(i64::from).product();
    let (sums, turns) = if config.is_fused {
        (all_rows * i64::from(inputs.variant.d), 1 + all_rows / i64::from(config.keys.stream))
    } else {
        (0, 0)
    };
    let sums = Tensor::f_empty([sums], (Kind::Float, inputs.device()))?;
    let turns = Tensor::f_empty([turns], (Kind::Int, inputs.device()))?;
    let partial = |split: Split, whole: &Tensor| {
        let count = if split.count == 1 { 0 } else { i64::from(split.count) };
        Tensor::f_empty([&[count], &whole.size()[..]].concat(), (Kind::Float, whole.device()))
    };
    let (dq, dk, dv) = (partial(queries, &gradients.dq)?, partial(keys, &gradients.dk)?, partial(keys, &gradients.dv)?);
    Ok([inputs.float(&rows)?, inputs.float(&rows)?, dq, dk, dv, sums, turns])
}

fn problem<'a>(
    inputs: &'a Inputs,
    saved: &'a Saved,
    gradients: &'a Gradients,
    [shift, delta, dq_parts, dk_parts, dv_parts, dq_sums, turns]: &'a [Tensor; 7],
    splits: [Split; 2],
) -> Result<Problem<'a>> {
    let sizes = &inputs.sizes;
    let [keys, queries] =
        splits.map(|split| -> Result<_> { Ok(params::Split { count: int(split.count)?, blocks: int(split.blocks)? }) });
    let padded = shift.size().last().copied().context("rows of statistics")?;
    Ok(Problem {
        n_queries: int(sizes.n_queries)?,
        n_keys: int(sizes.n_keys)?,
        heads: int(sizes.heads)?,
        batch: int(sizes.batch)?,
        scale: sizes.scale(),
        scale_log2: sizes.scale_log2(),
        heads_at_a_time: heads_at_a_time(inputs)?,
        padded_queries: i32::try_from(padded)?,
        keys: keys?,
        queries: queries?,
        group_size: int(sizes.group_size)?,
        unused: 0,
        q: input(&inputs.q),
        k: input(&inputs.k),
        v: input(&inputs.v),
        o: input(&saved.o),
        d_o: input(&saved.d_o),
        lse: Address::of(&saved.lse),
        shift: Address::of(shift),
        delta: Address::of(delta),
        dq: Address::of(&gradients.dq),
        dk: Address::of(&gradients.dk),
        dv: Address::of(&gradients.dv),
        dq_parts: Address::of(dq_parts),
        dk_parts: Address::of(dk_parts),
        dv_parts: Address::of(dv_parts),
        dq_sums: Address::of(dq_sums),
        turns: Address::of(turns),
    })
}
