//! Folders for files passed to the peer: in memory if there is room, and removed even if this process is killed.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::printable::shown_path;
use crate::process::{IN_MEMORY, LockedFolder, remove_unlocked, require_closed, room};
use crate::units::human_bytes;

/// A folder for `bytes`: in memory where there is room for twice as much, else where temporary files go.
pub fn scratch(bytes: u64) -> Result<LockedFolder> {
    scratch_in(Path::new(IN_MEMORY), &tempfile::env::temp_dir(), bytes)
}

fn scratch_in(memory: &Path, disk: &Path, bytes: u64) -> Result<LockedFolder> {
    // What was left may take the room.
    [memory, disk].into_iter().for_each(remove_unlocked);
    let has_room = |folder: &Path, bytes| room(folder).is_ok_and(|room| room >= bytes);
    // Volumes in memory that Kubernetes makes have the mode 777.
    let fits_in_memory = has_room(memory, 2 * bytes) && require_closed(memory).is_ok();
    let folder = if fits_in_memory { memory } else { disk };
    ensure!(
        fits_in_memory || has_room(disk, bytes + (1 << 20)),
        "neither {} nor {} has room for {}, by which the peer gets its weights: set TMPDIR to a folder that has",
        shown_path(memory),
        shown_path(disk),
        human_bytes(bytes)
    );
    let made = require_closed(folder).and_then(|()| LockedFolder::new_in(folder, "scratch"));
    made.with_context(|| format!("making a folder in {}", shown_path(folder)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn scratch_is_made_where_there_is_room_and_refused_where_there_is_none() {
        let folder = scratch(1 << 10).unwrap();
        assert!(folder.path().is_dir());
        assert!(scratch(1 << 60).unwrap_err().to_string().contains("TMPDIR"));
    }

    #[test]
    fn memory_that_others_can_write_to_is_passed_by() {
        let (memory, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (mode, expected) in [(0o777, &disk), (0o1777, &memory)] {
            fs::set_permissions(memory.path(), fs::Permissions::from_mode(mode)).unwrap();
            let folder = scratch_in(memory.path(), disk.path(), 1 << 10).unwrap();
            assert!(folder.path().starts_with(expected.path()), "{mode:o}");
        }
    }
}
