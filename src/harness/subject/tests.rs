//! Tests of what is refused as a subject, and what the hash of its code covers.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;
use crate::process::become_an_owner;

#[test]
fn a_folder_without_adapters_is_refused_with_what_is_expected() {
    let folder = tempfile::tempdir().unwrap();
    let said = format!("{:#}", Subject::find(folder.path(), 1, 1, 0).unwrap_err());
    assert!(said.contains("has neither tests/adapters.py nor adapters.py"), "{said}");
    let said = format!("{:#}", Subject::find(&folder.path().join("nowhere"), 1, 1, 0).unwrap_err());
    assert!(said.contains("nowhere cannot be opened"), "{said}");
    fs::write(folder.path().join("adapters.py"), "").unwrap();
    let subject = Subject::find(folder.path(), 1, 1, 0).unwrap();
    assert_ne!(subject.seed_for(0), subject.seed_for(1));
    let elsewhere = tempfile::tempdir().unwrap();
    let [one, other] = [folder.path(), elsewhere.path()].map(|above| {
        let folder = above.join("n".repeat(255));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("adapters.py"), "").unwrap();
        Subject::find(&folder, 1, 1, 0).unwrap().report_name()
    });
    assert_ne!(one, other);
    assert!(one.starts_with(&"n".repeat(60)) && one.len() < 255, "{one}");
    let patience = |limit_s| Subject { limit_s, ..subject.clone() }.patience(Duration::from_secs(600)).as_secs();
    assert_eq!([patience(1), patience(60)], [600, 300 + 64 * 60], "each of many calls may take its own limit");
}

#[test]
fn a_folder_that_cannot_be_read_is_said_so() {
    let refused = |unreadable: &'static str| {
        let attempt = move || {
            become_an_owner();
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("ada/tests")).unwrap();
            fs::write(folder.path().join("ada/tests/adapters.py"), "").unwrap();
            let set =
                |mode| fs::set_permissions(folder.path().join(unreadable), fs::Permissions::from_mode(mode)).unwrap();
            set(0);
            let said = format!("{:#}", Subject::find(&folder.path().join("ada"), 1, 1, 0).unwrap_err());
            set(0o700);
            said
        };
        std::thread::spawn(attempt).join().unwrap()
    };
    for unreadable in ["ada", "ada/tests"] {
        let said = refused(unreadable);
        assert!(said.contains("ada cannot be read: Permission denied") && said.contains("chmod -R u+rX"), "{said}");
    }
}

/// A subject of these files, each its own name, and of these links, `link -> target`.
fn subject_of(folder: &Path, files: &[&str], links: &[(&str, &str)]) -> Subject {
    for name in files.iter().chain(&["adapters.py"]) {
        fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
        fs::write(folder.join(name), name).unwrap();
    }
    for (link, target) in links {
        symlink(target, folder.join(link)).unwrap();
    }
    Subject::find(folder, 1, 1, 0).unwrap()
}

#[test]
fn the_hash_is_that_of_the_code_wherever_the_folder_lies() {
    let [here, there] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let files = ["package/a.py", "package/b.cu"];
    let [first, second] = [&here, &there].map(|folder| subject_of(folder.path(), &files, &[]));
    assert_eq!(first.hash().unwrap(), second.hash().unwrap());
    for (name, counts) in [("package/a.py", true), ("new.py", true), ("data.bin", false), (".git/x.py", false)] {
        let before = first.hash().unwrap();
        fs::create_dir_all(here.path().join(name).parent().unwrap()).unwrap();
        fs::write(here.path().join(name), "other").unwrap();
        assert_eq!(first.hash().unwrap() != before, counts, "{name}");
    }
    fs::rename(there.path().join("package/a.py"), there.path().join("package/c.py")).unwrap();
    assert_ne!(second.hash().unwrap(), first.hash().unwrap());
}

#[test]
fn a_file_of_terabytes_is_not_read_for_the_hash() {
    let folder = tempfile::tempdir().unwrap();
    let subject = subject_of(folder.path(), &[], &[]);
    let data = fs::File::create(folder.path().join("data.json")).unwrap();
    data.set_len(1 << 42).unwrap();
    let before = subject.hash().unwrap();
    assert_eq!(subject.hash().unwrap(), before);
    data.set_len((1 << 42) + 1).unwrap();
    assert_ne!(subject.hash().unwrap(), before);
}

#[test]
fn the_hash_covers_code_behind_a_link_within_the_folder_and_no_link_out_of_it() {
    let [folder, outside] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    fs::write(outside.path().join("theirs.py"), "theirs").unwrap();
    let elsewhere = outside.path().to_str().unwrap();
    let links = [
        ("impl.py", ".code/impl.py"),
        ("package", ".package"),
        ("loop", "."),
        (".package/up", ".."),
        ("dangling.py", "nowhere.py"),
        ("elsewhere", elsewhere),
    ];
    let subject = subject_of(folder.path(), &[".code/impl.py", ".package/deep/b.py", ".other.py"], &links);
    let changes = |path: &Path, counts: bool| {
        let before = subject.hash().unwrap();
        fs::write(path, "changed").unwrap();
        assert_eq!(subject.hash().unwrap() != before, counts, "{}", shown_path(path));
    };
    changes(&folder.path().join(".code/impl.py"), true);
    changes(&folder.path().join(".package/deep/b.py"), true);
    changes(&outside.path().join("theirs.py"), false);
    let before = subject.hash().unwrap();
    fs::remove_file(folder.path().join("impl.py")).unwrap();
    symlink(".package/deep/b.py", folder.path().join("impl.py")).unwrap();
    assert_ne!(subject.hash().unwrap(), before, "the link leads to other code");
}

#[test]
fn a_large_source_is_hashed_and_an_environment_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let links = [("venv/lib64", "lib"), ("site", "venv/lib")];
    let subject = subject_of(folder.path(), &["venv/pyvenv.cfg", "venv/lib/torch.so", "venv/lib/a.py"], &links);
    let set = |name: &str, bytes| fs::File::create(folder.path().join(name)).unwrap().set_len(bytes).unwrap();
    let before = subject.hash().unwrap();
    set("venv/lib/torch.so", 7);
    assert_eq!(subject.hash().unwrap(), before);
    set("tokens.txt", 65 << 20);
    let large = subject.hash().unwrap();
    assert_ne!(large, before);
    set("tokens.txt", (65 << 20) + 1);
    assert_ne!(subject.hash().unwrap(), large);
}

#[test]
fn a_remedy_names_the_folder_as_a_shell_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let within = folder.path().canonicalize().unwrap();
    let subject = subject_of(&folder.path().join("a b$(id)"), &[], &[]);
    assert_eq!(subject.argument(), format!(" --subject '{}/a b$(id)'", shown_path(within)));
}
