//! Whose code this program runs: that of this user and of root, in places where nobody else can put another one.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::links::{Link, Way, way_to};
use super::{PROGRAMS, holds_the_program, named, read_text};
use crate::printable::{shell_word, shown_path};

/// Folders of what runs as code, beside the virtual environment's: whoever can write to one, or to a folder above it, can replace
/// what is in it.
const CODE: &[&str] = &["", PROGRAMS];
/// Of these, and of each version of Python, the folders in them too, such as `__pycache__`.
const TREES: &[&str] = &["suites", "kernels"];
/// The virtual environment of most commands.
const ENVIRONMENT: &str = ".venv";
/// The permission to write of the group, and of others.
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
/// In such a folder, as /tmp is, only its owner can replace a file.
const STICKY: u32 = 0o1000;

/// Errors: a user who is not `trusted` owns the tree or a part of it that runs as code, or can write to it.
pub(super) fn require_own(root: &Path, trusted: &Trusted) -> Result<()> {
    require_own_code(root, code_of(root, ENVIRONMENT, CODE, TREES), trusted)
}

/// The same for the virtual environment in `folder` of the tree, which only some commands run. `$CS336_ROOT` trusts it with the
/// tree.
pub fn require_own_environment(root: &Path, folder: &str) -> Result<()> {
    if named().is_some() {
        return Ok(());
    }
    let above: Vec<&str> = Path::new(folder).ancestors().skip(1).filter_map(Path::to_str).collect();
    require_own_code(root, code_of(root, folder, &above, &[]), &Trusted::of(root, holds_the_program(root))?)
}

fn require_own_code(root: &Path, code: Vec<PathBuf>, trusted: &Trusted) -> Result<()> {
    let (remedy, mut above) = (remedy(root), BTreeSet::new());
    let mut add_above = |path: &Path| -> Result<()> {
        above.extend(trusted.way_above(path, &remedy)?);
        Ok(())
    };
    add_above(root)?;
    for folder in code {
        trusted.require(&folder, 0, &remedy)?;
        let listed = || format!("failed to list {}", shown_path(&folder));
        if folder.is_symlink() {
            add_above(&folder)?;
        }
        for entry in fs::read_dir(&folder).with_context(listed)? {
            let entry = entry.with_context(listed)?;
            let path = entry.path();
            // A link that leads nowhere, as an editor's lock is, runs as nothing; nor does a file that Python, which compiles
            // under another name, or an installation has removed since.
            if !path.is_file() {
                continue;
            }
            trusted.require(&path, 0, &remedy)?;
            if entry.file_type().with_context(listed)?.is_symlink() {
                add_above(&path)?;
            }
        }
    }
    above.iter().try_for_each(|folder| trusted.require(folder, STICKY, &remedy))
}

/// The folders that are there of these of a tree: a virtual environment's, `code`, and `trees` with the folders in them.
fn code_of(root: &Path, environment: &str, code: &[&str], trees: &[&str]) -> Vec<PathBuf> {
    let environment = root.join(environment);
    // A folder for each version of Python.
    let pythons = environment.join("lib");
    let mut trees: Vec<PathBuf> = trees.iter().map(|name| root.join(name)).chain(folders_in(&pythons)).collect();
    let mut folders: Vec<PathBuf> = code.iter().map(|name| root.join(name)).collect();
    folders.extend([environment.join("bin"), pythons, environment]);
    // A link may lead to a folder that it lies in.
    let mut seen = BTreeSet::new();
    while let Some(folder) = trees.pop() {
        if !folder.is_symlink() || fs::canonicalize(&folder).is_ok_and(|real| seen.insert(real)) {
            trees.extend(folders_in(&folder));
            folders.push(folder);
        }
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// The folders in `folder`, and the links to folders.
fn folders_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_folder = |entry: &fs::DirEntry| {
        entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink() && entry.path().is_dir())
    };
    entries.filter(is_folder).map(|entry| entry.path())
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
            let above = trusted.way_above(&folder, &remedy)?;
            above.iter().try_for_each(|above| trusted.require(above, STICKY, &remedy))?;
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
    format!("set CS336_ROOT={} to run what is there", shell_word(root))
}

/// Errors: on the way to `folder`, through all its links, there is a folder or a link of another user than root, or a folder that
/// others can write to: they could put another one there. `remedy` ends the message.
pub fn require_own_way(folder: &Path, remedy: &str) -> Result<()> {
    let mut trusted = Trusted::of(folder, false)?;
    // Root, also in a user namespace that has no number for it (user_namespaces(7)).
    trusted.users.push(look_at(Path::new("/"))?.uid());
    trusted.require(folder, STICKY, remedy)?;
    trusted.way_above(folder, remedy)?.iter().try_for_each(|step| trusted.require(step, STICKY, remedy))
}

/// The folder that a path leads to.
///
/// Errors: a link on the way belongs to a user who neither owns the folder nor is this user, root or `maker`. Who made it may
/// have no right to read what it leads to.
pub fn owners_folder(path: &Path, maker: Option<u32>) -> Result<PathBuf> {
    let Way { links, real, owner } = way_to(path).with_context(|| format!("following {}", shown_path(path)))?;
    // Who opens what is not there says so.
    let Some(owner) = owner else { return Ok(path.to_path_buf()) };
    let mut trusted = vec![Some(owner), Some(0), Some(rustix::process::geteuid().as_raw()), maker];
    trusted.retain(|user| *user != many_users());
    for Link { path, user, .. } in links {
        let (link, real) = (shown_path(path), shown_path(&real));
        let many = if Some(user) == many_users() { "; in this user namespace many users have that number" } else { "" };
        ensure!(
            trusted.contains(&Some(user)),
            "{link} is a link of user {user} to {real}, which belongs to user {owner}{many}: make a link of your own, or \
             leave it out"
        );
    }
    Ok(real)
}

/// The number of all users that have none in this user namespace (user_namespaces(7)).
pub fn many_users() -> Option<u32> {
    fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim().parse().ok()
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

    /// The folders above `path` and above all links on the way to it, to the root.
    ///
    /// Errors: a user who is not trusted owns such a link.
    fn way_above(&self, path: &Path, remedy: &str) -> Result<BTreeSet<PathBuf>> {
        let Way { links, real, .. } = way_to(path).with_context(|| format!("following {}", shown_path(path)))?;
        for Link { path, user, .. } in &links {
            ensure!(self.users.contains(user), "{} is a link of user {user}: {remedy}", shown_path(path));
        }
        let steps: Vec<PathBuf> = links.into_iter().map(|link| link.path).chain([real]).collect();
        Ok(steps.iter().flat_map(|step| step.ancestors().skip(1)).map(Path::to_path_buf).collect())
    }

    /// Errors: others own `path` or can write to it, unless its mode has the bit `allowing`.
    fn require(&self, path: &Path, allowing: u32, remedy: &str) -> Result<()> {
        let found = look_at(path)?;
        let (shown, owner, mode) = (shown_path(path), found.uid(), found.mode() & 0o7777);
        let user = self.users[0];
        ensure!(self.users.contains(&owner), "{shown} belongs to user {owner}, and you are user {user}: {remedy}");
        let is_open = mode & allowing == 0 && others_can_write(path, &found, &self.groups);
        ensure!(!is_open, "other users can write to {shown} (mode {mode:o}): {remedy}");
        Ok(())
    }
}

/// The mode of `folder` if other users can rename and replace what is in it, whoever owns it.
pub fn open_mode(folder: &Path) -> io::Result<Option<u32>> {
    let found = fs::metadata(folder)?;
    let is_open = found.mode() & STICKY == 0 && others_can_write(folder, &found, &Vec::from_iter(private_group()));
    Ok(is_open.then_some(found.mode() & 0o7777))
}

/// Whether its mode lets all users write to `path`, or a group that is none of `private`, or users and groups of a list.
fn others_can_write(path: &Path, found: &fs::Metadata, private: &[u32]) -> bool {
    let is_of_group = found.mode() & GROUP_WRITES != 0;
    found.mode() & OTHERS_WRITE != 0 || is_of_group && (!private.contains(&found.gid()) || has_access_list(path))
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
    let mut of_group = groups.lines().map(fields).filter(|fields| fields.len() > 3 && fields[2] == group).peekable();
    let has_only = |members: &str| members.split(',').all(|member| member.is_empty() || member == name);
    is_alone && of_group.peek().is_some() && of_group.all(|fields| fields[0] == *name && has_only(&fields[3]))
}

/// Whether users or groups of their own have rights to `path`. The group's bits of its mode are then the most that these have
/// (acl(5)).
fn has_access_list(path: &Path) -> bool {
    let mut list = [0u8; 64 << 10];
    rustix::fs::getxattr(path, c"system.posix_acl_access", &mut list[..]).is_ok_and(|bytes| bytes > 0)
}

fn look_at(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).with_context(|| format!("failed to look at {}", shown_path(path)))
}

#[cfg(test)]
mod tests;
