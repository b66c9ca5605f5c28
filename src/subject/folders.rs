//! The folders of a subject's processes: what each is given, what all of them write, and whether there is room for it.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use rustix::fs::{StatVfsMountFlags, statvfs};
use serde::{Deserialize, Serialize};

use super::SubjectFault;
use crate::error::NotGraded;
use crate::printable::shown_path;
use crate::process::{LEAST_ROOM, room};
use crate::units::human_bytes;

/// The most bytes of one file that the subject writes, and of all that it leaves: a model's values and compiled code fit.
pub(super) const MOST_BYTES: u64 = 4 << 30;
/// The most files and folders that it leaves.
const MOST_FILES: usize = 200_000;

/// The folders of a subject's processes. It may not write into the one that we write to, or it could lead our writing astray.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Folders {
    /// No process of the subject may read it but for its own folder in it: a rank must not see what others are given.
    pub(super) given: PathBuf,
    pub(super) scratch: PathBuf,
}

impl Folders {
    /// Makes both in `folder`.
    ///
    /// Errors: [`NotGraded`] where they cannot be made, no code can be loaded from them, or their paths are no text, as messages to
    /// Python are.
    pub(super) fn make(folder: &Path) -> Result<Self> {
        let remedy = "is not UTF-8; set TMPDIR to a folder whose name is";
        ensure!(
            folder.to_str().is_some(),
            NotGraded(format!("the folder for temporary files, {}, {remedy}", shown_path(folder)))
        );
        let made = Self { given: folder.join("given"), scratch: folder.join("scratch") };
        [&made.given, &made.scratch].into_iter().try_for_each(|folder| make(folder))?;
        let is_executable =
            statvfs(&made.scratch).map_or(true, |disk| !disk.f_flag.contains(StatVfsMountFlags::NOEXEC));
        require_executable(folder, is_executable)?;
        Ok(made)
    }

    /// Those of the process of this name, whose `given` is its own.
    pub(super) fn of_process(&self, name: &str) -> Result<Self> {
        let given = self.given.join(name);
        make(&given)?;
        Ok(Self { given, ..self.clone() })
    }

    /// The file that is made once the process's program has started.
    pub(super) fn started(&self) -> PathBuf {
        self.given.join("started")
    }

    pub(super) fn has_started(&self) -> bool {
        self.started().exists()
    }

    /// Errors: [`SubjectFault`] where the subject has left more than it may. What it writes within one call is bounded for
    /// each file alone.
    pub(super) fn require_small(&self) -> Result<()> {
        self.require_at_most(MOST_BYTES, MOST_FILES)
    }

    fn require_at_most(&self, most_bytes: u64, most_files: usize) -> Result<()> {
        let (mut bytes, mut files, mut folders) = (0, 0, vec![self.scratch.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let Ok(found) = entry.metadata() else { continue };
                files += 1;
                bytes += if found.is_file() { found.len() } else { 0 };
                folders.extend(found.is_dir().then(|| entry.path()));
                let words = || {
                    let (most, gib) = (most_files, most_bytes >> 30);
                    format!("the subject leaves more than {gib} GiB or {most} files in its scratch folder, its HOME")
                };
                ensure!(bytes <= most_bytes && files <= most_files, SubjectFault::new(words()));
            }
        }
        Ok(())
    }

    /// Errors: [`NotGraded`] where nobody can write to their disk, or it is nearly full, so that a failed call may be no fault of
    /// the subject: a compiler that finds no room removes what it wrote.
    pub(super) fn require_room(&self) -> Result<()> {
        let probe = self.given.join("probe");
        std::fs::write(&probe, [1; 1 << 16]).map_err(|error| NotGraded::while_doing(&shown_path(&probe), error))?;
        std::fs::remove_file(probe)?;
        require_least_room(room(&self.given)?)
    }
}

fn require_least_room(room: u64) -> Result<()> {
    let words = || {
        let [has, needs] = [room, LEAST_ROOM].map(human_bytes);
        format!("the disk of temporary files has room for {has}; set TMPDIR to a folder with more than {needs}")
    };
    ensure!(room >= LEAST_ROOM, NotGraded(words()));
    Ok(())
}

/// Errors: [`NotGraded`] where no compiled code can be loaded from the folder, as that of torch.compile or Triton is.
fn require_executable(folder: &Path, is_executable: bool) -> Result<()> {
    let remedy = "lies on a disk that is mounted noexec, where no compiled code runs; set TMPDIR to a folder elsewhere";
    let words = || NotGraded(format!("the folder for temporary files, {}, {remedy}", shown_path(folder)));
    ensure!(is_executable, words());
    Ok(())
}

fn make(folder: &Path) -> Result<()> {
    let making = || format!("making {}", shown_path(folder));
    Ok(std::fs::create_dir(folder).map_err(|error| NotGraded::while_doing(&making(), error))?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_folder_where_no_code_can_be_loaded_is_refused_with_the_remedy() {
        require_executable(Path::new("/tmp"), true).unwrap();
        let refused = require_executable(Path::new("/tmp"), false).unwrap_err();
        assert!(
            NotGraded::of(&refused).is_some_and(|NotGraded(words)| words.contains("/tmp") && words.contains("TMPDIR"))
        );
    }

    /// A compiler that found no room has removed what it wrote, so that something can be written again.
    #[test]
    fn a_failure_on_a_disk_that_is_nearly_full_is_not_charged_to_the_subject() {
        require_least_room(1 << 30).unwrap();
        let refused = require_least_room(20 << 20).unwrap_err();
        let words =
            "the disk of temporary files has room for 20.00 MiB; set TMPDIR to a folder with more than 128.00 MiB";
        assert!(NotGraded::of(&refused).is_some_and(|NotGraded(said)| said == words), "{refused}");
    }

    fn folders() -> (tempfile::TempDir, Folders) {
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::make(folder.path()).unwrap();
        (folder, folders)
    }

    #[test]
    fn what_a_subject_leaves_is_bounded_in_bytes_and_in_files() {
        let (_folder, folders) = folders();
        let deep = folders.scratch.join("a/b");
        std::fs::create_dir_all(&deep).unwrap();
        File::create(deep.join("large")).unwrap().set_len(3 << 30).unwrap();
        folders.require_small().unwrap();
        File::create(folders.scratch.join("second")).unwrap().set_len(2 << 30).unwrap();
        for (bytes, files) in [(MOST_BYTES, MOST_FILES), (u64::MAX, 3)] {
            let error = folders.require_at_most(bytes, files).unwrap_err();
            assert!(error.is::<SubjectFault>(), "{error:#}");
        }
    }

    #[test]
    fn a_failed_call_where_nobody_can_write_is_no_fault_of_the_subject() {
        let (folder, folders) = folders();
        folders.require_room().unwrap();
        drop(folder);
        assert!(NotGraded::of(&folders.require_room().unwrap_err()).is_some());
    }
}
