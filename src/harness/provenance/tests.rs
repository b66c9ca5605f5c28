//! What a run knows of its machine and its commit.

use super::super::manifest::{MANIFEST, PROGRAM};
use super::*;

#[test]
fn this_machine_has_a_name_cores_and_memory() {
    let machine = machine(&[]).unwrap();
    assert!(!machine.cpu.is_empty() && machine.cores >= 1 && machine.memory_bytes > 1 << 20, "{machine:?}");
    assert!(available_memory_bytes().unwrap() <= machine.memory_bytes);
}

#[test]
fn outside_a_checkout_the_commit_is_unknown_and_counts_as_dirty() {
    let folder = tempfile::tempdir().unwrap();
    let commit = Commit::of(folder.path(), &|| false).unwrap();
    assert_eq!((commit.commit.as_str(), commit.dirty), ("unknown", true));
    assert_eq!(Commit::why_unknown(folder.path(), &|| false).unwrap(), None);
}

fn commit_by(root: &Path, arguments: &[&str]) {
    run_git(root, &[AS_ANYBODY, arguments].concat(), &|| false).unwrap().unwrap();
}

/// A checkout with a suite.
fn checkout() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("suites")).unwrap();
    std::fs::write(folder.path().join("suites/p.toml"), "a").unwrap();
    commit_by(folder.path(), &["init", "--quiet"]);
    commit_by(folder.path(), &["add", "."]);
    commit_by(folder.path(), &["commit", "--quiet", "--message", "a"]);
    folder
}

#[test]
fn a_folder_whose_repository_looks_at_the_files_of_another_one_is_no_checkout() {
    let [original, copy] = [checkout(), checkout()];
    assert!(!Commit::of(copy.path(), &|| false).unwrap().dirty);
    commit_by(copy.path(), &["config", "core.worktree", original.path().to_str().unwrap()]);
    std::fs::write(copy.path().join("suites/p.toml"), "edited").unwrap();
    let commit = Commit::of(copy.path(), &|| false).unwrap();
    assert_eq!((commit.commit.as_str(), commit.dirty), ("unknown", true));
    let why = Commit::why_unknown(copy.path(), &|| false).unwrap().unwrap();
    assert!(why.ends_with(", which `core.worktree` names"), "{why}");
}

/// With these, git takes a file for unchanged whose size and time are as before.
#[test]
fn no_setting_of_the_checkout_hides_an_edit() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("suites")).unwrap();
    let path = folder.path().join("suites/p.toml");
    // As editors do: a new file takes the name.
    let write = |text: &str| {
        let (new, time) = (folder.path().join("new"), SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
        std::fs::write(&new, text).unwrap();
        std::fs::File::options().write(true).open(&new).unwrap().set_modified(time).unwrap();
        std::fs::rename(&new, &path).unwrap();
    };
    write("a");
    commit_by(folder.path(), &["init", "--quiet"]);
    commit_by(folder.path(), &["config", "core.checkStat", "minimal"]);
    commit_by(folder.path(), &["config", "core.trustctime", "false"]);
    commit_by(folder.path(), &["add", "."]);
    commit_by(folder.path(), &["commit", "--quiet", "--message", "a"]);
    assert!(!Commit::of(folder.path(), &|| false).unwrap().dirty);
    write("b");
    assert_eq!(Commit::of(folder.path(), &|| false).unwrap().modified, ["suites/p.toml"]);
    write("a");
    commit_by(folder.path(), &["config", "core.ignoreCase", "true"]);
    std::fs::write(folder.path().join("suites/P.toml"), "added").unwrap();
    assert_eq!(Commit::of(folder.path(), &|| false).unwrap().modified, ["suites/P.toml"]);
}

#[test]
fn what_git_says_of_a_damaged_checkout_is_told() {
    let folder = checkout();
    std::fs::write(folder.path().join(".git/index"), "DIRC").unwrap();
    let why = Commit::why_unknown(folder.path(), &|| false).unwrap().unwrap();
    assert!(why.contains("index"), "{why}");
    assert_eq!(Commit::of(folder.path(), &|| false).unwrap().commit, "unknown");
}

#[test]
fn a_checkout_names_its_changed_files_and_a_folder_that_git_does_not_track_has_no_commit() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("suites/p.toml", "a");
    write("templates/p.md", "a");
    commit_by(folder.path(), &["init", "--quiet"]);
    commit_by(folder.path(), &["add", "."]);
    commit_by(folder.path(), &["commit", "--quiet", "--message", "a"]);
    write("templates/p.md", "b");
    assert_eq!(Commit::why_unknown(folder.path(), &|| false).unwrap(), None);
    let clean = Commit::of(folder.path(), &|| false).unwrap();
    assert!(clean.commit.len() == 40 && !clean.dirty, "{clean:?}");
    write("suites/p.toml", "b");
    let changed = Commit::of(folder.path(), &|| false).unwrap();
    assert_eq!((changed.dirty, changed.modified), (true, vec!["suites/p.toml".to_string()]));
    write("suites/p.toml", "a");
    write("suites/subjects/right/.venv/a.py", "");
    write(".gitignore", "__pycache__");
    for added in ["suites/torch.py", "suites/peers/__pycache__/protocol.cpython-311.pyc"] {
        write(added, "");
        let found = Commit::of(folder.path(), &|| false).unwrap();
        assert_eq!((found.dirty, found.modified), (true, vec![added.to_string()]));
        std::fs::remove_file(folder.path().join(added)).unwrap();
    }
    for mark in ["assume-unchanged", "skip-worktree"] {
        commit_by(folder.path(), &["update-index", &format!("--{mark}"), "suites/p.toml"]);
        let hidden = Commit::of(folder.path(), &|| false).unwrap();
        assert_eq!((hidden.dirty, hidden.modified), (true, vec!["suites/p.toml".to_string()]), "{mark}");
        commit_by(folder.path(), &["update-index", &format!("--no-{mark}"), "suites/p.toml"]);
        assert!(!Commit::of(folder.path(), &|| false).unwrap().dirty);
    }
    // A replaced commit has the id of the one without the change.
    write("suites/p.toml", "b");
    commit_by(folder.path(), &["commit", "--quiet", "--all", "--message", "b"]);
    commit_by(folder.path(), &["reset", "--quiet", "HEAD~"]);
    commit_by(folder.path(), &["replace", "HEAD", "HEAD@{1}"]);
    assert_eq!(Commit::of(folder.path(), &|| false).unwrap().modified, ["suites/p.toml"]);
    write("dist/cs336/suites/p.toml", "a");
    assert_eq!(Commit::of(&folder.path().join("dist/cs336"), &|| false).unwrap().commit, "unknown");
}

#[test]
fn a_bundle_that_another_program_runs_has_its_commit_and_is_modified() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("bin")).unwrap();
    std::fs::write(folder.path().join(PROGRAM), "a program").unwrap();
    let packed = Commit { commit: "abc".into(), dirty: false, modified: Vec::new() };
    let manifest = Manifest::of(folder.path(), packed).unwrap();
    std::fs::write(folder.path().join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
    let found = Commit { commit: "abc".into(), dirty: true, modified: vec![PROGRAM.into()] };
    assert_eq!(Commit::of(folder.path(), &|| false).unwrap(), found);
}

#[test]
fn a_clock_whose_year_no_record_can_have_is_refused_before_anything_is_measured() {
    let at = |seconds: i64| match seconds {
        0.. => SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.unsigned_abs()),
        _ => SystemTime::UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()),
    };
    // Records can have the years 1970, 2026 and 1920, but none beyond 9999 and none before our era.
    for (seconds, started) in
        [(0, "1970-01-01T00:00:00Z"), (1_795_500_000, "2026-11-24T06:00:00Z"), (-1_577_923_200, "1920-01-01T00:00:00Z")]
    {
        assert_eq!(time(at(seconds)).unwrap().1, started);
    }
    for seconds in [400_000_000_000, i64::MAX, -98_230_000_000] {
        let said = format!("{:#}", time(at(seconds)).unwrap_err());
        assert!(
            said.starts_with(&format!("this machine's clock is {} s ", seconds.unsigned_abs()))
                && said.contains("set it to the present"),
            "{said}"
        );
    }
}

#[test]
fn run_ids_sort_by_time_and_differ() {
    let now = Timestamp::from_second(1_763_700_000).unwrap();
    let ids: std::collections::BTreeSet<_> = (0..8).map(|_| run_id(now).unwrap()).collect();
    assert!(ids.len() > 1 && ids.iter().all(|id| id.starts_with("20251121T044000Z-")), "{ids:?}");
}
