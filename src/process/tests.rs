//! Misbehaving children as shell scripts: each is reported with its cause, and no process of it remains.

use std::process::Command;
use std::time::Duration;

use serde_json::json;

use super::{Answer, Cause, ChildProcess, Death, is_alive, output_within, processes_with, wait_for_any, wait_until};

/// For children that answer or end by themselves, on a machine that may be busy.
const LONG_LIMIT: Duration = Duration::from_secs(60);
/// For children that do neither.
const SHORT_LIMIT: Duration = Duration::from_millis(100);

/// A child that misbehaves in one way, how long to wait for it, and the expected answer.
struct Hostile {
    name: &'static str,
    script: &'static str,
    limit: Duration,
    expected: fn(&Answer) -> bool,
}

/// The script of the child that sends 100 MB without a line break.
const LONG_LINE: &str = "head -c 100000000 /dev/zero >&0; sleep 60";

/// Every script has read its job from descriptor 0 into `$job`, and writes its replies to descriptor 0.
const HOSTILE: &[Hostile] = &[
    answers(
        "150 lines of output before the reply",
        "for i in $(seq 150); do printf 'line %s\\n' $i; done; echo {} >&0",
    ),
    answers("half a line of output before the reply", "printf 'half a li'; echo {} >&0; printf ne"),
    answers("output of byte 0xff before the reply", "printf '\\377\\n\\377'; echo {} >&0"),
    answers("output closed before the reply", "exec 1>&- 2>&-; echo {} >&0; sleep 60"),
    Hostile {
        name: "a reply of byte 0xff",
        script: "printf '\\377\\n' >&0; sleep 60",
        limit: LONG_LIMIT,
        expected: |answer| matches!(answer, Answer::Line(line) if line == "\u{fffd}"),
    },
    dies("an exit before the reply", "echo why; exit 3", |a| exited(a, 3) && last_output(a) == "why"),
    dies("half a reply and an exit", "printf '{\"half' >&0; exit 4", |a| exited(a, 4)),
    dies("an exit with success and without a reply", "exit 0", |a| exited(a, 0)),
    dies("death by a signal", "echo why; kill -SEGV $$", |a| signalled(a, 11) && last_output(a) == "why"),
    dies("a kill by another process", "kill -KILL $$", |a| signalled(a, 9)),
    dies("an exit with a living grandchild", "sleep 60 & echo $!; exit 5", |a| exited(a, 5) && grandchild_ends(a)),
    dies("death by a signal with a living grandchild", "sleep 60 & echo $!; kill -ABRT $$", |a| {
        signalled(a, 6) && grandchild_ends(a)
    }),
    dies("an exit with a grandchild in a session of its own", "setsid sleep 60 & echo $!; exit 6", |a| {
        exited(a, 6) && grandchild_ends(a)
    }),
    dies("an exit with a detached grandchild", "(setsid sleep 60 & echo $!); exit 7", |a| {
        exited(a, 7) && grandchild_ends(a)
    }),
    dies("a reply without end", LONG_LINE, |a| cause(a) == Some(Cause::LineTooLong)),
    Hostile {
        name: "a closed socket and no exit",
        script: "exec 0<&- 0>&- 1>&- 2>&-; exec sleep 60",
        limit: SHORT_LIMIT,
        // A timeout if the machine is so busy that the script has not started by then.
        expected: |answer| cause(answer) == Some(Cause::ClosedSocket) || times_out(answer),
    },
    hangs("no reply", "sleep 60"),
    Hostile {
        name: "no reply and a stopped grandchild in a session of its own",
        script: "setsid sh -c 'echo $$; kill -STOP $$' & sleep 60",
        limit: Duration::from_secs(2),
        expected: |answer| times_out(answer) && (last_output(answer).is_empty() || grandchild_ends(answer)),
    },
    hangs("a stop", "kill -STOP $$"),
    hangs("a stop with a stopped grandchild", "sh -c 'kill -STOP $$' & kill -STOP $$"),
    hangs("endless output", "exec yes"),
    hangs("ignored signals", "trap '' INT TERM HUP; sleep 60; sleep 60"),
];

const fn answers(name: &'static str, script: &'static str) -> Hostile {
    Hostile { name, script, limit: LONG_LIMIT, expected: |answer| matches!(answer, Answer::Line(line) if line == "{}") }
}

const fn dies(name: &'static str, script: &'static str, expected: fn(&Answer) -> bool) -> Hostile {
    Hostile { name, script, limit: LONG_LIMIT, expected }
}

const fn hangs(name: &'static str, script: &'static str) -> Hostile {
    Hostile { name, script, limit: SHORT_LIMIT, expected: times_out }
}

fn times_out(answer: &Answer) -> bool {
    matches!(answer, Answer::TimedOut { .. })
}

fn cause(answer: &Answer) -> Option<Cause> {
    if let Answer::Died(death) = answer { Some(death.cause) } else { None }
}

fn exited(answer: &Answer, code: i32) -> bool {
    matches!(cause(answer), Some(Cause::Exited { status, .. }) if status.code() == Some(code))
}

fn signalled(answer: &Answer, signal: i32) -> bool {
    use std::os::unix::process::ExitStatusExt as _;
    matches!(cause(answer), Some(Cause::Exited { status, .. }) if status.signal() == Some(signal))
}

fn last_output(answer: &Answer) -> &str {
    match answer {
        Answer::Died(Death { last_output, .. }) | Answer::TimedOut { last_output } => last_output,
        Answer::Line(_) | Answer::Interrupted => "",
    }
}

/// Whether the grandchild whose process id was printed is killed; the kernel may take a moment.
fn grandchild_ends(answer: &Answer) -> bool {
    let pid: u32 = last_output(answer).trim().parse().expect("the script prints its child's process id");
    wait_until(LONG_LIMIT, || !is_alive(pid))
}

fn start(script: &str) -> ChildProcess {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("read -r job\n{script}"));
    ChildProcess::start(command).unwrap()
}

/// Sends one child its job; checks the answer, and that the process is gone.
fn require_expected_end(hostile: &Hostile) {
    let mut child = start(hostile.script);
    let pid = child.id();
    child.send(&json!({ "job": 1 })).unwrap();
    let answer = child.receive(hostile.limit, &|| false);
    assert!((hostile.expected)(&answer), "{} ended as {answer:?}", hostile.name);
    drop(child);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{}: process {pid} is left", hostile.name);
}

/// `CS336_HOSTILE_CHILDREN=10000 cargo test --lib hostile_child` runs 10,000 children and cycles through all kinds; at
/// most 100 of them send 100 MB.
#[test]
fn every_hostile_child_is_reported_with_its_cause_and_leaves_no_process() {
    let requested = std::env::var("CS336_HOSTILE_CHILDREN").ok();
    let count = requested.map_or(HOSTILE.len(), |text| text.parse().expect("CS336_HOSTILE_CHILDREN is a number"));
    let long_lines = HOSTILE.iter().cycle().filter(|hostile| hostile.script == LONG_LINE).take(100.min(count));
    let others = HOSTILE.iter().filter(|hostile| hostile.script != LONG_LINE).cycle();
    let long_lines = long_lines.take(count.div_ceil(HOSTILE.len()));
    long_lines.chain(others).take(count).for_each(require_expected_end);
}

#[test]
fn an_interrupt_ends_the_wait_and_the_child() {
    let mut child = start("sleep 60");
    let pid = child.id();
    assert!(matches!(child.receive(LONG_LIMIT, &|| true), Answer::Interrupted));
    assert!(!is_alive(pid));
}

/// A parent that was stopped or starved reads the reply late.
/// A child that has run its script up to its reply.
fn replied(script: &str) -> ChildProcess {
    let mut child = start(script);
    child.send(&json!({ "job": 1 })).unwrap();
    let answer = child.receive(LONG_LIMIT, &|| false);
    assert!(matches!(answer, Answer::Line(_)), "{answer:?}");
    child
}

#[test]
fn a_descendant_that_executes_one_program_after_another_ends_with_the_child() {
    // The comment tells it from that of another run of this test.
    let again = format!("exec sh -c \"$AGAIN\" # {}", std::process::id());
    for _ in 0..100 {
        replied(&format!("export AGAIN='{again}'\nsetsid sh -c \"$AGAIN\" & echo {{}} >&0; sleep 60")).kill();
        assert!(processes_with(&format!("AGAIN={again}")).is_empty());
    }
}

/// Its own /proc/PID/stat then says that it is a zombie, and /proc/PID/environ is empty.
#[test]
fn a_descendant_whose_first_thread_has_ended_ends_with_the_child() {
    const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/.venv/bin/python");
    const ENDS: &str = "import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=[60]).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)";
    let mut child = replied(&format!("setsid '{PYTHON}' -c \"{ENDS}\" & echo $!; echo {{}} >&0; sleep 60"));
    let pid: u32 = child.last_output().parse().unwrap();
    let has_ended = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ");
    assert!(wait_until(LONG_LIMIT, has_ended), "its first thread does not end");
    assert!(is_alive(pid));
    child.kill();
    assert!(wait_until(LONG_LIMIT, || !is_alive(pid)), "process {pid} is left");
}

#[test]
fn a_reply_within_the_limit_counts_even_if_it_is_read_after_the_limit() {
    let mut command = Command::new("sh");
    command.args(["-c", "echo {} >&0; sleep 60"]);
    let mut child = ChildProcess::start(command).unwrap();
    wait_for_any([&child], LONG_LIMIT);
    assert!(matches!(child.receive(Duration::ZERO, &|| false), Answer::Line(_)));
}

#[test]
fn a_job_that_the_child_does_not_read_ends_at_the_limit() {
    let mut command = Command::new("sleep");
    command.arg("60");
    let mut child = ChildProcess::start(command).unwrap();
    child.send(&"x".repeat(4 << 20)).unwrap();
    assert!(times_out(&child.receive(SHORT_LIMIT, &|| false)));
}

#[test]
fn a_long_job_and_a_long_reply_are_transferred_whole() {
    let mut child = start("printf '%s%s\\n' \"$job\" \"$job\" >&0; sleep 60");
    let job = "x".repeat(1 << 20);
    child.send(&job).unwrap();
    match child.receive(LONG_LIMIT, &|| false) {
        Answer::Line(line) => assert!(line == format!("\"{job}\"\"{job}\""), "{} bytes came back", line.len()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_idle_child_has_sent_nothing_and_runs() {
    let mut idle = start("sleep 60");
    assert!(idle.is_idle());
    idle.send(&0).unwrap();
    assert!(idle.is_idle());
    for script in ["echo unasked >&0; sleep 60", "exit 0", "exec 0<&- 0>&-; sleep 60"] {
        let mut child = start(script);
        child.send(&0).unwrap();
        assert!(wait_until(LONG_LIMIT, || !child.is_idle()), "{script}: it stays idle");
    }
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    let error = format!("{:#}", ChildProcess::start(Command::new("/nowhere/cs336")).err().unwrap());
    assert!(error.contains("/nowhere/cs336"), "{error}");
}

#[test]
fn the_whole_output_of_a_program_is_given_with_how_it_ended() {
    let mut command = Command::new("sh");
    command.args(["-c", "head -c 1000000 /dev/zero; echo why >&2; cat; exit 3"]);
    let output = output_within(&mut command, LONG_LIMIT, &|| false).unwrap();
    assert_eq!((output.stdout.len(), &output.stderr[..], output.status.code()), (1_000_000, &b"why\n"[..], Some(3)));
}

#[test]
fn a_program_that_does_not_end_is_killed_with_what_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let [started, inner] = ["started", "inner"].map(|name| folder.path().join(name));
    let mut command = Command::new("sh");
    command.args(["-c", "sleep 60 & echo $! > inner; touch started; wait"]).current_dir(folder.path());
    let error = output_within(&mut command, LONG_LIMIT, &|| started.exists()).unwrap_err().to_string();
    assert_eq!(error, "sh was interrupted");
    let inner = std::fs::read_to_string(inner).unwrap().trim().parse().unwrap();
    assert!(wait_until(LONG_LIMIT, || !is_alive(inner)));
    let error = output_within(Command::new("sleep").arg("60"), SHORT_LIMIT, &|| false).unwrap_err().to_string();
    assert_eq!(error, "sleep did not end within 0.1 s and was killed");
    // Its output is in memory.
    let error = output_within(&mut Command::new("yes"), LONG_LIMIT, &|| false).unwrap_err().to_string();
    assert_eq!(error, "yes printed more than 256.00 MiB and was killed");
}
