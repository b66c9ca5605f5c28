//! Folders for files passed to the peer: in memory if there is room, and removed even if this process is killed.

use std::path::Path;

use anyhow::{Context as _, Result, bail};

use crate::printable::shown_path;
use crate::process::{IN_MEMORY, LockedFolder, remove_unlocked, require_closed};
use crate::units::human_bytes;

/// A folder for `bytes`: in memory where there is room for twice as much, else where temporary files go.
pub fn scratch(bytes: u64) -> Result<LockedFolder> {
    let disk = tempfile::env::temp_dir();
    for (folder, needed) in [(Path::new(IN_MEMORY), 2 * bytes), (disk.as_path(), bytes + (1 << 20))] {
        // What was left may take the room.
        remove_unlocked(folder);
        let room = rustix::fs::statvfs(folder).map(|fs| fs.f_bavail * fs.f_frsize);
        if room.is_ok_and(|room| room >= needed) {
            let made = require_closed(folder).and_then(|()| LockedFolder::new_in(folder, "scratch"));
            return made.with_context(|| format!("making a folder in {}", shown_path(folder)));
        }
    }
    bail!(
        "neither {IN_MEMORY} nor {} has room for {}, by which the peer gets its weights: set TMPDIR to a folder that has",
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
}
