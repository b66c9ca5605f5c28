//! The libtorch that is loaded: its version, its CUDA half, and the switch that changes its numbers.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use tch::{Cuda, Device};

use super::bridge::{check, ffi};
use crate::error::Fault;
use crate::printable::shown_path;

/// Loads libtorch's CUDA half if an NVIDIA driver is installed; every program must call it first.
///
/// It is not linked: it would add about 0.13 s and its relocations to every start on machines without a GPU. It
/// must come before any other use of libtorch, which looks for CUDA once and remembers the answer. Later calls
/// repeat the first one's result.
///
/// Errors: [`Fault::NotAvailable`] when the driver, or the CUDA build of libtorch, is missing.
pub fn load_cuda() -> Result<(), Fault> {
    static LOADED: OnceLock<Result<(), Fault>> = OnceLock::new();
    let load = || {
        let load = |library: &str, needs: &str| {
            let missing = |error| Fault::NotAvailable { needs: needs.to_string(), has: format!("none ({error})") };
            check(ffi::load_library(library)).map_err(missing)
        };
        load("libcuda.so.1", "an NVIDIA driver")?;
        load("libtorch_cuda.so", "a CUDA build of libtorch")
    };
    LOADED.get_or_init(load).clone()
}

/// Loads the shared library at `path`; later requests for a library of its name get this one.
///
/// Errors: the dynamic loader's.
pub fn load_shared_library(path: &Path) -> Result<()> {
    let name = path.to_str().with_context(|| format!("{} is not UTF-8", shown_path(path)))?;
    check(ffi::load_library(name))
}

/// The folder of the libtorch that is loaded (`.../torch/lib`), from the kernel's list of mapped files.
pub fn library_folder() -> Result<PathBuf> {
    let maps = std::fs::read("/proc/self/maps").context("failed to read /proc/self/maps")?;
    // "7f.. r-xp 00000000 fd:00 1234    /path/with spaces/libtorch_cpu.so"; a path may be any bytes but a newline.
    let lines = maps.split(|&byte| byte == b'\n');
    let paths = lines.filter_map(|line| {
        let start = line.iter().position(|&byte| byte == b'/')?;
        Some(Path::new(OsStr::from_bytes(&line[start..])))
    });
    let library = paths.into_iter().find(|path| path.ends_with("libtorch_cpu.so"));
    let folder = library.and_then(Path::parent).context("libtorch_cpu.so is not among this process's mapped files")?;
    Ok(folder.to_path_buf())
}

/// CUDA device `index`, if this machine has it.
///
/// Errors: [`Fault::NotAvailable`].
pub fn cuda_device(index: usize) -> Result<Device> {
    cuda_index(Device::Cuda(index))?;
    Ok(Device::Cuda(index))
}

/// A CUDA device's index for the shim.
pub(super) fn cuda_index(device: Device) -> Result<i8> {
    let Device::Cuda(index) = device else {
        return Err(Fault::NotAvailable { needs: "a CUDA GPU".into(), has: format!("{device:?}") }.into());
    };
    load_cuda()?;
    let count = usize::try_from(Cuda::device_count()).unwrap_or(0);
    if index < count {
        return i8::try_from(index).context("CUDA device index");
    }
    Err(lacks_gpu(index, count).into())
}

fn lacks_gpu(index: usize, count: usize) -> Fault {
    let has = if count == 1 { "1 GPU".to_string() } else { format!("{count} GPUs") };
    Fault::NotAvailable { needs: format!("GPU {index} (the first is GPU 0)"), has }
}

/// The version of the library that is loaded, as `"2.11.0"`; it may differ from the one that this program was built
/// with.
pub fn version() -> String {
    let [major, minor, patch, ..] = ffi::abi_version().to_be_bytes();
    format!("{major}.{minor}.{patch}")
}

/// Requires the libtorch version that this program was built with, for code that relies on its class layouts.
pub(super) fn require_built_version() -> Result<()> {
    let (built, loaded) = (env!("CS336_TORCH_VERSION"), version());
    ensure!(loaded == built, "libtorch {loaded} is loaded, but this program was built with {built}: use that version");
    Ok(())
}

/// The version of CUDA that libtorch brings, as `"13.0"`; `None` where its CUDA half is not loaded.
pub fn cuda_version() -> Option<String> {
    load_cuda().ok()?;
    let version = tch::utils::version_cudart();
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// The version of cuDNN that is loaded, as `"9.15.1"`; `None` where libtorch's CUDA half is not loaded.
pub fn cudnn_version() -> Option<String> {
    load_cuda().ok()?;
    let version = check(ffi::cudnn_version()).ok()?;
    Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// The vector instructions that libtorch's CPU kernels use on this machine, as `"AVX512"`.
pub fn cpu_capability() -> Result<String> {
    check(ffi::cpu_capability())
}

/// Whether float32 matrix products may be rounded to TF32 on CUDA; libtorch starts with `false`.
pub fn allow_tf32() -> Result<bool> {
    check(ffi::allow_tf32())
}

/// Runs `body` with TF32 allowed in matrix products, and restores the switch, also after an error or a panic.
pub fn allowing_tf32<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            check(ffi::set_allow_tf32(self.0)).expect("setting a flag to what it was does not fail");
        }
    }
    let _restore = Restore(allow_tf32()?);
    check(ffi::set_allow_tf32(true))?;
    body()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::fault_of;

    #[test]
    fn the_loaded_library_reports_its_version_and_build() {
        assert_eq!(version(), "2.11.0");
        require_built_version().unwrap();
        assert!(["DEFAULT", "AVX2", "AVX512", "NO AVX"].contains(&cpu_capability().unwrap().as_str()));
        assert!(library_folder().unwrap().join("libtorch_cpu.so").exists());
    }

    #[test]
    fn tf32_products_are_off_by_default_and_can_be_switched_on() {
        assert!(!allow_tf32().unwrap());
        assert!(allowing_tf32(allow_tf32).unwrap());
        assert!(allowing_tf32(|| -> Result<()> { anyhow::bail!("inside") }).is_err());
        assert!(!allow_tf32().unwrap());
    }

    #[test]
    fn a_missing_gpu_is_a_typed_fault() {
        let error = cuda_device(63).unwrap_err();
        assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        assert_eq!(lacks_gpu(1, 1).to_string(), "not available: needs GPU 1 (the first is GPU 0), has 1 GPU");
        assert_eq!(cuda_version().is_some(), load_cuda().is_ok());
        assert_eq!(cudnn_version().is_some(), load_cuda().is_ok());
    }
}
