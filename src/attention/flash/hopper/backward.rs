//! The launches of Hopper's backward pass.

use std::sync::Arc;

use anyhow::Result;
use tch::{Device, Tensor};

use super::rows_config;
use super::splits::{self, SplitsCache};
use super::tile_config::{BackwardConfig, Variant};
use crate::attention::flash::launch::{Gradients, Inputs, Saved, Sizes, int};
use crate::attention::flash::params::flash_backward::{
    Backward, Combine, Finish, Outputs, Parts, Prepare, Problem, SplitBackward,
};
use crate::cuda::{self, Address, Cache, DependentLaunches, Kernel, Module, TensorMap, multiprocessors};

/// The kernels before and after the one that multiplies.
struct Around {
    prepare: Kernel<Prepare<'static>>,
    finish: Kernel<Finish<'static>>,
}

struct WholeKernels {
    around: Around,
    backward: Kernel<Backward<'static>>,
}

struct SplitKernels {
    around: Around,
    backward: Kernel<SplitBackward<'static>>,
    combine: Kernel<Combine<'static>>,
}

/// What the kernels hand to one another, a row for each query, padded to whole blocks.
struct Scratch {
    lse_log2: Tensor,
    delta: Tensor,
    dq_sums: Tensor,
}

/// Writes the gradients: D and lse to base 2; then dk, dv and the sums of dq; then dq.
pub(super) fn launch(inputs: &Inputs, saved: &Saved, gradients: &Gradients) -> Result<()> {
    let (sizes, device) = (&inputs.sizes, inputs.device());
    let config = BackwardConfig::of(Variant::of(inputs)?);
    let steps = config.steps(sizes.n_queries, sizes.n_keys);
    static SPLITS: SplitsCache<BackwardConfig> = Cache::new();
    let splits = splits::cached(&SPLITS, config, inputs, &steps, multiprocessors(device)?)?;
    let blocks = sizes.n_queries.div_ceil(config.queries);
    let scratch = Scratch::of(inputs, config, blocks)?;
    let problem = problem(sizes, &scratch)?;
    let prepare = Prepare { problem, outputs: outputs(saved) };
    let finish = Finish { problem, dq: Address::of(&gradients.dq) };
    let rows = sizes.grid_by_head(blocks, 256, 0);
    let backward = params(config, inputs, saved, gradients, problem)?;
    let tiles = |count: usize| -> Result<_> {
        Ok(sizes.grid_by_head(u32::try_from(count)?, BackwardConfig::THREADS, config.shared_bytes()))
    };
    match &*splits {
        None => {
            let kernels = whole_kernels(config, device)?;
            let mut launches = DependentLaunches::default();
            launches.launch(&kernels.around.prepare, rows, &prepare)?;
            launches.launch(&kernels.backward, tiles(steps.len())?, &backward)?;
            launches.launch(&kernels.around.finish, rows, &finish)?;
            launches.finish()
        }
        Some(splits) => {
            let kernels = split_kernels(BackwardConfig { is_split: true, ..config }, device)?;
            let partial = || inputs.float(&[splits.most, sizes.batch, sizes.heads, sizes.n_keys, config.variant.d]);
            let (split_dk, split_dv) = (partial()?, partial()?);
            let parts = Parts {
                count: splits.count(),
                blocks: int(splits.steps)?,
                dk: Address::of(&split_dk),
                dv: Address::of(&split_dv),
                items: splits.table(),
            };
            let Backward { q, k, v, d_o, dk, dv, problem } = backward;
            let split = SplitBackward { q, k, v, d_o, dk, dv, problem, parts };
            let (dk, dv) = (Address::of(&gradients.dk), Address::of(&gradients.dv));
            let mut launches = DependentLaunches::default();
            launches.launch(&kernels.around.prepare, rows, &prepare)?;
            launches.launch(&kernels.backward, tiles(splits.items.len())?, &split)?;
            let keys = rows_config(sizes, sizes.n_keys, config.variant);
            launches.launch(&kernels.combine, keys, &Combine { problem, parts, dk, dv })?;
            launches.launch(&kernels.around.finish, rows, &finish)?;
            launches.finish()
        }
    }
}

impl Scratch {
    fn of(inputs: &Inputs, config: BackwardConfig, blocks: u32) -> Result<Self> {
        let Sizes { batch, heads, .. } = inputs.sizes;
        let float = |elements| inputs.float(&[batch, heads, blocks, elements]);
        let (lse_log2, delta) = (float(config.queries)?, float(config.queries)?);
        Ok(Self { lse_log2, delta, dq_sums: float(config.queries * config.variant.d)? })
    }
}

fn problem<'a>(sizes: &Sizes, scratch: &'a Scratch) -> Result<Problem<'a>> {
    Ok(Problem {
        n_queries: int(sizes.n_queries)?,
        n_keys: int(sizes.n_keys)?,
        heads: int(sizes.heads)?,
        batch: int(sizes.batch)?,
        d: int(sizes.d)?,
        scale: sizes.scale(),
        scale_log2: sizes.scale_log2(),
        lse_log2: Address::of(&scratch.lse_log2),
        delta: Address::of(&scratch.delta),
        dq_sums: Address::of(&scratch.dq_sums),
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
    let map = |t: &Tensor, rows| TensorMap::of(t, rows, config.columns());
    Ok(Backward {
        q: map(&inputs.q, config.queries)?,
        k: map(&inputs.k, BackwardConfig::KEYS)?,
        v: map(&inputs.v, BackwardConfig::KEYS)?,
        d_o: map(&saved.d_o, config.queries)?,
        dk: map(&gradients.dk, 64)?,
        dv: map(&gradients.dv, 64)?,
        problem,
    })
}

fn whole_kernels(config: BackwardConfig, device: Device) -> Result<Arc<WholeKernels>> {
    static LOADED: Cache<BackwardConfig, WholeKernels> = Cache::new();
    LOADED.get(device, config, || {
        let module = cuda::load(device, &config.program())?;
        let kernels = WholeKernels { around: around(&module)?, backward: module.kernel()? };
        kernels.backward.allow_shared(config.shared_bytes())?;
        Ok(kernels)
    })
}

fn split_kernels(config: BackwardConfig, device: Device) -> Result<Arc<SplitKernels>> {
    static LOADED: Cache<BackwardConfig, SplitKernels> = Cache::new();
    LOADED.get(device, config, || {
        let module = cuda::load(device, &config.program())?;
        let kernels = SplitKernels { around: around(&module)?, backward: module.kernel()?, combine: module.kernel()? };
        kernels.backward.allow_shared(config.shared_bytes())?;
        Ok(kernels)
    })
}

fn around(module: &Module) -> Result<Around> {
    Ok(Around { prepare: module.kernel()?, finish: module.kernel()? })
}
