//! Tests of whose Python is chosen, what it may read, what is refused as a subject, and what the hash of its code covers.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;
use crate::process::become_an_owner;

#[test]
fn the_variable_precedes_the_subjects_own_environment_and_that_precedes_ours() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join(".venv/bin/python");
    assert_ne!(python_of(folder.path(), None), own);
    fs::create_dir_all(own.parent().unwrap()).unwrap();
    fs::write(&own, "").unwrap();
    assert_eq!(python_of(folder.path(), None), own);
    assert_eq!(python_of(folder.path(), Some("".into())), own);
    assert_eq!(python_of(folder.path(), Some("/opt/python".into())), Path::new("/opt/python"));
}

#[test]
fn a_program_that_a_link_in_the_folder_leads_to_comes_from_the_folder() {
    let outer = tempfile::tempdir().unwrap();
    let at = |name: &str| outer.path().canonicalize().unwrap().join(name);
    fs::create_dir_all(at("subject/env/bin")).unwrap();
    fs::create_dir_all(at("tools/bin")).unwrap();
    fs::write(at("tools/bin/python"), "").unwrap();
    for (link, target) in [
        ("subject/.venv", "../tools"),
        ("subject/env/bin/python", "../../../tools/bin/python"),
        ("subject/loop", "loop"),
        ("by_link", "subject/.venv/bin"),
        ("base", "tools"),
        ("loop", "loop"),
    ] {
        symlink(target, at(link)).unwrap();
    }
    for (program, comes) in [
        ("subject/.venv/bin/python", true),
        ("subject/env/bin/python", true),
        ("by_link/python", true),
        ("base/../subject/.venv/bin/python", true),
        ("subject/loop", true),
        ("loop", true),
        ("tools/bin/python", false),
        ("base/bin/python", false),
        ("subject/env/../../tools/bin/python", false),
        ("nowhere", false),
    ] {
        assert_eq!(comes_from(&at(program), &at("subject")), comes, "{program}");
    }
}

/// Makes an environment in `own` whose interpreter links to `to`.
fn link_interpreter(own: &Path, to: &Path) -> PathBuf {
    fs::create_dir_all(own.join("bin")).unwrap();
    fs::write(own.join("pyvenv.cfg"), "home = /root\n").unwrap();
    symlink(to, own.join("bin/python")).unwrap();
    own.join("bin/python")
}

#[test]
fn an_interpreter_needs_its_environment_and_the_installation_that_its_link_leads_to() {
    let folder = tempfile::tempdir().unwrap();
    let (own, base) = (folder.path().join("own"), folder.path().join("base"));
    fs::create_dir_all(base.join("bin")).unwrap();
    fs::create_dir_all(base.join("lib/python3.12")).unwrap();
    fs::write(base.join("lib/python3.12/os.py"), "").unwrap();
    fs::write(base.join("bin/python3"), "").unwrap();
    let python = link_interpreter(&own, &base.join("bin/python3"));
    assert_eq!(own_files(&python), [base.join("bin"), base.join("lib"), own.join("bin"), own.join("pyvenv.cfg")]);
}

#[test]
fn no_link_and_no_setting_of_an_environment_makes_other_folders_readable() {
    let folder = tempfile::tempdir().unwrap();
    let (own, secret) = (folder.path().join("own"), folder.path().join("secret"));
    fs::create_dir_all(secret.join("bin")).unwrap();
    fs::create_dir_all(secret.join("lib")).unwrap();
    fs::write(secret.join("bin/tool"), "").unwrap();
    let python = link_interpreter(&own, &secret.join("bin/tool"));
    for settings in ["home = SECRET/bin", "HOME = SECRET/bin\nhome = /usr/bin"] {
        fs::write(own.join("pyvenv.cfg"), settings.replace("SECRET", secret.to_str().unwrap())).unwrap();
        assert_eq!(own_files(&python), [own.join("bin"), own.join("pyvenv.cfg")]);
    }
    // Whoever read it would wait for a writer.
    fs::remove_file(own.join("pyvenv.cfg")).unwrap();
    let (pipe, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, own.join("pyvenv.cfg"), pipe, mode, 0).unwrap();
    assert!(own_files(&python).is_empty());
    fs::remove_file(own.join("pyvenv.cfg")).unwrap();
    fs::write(own.join("pyvenv.cfg"), "").unwrap();
    symlink(&secret, own.join("lib")).unwrap();
    assert_eq!(own_files(&python), [own.join("bin"), own.join("pyvenv.cfg")]);
}

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
