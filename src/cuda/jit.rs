//! Compiles a file of `kernels/` to a cubin, with a cache on disk whose key covers all that the cubin depends on.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Once;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::device::Arch;
use super::nvrtc::{self, Source};
use super::resources::{self, Resources};
use super::toolchain::Toolchain;
use super::trusted_folder::TrustedFolder;
use crate::printable::shown_path;
use crate::root::{absolute, read_text};

mod shipped;

pub use shipped::use_package;

/// One file of `kernels/`, compiled one way.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Program {
    /// Its name under `kernels/`, such as "adamw.cu".
    pub file: &'static str,
    /// Macros and their values, such as tile sizes, on which the host relies.
    pub defines: Vec<(&'static str, String)>,
}

impl Program {
    pub fn new(file: &'static str, defines: impl IntoIterator<Item = (&'static str, u32)>) -> Self {
        Self { file, defines: defines.into_iter().map(|(name, value)| (name, value.to_string())).collect() }
    }
}

/// A compiled [`Program`].
#[derive(Debug, Clone)]
pub struct Built {
    /// SHA-256 of everything that the cubin depends on.
    pub key: String,
    pub cubin: Vec<u8>,
    /// The log of NVRTC and ptxas, with the resource report.
    pub log: String,
    /// Of each entry point, in the log's order.
    pub resources: Vec<Resources>,
    pub origin: Origin,
}

impl Built {
    /// The resources of the entry point `kernel`.
    pub fn resources_of(&self, kernel: &str) -> Result<&Resources> {
        self.resources.iter().find(|resources| resources.kernel == kernel).with_context(|| {
            let names: Vec<_> = self.resources.iter().map(|resources| resources.kernel.as_str()).collect();
            format!("there is no kernel {kernel:?}: the program has {}", names.join(", "))
        })
    }
}

/// Where a cubin came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A file of the wheel.
    Shipped,
    Cache,
    Compiled,
    /// Compiled, but the cache is not trusted or cannot be written; the reason. The next process compiles it again.
    NotKept(String),
}

/// A folder of sources, a folder of cubins, and in the wheel a folder of cubins that came with it.
#[derive(Debug, Clone)]
pub struct Compiler {
    pub kernels: PathBuf,
    pub cache: PathBuf,
    pub shipped: Option<PathBuf>,
}

impl Compiler {
    /// `kernels/` of the tree that [`crate::root::find`] finds, and `cs336/kernels` in the user's cache folder:
    /// `$XDG_CACHE_HOME`, else `~/.cache`, else the tree's `target`. In the wheel the tree is the installed package.
    pub fn of_this_tree() -> Result<Self> {
        let package = shipped::package();
        let shipped = package.map(|package| package.join(shipped::FOLDER));
        let root = package.map_or_else(crate::root::find, |package| Ok(package.to_path_buf()))?;
        let var = |name| absolute(std::env::var_os(name));
        let caches = var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")));
        let cache = caches.unwrap_or_else(|| root.join("target")).join("cs336").join("kernels");
        Ok(Self { kernels: root.join("kernels"), cache, shipped })
    }

    /// The cubin of `program` for `arch`, from the wheel or the cache if either has an intact one; needs no GPU.
    ///
    /// Errors: [`crate::error::Fault::NotAvailable`] without NVRTC; a program that does not compile, that spills registers,
    /// or that ptxas warns of, each with the compiler's log.
    pub fn build(&self, program: &Program, arch: Arch) -> Result<Built> {
        let context = || format!("kernels/{} for {arch}", program.file);
        let source = self.read(program).with_context(context)?;
        if let Some(built) = self.find_shipped(program, &source, arch).transpose().with_context(context)? {
            return Ok(built);
        }
        let toolchain = Toolchain::get()?;
        let options = options(program, arch);
        let key = key(toolchain, &source, &options);
        let entry = format!("{}-{arch}-{key}.cubin", program.file.trim_end_matches(".cu"));
        let cache = self.open_cache();
        let (Entry { log, cubin }, origin) = match cache.as_ref().ok().and_then(|cache| Entry::read(cache, &entry)) {
            Some(entry) => (entry, Origin::Cache),
            None => {
                let includes =
                    toolchain.include.iter().map(|folder| format!("--include-path={}", folder.to_string_lossy()));
                let options: Vec<String> = options.into_iter().chain(includes).collect();
                let (cubin, log) = nvrtc::compile(&source, &options).with_context(context)?;
                let compiled = Entry { log, cubin };
                let kept = cache.and_then(|cache| compiled.write(&cache, &entry));
                (compiled, kept.map_or_else(|error| Origin::NotKept(format!("{error:#}")), |()| Origin::Compiled))
            }
        };
        let resources = resources::accept(&log).with_context(context)?;
        Ok(Built { key, cubin, log, resources, origin })
    }

    /// The cache of compiled programs. Where it is not trusted, this process compiles for itself, and prints the reason once. Nobody
    /// reads what a worker prints; `cs336 doctor` says it too.
    pub(super) fn open_cache(&self) -> Result<TrustedFolder> {
        static TOLD: Once = Once::new();
        TrustedFolder::open(&self.cache)
            .inspect_err(|why| TOLD.call_once(|| eprintln!("cs336: compiled kernels are not kept: {why:#}")))
    }

    /// The program's text with every header of `kernels/lib`. NVRTC gets these texts and not the files, so that the key
    /// covers what is compiled.
    pub(super) fn read(&self, program: &Program) -> Result<Source> {
        let headers = self.headers("lib", "cuh")?;
        let text = read(&self.kernels.join(program.file))?;
        Ok(Source { name: format!("kernels/{}", program.file), text, headers })
    }

    /// Name as in `#include` and text of every file of `kernels/<folder>` with this extension, by name. A name that begins with
    /// a dot is an editor's, which may lead nowhere.
    pub(super) fn headers(&self, folder: &str, extension: &str) -> Result<Vec<(String, String)>> {
        let path = self.kernels.join(folder);
        if !path.is_dir() {
            return Ok(Vec::new());
        }
        let mut headers = Vec::new();
        for file in fs::read_dir(&path).with_context(|| format!("failed to list {}", shown_path(&path)))? {
            let path = file?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !name.starts_with('.') && path.extension().is_some_and(|e| e == extension) {
                headers.push((format!("{folder}/{name}"), read(&path)?));
            }
        }
        headers.sort();
        Ok(headers)
    }
}

fn read(path: &Path) -> Result<String> {
    read_text(path).with_context(|| format!("failed to read {}", shown_path(path)))
}

/// The folder of compiled kernels.
///
/// Errors: why it is not used.
pub fn kernel_cache() -> Result<String> {
    let Compiler { cache, .. } = Compiler::of_this_tree()?;
    let folder = TrustedFolder::open(&cache)?;
    tempfile::tempfile_in(folder.path()).with_context(|| format!("no file can be made in {}", shown_path(&cache)))?;
    Ok(shown_path(&cache))
}

/// All options that decide the code; none of them depends on the folders of this machine.
fn options(program: &Program, arch: Arch) -> Vec<String> {
    let fixed = [&format!("--gpu-architecture={arch}"), "--std=c++20", "--generate-line-info", "--ptxas-options=-v"];
    let defines = program.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}"));
    fixed.into_iter().map(String::from).chain(defines).collect()
}

fn key(toolchain: &Toolchain, source: &Source, options: &[String]) -> String {
    let headers = source.headers.iter().flat_map(|(name, text)| [name, text]);
    let parts = [&toolchain.identity, &source.name, &source.text].into_iter().chain(headers).chain(options);
    digest(parts.map(String::as_bytes))
}

/// SHA-256 of several texts, in hexadecimal digits.
pub(super) fn digest<'a>(parts: impl Iterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // With its length, so that two different lists of texts cannot give the same bytes.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a file of the cache holds: a line of JSON with the log and a digest, then the cubin.
struct Entry {
    log: String,
    cubin: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    log: String,
    /// Of the log and the cubin.
    sha256: String,
}

impl Entry {
    /// `None` if there is no intact file: then the program is compiled again.
    fn read(cache: &TrustedFolder, name: &str) -> Option<Self> {
        let mut bytes = Vec::new();
        cache.file(name).ok()?.read_to_end(&mut bytes).ok()?;
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|&byte| byte == b'\n')?;
        let header: Header = serde_json::from_slice(&bytes[..end]).ok()?;
        let entry = Self { log: header.log, cubin: bytes[end + 1..].to_vec() };
        (entry.digest() == header.sha256).then_some(entry)
    }

    fn write(&self, cache: &TrustedFolder, name: &str) -> Result<()> {
        cache.write(name, &[&self.header()?, b"\n", &self.cubin]).map(drop)
    }

    fn header(&self) -> Result<Vec<u8>> {
        Ok(serde_json::to_vec(&Header { log: self.log.clone(), sha256: self.digest() })?)
    }

    fn digest(&self) -> String {
        digest([self.log.as_bytes(), &self.cubin].into_iter())
    }
}

#[cfg(test)]
mod tests;
