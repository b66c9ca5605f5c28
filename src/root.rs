//! Where the tree lies that a command works on: a checkout, or an unpacked bundle.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

/// The nearest folder that holds `suites/` and `templates/`: `$CS336_ROOT`, else the working directory or one above it,
/// else the program's own folder or one above it.
pub fn find() -> Result<PathBuf> {
    if let Some(root) = std::env::var_os("CS336_ROOT").map(PathBuf::from) {
        ensure!(is_complete(&root), "CS336_ROOT={} holds no suites/ and templates/", root.display());
        return Ok(root);
    }
    let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
    for start in starts.into_iter().flatten() {
        if let Some(root) = start.ancestors().find(|folder| is_complete(folder)) {
            return Ok(root.to_path_buf());
        }
    }
    bail!("no suites/ and templates/ here or above: run cs336 inside its checkout, or set CS336_ROOT")
}

fn is_complete(root: &Path) -> bool {
    root.join("suites").is_dir() && root.join("templates").is_dir()
}
