//! Where the tree lies that a command works on: a checkout, or an unpacked bundle.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

/// The nearest folder that holds `suites/` and `templates/`: `$CS336_ROOT`, else the working directory or one above it,
/// else the program's own folder or one above it.
///
/// Errors: there is none; or it is above the working directory alone, and another user owns it. Its kernels and Python
/// files run as this user.
pub fn find() -> Result<PathBuf> {
    if let Some(root) = std::env::var_os("CS336_ROOT").filter(|root| !root.is_empty()).map(PathBuf::from) {
        ensure!(is_complete(&root), "CS336_ROOT={} holds no suites/ and templates/", root.display());
        return Ok(root);
    }
    let program = std::env::current_exe().ok();
    for start in [std::env::current_dir().ok(), program.clone()].into_iter().flatten() {
        if let Some(root) = start.ancestors().find(|folder| is_complete(folder)) {
            // Who owns a folder above the program could as well replace the program.
            if !program.is_some_and(|program| program.starts_with(root)) {
                require_own(root)?;
            }
            return Ok(root.to_path_buf());
        }
    }
    bail!("no suites/ and templates/ here or above: run cs336 inside its checkout, or set CS336_ROOT")
}

/// The path that a variable holds, if it is absolute: an empty or relative one would lead into the working directory.
pub fn absolute(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|path| path.is_absolute())
}

fn is_complete(root: &Path) -> bool {
    root.join("suites").is_dir() && root.join("templates").is_dir()
}

/// Errors: another user, other than root, owns the tree or a part of it that runs as code.
fn require_own(root: &Path) -> Result<()> {
    let user = rustix::process::geteuid().as_raw();
    for folder in ["", "suites", "kernels"].map(|name| root.join(name)).iter().filter(|folder| folder.exists()) {
        let owner = folder.metadata().with_context(|| format!("failed to look at {}", folder.display()))?.uid();
        ensure!(
            [user, 0].contains(&owner),
            "{} belongs to user {owner}, and you are user {user}: set CS336_ROOT={} to run that user's code",
            folder.display(),
            root.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_or_relative_folder_of_the_environment_does_not_count() {
        for value in ["", "cuda", "./cuda"] {
            assert_eq!(absolute(Some(value.into())), None);
        }
        assert_eq!(absolute(Some("/opt/cuda".into())), Some("/opt/cuda".into()));
    }

    #[test]
    fn a_tree_of_another_user_is_refused_with_the_remedy() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can give a folder to another user");
            return;
        }
        for part in ["", "suites", "kernels"] {
            let tree = tempfile::tempdir().unwrap();
            ["suites", "kernels"].iter().for_each(|name| std::fs::create_dir(tree.path().join(name)).unwrap());
            require_own(tree.path()).unwrap();
            std::os::unix::fs::chown(tree.path().join(part), Some(65_534), None).unwrap();
            let said = require_own(tree.path()).unwrap_err().to_string();
            assert!(said.contains("belongs to user 65534") && said.contains("set CS336_ROOT="), "{said}");
        }
    }
}
