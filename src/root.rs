//! Where the tree lies that a command works on, a checkout or an unpacked bundle, and the text of its files.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail, ensure};
use rustix::fs::OFlags;

pub use self::links::{FolderMode, Way, make_without_links, open_without_links, way_to};
use self::trust::{Trusted, require_own};
pub use self::trust::{
    many_users, open_mode, owners_folder, require_own_environment, require_own_repository, require_own_way,
};
use crate::printable::shown_path;

mod links;
mod trust;

/// The largest record of the handout's grids has 2 MB.
const MOST_BYTES: u64 = 64 << 20;

/// The text of a file of the tree, as [`read`].
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::new(ErrorKind::InvalidData, "it is not UTF-8"))
}

/// The bytes of a file of the tree, as [`read_at_most`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(path, MOST_BYTES)
}

/// The bytes of a file that others may have put there.
///
/// Errors: those of opening and reading; what is no regular file, since opening a pipe would wait for a writer and a device
/// may have no end; a file of /proc that would wait for the kernel's messages; more than `most` bytes, which would only fill
/// the memory.
pub fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let found = file.metadata()?;
    let mut bytes = Vec::new();
    // A file of /proc says that it has no bytes.
    if found.len() <= most {
        file.take(most + 1).read_to_end(&mut bytes)?;
    }
    if found.len().max(bytes.len() as u64) > most {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it has more than {} MiB", most >> 20)));
    }
    Ok(bytes)
}

/// A file that others may have put there, to read from.
///
/// Errors: those of opening; what is no regular file, as of [`read_at_most`].
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let found = file.metadata()?;
    match found.is_file() {
        true => Ok(file),
        false if found.is_dir() => Err(ErrorKind::IsADirectory.into()),
        false => Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// The variables by which C++ compilers search folders. An empty or relative one means the working directory.
pub const COMPILER_PATHS: [&str; 6] =
    ["CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"];

/// The nearest folder that holds `suites/` and `templates/`: `$CS336_ROOT`, else the bundle that the program is packed in, else
/// the working directory or one above it, else the program's own folder or one above it.
///
/// Errors: there is none; or, unless `$CS336_ROOT` names it, another user owns it or can write to it. Its kernels and Python
/// files run as this user.
pub fn find() -> Result<PathBuf> {
    if let Some(root) = named() {
        ensure!(is_complete(&root), "CS336_ROOT={} holds no suites/ and templates/", shown_path(&root));
        // A compiler runs in another folder.
        return Ok(std::path::absolute(root)?);
    }
    let program = std::env::current_exe().ok();
    let bundle = program.as_deref().and_then(bundle_of).map(Path::to_path_buf);
    for start in [bundle, std::env::current_dir().ok(), program].into_iter().flatten() {
        if let Some(root) = start.ancestors().find(|folder| is_complete(folder)) {
            // A process asks again and again, and a tree has thousands of files.
            static OWN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
            let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
            if !own.contains(root) {
                require_own(root, &Trusted::of(root, holds_the_program(root))?)?;
                own.insert(root.to_path_buf());
            }
            return Ok(root.to_path_buf());
        }
    }
    bail!(
        "no suites/ and templates/ here or above: run cs336 inside its checkout, set CS336_ROOT, or unpack its bundle anew"
    )
}

/// The tree that `$CS336_ROOT` names, whose code the user trusts.
fn named() -> Option<PathBuf> {
    std::env::var_os("CS336_ROOT").filter(|root| !root.is_empty()).map(PathBuf::from)
}

fn holds_the_program(root: &Path) -> bool {
    std::env::current_exe().is_ok_and(|program| program.starts_with(root))
}

/// How PyTorch of the right version, and the libraries beside it, are had: a bundle has no Makefile.
pub fn installing() -> &'static str {
    std::env::current_exe().map_or(SETUP, |program| installing_for(&program))
}

const SETUP: &str = "run `make setup`";

fn installing_for(program: &Path) -> &'static str {
    if bundle_of(program).is_some() { "install torch==2.11.0" } else { SETUP }
}

/// The path that a variable holds, if it is absolute: an empty or relative one would lead into the working directory.
pub fn absolute(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The tree that has `program` in its `bin/`, as no checkout has.
fn bundle_of(program: &Path) -> Option<&Path> {
    let folder = program.parent().filter(|folder| folder.ends_with(PROGRAMS))?;
    folder.parent().filter(|root| is_complete(root))
}

fn is_complete(root: &Path) -> bool {
    root.join("suites").is_dir() && root.join("templates").is_dir()
}

/// Where a bundle has its program.
const PROGRAMS: &str = "bin";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_empty_or_relative_folder_of_the_environment_does_not_count() {
        for value in ["", "cuda", "./cuda"] {
            assert_eq!(absolute(Some(value.into())), None);
        }
        assert_eq!(absolute(Some("/opt/cuda".into())), Some("/opt/cuda".into()));
    }

    #[test]
    fn a_bundle_has_no_make_to_install_by() {
        let tree = tempfile::tempdir().unwrap();
        let program = |folder: &str| tree.path().join(folder).join("cs336");
        assert_eq!(installing_for(&program("bin")), SETUP);
        for folder in ["suites", "templates"] {
            fs::create_dir(tree.path().join(folder)).unwrap();
        }
        assert_eq!(installing_for(&program("target/debug")), SETUP);
        assert_eq!(installing_for(&program("bin")), "install torch==2.11.0");
    }

    #[test]
    fn a_text_is_read_from_a_regular_file_of_bounded_size_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("text"), "whole").unwrap();
        assert_eq!(read_text(&path("text")).unwrap(), "whole");
        File::create(path("large")).unwrap().set_len(MOST_BYTES + 1).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
        let error = |path: &Path| read_text(path).unwrap_err().to_string();
        assert_eq!(error(&path("large")), "it has more than 64 MiB");
        for path in [path("pipe"), "/dev/zero".into()] {
            assert_eq!(error(&path), "it is not a regular file");
        }
        assert_eq!(read_text(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        assert_eq!(read_text(&path("missing")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
