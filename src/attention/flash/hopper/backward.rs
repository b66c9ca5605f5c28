//! The launches of Hopper's backward pass.

use std::sync::Arc;

use anyhow::Result;
use tch::{Device, Tensor};

use super::rows_config;
use super::splits::TileSplits;
use super::tile_config::{BackwardConfig, columns};
use crate::attention::flash::launch::{Gradients, Inputs, Saved, int};
use crate::attention::flash::params::flash_backward::{
    Backward, Combine, Finish, Outputs, Parts, Prepare, Problem, SplitBackward,
};
use crate::attention::flash::schedule::{self, SplitsCache};
use crate::cuda::{self, Address, Cache, DependentLaunches, Kernel, Module, TensorMap, multiprocessors};

/// The kernels that multiply, whole tiles or split ones, with those before and after them.
struct Kernels<M> {
    prepare: Kernel<Prepare<'static>>,
    multiply: M,
    finish: Kernel<Finish<'static>>,
}

type Whole = Kernel<Backward<'static>>;
type Split = (Kernel<SplitBackward<'static>>, Kernel<Combine<'static>>);

/// Writes the gradients: D and lse to base 2; then dk, dv and the sums of dq; then dq.
pub(super) fn launch(inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
    static SPLITS: SplitsCache<BackwardConfig, Option<TileSplits>> = Cache::new();
    static WHOLE: Cache<BackwardConfig, Kernels<Whole>> = Cache::new();
    static SPLIT: Cache<BackwardConfig, Kernels<Split>> = Cache::new();
    let (sizes, device) = (&inputs.sizes, inputs.device());
    let config = BackwardConfig { group_size: sizes.group_size, ..BackwardConfig::of(inputs.variant) };
    let (steps, shared_bytes) = (config.steps(sizes.n_queries, sizes.n_keys), config.shared_bytes());
    let ctas = multiprocessors(device)?;
    let search = || TileSplits::of(&steps, sizes.batch * sizes.kv_heads(), ctas);
    let splits = schedule::cached(&SPLITS, config, inputs, ctas, search)?;
    let blocks = sizes.n_queries.div_ceil(config.queries);
    let scratch = scratch(inputs, config, blocks)?;
    let problem = problem(inputs, &scratch)?;
    let prepare = Prepare { problem, outputs: outputs(saved) };
    let finish = Finish { problem, dq: Address::of(&gradients.dq) };
    let rows = sizes.grid_by_head(blocks, 256, 0);
    let backward = params(config, inputs, saved, gradients, problem)?;
    let tiles = |count: usize| -> Result<_> {
        Ok(sizes.grid_by_kv_head(u32::try_from(count)?, BackwardConfig::THREADS, shared_bytes))
    };
    let Some(splits) = &*splits else {
        let kernels = kernels(&WHOLE, config, device, |module| module.kernel()?.allow_shared(shared_bytes))?;
        let mut launches = DependentLaunches::default();
        launches.launch(&kernels.prepare, rows, &prepare)?;
        launches.launch(&kernels.multiply, tiles(steps.len())?, &backward)?;
        launches.launch(&kernels.finish, rows, &finish)?;
        return launches.finish();
    };
    let config = BackwardConfig { is_split: true, ..config };
    let multiply = |module: &Module| Ok((module.kernel()?.allow_shared(shared_bytes)?, module.kernel()?));
    let kernels = kernels(&SPLIT, config, device, multiply)?;
    let (multiply, combine_splits) = &kernels.multiply;
    let partial = || inputs.float(&[splits.most, sizes.batch, sizes.kv_heads(), sizes.n_keys, config.variant.d]);
    let (split_dk, split_dv) = (partial()?, partial()?);
    let (count, blocks, items) = (splits.count(), int(splits.steps)?, splits.table());
    let parts = Parts { count, blocks, dk: Address::of(&split_dk), dv: Address::of(&split_dv), items };
    let Backward { q, k, v, d_o, dk, dv, problem } = backward;
    let split = SplitBackward { q, k, v, d_o, dk, dv, problem, parts };
    let combine = Combine { problem, parts, dk: Address::of(&gradients.dk), dv: Address::of(&gradients.dv) };
    let mut launches = DependentLaunches::default();
    launches.launch(&kernels.prepare, rows, &prepare)?;
    launches.launch(multiply, tiles(splits.items.len())?, &split)?;
    launches.launch(combine_splits, rows_config(inputs, sizes.kv_heads(), sizes.n_keys), &combine)?;
    launches.launch(&kernels.finish, rows, &finish)?;
    launches.finish()
}

/// What the kernels hand to one another: lse to base 2, D and the sums of dq, a row for each query, padded to whole blocks.
fn scratch(inputs: &Inputs, config: BackwardConfig, blocks: u32) -> Result<[Tensor; 3]> {
    let float = |elements| inputs.float(&[inputs.sizes.batch, inputs.sizes.heads, blocks, elements]);
    Ok([float(config.queries)?, float(config.queries)?, float(config.queries * config.variant.d)?])
}

fn problem<'a>(inputs: &Inputs, [lse_log2, delta, dq_sums]: &'a [Tensor; 3]) -> Result<Problem<'a>> {
    let sizes = &inputs.sizes;
    Ok(Problem {
        n_queries: int(sizes.n_queries)?,
        n_keys: int(sizes.n_keys)?,
        heads: int(sizes.heads)?,
        batch: int(sizes.batch)?,
        d: int(sizes.d)?,
        scale: sizes.scale(),
        scale_log2: sizes.scale_log2(),
        group_size: int(sizes.group_size)?,
        lse_log2: Address::of(lse_log2),
        delta: Address::of(delta),
        dq_sums: Address::of(dq_sums),
    })
}

fn outputs(saved: &Saved) -> Outputs<'_> {
    let strides = |t: &Tensor| std::array::from_fn(|i| t.stride()[i]);
    Outputs {
        o: Address::of(&saved.o),
        d_o: Address::of(&saved.d_o),
        lse: Address::of(&saved.lse),
        o_strides: strides(&saved.o),
        do_strides: strides(&saved.d_o),
    }
}

fn params<'a>(
    config: BackwardConfig,
    inputs: &Inputs,
    saved: &Saved,
    gradients: &Gradients,
    problem: Problem<'a>,
) -> Result<Backward<'a>> {
    let map = |t: &Tensor, rows| TensorMap::of(t, rows, columns(config.variant));
    let key_map = |t: &Tensor, rows| TensorMap::of(t, rows, config.key_columns());
    Ok(Backward {
        q: map(&inputs.q, config.queries)?,
        k: key_map(&inputs.k, BackwardConfig::KEYS)?,
        v: map(&inputs.v, BackwardConfig::KEYS)?,
        d_o: map(&saved.d_o, config.queries)?,
        dk: key_map(&gradients.dk, 64)?,
        dv: map(&gradients.dv, 64)?,
        problem,
    })
}

fn kernels<M>(
    cache: &Cache<BackwardConfig, Kernels<M>>,
    config: BackwardConfig,
    device: Device,
    multiply: impl FnOnce(&Module) -> Result<M>,
) -> Result<Arc<Kernels<M>>> {
    cache.get(device, config, || {
        let module = cuda::load(device, &config.program())?;
        Ok(Kernels { prepare: module.kernel()?, multiply: multiply(&module)?, finish: module.kernel()? })
    })
}
