//! The cache's keys, damaged and untrusted entries, and what a build refuses.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

const KERNEL: &str = "#include \"lib/scale.cuh\"\n\
    extern \"C\" __global__ void probe(float *x) { x[threadIdx.x] *= SCALE * FACTOR; }\n";

struct Folders {
    _root: tempfile::TempDir,
    compiler: Compiler,
}

fn folders() -> Folders {
    let root = tempfile::tempdir().unwrap();
    let compiler = Compiler { kernels: root.path().join("kernels"), cache: root.path().join("cache"), shipped: None };
    fs::create_dir_all(compiler.kernels.join("lib")).unwrap();
    fs::write(compiler.kernels.join("probe.cu"), KERNEL).unwrap();
    fs::write(compiler.kernels.join("lib/scale.cuh"), "#define SCALE 2.0f\n").unwrap();
    Folders { _root: root, compiler }
}

fn probe(factor: &str) -> Program {
    Program { file: "probe.cu", defines: vec![("FACTOR", factor.to_string())] }
}

#[test]
fn a_second_build_is_the_first_one_from_the_cache() {
    let Folders { compiler, _root } = folders();
    let first = compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap();
    let second = compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap();
    assert_eq!((&first.origin, &second.origin), (&Origin::Compiled, &Origin::Cache));
    assert!(first.cubin == second.cubin && first.log == second.log && first.key == second.key);
    assert!(first.cubin.starts_with(b"\x7fELF") && first.resources_of("probe").unwrap().registers > 0, "{first:?}");
    assert_eq!(fs::read_dir(&compiler.cache).unwrap().count(), 1);
    let error = first.resources_of("prob").unwrap_err().to_string();
    assert!(error.contains("the program has probe"), "{error}");
}

#[test]
fn what_an_editor_leaves_beside_headers_is_not_read() {
    let Folders { compiler, _root } = folders();
    fs::write(compiler.kernels.join("lib/.scale.cuh.swp"), b"\xff").unwrap();
    std::os::unix::fs::symlink("nowhere", compiler.kernels.join("lib/.#scale.cuh")).unwrap();
    let names: Vec<_> = compiler.headers("lib", "cuh").unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["lib/scale.cuh"]);
}

#[test]
fn every_input_of_a_build_changes_its_key() {
    let Folders { compiler, _root } = folders();
    let first = compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap();
    let mut keys = vec![first.key];
    let mut changed = |program: &Program, arch| {
        let built = compiler.build(program, arch).unwrap();
        assert_eq!(built.origin, Origin::Compiled);
        keys.push(built.key);
    };
    changed(&probe("4.0f"), Arch::HOPPER);
    changed(&probe("3.0f"), Arch::AMPERE);
    fs::write(compiler.kernels.join("lib/scale.cuh"), "#define SCALE 5.0f\n").unwrap();
    changed(&probe("3.0f"), Arch::HOPPER);
    fs::write(compiler.kernels.join("probe.cu"), KERNEL.replace("*=", "+=")).unwrap();
    changed(&probe("3.0f"), Arch::HOPPER);
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 5);
}

#[test]
fn a_damaged_cache_entry_is_compiled_again_and_replaced() {
    let Folders { compiler, _root } = folders();
    let build = || compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap();
    let first = build();
    let path = fs::read_dir(&compiler.cache).unwrap().next().unwrap().unwrap().path();
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for damaged in [&flipped[..], &whole[..whole.len() - 1], b"", b"{}\n"] {
        fs::write(&path, damaged).unwrap();
        let again = build();
        assert!(again.origin == Origin::Compiled && again.cubin == first.cubin);
        assert_eq!(build().origin, Origin::Cache);
    }
}

#[test]
fn a_cache_that_cannot_be_written_does_not_stop_a_build() {
    let Folders { mut compiler, _root } = folders();
    compiler.cache = compiler.kernels.join("probe.cu").join("cache");
    let built = compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap();
    assert!(matches!(&built.origin, Origin::NotKept(why) if why.contains("failed to make")), "{:?}", built.origin);
}

#[test]
fn a_cache_that_others_can_write_to_is_neither_read_nor_written() {
    let Folders { compiler, _root } = folders();
    let first = compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap();
    fs::set_permissions(&compiler.cache, fs::Permissions::from_mode(0o777)).unwrap();
    let built = compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap();
    assert!(built.cubin == first.cubin && matches!(&built.origin, Origin::NotKept(why) if why.contains("mode 777")));
    assert!(matches!(compiler.build(&probe("4.0f"), Arch::HOPPER).unwrap().origin, Origin::NotKept(_)));
    assert_eq!(fs::read_dir(&compiler.cache).unwrap().count(), 1);
}

#[test]
fn a_cubin_that_others_can_write_to_is_compiled_again_and_replaced() {
    let Folders { compiler, _root } = folders();
    let build = || compiler.build(&probe("3.0f"), Arch::HOPPER).unwrap().origin;
    build();
    let path = fs::read_dir(&compiler.cache).unwrap().next().unwrap().unwrap().path();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!([build(), build()], [Origin::Compiled, Origin::Cache]);
}

#[test]
fn errors_name_the_file_and_include_the_compilers_output() {
    let Folders { compiler, _root } = folders();
    let message = |program: &Program| format!("{:#}", compiler.build(program, Arch::HOPPER).unwrap_err());
    let error = message(&probe("no_such_name"));
    assert!(
        error.contains("kernels/probe.cu for sm_90a") && error.contains("\"no_such_name\" is undefined"),
        "{error}"
    );
    let error = message(&Program { file: "missing.cu", defines: Vec::new() });
    assert!(error.contains("failed to read") && error.contains("missing.cu"), "{error}");
    fs::write(compiler.kernels.join("probe.cu"), "#include \"lib/none.cuh\"\n").unwrap();
    assert!(message(&probe("1")).contains("lib/none.cuh"), "{}", message(&probe("1")));
}

#[test]
fn a_program_that_spills_is_refused_also_from_the_cache() {
    let Folders { compiler, _root } = folders();
    let spilling = "extern \"C\" __global__ void __launch_bounds__(1024, 2) probe(float *x) {\n  float a[64];\n\
        #pragma unroll\n  for (int i = 0; i < 64; ++i) a[i] = x[i * 4096 + threadIdx.x];\n  __syncthreads();\n\
        #pragma unroll\n  for (int i = 0; i < 64; ++i) x[(63 - i) * 8192 + threadIdx.x] = a[i] * a[i ^ 1];\n}\n";
    fs::write(compiler.kernels.join("probe.cu"), spilling).unwrap();
    for _ in 0..2 {
        let error = format!("{:#}", compiler.build(&probe("1"), Arch::HOPPER).unwrap_err());
        assert!(error.contains("registers spill") && error.contains("bytes spill stores"), "{error}");
    }
}

#[test]
fn a_shipped_cubin_is_found_by_its_source_alone_and_a_damaged_one_is_not_used() {
    let Folders { mut compiler, _root } = folders();
    let shipped = _root.path().join("cubins");
    fs::create_dir(&shipped).unwrap();
    compiler.shipped = Some(shipped.clone());
    compiler.ship(&probe("3.0f"), Arch::AMPERE).unwrap();
    let origin = |factor, arch| compiler.build(&probe(factor), arch).unwrap().origin;
    assert_eq!(origin("3.0f", Arch::AMPERE), Origin::Shipped);
    assert_eq!(origin("3.0f", Arch { minor: 9, ..Arch::AMPERE }), Origin::Shipped, "8.9 runs what is made for 8.0");
    assert_eq!(origin("4.0f", Arch::AMPERE), Origin::Compiled);
    assert_eq!(origin("3.0f", Arch::HOPPER), Origin::Compiled);
    let path = fs::read_dir(&shipped).unwrap().next().unwrap().unwrap().path();
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(origin("3.0f", Arch::AMPERE), Origin::Cache);
    fs::write(&path, whole).unwrap();
    fs::write(compiler.kernels.join("lib/scale.cuh"), "#define SCALE 5.0f\n").unwrap();
    assert_eq!(origin("3.0f", Arch::AMPERE), Origin::Compiled);
}
