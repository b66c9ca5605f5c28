//! The links on the way to a path, each with its owner, and opening what lies at a path itself: another user who puts a link there,
//! or in the place of a folder above it, leads nobody elsewhere.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, mkdirat, open, openat, readlinkat};
use rustix::io::Errno;

/// Opens what is there, and no link that it may be.
const ITSELF: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What a path leads through.
pub struct Way {
    pub links: Vec<Link>,
    /// Where it leads in the end.
    pub real: PathBuf,
    /// Who owns what is there.
    pub owner: Option<u32>,
}

pub struct Link {
    /// Without a further link.
    pub path: PathBuf,
    pub user: u32,
    /// Of the folder that it lies in.
    pub above: FolderMode,
}

pub struct FolderMode {
    pub user: u32,
    pub mode: u32,
}

/// The links that a path leads through. What is not there, or cannot be looked at, counts as no link. A link's owner is that of
/// the link that was read, whatever takes its place.
///
/// Errors: more links than the kernel follows.
pub fn way_to(path: &Path) -> io::Result<Way> {
    const MOST_LINKS: usize = 40;
    let (mut links, mut path) = (Vec::new(), std::path::absolute(path)?);
    loop {
        match first_link(&path)? {
            Step::End { real, owner } => return Ok(Way { links, real, owner }),
            Step::Through(..) if links.len() == MOST_LINKS => return Err(Errno::LOOP.into()),
            Step::Through(link, next) => {
                links.push(link);
                path = next;
            }
        }
    }
}

enum Step {
    /// A link, and what the path is behind it.
    Through(Link, PathBuf),
    End {
        real: PathBuf,
        owner: Option<u32>,
    },
}

/// The step to the first link on the way, else to its end.
fn first_link(path: &Path) -> io::Result<Step> {
    let (mut real, mut parts) = (PathBuf::from("/"), path.components());
    let mut at = Some(open("/", ITSELF, Mode::empty())?);
    parts.next();
    while let Some(part) = parts.next() {
        if part == Component::ParentDir {
            real.pop();
            at = open_without_links(&real).ok();
            continue;
        }
        let found = at.as_ref().and_then(|at| openat(at, part.as_os_str(), ITSELF, Mode::empty()).ok());
        let is_link = |found: &OwnedFd| fstat(found).is_ok_and(|stat| is_symlink(&stat));
        if let (Some(above), Some(found)) = (&at, found.as_ref().filter(|found| is_link(found))) {
            let (above, target) = (fstat(above)?, readlinkat(found, "", Vec::new())?);
            let link = Link {
                path: real.join(part),
                user: fstat(found)?.st_uid,
                above: FolderMode { user: above.st_uid, mode: above.st_mode },
            };
            let next = real.join(OsStr::from_bytes(target.as_bytes())).join(parts.as_path());
            return Ok(Step::Through(link, next));
        }
        real.push(part);
        at = found;
    }
    Ok(Step::End { real, owner: at.and_then(|at| Some(fstat(at).ok()?.st_uid)) })
}

fn is_symlink(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_symlink()
}

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
    let flags = if makes { ITSELF | OFlags::DIRECTORY } else { ITSELF };
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
        if is_symlink(&fstat(&at)?) {
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

    #[test]
    fn the_way_has_every_link_with_its_owner() {
        let within = tempfile::tempdir().unwrap();
        let path = |name: &str| within.path().canonicalize().unwrap().join(name);
        fs::create_dir_all(path("a/b")).unwrap();
        fs::write(path("a/b/file"), "").unwrap();
        symlink("a", path("l")).unwrap();
        symlink("../l/b", path("a/m")).unwrap();
        symlink(path("l/m/./file"), path("n")).unwrap();
        symlink("loop", path("loop")).unwrap();
        let user = rustix::process::geteuid().as_raw();
        for (name, links, real, owner) in [
            ("a/b/file", &[][..], "a/b/file", Some(user)),
            ("l/m/file", &["l", "a/m", "l"], "a/b/file", Some(user)),
            ("n", &["n", "l", "a/m", "l"], "a/b/file", Some(user)),
            ("none/../l/new/x", &["l"], "a/new/x", None),
            ("l/../n/below", &["l", "n", "l", "a/m", "l"], "a/b/file/below", None),
        ] {
            let way = way_to(&path(name)).unwrap();
            let found: Vec<_> = way.links.iter().map(|link| link.path.clone()).collect();
            assert_eq!(
                (found, way.real, way.owner),
                (links.iter().map(|link| path(link)).collect(), path(real), owner)
            );
            assert!(way.links.iter().all(|link| link.user == user && link.above.user == user));
        }
        assert_eq!(way_to(&path("loop/x")).err().and_then(|e| e.raw_os_error()), Some(Errno::LOOP.raw_os_error()));
    }
}
