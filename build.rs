//! Finds the pinned libtorch, compiles the C++ shim of `src/torch` against it and links both.

use std::env;
use std::path::{Path, PathBuf};

/// The one libtorch whose layouts `tch` and the shim's stand-in Gloo headers describe.
const TORCH_VERSION: &str = "2.11.0";

const BRIDGES: &[&str] =
    &["src/torch/bridge.rs", "src/torch/memory_history/recorder.rs", "src/torch/allocator_stats.rs"];

fn main() {
    if let Err(message) = build() {
        println!("cargo::error={message}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    let libtorch = find_libtorch()?;
    // What is loaded at run time may be another: torch/library.rs compares.
    println!("cargo::rustc-env=CS336_TORCH_VERSION={TORCH_VERSION}");
    let cuda_headers = find_cuda_headers(&libtorch)?;
    // Clippy checks and links nothing.
    if !is_run_by_clippy() {
        compile_shim(&libtorch, cuda_headers)?;
    }
    link(&libtorch.join("lib"));
    Ok(())
}

fn is_run_by_clippy() -> bool {
    let wrapper = env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    wrapper.is_some_and(|wrapper| wrapper.file_stem() == Some("clippy-driver".as_ref()))
}

fn find_libtorch() -> Result<PathBuf, String> {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    let libtorch = env::var_os("LIBTORCH").map(PathBuf::from).ok_or(
        "LIBTORCH is not set: build inside the repository, where .cargo/config.toml sets it, after `make setup`",
    )?;
    let version_file = libtorch.join("version.py");
    println!("cargo::rerun-if-changed={}", version_file.display());
    let text = std::fs::read_to_string(&version_file)
        .map_err(|error| format!("no libtorch at {} ({error}): run `make setup`", libtorch.display()))?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("__version__ = "))
        .map(|value| value.trim_matches(['\'', '"']))
        .ok_or_else(|| format!("{} names no version: run `make setup`", version_file.display()))?;
    // "2.11.0+cu130" and "2.11.0+cpu" are the same sources.
    match version.split('+').next() {
        Some(TORCH_VERSION) => Ok(libtorch),
        _ => Err(format!(
            "libtorch at {} is {version}, this program is written for {TORCH_VERSION}: run `make setup`",
            libtorch.display()
        )),
    }
}

/// The CUDA headers that libtorch's own include, in the wheels beside it; nothing of CUDA is linked.
fn find_cuda_headers(libtorch: &Path) -> Result<PathBuf, String> {
    let packages = libtorch.canonicalize().map_err(|error| format!("{}: {error}", libtorch.display()))?;
    let include = packages.with_file_name("nvidia").join("cu13").join("include");
    match include.join("cuda_runtime_api.h").exists() {
        true => Ok(include),
        false => Err(format!("no CUDA 13 headers in {}: run `make setup`", include.display())),
    }
}

fn compile_shim(libtorch: &Path, cuda_include: PathBuf) -> Result<(), String> {
    let include = libtorch.join("include");
    let shim = Path::new("src/torch/shim");
    for bridge in BRIDGES {
        println!("cargo::rerun-if-changed={bridge}");
    }
    println!("cargo::rerun-if-changed={}", shim.display());
    let mut build = cxx_build::bridges(BRIDGES);
    build
        .std("c++17")
        .debug(false)
        .define("_GLIBCXX_USE_CXX11_ABI", env::var("LIBTORCH_CXX11_ABI").as_deref().unwrap_or("1"))
        // ProcessGroupGloo.hpp is empty without it.
        .define("USE_C10D_GLOO", None)
        .flag("-Wall")
        .flag("-Wextra");
    // System folders: the warnings of libtorch and CUDA are not ours to mend.
    for folder in [shim.join("gloo_headers"), include.join("torch/csrc/api/include"), include, cuda_include] {
        build.flag("-isystem").flag(folder.as_os_str());
    }
    build.include(shim).file(write_sources_as_one(shim)?).compile("cs336-shim");
    Ok(())
}

/// One file that includes every source of the shim: most of a compilation is libtorch's headers.
fn write_sources_as_one(shim: &Path) -> Result<PathBuf, String> {
    let entries = std::fs::read_dir(shim).expect("the shim is a folder of this repository");
    let names = entries.map(|entry| entry.expect("a file of the shim").file_name());
    let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
    names.retain(|name| name.ends_with(".cc"));
    names.sort();
    let file = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("shim.cc");
    let text: String = names.iter().map(|name| format!("#include \"{name}\"\n")).collect();
    std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(file)
}

fn link(lib: &Path) {
    println!("cargo::rustc-link-search=native={}", lib.display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
    // Binaries and tests find libtorch where they were built; elsewhere LD_LIBRARY_PATH does.
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
}
