//! Workers and Python peers that crash, hang, stop, fork or print, by themselves or by a preloaded library (`crashes.c`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use cs336::checks::faulty_runs::{LIMIT, Process};
use cs336::harness::case::Runner;
use cs336::harness::peer::Peer;
use cs336::harness::plan::Scope;
use cs336::harness::python::of_peers;
use cs336::harness::record::Profile;
use cs336::process::{is_alive, processes_with, wait_until};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::processes::{PROGRAM, SUITES, python};
use super::{Notes, TEST_REGISTRY, fails_with, in_time, outcome_by, require_failure, runner, tree, tree_of, visit};

/// How a process with the library must end.
#[derive(Clone, Copy)]
enum Expected {
    Answers,
    /// At its time limit.
    Hangs,
    /// With an error that contains the worker's words or the Python peer's.
    Fails([&'static str; 2]),
}

use Expected::{Answers, Fails, Hangs};

/// What a test proves, what the library does (`LIBRARY_FAULT` in `crashes.c`), and how a worker and a Python peer then end.
const LIBRARIES: &[(&str, &str, Expected)] = &[
    ("a_byte_that_is_not_utf8_on_the_output_hangs_nothing", "prints_a_byte_that_is_not_utf8", Answers),
    ("printing_swallows_no_reply", "prints_150_lines", Answers),
    ("printing_without_end_swallows_no_reply", "prints_without_end", Answers),
    ("a_detached_process_ends_with_it", "detaches_a_process", Answers),
    ("a_crash_is_called_a_crash_while_a_child_lives", "crashes_with_a_living_child", Fails(["signal 6 (SIGABRT)"; 2])),
    ("the_limit_is_kept_while_a_child_lives", "hangs_with_a_living_child", Hangs),
    ("the_limit_is_kept_in_another_process_group", "leaves_its_process_group", Hangs),
    ("the_limit_is_kept_while_it_is_stopped", "stops", Hangs),
    ("a_closed_socket_is_a_failure", "closes_the_socket", Fails(["the worker ", "the peer "])),
    (
        "a_line_that_is_not_a_reply_is_quoted",
        "writes_to_the_socket",
        Fails(["the worker sent \"chatter\", not a reply", "the peer sent \"chatter\", which is not JSON"]),
    ),
];

type Test = (&'static str, fn() -> Result<()>);

const OTHERS: &[Test] = &[
    ("a_crash_is_called_a_crash_where_sigchld_is_ignored", a_crash_is_called_a_crash_where_sigchld_is_ignored),
    ("a_terminated_worker_is_a_failure_with_its_signal", || fails_with("terminates_itself", "signal 15 (SIGTERM)")),
    ("a_worker_that_hangs_up_is_a_failure_with_its_signal", || fails_with("hangs_up", "signal 1 (SIGHUP)")),
    ("an_interrupted_worker_is_a_failure_with_its_signal", || fails_with("interrupts_itself", "signal 2 (SIGINT)")),
    ("a_stopped_worker_ends_at_the_limit", a_stopped_worker_ends_at_the_limit),
    ("a_peer_that_never_returns_does_not_outlive_its_worker", a_peer_that_never_returns_does_not_outlive_its_worker),
    ("a_socket_that_does_not_block_hangs_no_peer", || peer_with("makes_the_socket_non_blocking", Answers)),
    ("a_reply_is_never_taken_for_that_of_another_case", a_reply_is_never_taken_for_that_of_another_case),
    ("a_clock_that_jumps_changes_no_measurement", a_clock_that_jumps_changes_no_measurement),
];

/// The quickest problem that measures, with three cases.
const PROBLEM: &str = "mixed_precision_accumulation";
const SUITE: &str = "[cpu.all]\naccumulator = \"float32\"\naddend = \"float32\"\ncast = \"implicit\"\n\
                     addend_value = 0.01\niterations = [10, 11, 12]\n";

pub fn trials() -> Vec<Trial> {
    let trial = |name: String, run: Box<dyn Fn() -> Result<()> + Send>| {
        Trial::test(name, move || run().map_err(|error| format!("{error:#}").into()))
    };
    let libraries = LIBRARIES.iter().flat_map(|&(name, fault, expected)| {
        let worker = trial(format!("worker::{name}"), Box::new(move || worker_with("", fault, expected)));
        [worker, trial(format!("peer::{name}"), Box::new(move || peer_with(fault, expected)))]
    });
    libraries.chain(OTHERS.iter().map(|&(name, run)| trial(name.to_string(), Box::new(run)))).collect()
}

/// The library in a folder of its own. Its path marks the processes that it is loaded into.
struct Library {
    folder: tempfile::TempDir,
}

/// The bytes of the library, compiled once.
static COMPILED: LazyLock<Result<Vec<u8>, String>> = LazyLock::new(|| compile().map_err(|error| format!("{error:#}")));

fn compile() -> Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let (source, made) =
        (concat!(env!("CARGO_MANIFEST_DIR"), "/suites/isolation/crashes.c"), folder.path().join("made"));
    let built = Command::new("cc").args(["-shared", "-fPIC", source, "-o"]).arg(&made).status()?;
    ensure!(built.success(), "cc {source}: {built}");
    Ok(fs::read(made)?)
}

impl Library {
    fn new() -> Result<Self> {
        let library = Self { folder: tempfile::tempdir()? };
        fs::write(library.path(), COMPILED.as_ref().map_err(|error| anyhow!("{error}"))?)?;
        Ok(library)
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("crashes.so")
    }

    fn load_into(&self, command: &mut Command, fault: &str) {
        command.env("LD_PRELOAD", self.path()).env("LIBRARY_FAULT", fault);
    }

    /// Runs `cs336` with the library, through a shell that runs `line` first; gives back whether it succeeded, and what
    /// it printed.
    fn run(&self, line: &str, fault: &str, root: &Path, arguments: &[&str]) -> Result<(bool, String)> {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{line}\nexec \"$@\" >&2")).args(["sh", PROGRAM]).args(arguments);
        self.load_into(command.env("CS336_ROOT", root), fault);
        let (status, output) = Process::start(&mut command, root.join("output"))?.ended()?;
        ensure!(matches!(status.code(), Some(0 | 1)), "{status}: {output}");
        Ok((status.success(), output))
    }

    /// Fails if a process with the library is left.
    fn require_none_left(&self) -> Result<()> {
        let variable = format!("LD_PRELOAD={}", self.path().display());
        let none_left = wait_until(LIMIT, || processes_with(&variable).is_empty());
        ensure!(none_left, "processes {:?} are left", processes_with(&variable));
        Ok(())
    }
}

fn worker_with(line: &str, fault: &str, expected: Expected) -> Result<()> {
    let library = Library::new()?;
    let (folder, _) = tree_of(PROBLEM, SUITE)?;
    let limit = if matches!(expected, Hangs) { "1" } else { "600" };
    let arguments = ["measure", PROBLEM, "--profile", "cpu", "--set", "iterations=10", "--case-limit", limit];
    let (success, output) = library.run(line, fault, folder.path(), &arguments)?;
    let words = match expected {
        Answers => "\"sum\":",
        Hangs => "exceeded the limit of 1 s",
        Fails([words, _]) => words,
    };
    // The printed outcome is JSON, which escapes quotation marks.
    let found = output.contains(words) || output.contains(&words.replace('"', "\\\""));
    ensure!(success == matches!(expected, Answers) && found, "{words:?} is not in {output}");
    library.require_none_left()
}

fn peer_with(fault: &str, expected: Expected) -> Result<()> {
    let library = Library::new()?;
    let mut command = python();
    command.args(of_peers(SUITES.as_ref(), "measure")).arg("cpu");
    library.load_into(&mut command, fault);
    let limit = if matches!(expected, Hangs) { Duration::from_secs(1) } else { 2 * LIMIT };
    let call = |mut peer: Peer| peer.call::<Value>("close", json!({}), limit);
    match (Peer::start(command, 1, limit).and_then(call), expected) {
        (Ok(_), Answers) => {}
        (Err(error), Hangs) if format!("{error:#}").contains("no answer within 1 s") => {}
        (Err(error), Fails([_, words])) if format!("{error:#}").contains(words) => {}
        (ended, _) => bail!("{fault}: {ended:?}"),
    }
    library.require_none_left()
}

/// Some daemons start their programs so. The kernel then discards exit statuses.
fn a_crash_is_called_a_crash_where_sigchld_is_ignored() -> Result<()> {
    worker_with(
        "set -- env --ignore-signal=CHLD \"$@\"",
        "crashes_with_a_living_child",
        Fails(["signal 6 (SIGABRT)"; 2]),
    )
}

fn a_stopped_worker_ends_at_the_limit() -> Result<()> {
    in_time(|limit| {
        let (_folder, layout) = tree("actions", "\"stops_itself\", \"works\"")?;
        let outcome = outcome_by(&Runner { limit, ..runner(&layout) })?;
        require_failure(&outcome, &format!("limit of {} s", limit.as_secs()))
    })
}

/// Python runs no other thread while native code keeps the interpreter's lock, so the peer does not see its socket close.
fn a_peer_that_never_returns_does_not_outlive_its_worker() -> Result<()> {
    let (_folder, layout) = tree("actions", "\"hangs_in_its_peer\"")?;
    let hanging = || fs::read_to_string(layout.root.join("hanging")).ok()?.trim().parse::<u32>().ok();
    let hangs = || hanging().is_some();
    let tally = visit(&Runner::new(&layout, &hangs), &TEST_REGISTRY[0], Scope::All, &mut Notes::default())?.tally;
    let Some(peer) = hanging().filter(|_| tally.interrupted) else { bail!("no peer hangs: {tally:?}") };
    ensure!(wait_until(LIMIT, || !is_alive(peer)), "the peer {peer} outlived its worker");
    Ok(())
}

fn a_reply_is_never_taken_for_that_of_another_case() -> Result<()> {
    let library = Library::new()?;
    let (folder, layout) = tree_of(PROBLEM, SUITE)?;
    let (success, output) =
        library.run("", "answers_twice", folder.path(), &["measure", PROBLEM, "--profile", "cpu"])?;
    ensure!(!success && output.contains("2 measured, 0 out of memory, 0 not run, 1 failed"), "{output}");
    let record = layout.read_file(&layout.local(Profile::Cpu, PROBLEM), PROBLEM, Profile::Cpu)?;
    let record = record.context("no record")?;
    require_failure(&record.cases[1].outcome, "the worker answered job ")?;
    library.require_none_left()
}

fn a_clock_that_jumps_changes_no_measurement() -> Result<()> {
    let library = Library::new()?;
    let (folder, layout) = tree_of(PROBLEM, SUITE)?;
    let measure = |more: &[&str]| {
        let arguments = [&["measure", PROBLEM, "--profile", "cpu"], more].concat();
        library.run("", "makes_the_clock_jump", folder.path(), &arguments)
    };
    let (success, output) = measure(&["--budget", "1h"])?;
    ensure!(success && output.contains("3 measured, 0 out of memory, 0 not run, 0 failed"), "{output}");
    let record = layout.read_file(&layout.local(Profile::Cpu, PROBLEM), PROBLEM, Profile::Cpu)?;
    ensure!(record.is_some_and(|record| record.cases.iter().all(|case| case.elapsed_s < 3600.0)), "a time is wrong");
    let (success, output) = measure(&["--resume"])?;
    ensure!(success && output.contains("nothing to measure: all 3 cpu cases are recorded"), "{output}");
    library.require_none_left()
}
