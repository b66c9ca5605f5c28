//! Where the tree lies that a command works on, a checkout or an unpacked bundle, and the text of its files.

use std::collections::BTreeSet;
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
    let file = open(path)?;
    let found = file.metadata()?;
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

/// A file that others may have put there, to read from.
///
/// Errors: those of opening; what is no regular file, as of [`read_at_most`].
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let found = file.metadata()?;
    match found.is_file() {
        true => Ok(file),
        false if found.is_dir() => Err(ErrorKind::IsADirectory.into()),
        false => Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// The variables by which C++ compilers search folders. An empty or relative one means the working directory.
pub const COMPILER_PATHS: [&str; 6] =
    ["CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"];

/// The nearest folder that holds `suites/` and `templates/`: `$CS336_ROOT`, else the bundle that the program is packed in, else
/// the working directory or one above it, else the program's own folder or one above it.
///
/// Errors: there is none; or, unless `$CS336_ROOT` names it, another user owns it or can write to it. Its kernels and Python
/// files run as this user.
pub fn find() -> Result<PathBuf> {
    if let Some(root) = std::env::var_os("CS336_ROOT").filter(|root| !root.is_empty()).map(PathBuf::from) {
        ensure!(is_complete(&root), "CS336_ROOT={} holds no suites/ and templates/", shown_path(&root));
        // A compiler runs in another folder.
        return Ok(std::path::absolute(root)?);
    }
    let program = std::env::current_exe().ok();
    let bundle = program.as_deref().and_then(bundle_of).map(Path::to_path_buf);
    for start in [bundle, std::env::current_dir().ok(), program.clone()].into_iter().flatten() {
        if let Some(root) = start.ancestors().find(|folder| is_complete(folder)) {
            let holds_the_program = program.is_some_and(|program| program.starts_with(root));
            require_own(root, &Trusted::of(root, holds_the_program)?)?;
            return Ok(root.to_path_buf());
        }
    }
    bail!("no suites/ and templates/ here or above: run cs336 inside its checkout, or set CS336_ROOT")
}

/// How PyTorch of the right version, and the libraries beside it, are had: a bundle has no Makefile.
pub fn installing() -> &'static str {
    std::env::current_exe().map_or(SETUP, |program| installing_for(&program))
}

const SETUP: &str = "run `make setup`";

fn installing_for(program: &Path) -> &'static str {
    if bundle_of(program).is_some() { "install torch==2.11.0" } else { SETUP }
}

/// The path that a variable holds, if it is absolute: an empty or relative one would lead into the working directory.
pub fn absolute(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The tree that has `program` in its `bin/`, as no checkout has.
fn bundle_of(program: &Path) -> Option<&Path> {
    let folder = program.parent().filter(|folder| folder.ends_with(PROGRAMS))?;
    folder.parent().filter(|root| is_complete(root))
}

fn is_complete(root: &Path) -> bool {
    root.join("suites").is_dir() && root.join("templates").is_dir()
}

/// Where a bundle has its program.
const PROGRAMS: &str = "bin";
/// Folders of what runs as code: whoever can write to one, or to a folder above it, can replace what is in it.
const CODE: &[&str] =
    &["", PROGRAMS, "suites", "suites/peers", "kernels", "kernels/lib", "kernels/emulator", ".venv", ".venv/bin"];
/// The permission to write of the group, and of others.
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
/// In such a folder, as /tmp is, only its owner can replace a file.
const STICKY: u32 = 0o1000;

/// Errors: a user who is not `trusted` owns the tree or a part of it that runs as code, or can write to it.
fn require_own(root: &Path, trusted: &Trusted) -> Result<()> {
    let mut above = BTreeSet::new();
    let remedy = format!("set CS336_ROOT={} to run what is there", shown_path(root));
    for folder in CODE.iter().map(|name| root.join(name)).filter(|folder| folder.is_dir()) {
        trusted.require(&folder, 0, &remedy)?;
        let listed = || format!("failed to list {}", shown_path(&folder));
        above.extend(fs::canonicalize(&folder).with_context(listed)?.ancestors().skip(1).map(Path::to_path_buf));
        for entry in fs::read_dir(&folder).with_context(listed)? {
            let path = entry.with_context(listed)?.path();
            // A link that leads nowhere, as an editor's lock is, runs as nothing.
            if path.is_file() {
                trusted.require(&path, 0, &remedy)?;
            }
        }
    }
    above.iter().try_for_each(|folder| trusted.require(folder, STICKY, &remedy))
}

/// Errors: on the way to `folder`, through all its links, there is a folder or a link of another user than root, or a folder that
/// others can write to: they could put another one there. `remedy` ends the message.
pub fn require_own_way(folder: &Path, remedy: &str) -> Result<()> {
    let trusted = Trusted::of(folder, false)?;
    let (links, real) = way_to(folder).with_context(|| format!("following {}", shown_path(folder)))?;
    for link in &links {
        let owner = fs::symlink_metadata(link)?.uid();
        ensure!(trusted.users.contains(&owner), "{} is a link of user {owner}: {remedy}", shown_path(link));
    }
    let folders = links.iter().filter_map(|link| link.parent()).chain([real.as_path()]).flat_map(Path::ancestors);
    BTreeSet::from_iter(folders).into_iter().try_for_each(|step| trusted.require(step, STICKY, remedy))
}

/// The links that a path leads through, each with its path, in which there is no further link; and where it leads in the end.
///
/// Errors: more links than the kernel follows.
pub fn way_to(path: &Path) -> io::Result<(Vec<PathBuf>, PathBuf)> {
    const MOST_LINKS: usize = 40;
    let parts = |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>();
    let (mut at, mut left, mut links) = (PathBuf::new(), parts(&std::path::absolute(path)?), Vec::new());
    while let Some(part) = left.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        at.push(part);
        let Ok(target) = fs::read_link(&at) else { continue };
        if links.len() == MOST_LINKS {
            return Err(rustix::io::Errno::LOOP.into());
        }
        links.push(at.clone());
        at.pop();
        left.extend(parts(&target));
    }
    Ok((links, at))
}

/// The users and groups that may own code and write to it.
struct Trusted {
    users: Vec<u32>,
    groups: Vec<u32>,
}

impl Trusted {
    /// This user and root; of a tree that holds this program also the owners of its folder and of those above, who can as
    /// well replace the program.
    fn of(root: &Path, holds_the_program: bool) -> Result<Self> {
        // A group of the user's own name, as many systems give, holds nobody else.
        let mut trusted = Self {
            users: vec![rustix::process::geteuid().as_raw(), 0],
            groups: vec![rustix::process::getegid().as_raw()],
        };
        for folder in root.ancestors().filter(|_| holds_the_program) {
            let found = look_at(folder)?;
            trusted.users.push(found.uid());
            trusted.groups.extend(Some(found.gid()).filter(|_| found.mode() & GROUP_WRITES != 0));
        }
        Ok(trusted)
    }

    /// Errors: others own `path` or can write to it, unless its mode has the bit `allowing`.
    fn require(&self, path: &Path, allowing: u32, remedy: &str) -> Result<()> {
        let found = look_at(path)?;
        let (shown, owner, mode) = (shown_path(path), found.uid(), found.mode() & 0o7777);
        let user = self.users[0];
        ensure!(self.users.contains(&owner), "{shown} belongs to user {owner}, and you are user {user}: {remedy}");
        let is_open = mode & OTHERS_WRITE != 0 || mode & GROUP_WRITES != 0 && !self.groups.contains(&found.gid());
        ensure!(!is_open || mode & allowing != 0, "other users can write to {shown} (mode {mode:o}): {remedy}");
        Ok(())
    }
}

fn look_at(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).with_context(|| format!("failed to look at {}", shown_path(path)))
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
    fn a_bundle_has_no_make_to_install_by() {
        let tree = tempfile::tempdir().unwrap();
        let program = |folder: &str| tree.path().join(folder).join("cs336");
        assert_eq!(installing_for(&program("bin")), SETUP);
        for folder in ["suites", "templates"] {
            fs::create_dir(tree.path().join(folder)).unwrap();
        }
        assert_eq!(installing_for(&program("target/debug")), SETUP);
        assert_eq!(installing_for(&program("bin")), "install torch==2.11.0");
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// What is said of a tree; empty where it is not refused.
    fn refusal(root: &Path, holds_the_program: bool) -> String {
        let refused = require_own(root, &Trusted::of(root, holds_the_program).unwrap());
        refused.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_tree_whose_folders_or_files_others_can_write_to_is_refused_with_the_remedy() {
        for part in CODE {
            let tree = tempfile::tempdir().unwrap();
            let folder = tree.path().join(part);
            fs::create_dir_all(&folder).unwrap();
            let file = folder.join("file");
            fs::write(&file, "").unwrap();
            std::os::unix::fs::symlink("nowhere", folder.join(".#file")).unwrap();
            for (path, mode, is_open) in [
                (&folder, 0o755, false),
                (&folder, 0o775, false),
                (&folder, 0o757, true),
                (&folder, 0o1777, true),
                (&file, 0o664, false),
                (&file, 0o666, true),
            ] {
                set_mode(&folder, 0o755);
                set_mode(path, mode);
                for holds_the_program in [false, true] {
                    let said = refusal(tree.path(), holds_the_program);
                    let expected = format!("other users can write to {} (mode {mode:o})", shown_path(path));
                    assert_eq!(said.contains(&expected), is_open, "{said}");
                    assert_eq!(said.contains("set CS336_ROOT="), is_open, "{said}");
                }
            }
        }
    }

    #[test]
    fn a_folder_above_the_tree_or_above_what_it_links_to_is_refused_unless_it_is_sticky() {
        let above = tempfile::tempdir().unwrap();
        let [tree, elsewhere] = ["open/tree", "own/tree"].map(|name| above.path().join(name));
        [&tree, &elsewhere].iter().for_each(|folder| fs::create_dir_all(folder.join("suites")).unwrap());
        std::os::unix::fs::symlink(tree.join("suites"), elsewhere.join("kernels")).unwrap();
        for (mode, is_open) in [(0o755, false), (0o777, true), (0o1777, false)] {
            set_mode(&above.path().join("open"), mode);
            for root in [&tree, &elsewhere] {
                let said = refusal(root, true);
                assert_eq!(said.contains(&format!("open (mode {mode:o}): set CS336_ROOT=")), is_open, "{said}");
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
        for part in ["", "suites", "kernels", "kernels/file"] {
            let tree = tempfile::tempdir().unwrap();
            ["suites", "kernels"].iter().for_each(|name| fs::create_dir(tree.path().join(name)).unwrap());
            fs::write(tree.path().join("kernels/file"), "").unwrap();
            assert_eq!(refusal(tree.path(), false), "");
            std::os::unix::fs::chown(tree.path().join(part), Some(65_534), None).unwrap();
            let said = refusal(tree.path(), false);
            assert!(said.contains("belongs to user 65534") && said.contains("set CS336_ROOT="), "{said}");
            // Its owner can as well replace a program in it.
            assert_eq!(refusal(tree.path(), true).is_empty(), part.is_empty());
        }
    }
}
