//! The cubins of the wheel: each program that its operators load, for the GPUs that have kernels of their own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, Result};

use crate::attention::flash::DIMENSIONS;
use crate::attention::flash::hopper::tile_config::{self as hopper, BackwardConfig, ELEMENTS, ForwardConfig, TileSize};
use crate::attention::flash::portable::tile_config as portable;
use crate::attention::flash::variant::{Element, Variant};
use crate::cuda::{Arch, Compiler, Program};
use crate::model::fused_adamw;

/// Every program and its GPU, but those for heads in groups, which would double the wheel: their first call compiles them.
pub fn programs() -> Vec<(Program, Arch)> {
    let variants = || Variant::all(hopper::DIMENSIONS, ELEMENTS);
    let is_split = || variants().flat_map(|variant| [false, true].map(|is_split| (variant, is_split)));
    let sizes = is_split().flat_map(|(variant, is_split)| TileSize::ALL.map(|size| (variant, is_split, size)));
    let forward = sizes.map(|(variant, is_split, size)| ForwardConfig { is_split, ..ForwardConfig::of(variant, size) });
    let backward = is_split().map(|(variant, is_split)| BackwardConfig { is_split, ..BackwardConfig::of(variant) });
    let of_hopper = forward.map(|config| config.program()).chain(backward.map(|config| config.program()));
    let portable = Variant::all(DIMENSIONS, Element::ALL).flat_map(|variant| {
        let backward =
            [portable::BackwardConfig::of(variant)].into_iter().chain(portable::BackwardConfig::fused(variant));
        let backward = backward.map(|config| config.program());
        [portable::ForwardConfig::of(variant).program()].into_iter().chain(backward)
    });
    // Hopper runs the portable kernels in float32, where results must repeat, and for short backward passes.
    let both = portable.chain([fused_adamw::program(fused_adamw::SHAPE)]);
    let both = both.flat_map(|program| [Arch::AMPERE, Arch::HOPPER].map(|arch| (program.clone(), arch)));
    of_hopper.map(|program| (program, Arch::HOPPER)).chain(both).collect()
}

/// Compiles them into the package, several at a time; needs no GPU.
///
/// Errors: those of [`Compiler::ship`].
pub fn write() -> Result<()> {
    let (compiler, programs, next) = (Compiler::of_this_tree()?, programs(), AtomicUsize::new(0));
    let work = || {
        while let Some((program, arch)) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            compiler.ship(program, *arch)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().ok().context("a compiling thread panicked")?)
    })
}
