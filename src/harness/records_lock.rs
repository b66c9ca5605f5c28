//! One command at a time writes records, and removes what one that was killed left half written.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::fs::OFlags;

use super::partial::PARTIAL;
use super::record::Profile;
use super::store::{Layout, cannot_write, dangling};

/// Locks the records until the file is dropped, and removes what a killed command left half written. A second command that
/// writes records is refused, not queued.
pub fn lock_records(layout: &Layout) -> Result<File> {
    let path = layout.report().join("records").join(".lock");
    let open = || -> std::io::Result<File> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        // A pipe in its place would wait for a reader.
        let flags = OFlags::NONBLOCK.bits() as i32;
        // Whoever can open it can lock it.
        File::options().create(true).truncate(false).write(true).mode(0o600).custom_flags(flags).open(&path)
    };
    if let Some(link) = dangling(&path) {
        bail!("{}", layout.leads_nowhere(link));
    }
    let shown = layout.display(&path);
    let file = open().map_err(|error| match fs::metadata(&path) {
        Ok(found) if error.kind() == ErrorKind::PermissionDenied => anyhow!(
            "{shown} is locked by user {} alone: remove it when no cs336 of that user runs here, or work in a clone of your own",
            found.uid()
        ),
        _ => cannot_write(&path, &shown, &error),
    })?;
    match file.try_lock() {
        Ok(()) => {
            remove_partial(layout);
            Ok(file)
        }
        Err(fs::TryLockError::WouldBlock) => {
            bail!("another cs336 is writing records here ({shown} is locked): wait for it, or end it")
        }
        Err(fs::TryLockError::Error(error)) => Err(error).with_context(|| format!("failed to lock {shown}")),
    }
}

/// Nobody else writes in these folders while the records are locked. Best effort: what is left is ignored.
fn remove_partial(layout: &Layout) {
    for profile in Profile::ALL {
        // A subject's lock does not keep others from accepting records.
        let accepted = layout.subject.is_none().then(|| layout.accepted(profile, ""));
        for file in accepted.into_iter().chain([layout.local(profile, "")]) {
            let entries = file.parent().and_then(|folder| fs::read_dir(folder).ok());
            for entry in entries.into_iter().flatten().flatten() {
                if entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
                    let _ = fs::remove_file(entry.path());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lock_is_refused_until_the_first_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::at(folder.path().to_path_buf());
        let first = lock_records(&layout).unwrap();
        let refusal = format!("{:#}", lock_records(&layout).err().unwrap());
        assert!(refusal.contains("another cs336"), "{refusal}");
        drop(first);
        lock_records(&layout).map(drop).unwrap();
    }
}
