//! The hashes of a tree's files: the manifest of a bundle, and the hash of the Python peers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::provenance::Commit;
use super::store::{sha256, sha256_of_file};
use crate::json;
use crate::printable::{one_line, shell_word, shown_path};
use crate::root::read_text;

/// The file in which a bundle keeps its manifest.
pub const MANIFEST: &str = "bundle.json";
/// The program in a bundle.
pub const PROGRAM: &str = "bin/cs336";
/// The launcher in a bundle.
pub const LAUNCHER: &str = "cs336";

/// What a manifest covers beside the program. Commands in a bundle write to `report` and `snapshots`.
const COVERED: &[&str] = &[LAUNCHER, "kernels", "suites", "templates"];

/// The commit that a bundle was packed from, and its files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub commit: String,
    pub dirty: bool,
    /// SHA-256 by name.
    files: BTreeMap<String, String>,
}

/// How `file` of the tree in `root` comes back: from git, which a bundle has not.
pub fn restoring(root: &Path, file: &str) -> String {
    if is_bundle(root) {
        return "unpack the bundle again".into();
    }
    let is_here = std::env::current_dir().is_ok_and(|here| here == root);
    let in_tree = if is_here { String::new() } else { format!(" -C {}", shell_word(root)) };
    // From the commit: where the change or the deletion is staged, the index has not the committed file.
    format!("`git{in_tree} checkout HEAD -- {file}`")
}

/// Whether the tree in `root` is a bundle, not a checkout.
pub fn is_bundle(root: &Path) -> bool {
    root.join(MANIFEST).exists()
}

impl Manifest {
    /// Of the bundle that lies in `root`, packed from `commit`.
    pub fn of(root: &Path, commit: Commit) -> Result<Self> {
        let Commit { commit, dirty, .. } = commit;
        Ok(Self { commit, dirty, files: covered(root, &root.join(PROGRAM))? })
    }

    /// The manifest in `root`; `None` where there is none, as in a checkout.
    pub fn read(root: &Path) -> Result<Option<Self>> {
        let remedy = || format!("failed to read {MANIFEST}, which names the bundle's files: unpack the bundle again");
        match read_text(&root.join(MANIFEST)) {
            Ok(text) => json::from_str(&text).map(Some).with_context(remedy),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(remedy),
        }
    }

    /// The files that were changed, added or removed since the bundle was packed. `program` is what runs.
    pub fn modified(&self, root: &Path, program: &Path) -> Result<Vec<String>> {
        let files = covered(root, program)?;
        let names: BTreeSet<&String> = self.files.keys().chain(files.keys()).collect();
        Ok(names.into_iter().filter(|name| self.files.get(*name) != files.get(*name)).cloned().collect())
    }
}

/// In place of the hash of a link, a pipe or a device.
const NO_FILE: &str = "not a regular file";

/// SHA-256 of the names and texts of the Python files in `suites/peers`; `None` where there are none.
///
/// Errors: a link, a pipe or a device among them, whose code no record could name.
pub fn peers_hash(root: &Path) -> Result<Option<String>> {
    let files = hashes_in(root, "suites/peers", |name, found| name.ends_with(".py") || found.is_symlink())?;
    if let Some((name, _)) = files.iter().find(|(_, hash)| *hash == NO_FILE) {
        bail!("{} is {NO_FILE}: put a file in its place", one_line(name));
    }
    hash_of(&files)
}

/// SHA-256 of the names and texts of all suites; `None` where there are none.
pub fn suites_hash(root: &Path) -> Result<Option<String>> {
    hash_of(&hashes_in(root, "suites", |name, _| name.ends_with(".toml") && name.matches('/').count() == 1)?)
}

fn hash_of(files: &BTreeMap<String, String>) -> Result<Option<String>> {
    Ok(if files.is_empty() { None } else { Some(sha256(&serde_json::to_vec(files)?)) })
}

/// The folder itself may be a link.
fn hashes_in(root: &Path, name: &str, is_meant: impl Fn(&str, &Metadata) -> bool) -> Result<BTreeMap<String, String>> {
    let (folder, mut files) = (root.join(name), BTreeMap::new());
    hash_files(&folder.canonicalize().unwrap_or(folder), name, &is_meant, &mut files)?;
    Ok(files)
}

fn covered(root: &Path, program: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::from([(PROGRAM.to_string(), hash(program)?)]);
    COVERED.iter().try_for_each(|name| hash_files(&root.join(name), name, &|_, _| true, &mut files))?;
    Ok(files)
}

/// Adds the hash of the file `path` under `name`, or of each file in that folder, where it is meant. A missing one adds nothing.
fn hash_files(
    path: &Path,
    name: &str,
    is_meant: &dyn Fn(&str, &Metadata) -> bool,
    hashes: &mut BTreeMap<String, String>,
) -> Result<()> {
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    if found.is_dir() {
        for entry in fs::read_dir(path).with_context(|| format!("failed to list {name}"))? {
            let path = entry?.path();
            let inner = path.file_name().unwrap_or_default().to_string_lossy();
            hash_files(&path, &format!("{name}/{inner}"), is_meant, hashes)?;
        }
        return Ok(());
    }
    if !is_meant(name, &found) {
        return Ok(());
    }
    // A link or a pipe is not read: no bundle has one.
    let hash = if found.is_file() { hash(path)? } else { NO_FILE.into() };
    hashes.insert(name.to_string(), hash);
    Ok(())
}

fn hash(path: &Path) -> Result<String> {
    sha256_of_file(path).with_context(|| format!("failed to read {}", shown_path(path)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A bundle with a file of each kind.
    fn bundle() -> (tempfile::TempDir, Manifest) {
        let folder = tempfile::tempdir().unwrap();
        for name in [PROGRAM, LAUNCHER, "kernels/lib/a.cuh", "suites/p.toml", "suites/peers/a.py", "templates/p.md"] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        let manifest = Manifest::of(folder.path(), Commit { commit: "abc".into(), ..Commit::default() }).unwrap();
        (folder, manifest)
    }

    fn modified((folder, manifest): &(tempfile::TempDir, Manifest)) -> Vec<String> {
        manifest.modified(folder.path(), &folder.path().join(PROGRAM)).unwrap()
    }

    #[test]
    fn a_changed_suite_changes_the_hash_of_the_suites() {
        let (folder, _) = bundle();
        let before = suites_hash(folder.path()).unwrap().unwrap();
        fs::write(folder.path().join("suites/p.toml"), "changed").unwrap();
        assert_ne!(suites_hash(folder.path()).unwrap().unwrap(), before);
    }

    #[test]
    fn a_change_of_each_packed_file_is_named() {
        let bundle = bundle();
        assert!(modified(&bundle).is_empty());
        assert_eq!(bundle.1.files.len(), 6);
        for name in bundle.1.files.keys() {
            let path = bundle.0.path().join(name);
            fs::write(&path, "changed").unwrap();
            assert_eq!(modified(&bundle), [name.as_str()]);
            fs::remove_file(&path).unwrap();
            if name != PROGRAM {
                assert_eq!(modified(&bundle), [name.as_str()]);
            }
            fs::write(&path, name).unwrap();
        }
    }

    #[test]
    fn a_file_that_was_added_and_one_that_became_a_link_are_named() {
        let bundle = bundle();
        let at = |name: &str| bundle.0.path().join(name);
        fs::write(at("suites/peers/torch.py"), "").unwrap();
        fs::write(at("suites/peers").join(OsStr::from_bytes(b"\xff.py")), "").unwrap();
        fs::rename(at("templates/p.md"), at("elsewhere")).unwrap();
        symlink(at("elsewhere"), at("templates/p.md")).unwrap();
        assert_eq!(modified(&bundle), ["suites/peers/torch.py", "suites/peers/\u{fffd}.py", "templates/p.md"]);
    }

    #[test]
    fn records_and_reports_may_change_and_another_program_counts_as_modified() {
        let bundle = bundle();
        for folder in ["report/records/cpu", "snapshots/cpu"] {
            fs::create_dir_all(bundle.0.path().join(folder)).unwrap();
            fs::write(bundle.0.path().join(folder).join("p.json"), "{}").unwrap();
        }
        assert!(modified(&bundle).is_empty());
        let other = bundle.1.modified(bundle.0.path(), &bundle.0.path().join(LAUNCHER)).unwrap();
        assert_eq!(other, [PROGRAM]);
    }

    #[test]
    fn the_hash_of_the_peers_changes_with_their_code_alone() {
        let (folder, _) = bundle();
        let hash = || peers_hash(folder.path()).unwrap();
        let first = hash();
        assert_eq!(first.as_ref().map(String::len), Some(64));
        fs::write(folder.path().join("suites/peers/a.pyc"), "compiled").unwrap();
        assert_eq!(hash(), first);
        fs::write(folder.path().join("suites/peers/a.py"), "changed").unwrap();
        assert_ne!(hash(), first);
        let elsewhere = folder.path().join("elsewhere");
        fs::rename(folder.path().join("suites/peers"), &elsewhere).unwrap();
        assert_eq!(hash(), None);
        symlink(&elsewhere, folder.path().join("suites/peers")).unwrap();
        let linked = hash();
        assert!(linked.is_some() && linked != first);
        // Python takes a folder before a file of its name.
        symlink("/nowhere", elsewhere.join("a")).unwrap();
        let said = peers_hash(folder.path()).unwrap_err().to_string();
        assert_eq!(said, "suites/peers/a is not a regular file: put a file in its place");
    }
}
