//! Tests of the trials' cases, and of the kernel names for the sanitizer.

use super::*;

#[test]
fn every_kernel_belongs_to_one_implementation() {
    let of_both = [HOPPER.kernels, PORTABLE.kernels].concat();
    assert_eq!(of_both, Attestation::KERNELS);
}

/// On 132 multiprocessors.
#[test]
fn refills_fill_every_buffer_again_whole_and_in_parts() {
    use crate::attention::flash::hopper::splits::TileSplits;
    use crate::attention::flash::hopper::tile_config::{BackwardConfig, ForwardConfig, TileSize, kernel_dimension};
    use crate::attention::flash::variant::{Element, Variant};
    let parts = HOPPER.parts;
    let shapes = HOPPER.whole_tiles.into_iter().map(|shape| (shape, false));
    for (Shape { heads, n, is_causal }, is_cut) in shapes.chain([(parts, true)]) {
        let (heads, n) = (heads as u32, n as u32);
        for &d in HOPPER.dimensions(Device::Cuda(0)) {
            let variant = Variant { d: kernel_dimension(d).unwrap() as u32, element: Element::BFloat16, is_causal };
            let backward = (BackwardConfig::of(variant).steps(n, n), BackwardConfig::STAGES, 132);
            let forward = TileSize::ALL.map(|size| {
                let shape = ForwardConfig::of(variant, size);
                (shape.steps(n, n), shape.stages, 132 * shape.resident())
            });
            for (steps, stages, places) in forward.into_iter().chain([backward]) {
                let parts = TileSplits::of(&steps, heads, places);
                assert_eq!(parts.is_some(), is_cut, "{variant:?}, {heads} heads of {n}");
                let longest = parts.map_or_else(|| steps.iter().copied().max().unwrap(), |parts| parts.steps);
                assert!(longest > stages, "{variant:?}, {heads} heads of {n}: {longest} steps, {stages} buffers");
            }
        }
    }
}

/// On 132 multiprocessors.
#[test]
fn some_refills_have_more_tiles_than_a_device_has_places() {
    use crate::attention::flash::hopper::splits::TileSplits;
    use crate::attention::flash::hopper::tile_config::{ForwardConfig, TileSize, kernel_dimension};
    use crate::attention::flash::variant::{Element, Variant};
    let Shape { heads, n, is_causal } = HOPPER.more_tiles_than_places.unwrap();
    let (heads, n) = (heads as u32, n as u32);
    for &d in HOPPER.dimensions(Device::Cuda(0)) {
        let variant = Variant { d: kernel_dimension(d).unwrap() as u32, element: Element::BFloat16, is_causal };
        for forward in TileSize::ALL.map(|size| ForwardConfig::of(variant, size)) {
            let (steps, places) = (forward.steps(n, n), 132 * forward.resident());
            let tiles = heads * steps.len() as u32;
            assert!(tiles > places && TileSplits::of(&steps, heads, places).is_none(), "{forward:?}: {tiles} tiles");
        }
    }
    assert!(PORTABLE.more_tiles_than_places.is_none());
}

#[test]
fn refills_fill_every_buffer_of_the_portable_kernels_again() {
    use crate::attention::flash::portable::tile_config::{BackwardConfig, ForwardConfig};
    use crate::attention::flash::variant::{Element, Variant};
    let parts = PORTABLE.parts;
    let shapes = PORTABLE.whole_tiles.into_iter().map(|shape| (shape, false));
    for (Shape { heads, n, is_causal }, is_cut) in shapes.chain([(parts, true)]) {
        let (heads, n) = (heads as u32, n as u32);
        for variant in Variant::all(DIMENSIONS, Element::ALL)
            .filter(|v| v.is_causal == is_causal && !(is_cut && v.element != Element::BFloat16))
        {
            let (forward, backward) = (ForwardConfig::of(variant), BackwardConfig::of(variant));
            let [keys, queries] = backward.splits(n, n, heads, 132);
            for (split, stages) in
                [(forward.split(n, n, heads, 132), forward.stages), (keys, backward.stages), (queries, backward.stages)]
            {
                assert!(split.blocks > stages, "{variant:?}, {heads} heads of {n}: {split:?}, {stages} buffers");
            }
            assert_eq!(forward.split(n, n, heads, 132).count > 1, is_cut, "{variant:?}, {heads} heads of {n}");
        }
    }
}

#[test]
fn every_kernels_name_begins_with_the_sanitizers_prefix() {
    for tried in [HOPPER, PORTABLE] {
        for name in tried.kernels {
            let source = std::fs::read_to_string(format!("{}/kernels/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
            let entries = source.split("extern \"C\" __global__").skip(1);
            // Behind the launch bounds and before the parameters.
            let names =
                entries.map(|entry| entry.split_once("const __grid_constant__").unwrap().0.trim_end_matches('('));
            let names: Vec<_> = names.map(|head| head.rsplit([' ', '\n']).next().unwrap()).collect();
            assert!(!names.is_empty() && names.iter().all(|name| name.starts_with(tried.prefix)), "{names:?}");
        }
    }
}

#[test]
fn a_gpu_tries_what_the_kernels_are_compiled_for_and_rows_between() {
    use crate::attention::flash::hopper::tile_config;
    let [hopper, portable] = [HOPPER.dimensions, PORTABLE.dimensions];
    assert_eq!(portable, DIMENSIONS);
    assert!(tile_config::DIMENSIONS.iter().all(|d| hopper.contains(d)));
    assert_eq!(hopper.iter().filter(|d| !tile_config::DIMENSIONS.contains(d)).collect::<Vec<_>>(), [&40]);
}

#[test]
fn the_emulator_runs_the_same_trials_but_no_sanitizer() {
    let row = repeats(&HOPPER, HOPPER.parts, Device::Cpu).unwrap();
    assert_eq!((row.cases, row.dimensions, row.findings), (EMULATED_REPEATS, vec![64], None));
    let error = sanitized(Implementation::Hopper, "adversarial", Tool::Memcheck, Device::Cpu).unwrap_err();
    assert!(matches!(error.downcast_ref::<Fault>(), Some(Fault::NotAvailable { .. })), "{error:#}");
}
