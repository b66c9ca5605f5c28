//! Cubins that come with the wheel, so that the first call on a GPU compiles nothing.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, anyhow};

use super::{Built, Compiler, Entry, Origin, Program, digest, options};
use crate::cuda::device::Arch;
use crate::cuda::nvrtc::Source;
use crate::cuda::resources;
use crate::printable::shown_path;
use crate::root::read;

/// Their folder in the package, beside `kernels`.
pub(super) const FOLDER: &str = "cubins";

static PACKAGE: OnceLock<PathBuf> = OnceLock::new();

/// From now on this process takes kernels from the installed package at `folder`, and from no checkout.
///
/// Errors: another package was named before.
pub fn use_package(folder: &Path) -> Result<()> {
    let used = PACKAGE.get_or_init(|| folder.to_path_buf());
    (used == folder).then_some(()).with_context(|| {
        format!("the package at {} is loaded already; {} cannot be too", shown_path(used), shown_path(folder))
    })
}

pub(super) fn package() -> Option<&'static Path> {
    PACKAGE.get().map(PathBuf::as_path)
}

impl Compiler {
    /// The cubin that came with the wheel for this very source; `None` if there is none. The folder is as trusted as
    /// the library beside it, which is running.
    pub(super) fn find_shipped(&self, program: &Program, source: &Source, arch: Arch) -> Option<Result<Built>> {
        let folder = self.shipped.as_ref()?;
        // A GPU of 8.6 or 8.9 runs what is compiled for 8.0.
        [arch, Arch { minor: 0, ..arch }].into_iter().find_map(|arch| {
            let key = key(source, program, arch);
            let Entry { log, cubin } = Entry::parse(&read(&folder.join(file_name(program, arch, &key))).ok()?)?;
            let resources = resources::accept(&log);
            Some(resources.map(|resources| Built { key, cubin, log, resources, origin: Origin::Shipped }))
        })
    }

    /// Compiles `program` for `arch` into the folder of shipped cubins.
    ///
    /// Errors: those of [`Compiler::build`]; no such folder.
    pub fn ship(&self, program: &Program, arch: Arch) -> Result<()> {
        let folder = self.shipped.as_ref().context("this compiler ships no cubins")?;
        let Built { cubin, log, .. } = self.build(program, arch)?;
        let entry = Entry { log, cubin };
        let name = file_name(program, arch, &key(&self.read(program)?, program, arch));
        let bytes = [&entry.header()?, &b"\n"[..], &entry.cubin].concat();
        std::fs::write(folder.join(&name), bytes).map_err(|error| anyhow!("failed to write {name}: {error}"))
    }
}

/// SHA-256 of what is compiled. The compiler is left out, since it is the builder's and need not exist where it is loaded.
fn key(source: &Source, program: &Program, arch: Arch) -> String {
    let headers = source.headers.iter().flat_map(|(name, text)| [name, text]);
    let options = options(program, arch);
    let parts = [&source.name, &source.text].into_iter().chain(headers).chain(&options);
    digest(parts.map(String::as_bytes))
}

fn file_name(program: &Program, arch: Arch, key: &str) -> String {
    format!("{}-{arch}-{}.cubin", program.file.trim_end_matches(".cu"), &key[..32])
}
