//! The file in which a text is written before it takes another file's place.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::{Gid, XattrFlags, fchown, fremovexattr, fsetxattr, getxattr};
use rustix::io::Errno;
use tempfile::{Builder, NamedTempFile};

/// What the name of a file begins with that is not yet whole; git ignores it. A command that was killed leaves one.
pub const PARTIAL: &str = ".cs336-partial-";

/// The attribute of a file that holds its access control list (acl(5)).
const ACCESS: &str = "system.posix_acl_access";
/// The bits of a mode that say who may read, write and execute, without set-user-ID, set-group-ID and sticky.
const PERMISSIONS: u32 = 0o777;
/// Larger than any list on a common file system.
const MOST_BYTES: usize = 1 << 16;

/// An empty file in `folder`, which from its first moment nobody may read or write who may not do so with `existing`, the file
/// at `target`. Where there is none, others may read it as the umask or the folder's list leaves it, and none may write to it.
pub fn partial(folder: &Path, target: &Path, existing: Option<&Metadata>) -> io::Result<NamedTempFile> {
    let mut builder = Builder::new();
    builder.prefix(PARTIAL);
    let (made, mode) = if let Some(existing) = existing {
        let made = builder.tempfile_in(folder).map_err(without_path)?;
        let mode = match admit(made.as_file(), target, existing) {
            Ok(()) => existing.mode(),
            Err(_) if getxattr(target, ACCESS, &mut [0; 0][..]).is_ok() => existing.mode() & 0o700,
            Err(_) => with_group_as_others(existing.mode()),
        };
        // The file is this user's now: what another one prepared must not become a program of root.
        (made, mode & PERMISSIONS)
    } else {
        let made = builder.permissions(Permissions::from_mode(0o666)).tempfile_in(folder).map_err(without_path)?;
        let mode = made.as_file().metadata()?.mode();
        (made, mode & PERMISSIONS & !0o022)
    };
    // Some file systems give all files one mode, and refuse to change it.
    if made.as_file().metadata()?.mode() & PERMISSIONS != mode {
        made.as_file().set_permissions(Permissions::from_mode(mode))?;
    }
    Ok(made)
}

/// The error without the path of the partial file, which no user knows.
pub fn without_path(error: io::Error) -> io::Error {
    let text = error.to_string();
    io::Error::new(error.kind(), text.split(" at path ").next().unwrap_or_default())
}

/// The mode of a file whose group could not be kept: another group gets what all others have, and these nothing that
/// was kept from the group.
fn with_group_as_others(mode: u32) -> u32 {
    let others = mode & (mode >> 3) & 0o007;
    (mode & 0o700) | others << 3 | others
}

/// Gives `file` the group and the access control list of the file at `target`.
fn admit(file: &File, target: &Path, existing: &Metadata) -> Result<(), Errno> {
    fchown(file, None, Some(Gid::from_raw(existing.gid())))?;
    let has_none = |errno: Errno| if [Errno::NODATA, Errno::NOTSUP].contains(&errno) { Ok(()) } else { Err(errno) };
    let mut list = vec![0; MOST_BYTES];
    match getxattr(target, ACCESS, list.as_mut_slice()) {
        Ok(bytes) => fsetxattr(file, ACCESS, &list[..bytes], XattrFlags::empty()),
        // It may have got one from its folder.
        Err(errno) => has_none(errno).and_then(|()| fremovexattr(file, ACCESS).or_else(has_none)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::chown;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::setxattr;
    use tempfile::TempDir;

    use super::*;
    use crate::harness::store::write_atomically;

    /// A private file in a folder of its own.
    fn private() -> (TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grades.csv");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        (folder, path)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    /// A list with rights of the owner, of user 1234, of the group, of all named ones together, and of others.
    fn list(rights: [u16; 5]) -> Vec<u8> {
        let kinds = [(1_u16, u32::MAX), (2, 1234), (4, u32::MAX), (16, u32::MAX), (32, u32::MAX)];
        let entry = |((kind, id), right): ((u16, u32), u16)| {
            [&kind.to_le_bytes()[..], &right.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        [2_u32.to_le_bytes().to_vec(), kinds.into_iter().zip(rights).flat_map(entry).collect()].concat()
    }

    #[test]
    fn a_private_file_is_not_readable_while_it_is_replaced() {
        let (folder, path) = private();
        let (written, content) = (AtomicBool::new(false), vec![b'x'; 64 << 20]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                write_atomically(&path, &content).unwrap();
                written.store(true, Ordering::Relaxed);
            });
            while !written.load(Ordering::Relaxed) {
                for entry in fs::read_dir(folder.path()).unwrap().flatten() {
                    let mode = entry.metadata().map_or(0o600, |found| found.mode());
                    assert_eq!(mode & 0o777, 0o600, "{:?}", entry.path());
                }
            }
        });
        assert_eq!(fs::metadata(&path).unwrap().len(), content.len() as u64);
    }

    #[test]
    fn a_file_in_the_place_of_another_one_has_its_group() {
        let (_folder, path) = private();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        if chown(&path, None, Some(2000)).is_err() {
            eprintln!("skipped: only root can give a file to a group that it is not in");
            return;
        }
        write_atomically(&path, b"new").unwrap();
        assert_eq!((fs::metadata(&path).unwrap().gid(), mode(&path)), (2000, 0o640));
    }

    /// Whoever can write to the old file could otherwise run what he likes as root.
    #[test]
    fn a_file_in_the_place_of_another_ones_program_runs_as_nobody_else() {
        let (_folder, path) = private();
        fs::set_permissions(&path, Permissions::from_mode(0o6777)).unwrap();
        write_atomically(&path, b"new").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777);
    }

    #[test]
    fn a_group_that_cannot_be_kept_gets_what_all_others_have() {
        let modes = [0o640, 0o644, 0o600, 0o775, 0o604, 0o647];
        assert_eq!(modes.map(with_group_as_others), [0o600, 0o644, 0o600, 0o755, 0o600, 0o644]);
    }

    #[test]
    fn access_control_lists_of_files_are_kept_and_those_of_folders_let_nobody_write() {
        let (folder, path) = private();
        let of_file = list([6, 6, 0, 6, 0]);
        if let Err(errno) = setxattr(&path, ACCESS, &of_file, XattrFlags::empty()) {
            eprintln!("skipped: no access control lists here: {errno}");
            return;
        }
        write_atomically(&path, b"new").unwrap();
        let mut found = vec![0; MOST_BYTES];
        let bytes = getxattr(&path, ACCESS, found.as_mut_slice()).unwrap();
        assert_eq!(found[..bytes], of_file);

        setxattr(folder.path(), "system.posix_acl_default", &list([7; 5]), XattrFlags::empty()).unwrap();
        let new = folder.path().join("new.csv");
        write_atomically(&new, b"new").unwrap();
        assert_eq!(mode(&new), 0o644);
        let without_list = folder.path().join("without.csv");
        fs::write(&without_list, "old").unwrap();
        fremovexattr(File::open(&without_list).unwrap(), ACCESS).unwrap();
        fs::set_permissions(&without_list, Permissions::from_mode(0o660)).unwrap();
        write_atomically(&without_list, b"new").unwrap();
        assert_eq!(mode(&without_list), 0o660);
        assert_eq!(getxattr(&without_list, ACCESS, found.as_mut_slice()), Err(Errno::NODATA));
    }
}
