//! Trees, links and repositories that others could write to.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// What is said of a tree; empty where it is not refused.
fn refusal(root: &Path, holds_the_program: bool) -> String {
    let refused = require_own(root, &Trusted::of(root, holds_the_program).unwrap());
    refused.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn a_tree_whose_folders_or_files_others_can_write_to_is_refused_with_the_remedy() {
    let within = [
        ".venv/lib/python3.11",
        ".venv/lib/python3.11/site-packages",
        ".venv/lib/python3.11/site-packages/torch/nn",
        "suites/peers/__pycache__",
        "kernels/lib",
    ];
    let is_shared = private_group().is_none();
    for part in CODE.iter().chain(TREES).chain(&within) {
        let tree = tempfile::tempdir().unwrap();
        let folder = tree.path().join(part);
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("file");
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink("nowhere", folder.join(".#file")).unwrap();
        for (path, mode, is_open) in [
            (&folder, 0o755, false),
            (&folder, 0o775, is_shared),
            (&folder, 0o757, true),
            (&folder, 0o1777, true),
            (&file, 0o664, is_shared),
            (&file, 0o666, true),
        ] {
            set_mode(&folder, 0o755);
            set_mode(path, mode);
            for holds_the_program in [false, true] {
                let said = refusal(tree.path(), holds_the_program);
                let expected = format!("other users can write to {} (mode {mode:o})", shown_path(path));
                assert_eq!(said.contains(&expected), is_open, "{said}");
                assert_eq!(said.contains("set CS336_ROOT="), is_open, "{said}");
            }
        }
    }
}

#[test]
fn git_is_asked_only_of_a_repository_whose_configuration_others_cannot_write_to() {
    let tree = tempfile::tempdir().unwrap();
    let [root, linked] = ["a", "b"].map(|name| tree.path().join(name));
    let (own, shared) = (root.join(".git/worktrees/b"), root.join(".git"));
    [&own, &linked].iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
    fs::write(shared.join("config"), "").unwrap();
    fs::write(own.join("commondir"), "../..\n").unwrap();
    fs::write(linked.join(".git"), format!("gitdir: {}\n", own.to_str().unwrap())).unwrap();
    assert!(require_own_repository(&root.join("src")).unwrap() && require_own_repository(&linked).unwrap());
    for (part, mode, own_mode) in [(shared.join("config"), 0o666, 0o644), (shared.clone(), 0o777, 0o755)] {
        set_mode(&part, mode);
        for root in [&root, &linked] {
            let error = require_own_repository(root).unwrap_err().to_string();
            assert!(error.contains("other users can write to") && error.contains("set CS336_ROOT="), "{error}");
        }
        set_mode(&part, own_mode);
    }
    fs::write(linked.join(".git"), "gitdir: /nowhere/.git/worktrees/b\n").unwrap();
    assert!(!require_own_repository(&linked).unwrap());
    // A bare repository, which anybody can put into a folder such as /tmp.
    fs::remove_dir_all(&shared).unwrap();
    fs::write(root.join("HEAD"), "ref: refs/heads/main").unwrap();
    fs::write(root.join("config"), "[core]\nfsmonitor = false").unwrap();
    assert!(!require_own_repository(&root).unwrap());
}

#[test]
fn a_group_is_private_only_where_it_has_the_users_name_and_nobody_else() {
    let users = "root:x:0:0::/:/bin/sh\nada:x:1000:1000::/ada:/bin/sh\nbob:x:1001:100::/bob:/bin/sh\n";
    let groups = "root:x:0:\nusers:x:100:\nada:x:1000:ada\n";
    let is_private = |user, group, users: &str, groups: &str| super::is_private(user, group, users, groups);
    assert!(is_private(0, 0, users, groups) && is_private(1000, 1000, users, groups));
    assert!(!is_private(1001, 100, users, groups), "the group has another name");
    assert!(!is_private(1002, 1000, users, groups), "an unknown user");
    assert!(!is_private(1000, 1000, users, &groups.replace("1000:ada", "1000:ada,bob")), "another member");
    assert!(!is_private(1000, 1000, &users.replace("1001:100", "1001:1000"), groups), "another user's group");
    assert!(!is_private(1000, 1000, users, ""), "an unknown group");
    assert!(!is_private(1000, 1000, users, &format!("{groups}ours:x:1000:ada,bob\n")), "a second name of the group");
}

#[test]
fn a_folder_above_the_tree_or_above_what_it_links_to_is_refused_unless_it_is_sticky() {
    let above = tempfile::tempdir().unwrap();
    let [tree, elsewhere] = ["open/tree", "own/tree"].map(|name| above.path().join(name));
    [&tree, &elsewhere].iter().for_each(|folder| fs::create_dir_all(folder.join("suites")).unwrap());
    std::os::unix::fs::symlink(tree.join("suites"), elsewhere.join("kernels")).unwrap();
    for (mode, is_open) in [(0o755, false), (0o777, true), (0o1777, false)] {
        set_mode(&above.path().join("open"), mode);
        for root in [&tree, &elsewhere] {
            let said = refusal(root, true);
            assert_eq!(said.contains(&format!("open (mode {mode:o}): set CS336_ROOT=")), is_open, "{said}");
        }
    }
}

#[test]
fn what_a_link_in_the_tree_leads_to_is_a_part_of_it() {
    let above = tempfile::tempdir().unwrap();
    let [tree, linked] = ["tree", "open/linked"].map(|name| above.path().join(name));
    [tree.join("suites"), tree.join("kernels"), linked.join("lib")]
        .iter()
        .for_each(|folder| fs::create_dir_all(folder).unwrap());
    fs::write(linked.join("lib/file"), "").unwrap();
    std::os::unix::fs::symlink(&linked, tree.join("suites/peers")).unwrap();
    std::os::unix::fs::symlink(linked.join("lib/file"), tree.join("kernels/file")).unwrap();
    // Leads to a folder that it lies in.
    std::os::unix::fs::symlink(&tree, linked.join("lib/tree")).unwrap();
    assert_eq!(refusal(&tree, false), "");
    for part in ["linked", "linked/lib", "linked/lib/file", ""] {
        let (part, mode) = (above.path().join("open").join(part), if part.ends_with("file") { 0o646 } else { 0o757 });
        set_mode(&part, mode);
        let said = refusal(&tree, false);
        assert!(said.contains("other users can write to") && said.contains("set CS336_ROOT="), "{said}");
        set_mode(&part, if mode == 0o646 { 0o644 } else { 0o755 });
    }
    // A linked file alone.
    fs::remove_file(tree.join("suites/peers")).unwrap();
    assert_eq!(refusal(&tree, false), "");
    set_mode(&linked.join("lib"), 0o777);
    assert!(refusal(&tree, false).contains("linked/lib (mode 777)"));
}

#[test]
fn every_folder_that_links_lead_through_is_looked_at() {
    let above = tempfile::tempdir().unwrap();
    let [tree, real, open] = ["tree", "real", "open"].map(|name| above.path().join(name));
    [&tree.join("kernels"), &tree.join("suites"), &real, &open].iter().for_each(|at| fs::create_dir_all(at).unwrap());
    fs::write(real.join("file"), "").unwrap();
    for (link, target, real) in [("suites/peers", "folder", &real), ("kernels/file", "hop", &real.join("file"))] {
        std::os::unix::fs::symlink(real, open.join(target)).unwrap();
        std::os::unix::fs::symlink(open.join(target), tree.join(link)).unwrap();
        assert_eq!(refusal(&tree, false), "");
        set_mode(&open, 0o777);
        assert!(refusal(&tree, false).contains("open (mode 777)"), "{link}");
        set_mode(&open, 0o755);
        fs::remove_file(tree.join(link)).unwrap();
    }
}

#[test]
fn rights_of_another_user_by_an_access_list_are_those_of_others() {
    let Some(group) = private_group() else {
        eprintln!("skipped: without a private group no group may write at all");
        return;
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    let trusted = Trusted { users: vec![rustix::process::geteuid().as_raw()], groups: vec![group] };
    set_mode(file.path(), 0o664);
    trusted.require(file.path(), 0, "").unwrap();
    // Owner, user 65534, group, the most that both have, others (acl(5)); each a tag, rights and a number.
    let entries = [(1u16, 6u16, u32::MAX), (2, 6, 65_534), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 4, u32::MAX)];
    let bytes = |(tag, rights, id): (u16, u16, u32)| {
        [&tag.to_le_bytes()[..], &rights.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let list = [2u32.to_le_bytes().to_vec(), entries.map(bytes).concat()].concat();
    let flags = rustix::fs::XattrFlags::empty();
    if let Err(error) = rustix::fs::setxattr(file.path(), c"system.posix_acl_access", &list, flags) {
        eprintln!("skipped: the folder of temporary files has no access lists: {error}");
        return;
    }
    assert!(trusted.require(file.path(), 0, "").unwrap_err().to_string().contains("other users can write to"));
}

#[test]
fn a_tree_of_another_user_is_refused_with_the_remedy() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can give a folder to another user");
        return;
    }
    for part in ["", "suites", "kernels", "kernels/file"] {
        let tree = tempfile::tempdir().unwrap();
        ["suites", "kernels"].iter().for_each(|name| fs::create_dir(tree.path().join(name)).unwrap());
        fs::write(tree.path().join("kernels/file"), "").unwrap();
        assert_eq!(refusal(tree.path(), false), "");
        std::os::unix::fs::chown(tree.path().join(part), Some(65_534), None).unwrap();
        let said = refusal(tree.path(), false);
        assert!(said.contains("belongs to user 65534") && said.contains("set CS336_ROOT="), "{said}");
        // Its owner can as well replace a program in it.
        assert_eq!(refusal(tree.path(), true).is_empty(), part.is_empty());
    }
}
