//! A folder that only this user can write to, so that no other user's code is loaded from it.

use std::fs::{DirBuilder, File, Permissions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use crate::printable::shown_path;

/// For its owner alone.
const PRIVATE: u32 = 0o700;
/// The permission to write of the group and of others.
const OTHERS_WRITE: u32 = 0o022;

pub(super) struct TrustedFolder {
    /// The folder that was checked. Files are reached through it, because its path may name another folder by now.
    folder: File,
    /// Removed when this is dropped.
    _temporary: Option<TempDir>,
}

impl TrustedFolder {
    /// The folder at `path`, made if it is missing.
    ///
    /// Errors: another user owns it or can write to it, or it is a symbolic link.
    pub fn open(path: &Path) -> Result<Self> {
        let make = DirBuilder::new().recursive(true).mode(PRIVATE).create(path);
        make.with_context(|| format!("failed to make the folder {}", shown_path(path)))?;
        Ok(Self { folder: open_own(path, OFlags::DIRECTORY)?, _temporary: None })
    }

    /// A new folder of random name, which is removed when this is dropped.
    pub fn temporary() -> Result<Self> {
        let mut builder = tempfile::Builder::new();
        let made = builder.prefix("cs336-").permissions(Permissions::from_mode(PRIVATE)).tempdir();
        let made = made.context("failed to make a temporary folder: set TMPDIR to a folder that you can write to")?;
        Ok(Self { folder: open_own(made.path(), OFlags::DIRECTORY)?, _temporary: Some(made) })
    }

    /// A path to this folder for this process and its children, while this exists.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.folder.as_raw_fd()).into()
    }

    /// Opens the file `name` to read it.
    ///
    /// Errors: it is missing, another user owns it or can write to it, or it is not a regular file.
    pub fn file(&self, name: &str) -> Result<File> {
        // NONBLOCK: a named pipe does not block.
        let file = open_own(&self.path().join(name), OFlags::NONBLOCK)?;
        ensure!(file.metadata()?.is_file(), "{name} is not a regular file");
        Ok(file)
    }

    /// Writes the whole file or nothing, also when another process writes the same one; gives the open file.
    pub fn write(&self, name: &str, parts: &[&[u8]]) -> Result<File> {
        let attempt = || -> std::io::Result<File> {
            let mut file = tempfile::NamedTempFile::new_in(self.path())?;
            parts.iter().try_for_each(|part| file.write_all(part))?;
            file.persist(self.path().join(name)).map_err(|error| error.error)
        };
        attempt().with_context(|| format!("failed to write {name}"))
    }
}

/// Opens `path` to read it, and follows no link at its end.
///
/// Errors: another user owns it or can write to it.
fn open_own(path: &Path, kind: OFlags) -> Result<File> {
    let shown = shown_path(path);
    let opened = rustix::fs::open(path, OFlags::NOFOLLOW | OFlags::CLOEXEC | kind, Mode::empty());
    let file =
        File::from(opened.with_context(|| format!("failed to open {shown}, which must not be a symbolic link"))?);
    let (found, user) = (file.metadata()?, rustix::process::geteuid().as_raw());
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    ensure!(
        owner == user && mode & OTHERS_WRITE == 0,
        "{shown} belongs to user {owner} with mode {mode:o}; only user {user} may own it and write to it: remove it, or \
         set XDG_CACHE_HOME to a folder of yours"
    );
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    /// The id of the user nobody.
    const NOBODY: u32 = 65_534;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn refusal<T>(result: Result<T>) -> String {
        format!("{:#}", result.err().expect("it is refused"))
    }

    #[test]
    fn a_new_folder_and_its_files_are_private() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a").join("b");
        let folder = TrustedFolder::open(&path).unwrap();
        folder.write("code", &[b"one", b"two"]).unwrap();
        assert_eq!(std::io::read_to_string(folder.file("code").unwrap()).unwrap(), "onetwo");
        assert_eq!((mode(&path), mode(&path.join("code"))), (0o700, 0o600));
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_temporary_folder_is_private_has_a_random_name_and_is_removed() {
        let [one, other] = [0; 2].map(|_| TrustedFolder::temporary().unwrap());
        let [first, second] = [&one, &other].map(|folder| fs::read_link(folder.path()).unwrap());
        assert_eq!(mode(&first), 0o700);
        assert_ne!(first, second);
        one.write("code", &[b"x"]).unwrap();
        drop((one, other));
        assert!(!first.exists() && !second.exists());
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused_with_owner_mode_and_remedy() {
        let root = tempfile::tempdir().unwrap();
        for open in [0o770, 0o702, 0o1777] {
            set_mode(root.path(), open);
            let said = refusal(TrustedFolder::open(root.path()));
            let user = rustix::process::geteuid().as_raw();
            let expected = format!("{} belongs to user {user} with mode {open:o};", shown_path(root.path()));
            assert!(said.starts_with(&expected) && said.contains("remove it, or set XDG_CACHE_HOME"), "{said}");
        }
        set_mode(root.path(), 0o755);
        TrustedFolder::open(root.path()).map(drop).unwrap();
    }

    #[test]
    fn a_folder_and_a_file_of_another_user_are_refused() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can give a file to another user");
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let folder = TrustedFolder::open(root.path()).unwrap();
        folder.write("code", &[b"x"]).unwrap();
        chown(root.path().join("code"), Some(NOBODY), None).unwrap();
        assert!(refusal(folder.file("code")).contains("belongs to user 65534 with mode 600"));
        chown(root.path(), Some(NOBODY), None).unwrap();
        assert!(refusal(TrustedFolder::open(root.path())).contains("belongs to user 65534 with mode"));
    }

    #[test]
    fn links_pipes_and_files_that_others_can_write_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let folder = TrustedFolder::open(&root.path().join("cache")).unwrap();
        folder.write("code", &[b"x"]).unwrap();
        symlink("code", root.path().join("cache/link")).unwrap();
        assert!(refusal(folder.file("link")).contains("must not be a symbolic link"));
        rustix::fs::mknodat(rustix::fs::CWD, root.path().join("cache/pipe"), rustix::fs::FileType::Fifo, Mode::RUSR, 0)
            .unwrap();
        assert!(refusal(folder.file("pipe")).contains("is not a regular file"));
        set_mode(&root.path().join("cache/code"), 0o620);
        assert!(refusal(folder.file("code")).contains("with mode 620"));
        symlink("cache", root.path().join("other")).unwrap();
        assert!(refusal(TrustedFolder::open(&root.path().join("other"))).contains("must not be a symbolic link"));
    }

    #[test]
    fn a_folder_that_replaces_the_checked_one_is_not_read() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("cache");
        let folder = TrustedFolder::open(&path).unwrap();
        folder.write("code", &[b"ours"]).unwrap();
        fs::rename(&path, root.path().join("moved")).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("code"), "theirs").unwrap();
        assert_eq!(std::io::read_to_string(folder.file("code").unwrap()).unwrap(), "ours");
    }
}
