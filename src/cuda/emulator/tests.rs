//! What the emulator runs, and its errors for wrong kernels.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::*;
use crate::cuda::{Address, DependentLaunches, Kernel, LaunchConfig, kernel_params};

kernel_params! {
    /// Of every kernel here.
    struct Probe<'a> as "probe" { x: Address<'a> }
}

/// The emulator's own headers beside one kernel of the test.
struct Folders {
    _root: tempfile::TempDir,
    compiler: Compiler,
}

fn folders(kernel: &str) -> Folders {
    let root = tempfile::tempdir().unwrap();
    let kernels = root.path().join("kernels");
    let tree = crate::root::find().unwrap().join("kernels");
    for folder in ["lib", "emulator"] {
        fs::create_dir_all(kernels.join(folder)).unwrap();
        for file in fs::read_dir(tree.join(folder)).unwrap() {
            let path = file.unwrap().path();
            fs::copy(&path, kernels.join(folder).join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::write(kernels.join("probe.cu"), kernel).unwrap();
    Folders { compiler: Compiler { kernels, cache: root.path().join("cache"), shipped: None }, _root: root }
}

const PROBE: Program = Program { file: "probe.cu", defines: Vec::new() };

/// The kernels of these tests, compiled once.
fn emulation() -> Arc<Emulation> {
    static LOADED: OnceLock<(Folders, Arc<Emulation>)> = OnceLock::new();
    let (_, emulation) = LOADED.get_or_init(|| {
        let folders = folders(&[PROBES, OVERLAPPING].concat());
        let emulation = build(&folders.compiler, &PROBE).unwrap();
        (folders, Arc::new(emulation))
    });
    emulation.clone()
}

/// Kernels of 128 threads over 128 floats.
const PROBES: &str = r#"
#include "lib/hopper.cuh"
#define PROBE(name, ...)                                                      \
  extern "C" __global__ void __launch_bounds__(128, 1) name(float *x) {       \
    extern __shared__ unsigned char memory[];                                 \
    const u32 t = threadIdx.x, base = shared_address(memory);                 \
    float *shared = reinterpret_cast<float *>(memory);                        \
    (void)base, (void)shared;                                                 \
    __VA_ARGS__                                                               \
  }

PROBE(reverse, shared[t] = t; __syncthreads(); x[t] = shared[127 - t] + 1000.0f * __shfl_xor_sync(0xFFFFFFFF, t % 32, 1);)
PROBE(missing_barrier, shared[t] = t; x[t] = shared[127 - t];)
PROBE(deadlock, if (t < 64) named_sync(3, 128); else if (t < 96) __syncthreads();)
PROBE(no_barrier, barrier_wait(base, 0);)
PROBE(two_arrivals, if (t == 0) { barrier_init(base, 1); barrier_expect(base, 8); barrier_expect(base, 8); })
PROBE(outside, if (t < 32) store_matrices(base + 4096, 0, 0, 0, 0);)
PROBE(half_a_warp, if (t < 16) __shfl_sync(0xFFFFFFFF, t, 0);)
PROBE(two_calls, if (t % 32 < 16) __syncwarp(); else __shfl_sync(0xFFFFFFFF, t, 0);)
"#;

/// Runs a kernel of [`PROBES`]; gives the floats, or the emulator's error.
fn run(kernel: &'static str) -> Result<Vec<f32>> {
    let values = Tensor::zeros([128], (Kind::Float, Device::Cpu));
    let config = LaunchConfig { shared_bytes: 4096, ..LaunchConfig::line(1, 128) };
    Kernel::emulated(kernel, emulation())?.launch(config, &Probe { x: Address::of(&values) })?;
    Ok(Vec::try_from(values)?)
}

fn fault(kernel: &'static str) -> String {
    format!("{:#}", run(kernel).unwrap_err())
}

#[test]
fn barriers_and_shuffles_work() {
    let expected: Vec<f32> = (0..128).map(|t| (127 - t) as f32 + 1000.0 * ((t % 32) ^ 1) as f32).collect();
    assert_eq!(run("reverse").unwrap(), expected);
}

#[test]
fn a_missing_barrier_shows_as_a_wrong_result() {
    let values = run("missing_barrier").unwrap();
    assert!(values.iter().any(|value| value.is_nan()), "unwritten shared memory is no number: {values:?}");
}

#[test]
fn a_deadlock_is_reported_with_where_each_thread_waits() {
    let message = fault("deadlock");
    assert!(message.contains("no thread of block (0, 0, 0) can go on"), "{message}");
    assert!(message.contains("thread 0 to 63 waits for barrier 3 of 128 threads"), "{message}");
    assert!(message.contains("thread 96 to 127 has ended"), "{message}");
}

#[test]
fn undefined_behaviour_is_reported() {
    for (kernel, expected) in [
        ("no_barrier", "no barrier was initialised"),
        ("two_arrivals", "more than 1 arrivals"),
        ("outside", "reaches for 16 bytes"),
        ("half_a_warp", "no thread of block"),
        ("two_calls", "another lane of its warp calls"),
    ] {
        let error = fault(kernel);
        assert!(error.contains(expected), "{kernel}: {error}");
    }
}

#[test]
fn the_compiler_searches_neither_the_working_directory_nor_what_the_environment_lists() {
    let (root, folders) = (tempfile::tempdir().unwrap(), folders(PROBES));
    let command = compiler(&folders.compiler.kernels, root.path()).unwrap();
    assert_eq!(command.get_current_dir(), Some(root.path()));
    for name in COMPILER_PATHS {
        assert!(command.get_envs().any(|variable| variable == (name.as_ref(), None)), "{name}");
    }
}

#[test]
fn compile_errors_include_the_compilers_output() {
    let Folders { compiler, _root } =
        folders("#include \"lib/base.cuh\"\nextern \"C\" __global__ void probe(float *x) { x[0] = no_such_name; }\n");
    let error = format!("{:#}", build(&compiler, &PROBE).unwrap_err());
    assert!(error.contains("no_such_name"), "{error}");
    let Folders { compiler, _root } = folders("#include \"lib/base.cuh\"\n__device__ void probe() {}\n");
    assert!(format!("{:#}", build(&compiler, &PROBE).unwrap_err()).contains("no extern \"C\" __global__"));
}

#[test]
fn a_compiler_that_is_killed_or_says_too_much_is_named_with_how_it_ended() {
    let error_of = |script: &str| format!("{:#}", super::run(Command::new("sh").args(["-c", script])).unwrap_err());
    assert_eq!(super::run(Command::new("sh").args(["-c", "echo out"])).unwrap(), b"out\n");
    assert!(error_of("kill -KILL $$").starts_with("sh failed (signal: 9 (SIGKILL))"));
    let error = error_of("printf 'first\\351' >&2; yes | head -c 100000 >&2; exit 3");
    assert!(
        error.starts_with("sh failed (exit status: 3):\nfirst\u{fffd}y\n") && error.len() < 2 * MOST_WORDS,
        "{}",
        error.len()
    );
}

#[test]
fn a_program_has_the_kernels_that_its_macros_select() {
    let text = "// extern \"C\" __global__ void none(int)\n#include \"lib/hopper.cuh\"\n\
                extern \"C\" __global__ void one(int x) {}\n#if MORE\nextern \"C\" __global__ void __launch_bounds__(2 * 64, 1)\n\
                \x20   two(const __grid_constant__ TensorMap q,\n int x) {}\n#endif\n";
    let Folders { compiler, _root } = folders(text);
    for (more, names) in [("0", vec!["one"]), ("1", vec!["one", "two"])] {
        let program = Program { defines: vec![("MORE", more.to_string())], ..PROBE };
        let emulation = build(&compiler, &program).unwrap();
        assert_eq!(emulation.entries.keys().collect::<Vec<_>>(), names);
        assert_eq!(emulation.parameters("one").unwrap(), [4]);
    }
    assert!(entry_points("void one(int x) {}").is_empty());
}

const ONE: &str = "extern \"C\" __global__ void probe(float *x) { x[0] = 1.0f; }\n";

/// The path of an open file; "(deleted)" follows it if the file is gone.
fn path_of(file: &File) -> String {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().to_string_lossy().into_owned()
}

/// The one library in the compiler's cache.
fn kept(compiler: &Compiler) -> PathBuf {
    fs::read_dir(&compiler.cache).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn a_second_build_loads_the_library_of_the_cache() {
    let Folders { compiler, _root } = folders(ONE);
    drop(build(&compiler, &PROBE).unwrap());
    let emulation = build(&compiler, &PROBE).unwrap();
    assert_eq!(Path::new(&path_of(&emulation._file)), kept(&compiler));
}

#[test]
fn a_library_that_cannot_be_loaded_or_was_cut_short_is_built_again() {
    let Folders { compiler, _root } = folders(ONE);
    drop(build(&compiler, &PROBE).unwrap());
    let library = kept(&compiler);
    let whole = fs::read(&library).unwrap();
    let foreign = [b"of another machine", digest_of(b"of another machine").as_bytes()].concat();
    // With its header, such a library would be loaded up to where it ends.
    for damaged in [&foreign, &whole[..whole.len() / 2], b""] {
        // In a file of its own: a library that is loaded still must keep its pages.
        fs::remove_file(&library).and_then(|()| fs::write(&library, damaged)).unwrap();
        assert!(build(&compiler, &PROBE).unwrap().entries.contains_key("probe"));
        assert!(fs::metadata(&library).unwrap().len() == whole.len() as u64, "the cache keeps what is damaged");
    }
}

#[test]
fn what_cannot_be_loaded_is_not_kept() {
    let Folders { compiler, _root } =
        folders("extern int nowhere;\nextern \"C\" __global__ void probe(float *x) { x[0] = nowhere; }\n");
    let error = format!("{:#}", build(&compiler, &PROBE).unwrap_err());
    assert!(error.contains("failed to load the compiled library") && error.contains("nowhere"), "{error}");
    assert_eq!(fs::read_dir(&compiler.cache).unwrap().count(), 0);
}

#[test]
fn without_a_cache_the_library_is_loaded_from_a_private_folder_that_is_removed() {
    let Folders { mut compiler, _root } = folders(ONE);
    compiler.cache = compiler.kernels.join("probe.cu").join("cache");
    let emulation = build(&compiler, &PROBE).unwrap();
    let path = path_of(&emulation._file);
    assert!(Path::new(&path).starts_with(std::env::temp_dir()) && path.ends_with(" (deleted)"), "{path}");
    assert!(!Path::new(&path).parent().unwrap().exists(), "{path} is left behind");
    assert!(emulation.entries.contains_key("probe"));
}

#[test]
fn a_library_is_loaded_from_memory_where_its_folder_takes_no_code() {
    let Folders { compiler, _root } = folders(ONE);
    let copy = in_memory(&build(&compiler, &PROBE).unwrap()._file).unwrap();
    assert!(path_of(&copy).starts_with("/memfd:"));
    assert!(Emulation::open(copy).unwrap().entries.contains_key("probe"));
}

#[test]
fn a_library_that_others_could_have_planted_is_not_loaded() {
    let Folders { compiler, _root } = folders(ONE);
    drop(build(&compiler, &PROBE).unwrap());
    let planted = kept(&compiler);
    let other = folders(&ONE.replace("probe", "planted"));
    drop(build(&other.compiler, &PROBE).unwrap());
    let library = kept(&other.compiler);
    let plant = || fs::remove_file(&planted).and_then(|()| fs::copy(&library, &planted)).unwrap();
    let names = || build(&compiler, &PROBE).unwrap().entries.into_keys().collect::<Vec<_>>();
    plant();
    fs::set_permissions(&planted, Permissions::from_mode(0o666)).unwrap();
    assert_eq!(names(), ["probe"], "a file that others can write to");
    plant();
    assert_eq!(names(), ["planted"], "the user's own file is not looked into");
    fs::set_permissions(&compiler.cache, Permissions::from_mode(0o777)).unwrap();
    assert_eq!(names(), ["probe"], "a folder that others can write to");
}

/// `first` adds one to each of 96 floats; the others follow it and may overlap with it.
const OVERLAPPING: &str = r#"
#define KERNEL(name) extern "C" __global__ void name(float *x)
#define AT const u32 t = threadIdx.x, at = 32 * blockIdx.x + t

KERNEL(first) { AT; allow_next_kernel(); x[at] += 1.0f; }

// Registers, shared memory and barriers keep their state over the wait.
KERNEL(waits) {
  AT;
  extern __shared__ unsigned char memory[];
  float *shared = reinterpret_cast<float *>(memory);
  const u32 barrier = shared_address(memory) + 128;
  shared[t] = 10.0f * at;
  if (t == 0) barrier_init(barrier, 1);
  __syncwarp();
  const float own = shared[t ^ 1];
  await_last_kernel();
  if (t == 0) barrier_arrive(barrier);
  barrier_wait(barrier, 0);
  x[at] = 1000.0f * x[at] + own + shared[t];
}
KERNEL(waits_in_one_thread) { AT; if (t == 5) await_last_kernel(); __syncthreads(); x[at] *= 3.0f; }
KERNEL(reads_early) { AT; const float early = x[at]; await_last_kernel(); x[at] = 3.0f * early; }
KERNEL(writes_early) { AT; x[at] = 7.0f; await_last_kernel(); }
KERNEL(waits_in_some_blocks) { AT; if (blockIdx.x != 1) await_last_kernel(); x[at] = 7.0f; }
KERNEL(waits_for_ever) { AT; if (t == 0) await_last_kernel(); if (t != 1) __syncthreads(); x[at] = 7.0f; }
"#;

/// What `first` and, behind it, `kernels` leave of 96 zeros.
fn overlap(kernels: &[&'static str]) -> Result<Vec<f32>> {
    let emulation = emulation();
    let values = Tensor::zeros([96], (Kind::Float, Device::Cpu));
    let config = LaunchConfig { shared_bytes: 256, ..LaunchConfig::line(3, 32) };
    let mut launches = DependentLaunches::default();
    for name in [&["first"], kernels].concat() {
        let kernel = Kernel::emulated(name, emulation.clone())?;
        launches.launch(&kernel, config, &Probe { x: Address::of(&values) })?;
    }
    launches.finish()?;
    Ok(Vec::try_from(values)?)
}

#[test]
fn a_kernel_that_waits_sees_the_results_of_the_one_before() {
    let expected: Vec<f32> = (0..96).map(|at| 1000.0 + 10.0 * ((at ^ 1) + at) as f32).collect();
    assert_eq!(overlap(&["waits"]).unwrap(), expected);
    assert_eq!(overlap(&["waits_in_one_thread", "waits_in_one_thread"]).unwrap(), [9.0; 96]);
}

#[test]
fn a_read_or_write_before_the_wait_shows_in_the_results() {
    assert_eq!(overlap(&["reads_early"]).unwrap(), [0.0; 96], "the sums were not there yet");
    assert_eq!(overlap(&["writes_early"]).unwrap(), [8.0; 96], "`first` added to the overwritten values");
    // The results of earlier kernels are not there either.
    assert_eq!(overlap(&["waits_in_one_thread", "reads_early"]).unwrap(), [0.0; 96]);
}

#[test]
fn a_block_that_does_not_wait_for_the_kernel_before_it_is_named() {
    let message = |kernel| format!("{:#}", overlap(&["waits_in_one_thread", kernel]).unwrap_err());
    let error = message("waits_in_some_blocks");
    assert!(error.contains("launching waits_in_some_blocks as"), "{error}");
    assert!(error.contains("block (1, 0, 0): no thread called await_last_kernel"), "{error}");
    let error = message("waits_for_ever");
    assert!(error.contains("no thread of block (0, 0, 0) can go on: thread 0 waits for barrier 0"), "{error}");
}
