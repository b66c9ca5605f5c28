//! Folders for files passed to the peer: in memory if there is room, and removed even if this process is killed.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::printable::shown_path;
use crate::units::human_bytes;

/// What scratch folders begin with; the process that made one follows.
const SCRATCH: &str = "cs336-scratch-";

/// Removes the scratch folders of processes that were killed: in memory they would be lost until the machine restarts.
fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(owner) = name.strip_prefix(SCRATCH).and_then(|rest| rest.split('-').next()) else { continue };
        if owner.parse::<u32>().is_ok() && !Path::new("/proc").join(owner).exists() {
            // Another process may remove them at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A folder for `bytes`: in memory where there is room for twice as much, else where temporary files go.
pub fn scratch(bytes: u64) -> Result<TempDir> {
    let disk = std::env::temp_dir();
    for (folder, needed) in [(Path::new("/dev/shm"), 2 * bytes), (disk.as_path(), bytes + (1 << 20))] {
        sweep(folder);
        let room = rustix::fs::statvfs(folder).map(|fs| fs.f_bavail * fs.f_frsize);
        if room.is_ok_and(|room| room >= needed) {
            let made = tempfile::Builder::new().prefix(&format!("{SCRATCH}{}-", std::process::id())).tempdir_in(folder);
            return made.with_context(|| format!("making a folder in {}", shown_path(folder)));
        }
    }
    bail!(
        "neither /dev/shm nor {} has room for {}, by which the peer gets its weights: set TMPDIR to a folder that has",
        shown_path(&disk),
        human_bytes(bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_made_where_there_is_room_and_refused_where_there_is_none() {
        let folder = scratch(1 << 10).unwrap();
        assert!(folder.path().is_dir());
        assert!(scratch(1 << 60).unwrap_err().to_string().contains("TMPDIR"));
    }

    #[test]
    fn folders_of_killed_processes_are_removed_and_those_of_living_ones_kept() {
        let folder = tempfile::tempdir().unwrap();
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        let names = [format!("{SCRATCH}{}-a", gone.id()), format!("{SCRATCH}{}-b", std::process::id()), "other".into()];
        names.iter().for_each(|name| std::fs::create_dir(folder.path().join(name)).unwrap());
        sweep(folder.path());
        let left = names.map(|name| folder.path().join(name).exists());
        assert_eq!(left, [false, true, true]);
    }
}
