//! Files that a command line names for results: none is a folder, no two are one file, and open descriptors are written to.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use rustix::io::Errno;

use super::partial::{PARTIAL, without_path};
use super::store::cannot_write;
use super::target::{Target, descriptor, links, open_in_place};
use crate::printable::shown_path;

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
        let (target, shown) = (Target::of(path)?, shown_path(path));
        if descriptor(path).is_some() || fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            continue;
        }
        let opened = open_in_place(&target.path);
        if let (Some(existing), Err(_), true) = (&target.existing, &opened, target.is_kept()) {
            bail!(
                "{shown} cannot be written: it is a file of user {}, who alone may replace it: name another file",
                existing.uid()
            );
        }
        let locked = |error: &io::Error| error.raw_os_error() == Some(Errno::PERM.raw_os_error());
        opened
            .err()
            .filter(locked)
            .map_or_else(|| try_folder_of(&target.path), Err)
            .map_err(|error| cannot_write(path, &shown, &error))?;
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
    tempfile::Builder::new().prefix(PARTIAL).tempfile_in(folder).map(drop).map_err(without_path)
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
            Err(_) => Some(Self::Missing(Target::of(path).map_or_else(|_| path.to_path_buf(), |target| target.path))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::harness::store::write_atomically;

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
}
