//! Files that a command line names for results: no two are one file, and open descriptors are written to.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::printable::shown_path;

/// More links than the kernel follows.
const MOST_LINKS: usize = 40;

/// Errors: two of `files`, each after the option that names it, are one file. Devices and pipes may be named twice.
pub fn require_distinct(files: &[(&str, Option<&Path>)]) -> Result<()> {
    let named = files.iter().filter_map(|(option, path)| Some((option, (*path)?, FileId::of((*path)?)?)));
    let named: Vec<_> = named.collect();
    for (at, (option, path, id)) in named.iter().enumerate() {
        if let Some((other, ..)) = named[..at].iter().find(|(.., earlier)| earlier == id) {
            let shown = shown_path(path);
            bail!("{other} and {option} both name the file {shown}: name another one for one of them");
        }
    }
    Ok(())
}

#[derive(PartialEq)]
enum FileId {
    /// Device and number, which hard links have in common.
    Existing(u64, u64),
    Missing(PathBuf),
}

impl FileId {
    /// `None` for what is no regular file.
    fn of(path: &Path) -> Option<Self> {
        match fs::metadata(path) {
            Ok(found) => found.is_file().then(|| Self::Existing(found.dev(), found.ino())),
            Err(_) => Some(Self::Missing(links(path).last().unwrap_or_else(|| path.to_path_buf()))),
        }
    }
}

/// The number of this process's open file that `path` leads to, as /dev/stdout and /dev/fd/3 do.
pub(super) fn descriptor(path: &Path) -> Option<u32> {
    let own = fs::canonicalize("/proc/self/fd").ok()?;
    links(path).find(|path| path.parent() == Some(&own))?.file_name()?.to_str()?.parse().ok()
}

/// `path` and what it leads to link by link, each in its folder without links.
fn links(path: &Path) -> impl Iterator<Item = PathBuf> {
    let in_folder = |path: PathBuf| {
        let path = std::path::absolute(path).ok()?;
        let folder = path.parent()?;
        Some(fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf()).join(path.file_name()?))
    };
    let next = move |path: &PathBuf| in_folder(path.parent()?.join(fs::read_link(path).ok()?));
    std::iter::successors(in_folder(path.to_path_buf()), next).take(MOST_LINKS)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

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
