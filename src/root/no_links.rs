//! Opening what lies at a path itself: another user who puts a link there, or in the place of a folder above it, leads nobody elsewhere.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat, mkdirat, open, openat};
use rustix::io::Errno;

/// A handle of what is there, which cannot be read from (`O_PATH`).
///
/// Errors: those of opening; a link is there or on the way.
pub fn open_without_links(path: &Path) -> io::Result<OwnedFd> {
    walk(path, false)
}

/// A handle of the folder at `path`, which is made where it is missing.
///
/// Errors: those of opening and making it; a link is there or on the way.
pub fn make_without_links(path: &Path) -> io::Result<OwnedFd> {
    walk(path, true)
}

fn walk(path: &Path, makes: bool) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let flags = if makes { flags | OFlags::DIRECTORY } else { flags };
    let mut at = open("/", flags, Mode::empty())?;
    for part in std::path::absolute(path)?.components().skip(1) {
        let part = part.as_os_str();
        let mut found = openat(&at, part, flags, Mode::empty());
        if makes && matches!(found, Err(Errno::NOENT)) {
            match mkdirat(&at, part, Mode::from_raw_mode(0o777)) {
                // Another process has made it.
                Ok(()) | Err(Errno::EXIST) => found = openat(&at, part, flags, Mode::empty()),
                Err(errno) => return Err(errno.into()),
            }
        }
        at = found?;
        if FileType::from_raw_mode(fstat(&at)?.st_mode).is_symlink() {
            return Err(Errno::NOTDIR.into());
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_link_is_followed_and_folders_are_made_where_they_are_missing() {
        let within = tempfile::tempdir().unwrap();
        let path = |name: &str| within.path().join(name);
        make_without_links(&path("new/deep")).unwrap();
        fs::write(path("new/deep/file"), "").unwrap();
        for name in ["new", "new/deep", "new/deep/file"] {
            open_without_links(&path(name)).unwrap();
        }
        let refusals = |names: &[&str]| {
            names.iter().all(|name| {
                let tried = [open_without_links(&path(name)), make_without_links(&path(name))];
                tried.into_iter().all(|tried| tried.is_err_and(|error| error.kind() == io::ErrorKind::NotADirectory))
            })
        };
        symlink("new", path("link")).unwrap();
        symlink("deep/file", path("new/file")).unwrap();
        assert!(refusals(&["link", "link/deep", "new/file", "new/deep/file/below"]));
        assert!(open_without_links(&path("missing")).is_err());
    }
}
