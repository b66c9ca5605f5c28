//! Where the tree lies that a command works on, a checkout or an unpacked bundle, and the text of its files.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::OFlags;

use crate::printable::shown_path;

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
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let found = file.metadata()?;
    if found.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !found.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
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

/// The variables by which C++ compilers search folders. An empty or relative one means the working directory.
pub const COMPILER_PATHS: [&str; 6] =
    ["CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"];

/// The nearest folder that holds `suites/` and `templates/`: `$CS336_ROOT`, else the working directory or one above it,
/// else the program's own folder or one above it.
///
/// Errors: there is none; or it is above the working directory alone, and another user owns it or can write to it. Its
/// kernels and Python files run as this user.
pub fn find() -> Result<PathBuf> {
    if let Some(root) = std::env::var_os("CS336_ROOT").filter(|root| !root.is_empty()).map(PathBuf::from) {
        ensure!(is_complete(&root), "CS336_ROOT={} holds no suites/ and templates/", shown_path(&root));
        // A compiler runs in another folder.
        return Ok(std::path::absolute(root)?);
    }
    let program = std::env::current_exe().ok();
    for start in [std::env::current_dir().ok(), program.clone()].into_iter().flatten() {
        if let Some(root) = start.ancestors().find(|folder| is_complete(folder)) {
            // Who owns a folder above the program could as well replace the program.
            if !program.is_some_and(|program| program.starts_with(root)) {
                require_own(root)?;
            }
            return Ok(root.to_path_buf());
        }
    }
    bail!("no suites/ and templates/ here or above: run cs336 inside its checkout, or set CS336_ROOT")
}

/// The path that a variable holds, if it is absolute: an empty or relative one would lead into the working directory.
pub fn absolute(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|path| path.is_absolute())
}

fn is_complete(root: &Path) -> bool {
    root.join("suites").is_dir() && root.join("templates").is_dir()
}

/// What runs as code, and the folders above it: whoever can write to a folder can replace what is in it.
const CODE: &[&str] =
    &["", "suites", "suites/peers", "kernels", "kernels/lib", "kernels/emulator", ".venv", ".venv/bin"];
/// The permission to write of the group, and of others.
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// Errors: another user, other than root, owns the tree or a part of it that runs as code, or can write to it.
fn require_own(root: &Path) -> Result<()> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    for folder in CODE.iter().map(|name| root.join(name)).filter(|folder| folder.symlink_metadata().is_ok()) {
        let shown = shown_path(&folder);
        let found = fs::metadata(&folder).with_context(|| format!("failed to look at {shown}"))?;
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        let remedy = || format!("set CS336_ROOT={} to run what is there", shown_path(root));
        ensure!([user, 0].contains(&owner), "{shown} belongs to user {owner}, and you are user {user}: {}", remedy());
        // A group of the user's own name, as many systems give, holds nobody else.
        let is_open = mode & OTHERS_WRITE != 0 || mode & GROUP_WRITES != 0 && found.gid() != group;
        ensure!(!is_open, "other users can write to {shown} (mode {mode:o}): {}", remedy());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn an_empty_or_relative_folder_of_the_environment_does_not_count() {
        for value in ["", "cuda", "./cuda"] {
            assert_eq!(absolute(Some(value.into())), None);
        }
        assert_eq!(absolute(Some("/opt/cuda".into())), Some("/opt/cuda".into()));
    }

    #[test]
    fn a_tree_that_others_can_write_to_is_refused_with_the_remedy() {
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        for part in CODE {
            let tree = tempfile::tempdir().unwrap();
            let (whole, part) = (tree.path(), tree.path().join(part));
            fs::create_dir_all(&part).unwrap();
            for (mode, is_open) in [(0o755, false), (0o775, false), (0o757, true), (0o1777, true)] {
                set_mode(&part, mode);
                let said = require_own(whole).err().map(|error| error.to_string()).unwrap_or_default();
                let shown = shown_path(&part);
                assert_eq!(
                    said.contains(&format!("other users can write to {shown} (mode {mode:o})")),
                    is_open,
                    "{said}"
                );
                assert_eq!(said.contains("set CS336_ROOT="), is_open, "{said}");
            }
        }
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

    #[test]
    fn a_tree_of_another_user_is_refused_with_the_remedy() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can give a folder to another user");
            return;
        }
        for part in ["", "suites", "kernels"] {
            let tree = tempfile::tempdir().unwrap();
            ["suites", "kernels"].iter().for_each(|name| std::fs::create_dir(tree.path().join(name)).unwrap());
            require_own(tree.path()).unwrap();
            std::os::unix::fs::chown(tree.path().join(part), Some(65_534), None).unwrap();
            let said = require_own(tree.path()).unwrap_err().to_string();
            assert!(said.contains("belongs to user 65534") && said.contains("set CS336_ROOT="), "{said}");
        }
    }
}
