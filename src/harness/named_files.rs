//! Files that a command line names for results: none is a folder, no two are one file, and open descriptors are written to.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::partial::PARTIAL;
use super::store::cannot_write;
use crate::printable::shown_path;
use crate::root::way_to;

/// More links than the kernel follows.
const MOST_LINKS: usize = 40;

/// Errors: two of `files`, each after the option that names it, are one file, or one would lie in the other. Devices and pipes may
/// be named twice.
pub fn require_distinct(files: &[(&str, Option<&Path>)]) -> Result<()> {
    let named = files.iter().filter_map(|(option, path)| Some((option, (*path)?, FileId::of((*path)?)?)));
    let named: Vec<_> = named.collect();
    for (at, (option, path, id)) in named.iter().enumerate() {
        if let Some((other, ..)) = named[..at].iter().find(|(.., earlier)| earlier == id) {
            let shown = shown_path(path);
            bail!("{other} and {option} both name the file {shown}: name another one for one of them");
        }
        if let Some((other, ..)) = named.iter().find(|(.., other)| id.is_below(other)) {
            bail!("{option} {} would lie in the file of {other}: name another one for one of them", shown_path(path));
        }
    }
    Ok(())
}

/// Errors: one of `files`, each after the option that names it, is a folder, or can be nothing else by its name.
pub fn require_no_folders(files: &[(&str, Option<&Path>)]) -> Result<()> {
    let is_folder = |path: &&Path| path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/");
    for (option, path) in files {
        if let Some(folder) = path.filter(is_folder) {
            bail!("{option} {} is a folder: name a file in it", shown_path(folder));
        }
    }
    Ok(())
}

/// Errors: one of `files`, each after the option that names it, lies in `folder`, whose files others write, before its links are
/// followed or after. A link that they leave there would lead our writing to any file.
pub fn require_outside(files: &[(&str, Option<&Path>)], folder: &Path) -> Result<()> {
    let real = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf());
    for (option, path) in files {
        let Some(path) = path else { continue };
        if links(path).any(|link| link.starts_with(&real)) {
            let (path, folder) = (shown_path(path), shown_path(folder));
            bail!("{option} {path} must not lie in {folder}, whose files others write: name another file");
        }
    }
    Ok(())
}

/// Errors: one of `files` could not be written at the end, since its folder takes no file or it is locked. Nothing is left there, and no
/// folder is made. A device and an open file are not tried.
pub fn require_writable<'a>(files: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    for path in files {
        if descriptor(path).is_some() || fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            continue;
        }
        let target = target_of(path)?;
        if target.is_symlink() && !target.exists() {
            bail!("{} is a link that leads to itself: remove it", shown_path(path));
        }
        let locked = |error: &io::Error| error.raw_os_error() == Some(Errno::PERM.raw_os_error());
        let tried = match open_in_place(&target).err().filter(locked) {
            Some(error) => Err(error),
            None => try_folder_of(&target),
        };
        tried.map_err(|error| cannot_write(path, &shown_path(path), &error))?;
    }
    Ok(())
}

/// Makes and removes a file in the folder of `target`, or in the one above that is there.
fn try_folder_of(target: &Path) -> io::Result<()> {
    let target = std::path::absolute(target)?;
    let folder = target.ancestors().skip(1).find(|folder| folder.symlink_metadata().is_ok());
    let folder = folder.ok_or(ErrorKind::NotFound)?;
    if !folder.is_dir() {
        return Err(ErrorKind::NotADirectory.into());
    }
    tempfile::Builder::new().prefix(PARTIAL).tempfile_in(folder).map(drop)
}

#[derive(PartialEq)]
enum FileId {
    /// Device and number, which hard links have in common.
    Existing(u64, u64),
    Missing(PathBuf),
}

impl FileId {
    fn is_below(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Missing(inner), Self::Missing(outer)) if inner != outer && inner.starts_with(outer))
    }

    /// `None` for what is no regular file.
    fn of(path: &Path) -> Option<Self> {
        match fs::metadata(path) {
            Ok(found) => found.is_file().then(|| Self::Existing(found.dev(), found.ino())),
            Err(_) => Some(Self::Missing(target_of(path).unwrap_or_else(|_| path.to_path_buf()))),
        }
    }
}

/// The number of this process's open file that `path` leads to, as /dev/stdout and /dev/fd/3 do.
pub(super) fn descriptor(path: &Path) -> Option<u32> {
    let own = fs::canonicalize("/proc/self/fd").ok()?;
    links(path).find(|path| path.parent() == Some(&own))?.file_name()?.to_str()?.parse().ok()
}

/// The file that `path` leads to through its links, also where none is there yet. Of a loop, a link; of what the system alone can
/// follow, as another process's pipe, `path`.
///
/// Errors: on the way there is another user's link in a folder where a group or everybody can make one, such as /tmp. It would
/// choose the file that we write. The kernel follows none in /tmp either, unless it is told to (fs.protected_symlinks in proc(5)).
pub(super) fn target_of(path: &Path) -> Result<PathBuf> {
    let Ok((on_the_way, real)) = way_to(path) else { return Ok(path.to_path_buf()) };
    on_the_way.iter().try_for_each(|link| require_not_planted(link, path))?;
    if fs::metadata(path).is_err() {
        // A folder on the way may be a link that leads nowhere.
        return Ok(links(path).last().filter(|last| *last == real).unwrap_or_else(|| path.to_path_buf()));
    }
    let Ok(found) = fs::canonicalize(path) else { return Ok(path.to_path_buf()) };
    ensure!(found == real, "{} cannot be written: what it leads to changes: name another file", shown_path(path));
    Ok(real)
}

/// Errors: `link`, on the way to `path`, is another user's where others than the folder's owner can make one.
fn require_not_planted(link: &Path, path: &Path) -> Result<()> {
    let shown = shown_path(path);
    // It was there a moment ago.
    let changes = || format!("{shown} cannot be written: what it leads to changes: name another file");
    let found = fs::symlink_metadata(link).with_context(changes)?;
    let above = fs::metadata(link.parent().unwrap_or(link)).with_context(changes)?;
    // In a user namespace many users have this number (user_namespaces(7)).
    let unknown = fs::read_to_string("/proc/sys/kernel/overflowuid").ok().and_then(|uid| uid.trim().parse().ok());
    let is_of_folder = found.uid() == above.uid() && Some(found.uid()) != unknown;
    let is_own = is_of_folder || found.uid() == rustix::process::geteuid().as_raw();
    let (link, owner) = (shown_path(link), found.uid());
    ensure!(
        above.mode() & 0o022 == 0 || is_own,
        "{shown} cannot be written: {link} is a link of user {owner} where others can make one: name another file"
    );
    Ok(())
}

/// A regular file, open for writing. What another user puts there meanwhile is neither followed nor waited for.
pub(super) fn open_in_place(target: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options().write(true).custom_flags(flags.bits() as i32).open(target)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(ErrorKind::InvalidInput.into()) }
}

/// `path` and what it leads to link by link, each in its folder without links.
fn links(path: &Path) -> impl Iterator<Item = PathBuf> {
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

    use super::*;
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

    #[test]
    fn one_file_by_two_names_is_refused_and_a_device_may_be_named_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "").unwrap();
        fs::hard_link(path("file"), path("hard")).unwrap();
        symlink("file", path("soft")).unwrap();
        symlink("missing", path("dangling")).unwrap();
        for (first, second, are_one) in [
            ("file", "file", true),
            ("file", "./file", true),
            ("file", "hard", true),
            ("soft", "file", true),
            ("missing", "dangling", true),
            ("missing", "./missing", true),
            ("missing", "none/../missing", true),
            ("file", "missing", false),
            ("missing", "other", false),
            ("/dev/null", "/dev/null", false),
        ] {
            let files = [("--a", Some(path(first))), ("--none", None), ("--b", Some(path(second)))];
            let said = require_distinct(&files.each_ref().map(|(option, path)| (*option, path.as_deref())));
            let said = said.err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(said.starts_with("--a and --b both name the file "), are_one, "{first} {second}: {said}");
        }
    }

    #[test]
    fn a_file_that_another_ones_folder_would_be_and_a_name_that_only_a_folder_can_have_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("real")).unwrap();
        symlink("real", path("link")).unwrap();
        for (first, second) in [("real/new", "link/new/x.json"), ("link/a/b/x.xml", "no/../real/a")] {
            let (first, second) = (path(first), path(second));
            let said = require_distinct(&[("--a", Some(&first)), ("--b", Some(&second))]).unwrap_err().to_string();
            assert!(said.contains(" would lie in the file of --"), "{said}");
        }
        let said = require_no_folders(&[("--a", Some(&path("new/")))]).unwrap_err().to_string();
        assert!(said.starts_with("--a /") && said.ends_with("/new/ is a folder: name a file in it"), "{said}");
        symlink("loop", path("loop")).unwrap();
        let said = require_writable([path("loop").as_path()]).unwrap_err().to_string();
        assert!(said.ends_with("/loop is a link that leads to itself: remove it"), "{said}");
    }

    #[test]
    fn a_file_whose_folder_takes_none_is_named_and_trying_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "").unwrap();
        symlink("nowhere", path("dangling")).unwrap();
        let said = |path: &Path| require_writable([path]).err().map(|error| error.to_string()).unwrap_or_default();
        for name in ["new", "a/b/new", "file", "dangling", "/dev/full", "/dev/stdout", "/dev/null"] {
            assert_eq!(said(&path(name)), "", "{name}");
        }
        for (name, words) in [
            ("file/new", "file/new cannot be written: not a directory; move the file that has its folder's name"),
            ("file/deeper/new", "move the file that has its folder's name"),
            ("dangling/new", "/dangling is a link that leads nowhere; mend or remove it"),
            ("/proc/new", "/proc/new cannot be written: "),
        ] {
            let said = said(&path(name));
            assert!(said.contains(words), "{name}: {said}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let refused = write_atomically(folder.path(), b"report").unwrap_err().to_string();
        assert!(refused.ends_with("; move the folder that has its name"), "{refused}");
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
