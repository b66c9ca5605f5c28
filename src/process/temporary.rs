//! Folders for temporary files: none outlives the process that made it for long, however that process ends.
//!
//! A process that is killed removes nothing. Its parent removes what it had in the parent's folder, and what it had elsewhere
//! is removed when the next process of the same user makes a folder there.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use tempfile::Builder;

use super::{output_within, program};
use crate::printable::shown_path;
use crate::root::open_mode;

/// The variable that names the folder for a child's temporary files ([`super::Parent::connect`]). Its parent removes that folder.
pub const TEMPORARY_FOLDER: &str = "CS336_WORKER_FOLDER";

/// A folder whose files lie in memory, where what is left would be lost until the machine restarts.
pub const IN_MEMORY: &str = "/dev/shm";

/// The first and last letters of the name of a [`LockedFolder`].
const NAME: (&str, &str) = ("cs336-", ".locked");

/// How long each program that removes a folder may take: of many files it takes seconds.
const LIMIT: Duration = Duration::from_secs(120);

/// A folder that its process holds a lock on (flock(2)), which ends with the process. A process of another container that
/// sees the folder sees the lock too, unlike the number of the process.
#[derive(Debug)]
pub struct LockedFolder {
    path: PathBuf,
    /// Unlocked after the folder has been removed.
    _lock: File,
}

impl LockedFolder {
    /// A new folder `cs336-<kind>-..` where temporary files go; removes those of ended processes there and in memory.
    pub fn new(kind: &str) -> io::Result<Self> {
        let within = tempfile::env::temp_dir();
        [&within, Path::new(IN_MEMORY)].into_iter().for_each(remove_unlocked);
        let remedy = |error: io::Error| {
            io::Error::new(error.kind(), format!("{error}; set TMPDIR to a folder that can be written to and has room"))
        };
        require_closed(&within)?;
        Self::new_in(&within, kind).map_err(remedy)
    }

    /// A new folder `cs336-<kind>-..` in `within`.
    pub fn new_in(within: &Path, kind: &str) -> io::Result<Self> {
        loop {
            // Who can open a folder can lock it, and this would wait for another user's lock for ever.
            let own = fs::Permissions::from_mode(0o700);
            let (prefix, suffix) = (format!("{}{kind}-", NAME.0), NAME.1);
            let folder = Builder::new().prefix(&prefix).suffix(suffix).permissions(own).tempdir_in(within)?;
            let opened = File::open(folder.path());
            if let Ok(lock) = &opened {
                // Where a file system has no locks, no process removes the folder of another one.
                let _ = lock.lock();
            }
            // Another process may have removed it before it was locked.
            if folder.path().exists() {
                return Ok(Self { _lock: opened?, path: folder.keep() });
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A disk with less is nearly full: the files of one check, and what compilers write meanwhile, have megabytes.
pub const LEAST_ROOM: u64 = 128 << 20;

/// The bytes that can still be written to the disk of `folder`; of a file system in memory without a limit, the most that there
/// are.
pub fn room(folder: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(if disk.f_blocks == 0 { u64::MAX } else { disk.f_bavail * disk.f_frsize })
}

/// Whether `error` is that of [`require_closed`]: then no file may go there, whoever needs it.
pub fn is_open(error: &io::Error) -> bool {
    error.kind() == ErrorKind::Other
}

/// Errors: other users can rename and replace what is in `folder`. Who makes a folder there says why none can be made.
pub fn require_closed(folder: &Path) -> io::Result<()> {
    let Ok(Some(mode)) = open_mode(folder) else { return Ok(()) };
    let shown = shown_path(folder);
    let remedy = "set TMPDIR to a folder that they cannot write to, or give it the sticky bit (chmod +t)";
    Err(io::Error::other(format!("other users can replace what is in {shown} (mode {mode:o}); {remedy}")))
}

impl Drop for LockedFolder {
    fn drop(&mut self) {
        if !remove(&self.path) {
            let shown = shown_path(&self.path);
            // Nobody may read this.
            let _ = writeln!(io::stderr(), "the temporary folder {shown} cannot be removed; remove it by hand");
        }
    }
}

/// Removes a folder, whatever modes those in it have and however deep they lie; whether it is gone. Not for a link, whose
/// target's modes it may change.
pub fn remove(folder: &Path) -> bool {
    // Not the standard library, which takes a descriptor and a stack frame for each folder above another one.
    let programs = [("rm", ["-rf"].as_slice()), ("chmod", &["-Rf", "u+rwx"]), ("rm", &["-rf"])];
    let is_gone = || fs::remove_dir(folder).is_ok() || folder.symlink_metadata().is_err();
    for (name, arguments) in programs {
        if is_gone() {
            return true;
        }
        // What is left tells whether it worked.
        let mut command = program(name);
        command.args(arguments).arg("--").arg(folder);
        let _ = output_within(&mut command, LIMIT, &|| false);
    }
    is_gone()
}

/// Removes this user's [`LockedFolder`]s in `within` that no process holds. Best effort: another process may do the same.
pub fn remove_unlocked(within: &Path) {
    let user = rustix::process::geteuid().as_raw();
    // Others who can rename what is there could give any folder of this user such a name.
    let is_owned = fs::metadata(within).is_ok_and(|found| [user, 0].contains(&found.uid()));
    if !is_owned || !matches!(open_mode(within), Ok(None)) {
        return;
    }
    for entry in fs::read_dir(within).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_meant = name.to_str().is_some_and(|name| name.starts_with(NAME.0) && name.ends_with(NAME.1));
        if is_meant && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user) {
            let _ = remove_if_unlocked(&entry.path());
        }
    }
}

fn remove_if_unlocked(path: &Path) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let folder = File::options().read(true).custom_flags(flags.bits() as i32).open(path)?;
    // Held until the folder is gone, so that its maker, which waits for the lock, then sees that.
    folder.try_lock().map_err(|_| ErrorKind::WouldBlock)?;
    remove(path);
    Ok(())
}

#[cfg(test)]
pub mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

    use super::*;

    #[test]
    fn a_folder_is_its_users_alone_so_that_nobody_else_can_lock_it() {
        let within = tempfile::tempdir().unwrap();
        let folder = LockedFolder::new_in(within.path(), "test").unwrap();
        assert_eq!(fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_folder_that_a_process_holds_is_kept_and_one_of_an_ended_process_is_removed() {
        let within = tempfile::tempdir().unwrap();
        let made = || {
            remove_unlocked(within.path());
            LockedFolder::new_in(within.path(), "test").unwrap()
        };
        let held = made();
        fs::write(held.path().join("file"), "").unwrap();
        for name in ["cs336-test-a.locked", "cs336-b", "c.locked"] {
            fs::create_dir(within.path().join(name)).unwrap();
            fs::write(within.path().join(name).join("file"), "").unwrap();
        }
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink(outside.path(), within.path().join("cs336-d.locked")).unwrap();
        let other = made();
        assert!(held.path().join("file").is_file() && outside.path().join("file").is_file());
        let left = |name: &str| within.path().join(name).exists();
        assert_eq!(["cs336-test-a.locked", "cs336-b", "c.locked"].map(left), [false, true, true]);
        let paths = [held.path().to_path_buf(), other.path().to_path_buf()];
        drop((held, other));
        assert!(paths.iter().all(|path| !path.exists()));
    }

    #[test]
    fn folders_that_threads_make_and_remove_at_once_stay_their_own() {
        let within = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        remove_unlocked(within.path());
                        let folder = LockedFolder::new_in(within.path(), "test").unwrap();
                        fs::write(folder.path().join("file"), "").expect("nobody removes it");
                        assert!(folder.path().join("file").is_file());
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(within.path()).unwrap().count(), 0);
    }

    /// Root may list any folder. This thread, and what it starts, then may no more than the owner.
    pub fn become_an_owner() {
        for capability in [CapabilitySet::DAC_OVERRIDE, CapabilitySet::DAC_READ_SEARCH] {
            // Others than root have none to lose.
            let _ = rustix::thread::remove_capability_from_bounding_set(capability);
        }
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, ..capabilities(None).unwrap() })
            .unwrap();
    }

    fn removed(fill: impl FnOnce(&Path) + Send + 'static) {
        let remove = || {
            become_an_owner();
            let folder = LockedFolder::new_in(&std::env::temp_dir(), "test").unwrap();
            let path = folder.path().to_path_buf();
            fill(&path);
            drop(folder);
            assert!(!path.exists(), "{} is left", shown_path(&path));
        };
        std::thread::spawn(remove).join().unwrap();
    }

    #[test]
    fn a_folder_is_removed_that_nobody_may_list_in_one_that_nobody_may_change() {
        removed(|path| {
            fs::create_dir_all(path.join("a/b/c")).unwrap();
            fs::write(path.join("a/b/file"), "").unwrap();
            for (folder, mode) in [("a/b", 0), ("a", 0o500)] {
                fs::set_permissions(path.join(folder), fs::Permissions::from_mode(mode)).unwrap();
            }
        });
    }

    #[test]
    fn folders_are_removed_that_lie_deeper_than_a_path_is_long() {
        removed(|path| {
            let mode = rustix::fs::Mode::RWXU;
            let mut at = rustix::fs::open(path, rustix::fs::OFlags::PATH, mode).unwrap();
            let name = "d".repeat(200);
            for _ in 0..2000 {
                rustix::fs::mkdirat(&at, &name, mode).unwrap();
                at = rustix::fs::openat(&at, &name, rustix::fs::OFlags::PATH, mode).unwrap();
            }
        });
    }

    #[test]
    fn a_folder_in_which_others_can_replace_what_is_there_takes_no_temporary_files_and_loses_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let set_mode = |mode| fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
        let said = |mode: u32| {
            set_mode(mode);
            require_closed(folder.path()).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert!(
            said(0o777).contains("other users can replace what is in ")
                && said(0o777).contains(" (mode 777); set TMPDIR")
        );
        assert_eq!([0o1777, 0o755, 0o700].map(said), ["", "", ""]);
        set_mode(0o755);
        let renamed = folder.path().join("cs336-thesis.locked");
        fs::create_dir(&renamed).unwrap();
        for (mode, is_left) in [(0o777, true), (0o1777, false)] {
            set_mode(mode);
            remove_unlocked(folder.path());
            assert_eq!(renamed.exists(), is_left, "another user may have given it its name");
        }
        if chown(folder.path(), None, Some(2000)).is_err() {
            eprintln!("skipped in part: only root can give a folder to a group that it is not in");
            return;
        }
        assert!(said(0o770).contains("other users can replace") && said(0o2770).contains("other users can replace"));
        assert_eq!([0o1770, 0o750].map(said), ["", ""]);
    }
}
