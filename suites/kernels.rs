//! Every kernel compiles for its targets on any machine, without spills, and with the registers that its launch assumes.
//!
//! After an intended change: run `INSTA_UPDATE=always cargo test --test kernels`, check the diff, commit.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cs336::attention::flash::DIMENSIONS;
use cs336::attention::flash::hopper::tile_config::{self, BackwardConfig, ELEMENTS, ForwardConfig, TileSize};
use cs336::attention::flash::portable::tile_config as portable;
use cs336::attention::flash::textbook;
use cs336::attention::flash::variant::{Element, Variant};
use cs336::cuda::{Arch, Compiler, Program};
use cs336::model::Precision;
use cs336::model::fused::kernels::Shape;
use cs336::model::fused::own_products;
use cs336::model::fused_adamw;
use cs336::python::cubins;
use rstest::rstest;

/// One way in which the program compiles a file of `kernels/`.
struct Build {
    program: Program,
    targets: &'static [Arch],
    /// The most registers per thread with which the assumed number of blocks fits a multiprocessor.
    registers: u32,
}

/// All builds. Every file of `kernels/` has at least one.
fn builds() -> Vec<Build> {
    let adamw = Build {
        program: fused_adamw::program(fused_adamw::SHAPE),
        targets: &[Arch::AMPERE, Arch::HOPPER],
        registers: registers_for(fused_adamw::SHAPE.threads * fused_adamw::SHAPE.blocks),
    };
    // For a kernel that moves registers between warpgroups, ptxas reports the registers on entry.
    let hopper = |program, threads| Build { program, targets: &[Arch::HOPPER], registers: registers_for(threads) };
    // One program serves groups of every size.
    let of_group = |is_split| [1, 2].map(|group_size| (is_split, group_size));
    let split = || {
        Variant::all(tile_config::DIMENSIONS, ELEMENTS)
            .flat_map(|variant| [false, true].map(|is_split| (variant, is_split)))
    };
    let split = || split().flat_map(move |(variant, is_split)| of_group(is_split).map(|kinds| (variant, kinds)));
    let sizes = split().flat_map(|(variant, kinds)| TileSize::ALL.map(|size| (variant, size, kinds)));
    let forward = sizes.map(|(variant, size, (is_split, group_size))| ForwardConfig {
        is_split,
        group_size,
        ..ForwardConfig::of(variant, size)
    });
    let forward = forward.map(|shape| hopper(shape.program(), shape.threads() * shape.resident()));
    let backward = split().map(|(variant, (is_split, group_size))| BackwardConfig {
        is_split,
        group_size,
        ..BackwardConfig::of(variant)
    });
    let backward = backward.map(|shape| hopper(shape.program(), BackwardConfig::THREADS));
    let cuts = Variant::all(DIMENSIONS, [Element::Float, Element::BFloat16, Element::Half])
        .flat_map(|variant| [textbook::TileConfig::forward(variant), textbook::TileConfig::backward(variant)]);
    let textbook = cuts.map(|cut| {
        // The number of blocks that fit Hopper's shared memory for most tile sizes.
        let registers = registers_for(3 * textbook::THREADS);
        // They use only features that all our targets have.
        Build { program: cut.program(), targets: &[Arch::AMPERE], registers }
    });
    [adamw]
        .into_iter()
        .chain(fused_step_builds())
        .chain(own_products::programs().map(|program| hopper(program, own_products::THREADS)))
        .chain(forward)
        .chain(backward)
        .chain(textbook)
        .chain(portable_builds())
        .collect()
}

/// Of the handout's extremes in width, and of a vocabulary of no whole pieces.
fn fused_step_builds() -> impl Iterator<Item = Build> {
    let shapes =
        [(Precision::Bfloat16, 768, 10_000), (Precision::Bfloat16, 2560, 10_000), (Precision::Float32, 1600, 50)];
    let shape = |(precision, d_model, vocabulary)| Shape { precision, d_model, vocabulary };
    let programs = shapes.map(shape).into_iter().flat_map(|shape| shape.programs());
    let mut seen = Vec::new();
    let new = move |program: &Program| {
        !seen.contains(program) && {
            seen.push(program.clone());
            true
        }
    };
    // Four blocks of 256 threads, or two of 512.
    let build = |program| Build { program, targets: &[Arch::AMPERE, Arch::HOPPER], registers: registers_for(512) };
    programs.filter(new).map(build)
}

fn portable_builds() -> impl Iterator<Item = Build> {
    let build =
        |program, threads| Build { program, targets: &[Arch::AMPERE, Arch::HOPPER], registers: registers_for(threads) };
    let of_group =
        || Variant::all(DIMENSIONS, Element::ALL).flat_map(|variant| [1, 2].map(|group_size| (variant, group_size)));
    let forward = of_group()
        .map(|(variant, group_size)| portable::ForwardConfig { group_size, ..portable::ForwardConfig::of(variant) });
    let configs = |variant| [Some(portable::BackwardConfig::of(variant)), portable::BackwardConfig::fused(variant)];
    let backward = of_group().flat_map(move |(variant, group_size)| {
        configs(variant).into_iter().flatten().map(move |config| portable::BackwardConfig { group_size, ..config })
    });
    let forward = forward.map(move |shape| build(shape.program(), shape.threads() * shape.blocks));
    forward.chain(backward.map(move |shape| build(shape.program(), shape.threads() * shape.blocks)))
}

/// Registers per thread if `threads` threads share a multiprocessor's 65,536 registers, allocated in units of eight.
fn registers_for(threads: u32) -> u32 {
    65_536 / threads / 8 * 8
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

/// One test for each file, so that files compile in parallel.
#[rstest]
#[case("adamw.cu")]
#[case("rms_norm.cu")]
#[case("rope.cu")]
#[case("swiglu.cu")]
#[case("cross_entropy.cu")]
#[case("embedding_gradient.cu")]
#[case("packed_adamw.cu")]
#[case("product.cu")]
#[case("flash_forward.cu")]
#[case("flash_backward.cu")]
#[case("portable_forward.cu")]
#[case("portable_backward.cu")]
#[case("textbook_forward.cu")]
#[case("textbook_backward.cu")]
fn every_kernel_compiles_for_its_targets_in_its_registers(#[case] file: &str) {
    // The cache keeps the compiler's output with each kernel. The key covers the kernel's text and the compiler.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let compiler = Compiler { kernels: root().join("kernels"), cache, shipped: None };
    let mut report = String::new();
    for Build { program, targets, registers } in builds().into_iter().filter(|build| build.program.file == file) {
        if file != "adamw.cu" {
            let shape = program.defines.iter().map(|(name, value)| format!("{name}={value}"));
            report += &format!("{}\n", shape.collect::<Vec<_>>().join(" "));
        }
        for arch in targets {
            for kernel in compiler.build(&program, *arch).unwrap().resources {
                assert!(kernel.registers <= registers, "{kernel}, for {arch}: {registers} registers at most");
                report += &format!("{arch} {kernel}\n");
            }
        }
    }
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(root().join("snapshots").join("kernels"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    // A file that is not in the list above fails the next test.
    settings.bind(|| insta::assert_snapshot!(file.trim_end_matches(".cu"), report));
}

#[test]
fn every_kernel_file_is_compiled_and_has_its_snapshot() {
    let stems = |folder: &str, extension: &str| -> BTreeSet<String> {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let wanted = entries.filter(|path| path.extension().is_some_and(|e| e == extension));
        wanted.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect()
    };
    let compiled: BTreeSet<String> =
        builds().iter().map(|build| build.program.file.trim_end_matches(".cu").to_string()).collect();
    assert_eq!(stems("kernels", "cu"), compiled, "kernels/*.cu and this list differ");
    assert_eq!(stems("snapshots/kernels", "snap"), compiled, "snapshots/kernels and this list differ");
}

/// A first call on such a GPU finds its cubin, except for heads in groups.
#[test]
fn the_wheel_holds_a_cubin_of_each_build_of_its_kernels_without_groups() {
    let shipped: BTreeSet<(Program, String)> =
        cubins::programs().into_iter().map(|(program, arch)| (program, arch.to_string())).collect();
    let files: BTreeSet<&str> = shipped.iter().map(|(program, _)| program.file).collect();
    assert!(cs336::attention::FLASH_KERNELS.iter().chain(&["adamw.cu"]).all(|file| files.contains(file)));
    let is_grouped =
        |program: &Program| program.defines.iter().any(|(name, of)| name.ends_with("_GROUPED") && of == "1");
    let builds = builds().into_iter();
    let builds = builds.filter(|build| files.contains(build.program.file) && !is_grouped(&build.program));
    let built =
        builds.flat_map(|build| build.targets.iter().map(move |arch| (build.program.clone(), arch.to_string())));
    assert_eq!(built.collect::<BTreeSet<_>>(), shipped);
}
