//! Where NVRTC and CUDA's headers are: in the wheels beside libtorch, or in a CUDA toolkit.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, ensure};

use super::jit::digest;
use super::nvrtc;
use crate::error::Fault;
use crate::printable::shown_path;
use crate::root::{absolute, installing};
use crate::torch;

/// The release in PyTorch 2.11's wheels, whose cubins the driver of a CUDA 13 machine loads.
const LIBRARY: &str = "libnvrtc.so.13";
const BUILTINS: &str = "libnvrtc-builtins.so.13";

/// A loaded NVRTC.
#[derive(Debug, Clone)]
pub(super) struct Toolchain {
    /// Identifies the compiler: its version, its library's size, and the headers that it finds.
    pub identity: String,
    /// Folders for `#include <cuda_bf16.h>`; CUDA 13 keeps libcu++ in a folder of its own.
    pub include: Vec<PathBuf>,
}

impl Toolchain {
    /// Finds and loads NVRTC once; later calls repeat the first one's result.
    ///
    /// Errors: [`Fault::NotAvailable`], naming the folders that were searched.
    pub fn get() -> Result<&'static Self, Fault> {
        static LOADED: OnceLock<Result<Toolchain, Fault>> = OnceLock::new();
        let load = || {
            Self::find().map_err(|error| Fault::NotAvailable {
                needs: format!("NVRTC ({LIBRARY})"),
                has: format!("none: {error:#}"),
            })
        };
        LOADED.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    fn find() -> Result<Self> {
        let homes = homes(&torch::library_folder()?, |name| std::env::var_os(name));
        let library =
            |home: &Path| ["lib", "lib64"].map(|lib| home.join(lib).join(LIBRARY)).into_iter().find(|p| p.exists());
        let found = homes.iter().find_map(|home| Some((home, library(home)?)));
        let (home, library) = found.with_context(|| {
            let shown: Vec<_> = homes.iter().map(shown_path).collect();
            let remedy = format!("{}, or set CUDA_HOME to a CUDA 13 toolkit", installing());
            format!("it is in none of {}; {remedy}", shown.join(", "))
        })?;
        // NVRTC looks for its builtins by name in LD_LIBRARY_PATH. Loaded first, they are found.
        let builtins = builtins_beside(&library)?;
        torch::load_shared_library(&builtins)?;
        torch::load_shared_library(&library)?;
        let (major, minor) = nvrtc::version()?;
        let bytes = fs::metadata(&library).with_context(|| shown_path(&library))?.len();
        let include = home.join("include");
        let host = host_headers(&homes).filter(|folder| *folder != include);
        let roots: Vec<&Path> = [Some(&include), host.as_ref()].into_iter().flatten().map(PathBuf::as_path).collect();
        let headers = listing(&roots).context("listing CUDA's headers")?;
        let identity = format!("NVRTC {major}.{minor} of {bytes} bytes, headers {}", &headers[..12]);
        Ok(Self { identity, include: [include.join("cccl"), include].into_iter().chain(host).collect() })
    }
}

/// A digest of the names and sizes of all files in folders of headers, wherever the folders are: two installations may
/// have the same compiler and different headers.
fn listing(folders: &[&Path]) -> Result<String> {
    let mut names = Vec::new();
    for folder in folders {
        let mut files = Vec::new();
        list(folder, "", &mut files).with_context(|| shown_path(folder))?;
        files.sort();
        names.append(&mut files);
        names.push(String::new());
    }
    Ok(digest(names.iter().map(String::as_bytes)))
}

fn list(folder: &Path, prefix: &str, files: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        // A symbolic link counts as a file, because it may form a cycle.
        match entry.file_type()?.is_dir() {
            true => list(&entry.path(), &format!("{name}/"), files)?,
            false => files.push(format!("{name} {}", entry.metadata()?.len())),
        }
    }
    Ok(())
}

/// The first folder with the headers that only a compiler for the CPU needs. The wheels may lack them; a toolkit has
/// them.
fn host_headers(homes: &[PathBuf]) -> Option<PathBuf> {
    homes.iter().map(|home| home.join("include")).find(|folder| folder.join("crt/host_defines.h").exists())
}

/// The version of NVRTC and a digest of the CUDA headers.
///
/// Errors: [`Fault::NotAvailable`], naming the folders that were searched.
pub fn compiler_version() -> Result<String> {
    Ok(Toolchain::get()?.identity.clone())
}

/// Folders that may hold `lib/` and `include/` of CUDA, the wheels that libtorch itself uses first; `torch` has its libraries.
fn homes(torch: &Path, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let wheels = torch.ancestors().nth(2).map(|packages| packages.join("nvidia").join("cu13"));
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(|name| absolute(variable(name)));
    wheels.into_iter().chain(toolkits).chain([PathBuf::from("/usr/local/cuda")]).collect()
}

/// The library of built-in headers has the minor version in its name.
fn builtins_beside(library: &Path) -> Result<PathBuf> {
    let folder = library.parent().context("a library lies in a folder")?;
    let entries = fs::read_dir(folder).with_context(|| format!("failed to list {}", shown_path(folder)))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut builtins: Vec<String> = names.filter(|name| name.starts_with(BUILTINS)).collect();
    builtins.sort();
    ensure!(!builtins.is_empty(), "{} holds {LIBRARY} without {BUILTINS}.*: reinstall it", shown_path(folder));
    Ok(folder.join(&builtins[builtins.len() - 1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolkit_in_the_working_directory_is_not_used() {
        let of = |variable: fn(&str) -> Option<OsString>| homes(Path::new("/packages/torch/lib"), variable);
        let both = of(|name| Some(if name == "CUDA_HOME" { "/opt/cuda" } else { "/opt/other" }.into()));
        assert_eq!(both, ["/packages/nvidia/cu13", "/opt/cuda", "/opt/other", "/usr/local/cuda"].map(PathBuf::from));
        for planted in [|_: &str| Some("cuda".into()), |_: &str| Some("".into())] {
            assert_eq!(of(planted), ["/packages/nvidia/cu13", "/usr/local/cuda"].map(PathBuf::from));
        }
    }

    #[test]
    fn headers_that_the_wheels_lack_come_from_a_toolkit() {
        let (wheels, toolkit) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let homes = [wheels.path().to_path_buf(), toolkit.path().to_path_buf()];
        assert_eq!(host_headers(&homes), None);
        let folder = toolkit.path().join("include");
        fs::create_dir_all(folder.join("crt")).unwrap();
        fs::write(folder.join("crt/host_defines.h"), "").unwrap();
        assert_eq!(host_headers(&homes), Some(folder));
    }

    #[test]
    fn the_toolchain_differs_with_the_headers_and_not_with_their_folder() {
        let [one, other, extra] = [0; 3].map(|_| tempfile::tempdir().unwrap());
        for folder in [&one, &other] {
            fs::create_dir(folder.path().join("crt")).unwrap();
            fs::write(folder.path().join("cuda.h"), "#define CUDA_VERSION 13000").unwrap();
            fs::write(folder.path().join("crt/host_defines.h"), "a").unwrap();
        }
        let of =
            |folders: &[&tempfile::TempDir]| listing(&folders.iter().map(|f| f.path()).collect::<Vec<_>>()).unwrap();
        assert_eq!(of(&[&one]), of(&[&other]));
        let alone = of(&[&one]);
        assert_ne!(of(&[&one, &extra]), alone, "another folder counts");
        fs::write(other.path().join("crt/host_defines.h"), "ab").unwrap();
        assert_ne!(of(&[&other]), alone, "files in subfolders count");
        assert_ne!(of(&[&one, &other]), of(&[&other, &one]), "the order of the folders counts");
    }

    #[test]
    fn the_wheels_beside_libtorch_hold_a_compiler_and_its_headers() {
        let toolchain = Toolchain::get().unwrap();
        assert!(toolchain.identity.starts_with("NVRTC 13."), "{toolchain:?}");
        for (header, folder) in [("nv/target", 0), ("cuda_bf16.h", 1)] {
            assert!(toolchain.include[folder].join(header).exists(), "{header}: {toolchain:?}");
        }
    }

    #[test]
    fn a_library_without_its_builtins_is_an_error_that_names_both() {
        let folder = tempfile::tempdir().unwrap();
        let error = builtins_beside(&folder.path().join(LIBRARY)).unwrap_err().to_string();
        assert!(error.contains("without libnvrtc-builtins.so.13"), "{error}");
        fs::write(folder.path().join("libnvrtc-builtins.so.13.0"), "").unwrap();
        assert!(builtins_beside(&folder.path().join(LIBRARY)).unwrap().ends_with("libnvrtc-builtins.so.13.0"));
    }
}
