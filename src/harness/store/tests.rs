//! Files of the store: written whole or not at all, and hashes of kernels.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown, symlink};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::super::named_files::require_writable;
use super::*;
use crate::process::become_an_owner;

#[test]
fn sha256_of_abc_is_the_published_one() {
    assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

#[test]
fn an_atomic_write_replaces_the_file_and_leaves_no_temporary_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/er/file.json");
    write_atomically(&path, b"one").unwrap();
    write_atomically(&path, b"two").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"two");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn a_write_through_a_link_changes_its_target_and_leaves_the_link() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("deep")).unwrap();
    fs::write(path("deep/private"), "old").unwrap();
    fs::set_permissions(path("deep/private"), fs::Permissions::from_mode(0o600)).unwrap();
    for (link, target) in [("live", "deep/private"), ("dangling", "deep/new"), ("far", "none/yet/new")] {
        symlink(target, path(link)).unwrap();
        write_atomically(&path(link), b"new").unwrap();
        assert_eq!(fs::read_link(path(link)).unwrap(), Path::new(target));
        assert_eq!(fs::read(path(target)).unwrap(), b"new");
    }
    assert_eq!(fs::metadata(path("deep/private")).unwrap().permissions().mode() & 0o777, 0o600);
}

/// That of its folder's owner, where the folder is sticky.
#[test]
fn a_file_that_cannot_be_replaced_is_written_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.xml");
    fs::write(&file, "an older and longer text").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    if [&file, folder.path()].iter().any(|path| chown(path, Some(1234), None).is_err()) {
        eprintln!("skipped: only root can give a file to another user");
        return;
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let write = || {
        become_an_owner();
        let tried = require_writable([file.as_path()]);
        tried.and_then(|()| write_atomically(&file, b"new")).map_err(|error| format!("{error:#}"))
    };
    assert_eq!(std::thread::scope(|scope| scope.spawn(write).join().unwrap()), Ok(()));
    assert_eq!(fs::read(&file).unwrap(), b"new");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a temporary file is left");
}

#[test]
fn what_is_no_regular_file_is_written_to_and_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let error = format!("{:#}", write_atomically(&pipe, b"for nobody").unwrap_err());
    assert!(error.contains("pipe cannot be written: ") && error.ends_with("; remove what is in its place"), "{error}");
    // For reading and writing, which waits for no other side.
    let mut reader = File::options().read(true).write(true).open(&pipe).unwrap();
    write_atomically(&pipe, b"through").unwrap();
    assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    let mut through = [0; 7];
    reader.read_exact(&mut through).unwrap();
    assert_eq!(&through, b"through");
    // Through a link, so that a fault would replace the link and not the device.
    let full = folder.path().join("full");
    symlink("/dev/full", &full).unwrap();
    let error = format!("{:#}", write_atomically(&full, b"x").unwrap_err());
    assert!(error.contains("full cannot be written: ") && error.contains("No space left"), "{error}");
    assert!(full.is_symlink() && !full.is_file());
    assert!(write_atomically(folder.path(), b"x").is_err());
}

#[test]
fn a_record_is_moved_aside_to_a_name_that_nothing_has() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::at(folder.path().into());
    let path = layout.local(Profile::Cpu, "x");
    for (content, name) in [(b"one", "x.json.unreadable"), (b"two", "x.json.unreadable-2")] {
        write_atomically(&path, content).unwrap();
        let said = layout.set_aside(&path, "unreadable").unwrap();
        assert_eq!(said, format!("moved report/records/cpu/x.json to report/records/cpu/{name}"));
        assert_eq!(fs::read(path.with_file_name(name)).unwrap(), content);
        assert!(!path.exists());
    }
}

#[test]
fn a_kernels_hash_covers_exactly_the_headers_that_it_includes() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::at(folder.path().to_path_buf());
    let write = |name: &str, text: &str| write_atomically(&folder.path().join("kernels").join(name), text.as_bytes());
    write("plain.cu", "code").unwrap();
    assert_eq!(layout.kernel_hash("plain.cu").unwrap(), sha256(b"code\n"));
    write("with.cu", "#include <math.h>\n#include \"lib/a.cuh\"\n").unwrap();
    write("lib/a.cuh", "#include \"lib/b.cuh\"\n").unwrap();
    write("lib/b.cuh", "#include \"lib/a.cuh\"\n").unwrap();
    write("lib/c.cuh", "").unwrap();
    let hash = || layout.kernel_hash("with.cu").unwrap();
    let first = hash();
    write("lib/c.cuh", "other").unwrap();
    assert_eq!(hash(), first);
    write("lib/b.cuh", "#include \"lib/a.cuh\"\nchanged\n").unwrap();
    assert_ne!(hash(), first);
    fs::remove_file(folder.path().join("kernels/lib/b.cuh")).unwrap();
    assert!(format!("{:#}", layout.kernel_hash("with.cu").unwrap_err()).contains("kernels/lib/b.cuh"));
}

#[test]
fn comments_are_dropped_and_strings_are_kept() {
    let source = "// Notebook\n//   1. slow\n\nint a; // one\nasm(\"// \\\" //\"); // two\n  // three\n  b / c;\n";
    assert_eq!(code_of(source), "int a;\nasm(\"// \\\" //\");\n  b / c;\n");
    assert_ne!(code_of("a / b;"), code_of("a // b;"));
}

#[test]
fn a_link_that_leads_nowhere_is_no_missing_record() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::at(folder.path().into());
    let read = || layout.read_accepted_file("x", Profile::Gpu).map_err(|error| error.to_string());
    assert_eq!(read(), Ok(None));
    fs::create_dir_all(folder.path().join("snapshots/gpu")).unwrap();
    let record = layout.accepted(Profile::Gpu, "x");
    symlink("nowhere", &record).unwrap();
    assert!(read().unwrap_err().contains("snapshots/gpu/x.json is a link that leads nowhere"));
    fs::remove_file(record).unwrap();
    fs::remove_dir(folder.path().join("snapshots/gpu")).unwrap();
    symlink("nowhere", folder.path().join("snapshots/gpu")).unwrap();
    assert!(read().unwrap_err().contains("snapshots/gpu is a link that leads nowhere"));
}

#[test]
fn a_failure_for_want_of_room_says_what_to_do() {
    let full = |errno: Errno| format!("x: {}: in the smallest failing case [1]", io::Error::from(errno));
    assert!(with_room(full(Errno::FBIG)).ends_with("[1]; raise the limit on file sizes (ulimit -f)"));
    assert!(with_room(full(Errno::NOSPC)).ends_with("[1]; free space on its disk"));
    assert_eq!(with_room("x".into()), "x");
}
