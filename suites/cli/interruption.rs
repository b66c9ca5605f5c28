//! Measuring that is killed, interrupted, stopped, or cannot write: what is kept, what is left running, and that
//! `--resume` goes on.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::time::SystemTime;

use cs336::harness::record::CaseRecord;
use cs336::process::processes_with;

use super::*;

pub const MEASURE: &[&str] = &["measure", PROBLEM, "--profile", "cpu"];
const RESUME: &[&str] = &["measure", PROBLEM, "--profile", "cpu", "--resume"];

/// Replaces the suite's grids by one with a case for each number of additions.
pub fn set_cases(tree: &Tree, additions: impl Iterator<Item = i64>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("suites/{PROBLEM}.toml"));
    let suite: toml::Table = fs::read_to_string(&path).unwrap().parse().unwrap();
    let mut keys = suite["cpu"].as_table().unwrap().iter().next().unwrap().1.as_table().unwrap().clone();
    keys.insert("iterations".into(), additions.collect::<Vec<_>>().into());
    let grids = toml::Table::from_iter([("all".to_string(), toml::Value::Table(keys))]);
    tree.suite(&toml::to_string(&toml::Table::from_iter([("cpu".to_string(), toml::Value::Table(grids))])).unwrap());
}

/// `cs336` in the tree, by a shell that runs `line` first.
pub fn through_shell(tree: &Tree, line: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{line}\nexec \"$@\"")).args(["sh", env!("CARGO_BIN_EXE_cs336")]).args(arguments);
    command.env("CS336_ROOT", tree.folder.path()).current_dir(tree.folder.path());
    command
}

/// The line of shell after which permissions bind root too.
pub fn permissions_bind() -> &'static str {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    if is_root { "set -- setpriv --bounding-set=-dac_override \"$@\"" } else { "" }
}

/// Starts measuring eight slow cases, each half a second or so of additions, and waits until two are recorded.
fn start_slow_measuring(tree: &Tree, line: &str) -> Child {
    set_cases(tree, 200_000..200_008);
    let mut child = through_shell(tree, line, MEASURE).stderr(Stdio::null()).spawn().unwrap();
    wait_for_cases(tree, &mut child, 2);
    child
}

pub fn wait_for_cases(tree: &Tree, child: &mut Child, count: usize) {
    let are_recorded = || {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be stopped");
        cases(tree).len() >= count
    };
    assert!(wait_until(Duration::from_secs(120), are_recorded), "fewer than {count} cases were recorded");
}

/// The recorded cases. If the record exists, it must be complete.
pub fn cases(tree: &Tree) -> Vec<CaseRecord> {
    let text = fs::read_to_string(tree.record_path());
    text.map_or(Vec::new(), |text| RecordFile::parse(&text, "the record").unwrap().cases)
}

fn send(signal: &str, child: &Child) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// A process that the command has started.
pub fn worker_of(command: &Child) -> Option<u32> {
    processes_with(&format!("{}={}", cs336::process::PARENT, command.id())).first().copied()
}

/// What must be true after every fault: no process is left, the lock is free, each case of `acknowledged` is recorded as
/// it was, and `--resume` measures the rest.
pub fn require_intact(tree: &Tree, acknowledged: &[CaseRecord]) {
    let of_this_tree = format!("CS336_ROOT={}", tree.folder.path().display());
    let none_left = wait_until(Duration::from_secs(60), || processes_with(&of_this_tree).is_empty());
    assert!(none_left, "processes {:?} are left", processes_with(&of_this_tree));
    drop(lock_records(&tree.layout()).expect("the lock is free"));
    let output = tree.run(RESUME);
    assert!(output.status.success(), "{}", output_text(&output));
    let recorded = cases(tree);
    let total = suite::load(tree.folder.path(), problem()).unwrap().unwrap().cases(Profile::Cpu).count();
    assert!(recorded.len() == total && recorded.iter().all(|c| matches!(c.outcome, Outcome::Measured { .. })));
    for case in acknowledged {
        assert!(recorded.contains(case), "a recorded case was lost or measured again: {case:?}");
    }
}

#[test]
fn kill_9_loses_at_most_the_running_case() {
    let tree = Tree::new();
    let mut child = start_slow_measuring(&tree, "");
    let acknowledged = cases(&tree);
    child.kill().unwrap();
    child.wait().unwrap();
    require_intact(&tree, &acknowledged);
}

#[rstest]
#[case::ctrl_c("-INT")]
#[case::sigterm("-TERM")]
#[case::hangup("-HUP")]
fn an_interrupt_keeps_what_was_measured_and_exits_with_130(#[case] signal: &str) {
    let tree = Tree::new();
    let mut child = start_slow_measuring(&tree, "");
    let acknowledged = cases(&tree);
    send(signal, &child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    require_intact(&tree, &acknowledged);
}

/// To compare a file that is newer than its commit, git reads the attributes beside it, and a pipe never ends.
#[test]
fn measuring_ends_at_an_interrupt_while_git_waits_for_a_pipe() {
    let tree = Tree::new();
    super::bundle::commit_all(&tree.path(""));
    let pipe = tree.path("kernels/.gitattributes");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let newer = SystemTime::now() + Duration::from_secs(60);
    fs::File::open(tree.path("kernels/rope.cu")).unwrap().set_modified(newer).unwrap();
    let mut child = tree.command(MEASURE).stderr(Stdio::null()).spawn().unwrap();
    let of_this_tree = format!("CS336_ROOT={}", tree.folder.path().display());
    let is_git = |pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "git\n");
    assert!(
        wait_until(Duration::from_secs(60), || processes_with(&of_this_tree).into_iter().any(is_git)),
        "git does not run"
    );
    send("-TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    fs::remove_file(pipe).unwrap();
    require_intact(&tree, &[]);
}

/// The interrupt that grading watches for would be seen after the write, which nothing ends.
#[test]
fn a_later_interrupt_ends_a_command_that_writes_to_a_full_pipe() {
    let tree = Tree::new();
    let pipe = tree.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut reader = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    // As much as a pipe holds (pipe(7)).
    reader.write_all(&[0; 1 << 16]).unwrap();
    let grade = ["grade", "communication_accounting", "--junit", "pipe"];
    let mut child = tree.command(&grade).stdout(Stdio::null()).spawn().unwrap();
    let writes = || {
        let waits_in = fs::read_to_string(format!("/proc/{}/wchan", child.id())).unwrap_or_default();
        waits_in.contains("pipe_write")
    };
    assert!(wait_until(Duration::from_secs(60), writes), "it does not wait for the pipe");
    send("-INT", &child);
    std::thread::sleep(Duration::from_secs(1));
    assert!(child.try_wait().unwrap().is_none(), "the first interrupt ended it at once");
    let ends = || {
        send("-INT", &child);
        child.try_wait().unwrap().is_some()
    };
    assert!(wait_until(Duration::from_secs(60), ends), "no interrupt ends it");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn under_nohup_a_hangup_does_not_end_measuring() {
    let tree = Tree::new();
    let mut child = start_slow_measuring(&tree, "trap '' HUP");
    let acknowledged = cases(&tree);
    send("-HUP", &child);
    wait_for_cases(&tree, &mut child, acknowledged.len() + 2);
    send("-TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    require_intact(&tree, &acknowledged);
}

#[test]
fn measuring_that_was_stopped_goes_on_when_it_is_continued() {
    let tree = Tree::new();
    let mut child = start_slow_measuring(&tree, "");
    let acknowledged = cases(&tree);
    send("-STOP", &child);
    let is = |pid: u32, state: &str| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(state);
    assert!(wait_until(Duration::from_secs(60), || is(child.id(), ") T ")));
    let worker = worker_of(&child).expect("a worker");
    assert!(wait_until(Duration::from_secs(60), || is(worker, ") S ")), "its worker does not end the running case");
    send("-CONT", &child);
    assert!(child.wait().unwrap().success());
    assert_eq!(cases(&tree).len(), 8);
    require_intact(&tree, &acknowledged);
}

#[test]
fn an_interrupt_of_measuring_names_the_command_that_continues_and_of_grading_none() {
    let tree = Tree::new();
    set_cases(&tree, 900_000..900_040);
    for (arguments, continues) in [(MEASURE, true), (&["grade"], false)] {
        let mut child = tree.command(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(60), || worker_of(&child).is_some()), "no worker started");
        send("-INT", &child);
        let mut said = String::new();
        std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
        let command = format!("continue with: cs336 measure {PROBLEM} --profile cpu --resume");
        assert!(
            said.contains(&command) == continues && said.ends_with("cs336: interrupted\n"),
            "{arguments:?}: {said}"
        );
        assert!(continues || !said.contains("resume"), "{said}");
    }
}

/// A limit on file sizes fails a write as a full disk does: after some bytes, with an error.
#[test]
fn a_full_disk_loses_no_recorded_case_and_the_tally_counts_the_recorded_ones() {
    let tree = Tree::new();
    set_cases(&tree, 1..65);
    let output = through_shell(&tree, "ulimit -f 8", MEASURE).output().unwrap();
    let (said, recorded) = (output_text(&output), cases(&tree));
    assert!(output.status.code() == Some(1) && !said.contains("panicked"), "{said}");
    assert!(!recorded.is_empty() && recorded.len() < 64, "{} cases were recorded", recorded.len());
    let tally = format!("{} measured, 0 out of memory, 0 not run, {} failed", recorded.len(), 64 - recorded.len());
    assert!(said.contains(&tally), "{tally:?} is not in {said}");
    assert!(said.contains(&format!("{PROBLEM}.json cannot be written")) && said.contains("ulimit -f"), "{said}");
    require_intact(&tree, &recorded);
}

#[test]
fn a_full_disk_under_a_record_that_is_a_mount_of_its_own_loses_no_recorded_case() {
    let tree = Tree::new();
    set_cases(&tree, 1..4);
    assert!(tree.command(MEASURE).output().unwrap().status.success());
    let before = cases(&tree);
    set_cases(&tree, 1..40);
    let (disk, after) = (tree.path("disk"), tree.path("after"));
    fs::create_dir(&disk).unwrap();
    let paths = [disk.as_path(), &tree.record_path(), &after].map(|path| path.display().to_string());
    let line = "mount -t tmpfs -o size=16k none \"$1\" && cp \"$2\" \"$1/r\" && { cat /dev/zero > \"$1/fill\"; mount --bind \"$1/r\" \
                \"$2\"; } || exit 77; \"$0\" measure \"$4\" --profile cpu --resume; cat \"$2\" > \"$3\"";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", line, env!("CARGO_BIN_EXE_cs336")]);
    let output = command.args(&paths).arg(PROBLEM).env("CS336_ROOT", tree.folder.path()).output().unwrap();
    let said = output_text(&output);
    if output.status.code() == Some(77) || !after.exists() {
        eprintln!("skipped: no mounts here: {said}");
        return;
    }
    assert!(said.contains("No space left on device"), "{said}");
    // Those that fit into its last page are recorded too.
    let left = RecordFile::parse(&fs::read_to_string(after).unwrap(), "the record").unwrap().cases;
    assert!(left.len() < 39 && left.starts_with(&before), "{} cases of {}: {said}", left.len(), before.len());
}

/// Runs a command that cannot write to the folder of the local records.
fn in_read_only_folder(tree: &Tree, arguments: &[&str]) -> Output {
    let folder = tree.record_path().parent().unwrap().to_path_buf();
    fs::create_dir_all(&folder).unwrap();
    let set_mode = |mode| fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o555);
    let output = through_shell(tree, permissions_bind(), arguments).output().unwrap();
    set_mode(0o755);
    output
}

#[test]
fn a_read_only_folder_is_named_and_loses_no_recorded_case() {
    let tree = Tree::new();
    set_cases(&tree, 1..3);
    assert!(tree.run(MEASURE).status.success());
    let recorded = cases(&tree);
    set_cases(&tree, 1..4);
    let output = in_read_only_folder(&tree, RESUME);
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("{PROBLEM}.json cannot be written: Permission denied")), "{said}");
    assert!(said.contains("make its folder writable") && said.contains("0 measured, "), "{said}");
    assert_eq!(cases(&tree), recorded);
    require_intact(&tree, &recorded);
}

#[test]
fn a_write_up_during_which_cases_fail_says_so_at_its_end() {
    let tree = Tree::with_records();
    // Nothing else is to be measured.
    for suite in fs::read_dir(tree.path("suites")).unwrap() {
        fs::write(suite.unwrap().path(), "").unwrap();
    }
    set_cases(&tree, 1..3);
    let output = in_read_only_folder(&tree, &["writeup", "--profile", "cpu"]);
    let said = output_text(&output);
    assert!(
        output.status.code() == Some(1) && said.contains("failed when they were measured now, as said above: 2"),
        "{said}"
    );
}

#[test]
fn a_full_disk_under_the_output_is_named() {
    let tree = Tree::new();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = tree.command(&["list"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = output_text(&output);
    assert!(
        said.starts_with("cs336: standard output cannot be written: No space left") && !said.contains("panicked"),
        "{said}"
    );
}

#[test]
fn output_that_nobody_reads_ends_a_command_without_a_panic() {
    let tree = Tree::new();
    assert_eq!(tree.command(&["list"]).stdout(unread()).status().unwrap().code(), Some(141));
}

/// A pipe whose reader has ended.
pub fn unread() -> std::io::PipeWriter {
    std::io::pipe().unwrap().1
}

#[test]
fn measuring_goes_on_where_nobody_reads_its_progress() {
    let tree = Tree::new();
    let status = tree.command(MEASURE).stdout(Stdio::null()).stderr(unread()).status().unwrap();
    assert!(status.success() && !cases(&tree).is_empty());
    require_intact(&tree, &cases(&tree));
}

#[rstest]
fn an_interrupt_of_cases_keeps_the_finished_ones(#[values("-INT", "-TERM")] signal: &str) {
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    let sound = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases/rmsnorm.safetensors");
    for i in 0..400 {
        fs::copy(&sound, tree.path(format!("cases/{i:03}.safetensors"))).unwrap();
    }
    let mut command = tree.command(&["grade", "--cases", "cases", "--junit", "j.xml"]);
    fs::write(tree.path("j.xml"), "old").unwrap();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    assert_eq!(&first, b"passed");
    send(signal, &child);
    let said = output_text(&child.wait_with_output().unwrap());
    assert!(said.contains("of 400 cases passed") && said.contains("cs336: interrupted"), "{said}");
    let xml = fs::read_to_string(tree.path("j.xml")).unwrap();
    assert!(xml.contains("of 400 cases were not run"), "{xml}");
    assert!(xml.contains("000.safetensors") && xml.contains("failures=\"1\""), "{xml}");
}
