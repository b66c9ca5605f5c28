//! Files that are no case, or not even a file: each is refused in words, and none is waited for.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

fn refusal(path: &Path) -> String {
    format!("{:#}", CaseFile::read(path).err().unwrap_or_else(|| panic!("{path:?} was read")))
}

#[test]
fn what_is_no_regular_file_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    symlink("no\nwhere", path("dangling")).unwrap();
    symlink("loop", path("loop")).unwrap();
    symlink("/dev/null", path("device")).unwrap();
    std::fs::create_dir(path("folder.safetensors")).unwrap();
    mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    let _listener = UnixListener::bind(path("socket")).unwrap();
    File::create(path("sparse")).unwrap().set_len(MAX_BYTES + 1).unwrap();
    for (name, words) in [
        ("dangling", "a link to \"no\\nwhere\", which cannot be opened"),
        ("loop", "a link to \"loop\", which cannot be opened"),
        ("missing", "missing\" cannot be opened"),
        ("device", "this is a device, not a regular file"),
        ("folder.safetensors", "this is a folder, not a regular file"),
        ("pipe", "this is a pipe, not a regular file"),
        ("socket", "this is a socket, not a regular file"),
        ("sparse", "it has more than 4096 MiB"),
    ] {
        let said = refusal(&path(name));
        assert!(said.contains(words) && !said.contains('\n'), "{name}: {said}");
    }
}

/// Its length says nothing, and its first page is never mapped.
#[test]
fn a_file_whose_bytes_cannot_be_read_is_refused() {
    let said = refusal(Path::new("/proc/self/mem"));
    assert!(said.starts_with("the file cannot be read: "), "{said}");
}

/// A file that shrinks while it is read is one of these.
#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let whole = std::fs::read(golden("rmsnorm").path).unwrap();
    assert!(run_bytes(&whole).is_ok());
    for length in 0..whole.len() {
        assert!(run_bytes(&whole[..length]).is_err(), "{length} of {} bytes were graded", whole.len());
    }
}
