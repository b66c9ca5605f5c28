//! Whose code this program runs: that of this user and of root, in places where nobody else can put another one.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::{PROGRAMS, holds_the_program, named, read_text};
use crate::printable::shown_path;

/// Folders of what runs as code: whoever can write to one, or to a folder above it, can replace what is in it.
const CODE: &[&str] = &["", PROGRAMS, ".venv", ".venv/bin", PYTHONS];
/// Of these the folders in them too, such as Python's `__pycache__`.
const TREES: &[&str] = &["suites", "kernels"];
/// A folder for each version of Python.
const PYTHONS: &str = ".venv/lib";
/// The permission to write of the group, and of others.
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
/// In such a folder, as /tmp is, only its owner can replace a file.
const STICKY: u32 = 0o1000;

/// Errors: a user who is not `trusted` owns the tree or a part of it that runs as code, or can write to it.
pub(super) fn require_own(root: &Path, trusted: &Trusted) -> Result<()> {
    let mut above = BTreeSet::new();
    let remedy = remedy(root);
    for folder in code_of(root) {
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

/// The folders of a tree that are there and hold what runs as code.
fn code_of(root: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = CODE.iter().map(|name| root.join(name)).collect();
    for python in folders_in(&root.join(PYTHONS)) {
        // Python runs the lines of each .pth file there when it starts.
        folders.extend([python.join("site-packages"), python]);
    }
    let mut trees: Vec<PathBuf> = TREES.iter().map(|name| root.join(name)).collect();
    while let Some(folder) = trees.pop() {
        trees.extend(folders_in(&folder));
        folders.push(folder);
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// The folders in `folder`, without links.
fn folders_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// Whether git may be asked about `root`: that it or a folder above it has a repository, and not only an entry that leads nowhere,
/// as that of a worktree copied alone. Git runs what a repository's configuration names.
///
/// Errors: another user owns that configuration or can write to it, unless `$CS336_ROOT` names the tree.
pub fn require_own_repository(root: &Path) -> Result<bool> {
    let mut entries = root.ancestors().map(|folder| folder.join(".git"));
    let Some(entry) = entries.find(|entry| entry.symlink_metadata().is_ok()) else { return Ok(false) };
    let folders = git_folders(&entry);
    if !folders.iter().all(|folder| folder.is_dir()) {
        return Ok(false);
    }
    if named().is_none() {
        let remedy = remedy(root);
        let trusted = Trusted::of(root, holds_the_program(root))?;
        trusted.require(&entry, 0, &remedy)?;
        for folder in folders {
            let parts = ["", "commondir", "config", "config.worktree"].map(|name| folder.join(name));
            parts.iter().filter(|part| part.exists()).try_for_each(|part| trusted.require(part, 0, &remedy))?;
            let real = fs::canonicalize(&folder).with_context(|| format!("following {}", shown_path(&folder)))?;
            real.ancestors().skip(1).try_for_each(|above| trusted.require(above, STICKY, &remedy))?;
        }
    }
    Ok(true)
}

/// The folders of a repository. A linked worktree has a file that names its own, and that one names the one of all worktrees
/// (gitrepository-layout(5)).
fn git_folders(entry: &Path) -> Vec<PathBuf> {
    let above = entry.parent().unwrap_or(entry);
    let named = |text: String| above.join(text.trim_start_matches("gitdir:").trim());
    let own = read_text(entry).map_or_else(|_| entry.to_path_buf(), named);
    let shared = read_text(&own.join("commondir")).ok().map(|text| own.join(text.trim()));
    [Some(own), shared].into_iter().flatten().collect()
}

fn remedy(root: &Path) -> String {
    format!("set CS336_ROOT={} to run what is there", shown_path(root))
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
pub(super) struct Trusted {
    users: Vec<u32>,
    groups: Vec<u32>,
}

impl Trusted {
    /// This user and root; of a tree that holds this program also the owners of its folder and of those above, who can as
    /// well replace the program.
    pub(super) fn of(root: &Path, holds_the_program: bool) -> Result<Self> {
        let mut trusted =
            Self { users: vec![rustix::process::geteuid().as_raw(), 0], groups: Vec::from_iter(private_group()) };
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

/// This user's group if it holds nobody else. A group that only a directory service knows counts as shared.
fn private_group() -> Option<u32> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let [users, groups] = ["/etc/passwd", "/etc/group"].map(|file| read_text(Path::new(file)).unwrap_or_default());
    is_private(user, group, &users, &groups).then_some(group)
}

/// Whether a group has the name of `user` and no other member, by the texts of passwd(5) and group(5).
fn is_private(user: u32, group: u32, users: &str, groups: &str) -> bool {
    let [user, group] = [user, group].map(|number| number.to_string());
    let fields = |line: &str| line.split(':').map(str::to_string).collect::<Vec<_>>();
    let users: Vec<_> = users.lines().map(fields).filter(|fields| fields.len() > 3).collect();
    let Some(name) = users.iter().find(|fields| fields[2] == user).map(|fields| &fields[0]) else { return false };
    let is_alone = users.iter().all(|fields| fields[3] != group || fields[2] == user);
    let of_group = groups.lines().map(fields).find(|fields| fields.len() > 3 && fields[2] == group);
    let has_only = |members: &str| members.split(',').all(|member| member.is_empty() || member == name);
    is_alone && of_group.is_some_and(|fields| fields[0] == *name && has_only(&fields[3]))
}

fn look_at(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).with_context(|| format!("failed to look at {}", shown_path(path)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

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
        let within =
            [".venv/lib/python3.11", ".venv/lib/python3.11/site-packages", "suites/peers/__pycache__", "kernels/lib"];
        let is_shared = private_group().is_none();
        for part in CODE.iter().chain(TREES).chain(&within) {
            let tree = tempfile::tempdir().unwrap();
            let folder = tree.path().join(part);
            fs::create_dir_all(&folder).unwrap();
            let file = folder.join("file");
            fs::write(&file, "").unwrap();
            std::os::unix::fs::symlink("nowhere", folder.join(".#file")).unwrap();
            for (path, mode, is_open) in [
                (&folder, 0o755, false),
                (&folder, 0o775, is_shared),
                (&folder, 0o757, true),
                (&folder, 0o1777, true),
                (&file, 0o664, is_shared),
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
    fn git_is_asked_only_of_a_repository_whose_configuration_others_cannot_write_to() {
        let tree = tempfile::tempdir().unwrap();
        let [root, linked] = ["a", "b"].map(|name| tree.path().join(name));
        let (own, shared) = (root.join(".git/worktrees/b"), root.join(".git"));
        [&own, &linked].iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        fs::write(shared.join("config"), "").unwrap();
        fs::write(own.join("commondir"), "../..\n").unwrap();
        fs::write(linked.join(".git"), format!("gitdir: {}\n", own.to_str().unwrap())).unwrap();
        assert!(require_own_repository(&root.join("src")).unwrap() && require_own_repository(&linked).unwrap());
        for (part, mode, own_mode) in [(shared.join("config"), 0o666, 0o644), (shared.clone(), 0o777, 0o755)] {
            set_mode(&part, mode);
            for root in [&root, &linked] {
                let error = require_own_repository(root).unwrap_err().to_string();
                assert!(error.contains("other users can write to") && error.contains("set CS336_ROOT="), "{error}");
            }
            set_mode(&part, own_mode);
        }
        fs::write(linked.join(".git"), "gitdir: /nowhere/.git/worktrees/b\n").unwrap();
        assert!(!require_own_repository(&linked).unwrap());
        // A bare repository, which anybody can put into a folder such as /tmp.
        fs::remove_dir_all(&shared).unwrap();
        fs::write(root.join("HEAD"), "ref: refs/heads/main").unwrap();
        fs::write(root.join("config"), "[core]\nfsmonitor = false").unwrap();
        assert!(!require_own_repository(&root).unwrap());
    }

    #[test]
    fn a_group_is_private_only_where_it_has_the_users_name_and_nobody_else() {
        let users = "root:x:0:0::/:/bin/sh\nada:x:1000:1000::/ada:/bin/sh\nbob:x:1001:100::/bob:/bin/sh\n";
        let groups = "root:x:0:\nusers:x:100:\nada:x:1000:ada\n";
        let is_private = |user, group, users: &str, groups: &str| super::is_private(user, group, users, groups);
        assert!(is_private(0, 0, users, groups) && is_private(1000, 1000, users, groups));
        assert!(!is_private(1001, 100, users, groups), "the group has another name");
        assert!(!is_private(1002, 1000, users, groups), "an unknown user");
        assert!(!is_private(1000, 1000, users, &groups.replace("1000:ada", "1000:ada,bob")), "another member");
        assert!(!is_private(1000, 1000, &users.replace("1001:100", "1001:1000"), groups), "another user's group");
        assert!(!is_private(1000, 1000, users, ""), "an unknown group");
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
