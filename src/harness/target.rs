//! Where a file that a command line names is written: through its links, in none that other users planted.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::OFlags;
use rustix::io::{Errno, ioctl_fionbio};

use crate::printable::shown_path;
use crate::root::{FolderMode, Way, make_without_links, many_users, way_to};

/// More links than the kernel follows.
const MOST_LINKS: usize = 40;
/// The permission to write of the group or of others.
const OTHERS_WRITE: u32 = 0o022;
/// In such a folder, as /tmp is, only its owner and root can replace another user's file.
const STICKY: u32 = 0o1000;

/// The number of this process's open file that `path` leads to, as /dev/stdout and /dev/fd/3 do.
pub(super) fn descriptor(path: &Path) -> Option<u32> {
    let own = fs::canonicalize("/proc/self/fd").ok()?;
    links(path).find(|path| path.parent() == Some(&own))?.file_name()?.to_str()?.parse().ok()
}

/// What a path leads to.
pub(super) struct Target {
    /// Without links, also where nothing is there yet. Of what the system alone can follow, as another process's pipe, its link in
    /// /proc.
    pub path: PathBuf,
    /// What is there.
    pub existing: Option<Metadata>,
}

impl Target {
    /// Errors: on the way there is another user's link in a folder where others can make one, or the target is another user's
    /// file in a sticky folder such as /tmp. It would choose what we write to, and who can read it. The kernel opens neither
    /// in /tmp, unless it is told to (fs.protected_symlinks and fs.protected_regular in proc(5)).
    pub fn of(path: &Path) -> Result<Self> {
        let target = resolved(path)?;
        let existing = fs::symlink_metadata(&target).ok();
        if let (Some(existing), Ok(above)) = (&existing, fs::metadata(target.parent().unwrap_or(&target))) {
            let above = FolderMode { user: above.uid(), mode: above.mode() };
            require_not_planted(&target, existing.is_symlink(), existing.uid(), &above, path)?;
        }
        Ok(Self { path: target, existing })
    }

    /// Whether it is a file that this user cannot replace: neither it nor its sticky folder is theirs.
    pub fn is_kept(&self) -> bool {
        let user = rustix::process::geteuid().as_raw();
        let is_anothers = |found: &Metadata| found.uid() != user;
        let above = self.path.parent().and_then(|above| fs::metadata(above).ok());
        user != 0
            && self.existing.as_ref().is_some_and(is_anothers)
            && above.is_some_and(|above| above.mode() & STICKY != 0 && is_anothers(&above))
    }
}

fn resolved(path: &Path) -> Result<PathBuf> {
    let changes = || format!("{} cannot be written: what it leads to changes: name another file", shown_path(path));
    let Way { links: on_the_way, real, .. } = match way_to(path) {
        Ok(way) => way,
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            bail!("{} is a link that leads to itself: remove it", shown_path(path))
        }
        // An empty path.
        Err(_) => return Ok(path.to_path_buf()),
    };
    for link in &on_the_way {
        require_not_planted(&link.path, true, link.user, &link.above, path)?;
    }
    if fs::metadata(path).is_err() {
        // A folder on the way may be a link that leads nowhere.
        return Ok(links(path).last().filter(|last| *last == real).unwrap_or_else(|| path.to_path_buf()));
    }
    let found = fs::canonicalize(path).ok().or_else(|| Some(on_the_way.last()?.path.clone()));
    let is_known = |found: &PathBuf| *found == real || found.starts_with("/proc");
    found.filter(is_known).with_context(changes)
}

/// Errors: `at`, on the way to `path`, is another user's where others than the folder's owner can make one.
fn require_not_planted(at: &Path, is_link: bool, user: u32, above: &FolderMode, path: &Path) -> Result<()> {
    let is_of_folder = user == above.user && Some(user) != many_users();
    let is_own = is_of_folder || [0, rustix::process::geteuid().as_raw()].contains(&user);
    // Where a folder is not sticky, whoever can write to it can replace the file afterwards too.
    let is_shared = above.mode & OTHERS_WRITE != 0 && (is_link || above.mode & STICKY != 0);
    let (shown, at, kind) = (shown_path(path), shown_path(at), if is_link { "link" } else { "file" });
    ensure!(
        is_own || !is_shared,
        "{shown} cannot be written: {at} is a {kind} of user {user} where others can make one: name another file"
    );
    Ok(())
}

/// The folder of a target, made where it is missing and held. What another user puts in its place, or in that of a folder above
/// it, is not written to.
pub(super) struct HeldFolder(OwnedFd);

impl HeldFolder {
    pub fn of(target: &Path) -> io::Result<Self> {
        make_without_links(std::path::absolute(target)?.parent().unwrap_or(target)).map(Self)
    }

    /// The path of `name` in it, as long as it is held.
    pub fn join(&self, name: &OsStr) -> PathBuf {
        Path::new("/proc/self/fd").join(self.0.as_raw_fd().to_string()).join(name)
    }
}

/// A regular file, open for writing. What another user puts there meanwhile is neither followed nor waited for.
pub(super) fn open_in_place(target: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options().write(true).custom_flags(flags.bits() as i32).open(target)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(ErrorKind::InvalidInput.into()) }
}

/// A device or a pipe, open for writing; a pipe must have a reader, since opening it would wait for one.
///
/// Errors: those of opening; something else is there than `existing`.
pub(super) fn open_device(target: &Path, existing: &Metadata) -> io::Result<File> {
    // A link that is left is one of /proc, which the system alone can follow.
    let no_link = if existing.is_symlink() { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = no_link | OFlags::NONBLOCK;
    let file = File::options().write(true).custom_flags(flags.bits() as i32).open(target)?;
    let found = file.metadata()?;
    let is_it = existing.is_symlink() || (found.dev(), found.ino()) == (existing.dev(), existing.ino());
    if !is_it {
        return Err(io::Error::other("what is there changes"));
    }
    ioctl_fionbio(&file, false)?;
    Ok(file)
}

/// This process's open file of that number, to add to what it holds.
pub(super) fn open_descriptor(number: u32) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().append(true).custom_flags(flags).open(format!("/proc/self/fd/{number}"))?;
    ioctl_fionbio(&file, false)?;
    Ok(file)
}

/// `path` and what it leads to link by link, each in its folder without links.
pub(super) fn links(path: &Path) -> impl Iterator<Item = PathBuf> {
    let in_folder = |path: PathBuf| {
        let path = std::path::absolute(path).ok()?;
        Some(real(path.parent()?).join(path.file_name()?))
    };
    let next = move |path: &PathBuf| in_folder(path.parent()?.join(fs::read_link(path).ok()?));
    std::iter::successors(in_folder(path.to_path_buf()), next).take(MOST_LINKS)
}

/// The folder without links and `..`. What is not there will be a folder.
fn real(folder: &Path) -> PathBuf {
    let mut real = PathBuf::new();
    for part in folder.components() {
        if part == Component::ParentDir {
            real.pop();
            continue;
        }
        real.push(part);
        real = fs::canonicalize(&real).unwrap_or(real);
    }
    real
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;
    use crate::harness::named_files::require_writable;
    use crate::harness::store::write_atomically;

    /// Such as /tmp, where a link would make root replace any file.
    #[test]
    fn another_users_link_where_others_can_make_one_is_not_followed() {
        let (shared, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (file, folder) = (shared.path().join("results.xml"), shared.path().join("results"));
        fs::write(own.path().join("results.xml"), "precious").unwrap();
        symlink(own.path().join("results.xml"), &file).unwrap();
        symlink(own.path(), &folder).unwrap();
        let set_mode = |mode| fs::set_permissions(shared.path(), fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0o1777);
        let through = [file.clone(), folder.join("results.xml"), folder.join("new/results.xml")];
        // A link of one's own leads where one wants.
        through.iter().for_each(|path| write_atomically(path, b"own").unwrap());
        if [&file, &folder].iter().any(|link| lchown(link, Some(65_534), None).is_err()) {
            eprintln!("skipped: only root can give a link to another user");
            return;
        }
        for (path, mode) in through.iter().flat_map(|path| [(path, 0o1777), (path, 0o777), (path, 0o770)]) {
            set_mode(mode);
            let checked = require_writable([path.as_path()]).unwrap_err().to_string();
            let written = write_atomically(path, b"theirs").unwrap_err().to_string();
            assert_eq!(checked, written);
            assert!(written.contains("is a link of user 65534") && written.contains("name another file"), "{written}");
        }
        assert_eq!(fs::read_to_string(own.path().join("results.xml")).unwrap(), "own");
        set_mode(0o755);
        write_atomically(&file, b"in a folder of one's own").unwrap();
    }

    #[test]
    fn a_link_of_the_folders_owner_is_followed_unless_many_users_have_that_number() {
        let (shared, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = shared.path().join("results.xml");
        symlink(own.path().join("results.xml"), &file).unwrap();
        fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        for (user, is_followed) in [(1234, true), (65_534, false)] {
            if [shared.path(), &file].iter().any(|path| lchown(path, Some(user), None).is_err()) {
                eprintln!("skipped: only root can give a link to another user");
                return;
            }
            assert_eq!(write_atomically(&file, b"own").is_ok(), is_followed, "{user}");
        }
    }

    /// It could be read, or changed afterwards, by who put it there.
    #[test]
    fn another_users_file_or_pipe_in_a_sticky_folder_is_not_written_to() {
        let shared = tempfile::tempdir().unwrap();
        let [file, pipe] = ["results.json", "pipe"].map(|name| shared.path().join(name));
        fs::write(&file, "theirs").unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let _reader = File::options().read(true).write(true).open(&pipe).unwrap();
        let set_mode = |mode| fs::set_permissions(shared.path(), fs::Permissions::from_mode(mode)).unwrap();
        if [&file, &pipe].iter().any(|path| lchown(path, Some(1234), None).is_err()) {
            eprintln!("skipped: only root can give a file to another user");
            return;
        }
        for (path, mode) in [(&file, 0o1777), (&file, 0o1770), (&pipe, 0o1777)] {
            set_mode(mode);
            let checked = require_writable([path.as_path()]).unwrap_err().to_string();
            assert_eq!(write_atomically(path, b"ours").unwrap_err().to_string(), checked);
            assert!(checked.contains("is a file of user 1234 where others can make one"), "{checked}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "theirs");
        for mode in [0o777, 0o755] {
            set_mode(mode);
            write_atomically(&file, b"in a folder where any file can be replaced").unwrap();
            lchown(&file, Some(1234), None).unwrap();
        }
    }

    #[test]
    fn a_file_that_only_its_owner_may_replace_is_named_before_anything_is_done() {
        let shared = tempfile::tempdir().unwrap();
        let file = shared.path().join("results.json");
        fs::write(&file, "theirs").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        if [shared.path(), &file].iter().any(|path| lchown(path, Some(1234), None).is_err()) {
            eprintln!("skipped: only root can give a file to another user");
            return;
        }
        fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let tried = || {
            rustix::thread::set_thread_uid(rustix::fs::Uid::from_raw(2345)).unwrap();
            require_writable([file.as_path()]).unwrap_err().to_string()
        };
        let said = std::thread::scope(|scope| scope.spawn(tried).join().unwrap());
        assert!(said.contains("is a file of user 1234, who alone may replace it: name another file"), "{said}");
    }

    #[test]
    fn what_takes_a_folders_place_is_not_written_to() {
        let within = tempfile::tempdir().unwrap();
        let path = |name: &str| within.path().join(name);
        let target = path("new/deep/results.json");
        let held = HeldFolder::of(&target).unwrap();
        fs::rename(path("new"), path("moved")).unwrap();
        fs::create_dir_all(path("precious/deep")).unwrap();
        symlink("precious", path("new")).unwrap();
        assert_eq!(HeldFolder::of(&target).err().map(|error| error.kind()), Some(ErrorKind::NotADirectory));
        fs::write(held.join(OsStr::new("results.json")), "").unwrap();
        assert!(path("moved/deep/results.json").exists() && !path("precious/deep/results.json").exists());
    }

    #[test]
    fn what_takes_a_pipes_place_is_not_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let [pipe, precious] = ["pipe", "precious"].map(|name| folder.path().join(name));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let existing = Target::of(&pipe).unwrap().existing.unwrap();
        fs::write(&precious, "precious").unwrap();
        for take_place in [|from: &Path, to: &Path| symlink(from, to), |from: &Path, to: &Path| fs::hard_link(from, to)]
        {
            fs::remove_file(&pipe).unwrap();
            take_place(&precious, &pipe).unwrap();
            assert!(open_device(&pipe, &existing).is_err());
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn paths_to_open_files_have_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink("/dev/stdout", &link).unwrap();
        for (path, number) in [
            (Path::new("/dev/stdout"), Some(1)),
            (Path::new("/dev/fd/2"), Some(2)),
            (Path::new("/proc/self/fd/0"), Some(0)),
            (&link, Some(1)),
            (Path::new("/dev/null"), None),
            (folder.path(), None),
        ] {
            assert_eq!(descriptor(path), number, "{path:?}");
        }
    }
}
