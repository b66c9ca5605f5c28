//! What a command leaves when it is ended: no temporary folder after a signal that it sees, and after `kill -9` none once
//! the next command has run.

use cs336::process::processes_with;

use super::*;

/// The library that holds a command up, or kills it, where it writes a file.
fn library(folder: &Path) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/suites/isolation/crashes.c");
    let made = folder.join("crashes.so");
    assert!(Command::new("cc").args(["-shared", "-fPIC", source, "-o"]).arg(&made).status().unwrap().success());
    made
}

/// The names of all files and folders below `folder`.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    entries.flat_map(|path| [vec![path.display().to_string()], names(&path)].concat()).collect()
}

fn has(folder: &Path, part: &str) -> bool {
    names(folder).iter().any(|name| name.contains(part))
}

fn send(signal: &str, child: &Child) {
    assert!(Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap().success());
}

/// Grading that is ended while its ranks run.
#[rstest]
#[case::ctrl_c("INT", Some(130))]
#[case::sigterm("TERM", Some(130))]
#[case::hangup("HUP", Some(130))]
#[case::kill_9("KILL", None)]
fn the_folder_of_ranks_is_removed(#[case] signal: &str, #[case] code: Option<i32>) {
    let (tree, temporary) = (Tree::new(), tempfile::tempdir().unwrap());
    let grading = |problem: &str| {
        let mut command = tree.command(&["grade", problem]);
        command.env("TMPDIR", temporary.path()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut child = grading("naive_ddp").spawn().unwrap();
    assert!(wait_until(Duration::from_secs(120), || has(temporary.path(), "rank0.flight")), "no ranks were started");
    send(signal, &child);
    assert_eq!(child.wait().unwrap().code(), code);
    let of_this_tree = format!("CS336_ROOT={}", tree.folder.path().display());
    assert!(wait_until(Duration::from_secs(60), || processes_with(&of_this_tree).is_empty()));
    if signal == "KILL" {
        assert!(has(temporary.path(), "rank0.flight"));
        grading(PROBLEM).status().unwrap();
    }
    assert_eq!(names(temporary.path()), [""; 0]);
}

/// Python hangs while it is asked for its PyTorch.
#[rstest]
#[case::ctrl_c("INT")]
#[case::sigterm("TERM")]
#[case::hangup("HUP")]
fn an_interrupted_doctor_ends_its_python(#[case] signal: &str) {
    let tree = Tree::new();
    let script = tree.path("python");
    fs::write(&script, "#!/bin/sh\necho $$ > asked\nexec sleep 600\n").unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&script).status().unwrap().success());
    let mut command = tree.command(&["doctor"]);
    let mut child = command.env("CS336_PYTHON", &script).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let asked = || fs::read_to_string(tree.path("asked")).ok().filter(|pid| pid.ends_with('\n'));
    assert!(wait_until(Duration::from_secs(60), || asked().is_some()), "Python was not asked");
    send(signal, &child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let process = Path::new("/proc").join(asked().unwrap().trim());
    assert!(wait_until(Duration::from_secs(60), || !process.exists()));
}

#[test]
fn what_a_killed_accept_leaves_is_no_change_and_is_removed_by_the_next_command() {
    let tree = Tree::new();
    let library = library(tree.folder.path());
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(".gitignore"), tree.path(".gitignore")).unwrap();
    super::bundle::commit_all(&tree.path(""));
    let measure = ["measure", PROBLEM, "--profile", "cpu"];
    assert!(tree.run(&measure).status.success());
    let mut accept = tree.command(&["accept", PROBLEM]);
    let killed = accept.env("LD_PRELOAD", library).env("LIBRARY_FAULT", "is_killed_as_it_writes").output().unwrap();
    assert_eq!(killed.status.code(), None, "{}", output_text(&killed));
    assert_eq!(names(&tree.path("snapshots/cpu")).len(), 1, "the file is not the one that was half written");
    let output = tree.run(&measure);
    assert!(output.status.success(), "{}", output_text(&output));
    assert_eq!(names(&tree.path("snapshots/cpu")), [""; 0]);
    let runs = tree.layout().read_local(Profile::Cpu, problem()).unwrap().unwrap().runs;
    assert!(runs.iter().all(|run| !run.dirty), "{runs:?}");
}

/// Where it writes, a command that ends by the signal itself would exit with 143.
#[rstest]
#[case::accept(&["accept", PROBLEM], "TERM")]
#[case::writeup(&["writeup", "--no-measure"], "TERM")]
#[case::writeup_by_ctrl_c(&["writeup", "--no-measure"], "INT")]
fn a_verb_that_is_interrupted_exits_with_130(#[case] verb: &[&str], #[case] signal: &str) {
    let tree = Tree::with_records();
    let library = library(tree.folder.path());
    if verb[0] == "accept" {
        fs::remove_dir_all(tree.path("snapshots")).unwrap();
        super::bundle::commit_all(&tree.path(""));
        assert!(tree.run(&["measure", PROBLEM, "--profile", "cpu"]).status.success());
    }
    let mut command = tree.command(verb);
    command.env("LD_PRELOAD", library).env("LIBRARY_FAULT", "hangs_as_it_writes").stdout(Stdio::null());
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let writes = || has(tree.folder.path(), ".cs336-partial-");
    assert!(wait_until(Duration::from_secs(120), writes), "{verb:?} writes nothing");
    send(signal, &child);
    assert!(wait_until(Duration::from_secs(60), || child.try_wait().unwrap().is_some()), "it goes on");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
