//! Fault tests: a rank that fails, in whatever way, ends its whole run in time, by name, and leaves nothing behind.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cs336::checks::fault_test::{self, Fault, is_alive, pids};
use cs336::checks::sharded_protocol::{self, Case, Seen};
use cs336::collective::ranks::{Launch, launch_program};
use cs336::collective::{Backend, selftest};
use cs336::model::toy::{Bias, Blueprint, Layer};
use cs336::parallel::Options;
use cs336::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::in_time;
use crate::processes::{PROGRAM, by_hand, input, none_left, supervised_stall};

/// A fault of the last of two ranks, and what the error must say, in order of appearance.
const FAULTS: &[(Fault, &[&str])] = &[
    (
        Fault::Exit,
        &[
            "which rank 1 has ended without calling",
            "rank 1 of 2 exited with status 7; it was in no collective; its last was barrier 1",
        ],
    ),
    (Fault::Leave, &["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has ended without calling"]),
    (Fault::Fail, &["rank 1 of 2 exited with status 1; it was in no collective; its last was barrier 1", "gives up"]),
    (Fault::Panic, &["rank 1 of 2 exited with status 101; it was in no", "barrier 1", "panicked at", "rank panics"]),
    (Fault::PanicInBackward, &["rank 1 of 2 exited with status 1; it was in no", "barrier 1", "this hook panics"]),
    (Fault::Stall, &["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called: it stalls, idle for"]),
    (
        Fault::Work,
        &[
            "the deadline of ",
            "rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called: it works",
            "rank 1 of 2 was still running",
        ],
    ),
    (Fault::NeverReady, &["rank 0 waits in all_reduce 2", "rank 1 has not called: it stalls", "last was barrier 1"]),
    (
        Fault::WrongCount,
        &["the ranks disagree on collective 2: rank 0 calls all_reduce of 4 Float, sum, rank 1 calls all_reduce of 8"],
    ),
    (
        Fault::WrongOrder,
        &["the ranks disagree on collective 2: rank 0 calls all_reduce of 4 Float, sum, rank 1 calls broadcast of 4"],
    ),
];

/// The same on two GPUs. What a rank waits in is known a second later there, so less is said of the quick ends.
const GPU_FAULTS: &[(Fault, &[&str])] = &[
    (Fault::Exit, &["rank 1 of 2 exited with status 7; it was in no collective; its last was barrier 1"]),
    (Fault::Leave, &["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has ended without calling"]),
    (Fault::Fail, &["rank 1 of 2 exited with status 1; it was in no collective; its last was barrier 1", "gives up"]),
    (Fault::Stall, &["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called: it stalls, idle for"]),
    (Fault::WrongCount, &["the ranks disagree on collective 2", "all_reduce of 4 Float, sum", "all_reduce of 8"]),
    (Fault::WrongOrder, &["the ranks disagree on collective 2", "all_reduce of 4 Float, sum", "broadcast of 4"]),
];

type Body = fn() -> Result<()>;

fn name(fault: Fault) -> String {
    format!("{fault:?}").chars().fold(String::new(), |name, letter| match letter.is_uppercase() && !name.is_empty() {
        true => format!("{name}_{}", letter.to_ascii_lowercase()),
        false => format!("{name}{}", letter.to_ascii_lowercase()),
    })
}

pub fn trials() -> Vec<Trial> {
    let trial = |name: String, run: Box<dyn Fn() -> Result<()> + Send>| {
        Trial::test(format!("ranks::{name}"), move || run().map_err(|error| format!("{error:#}").into()))
    };
    let fault = |&(fault, words): &'static (Fault, &'static [&str])| {
        trial(name(fault), Box::new(move || fault_ends_the_run(Backend::Gloo, fault, words)))
    };
    let others: [(&str, Body); 10] = [
        ("exit_before_the_ranks_meet", exit_before_the_ranks_meet),
        ("wrong_world_size", wrong_world_size),
        ("port_taken", port_taken),
        ("a_missing_rank_is_named", a_missing_rank_is_named),
        ("an_unknown_task_is_named", an_unknown_task_is_named),
        ("ctrl_c", || signal_ends_a_launch("INT")),
        ("sigterm", || signal_ends_a_launch("TERM")),
        ("a_killed_supervisor_takes_its_ranks_along", a_killed_supervisor_takes_its_ranks_along),
        ("selftest_on_two_ranks", || selftest(Backend::Gloo, 2)),
        ("selftest_on_three_ranks", || selftest(Backend::Gloo, 3)),
    ];
    let others = others.into_iter().map(|(name, run)| trial(name.to_string(), Box::new(run)));
    FAULTS.iter().map(fault).chain(others).chain(gpu_trials()).collect()
}

/// Ignored: `cargo test --test isolation -- --ignored ranks::nccl` runs them on a machine with two GPUs.
fn gpu_trials() -> Vec<Trial> {
    let trial = |name: &str, run: Box<dyn Fn() -> Result<()> + Send>| {
        let run = move || run().map_err(|error| format!("{error:#}").into());
        Trial::test(format!("ranks::nccl::{name}"), run).with_ignored_flag(true)
    };
    let fault = |&(fault, words): &'static (Fault, &'static [&str])| {
        trial(&name(fault), Box::new(move || fault_ends_the_run(Backend::Nccl, fault, words)))
    };
    let others = [
        trial("selftest_needs_two_gpus", Box::new(|| selftest(Backend::Nccl, 2))),
        trial("a_late_peer_ends_in_an_abort", Box::new(a_late_peer_ends_in_an_abort)),
    ];
    let sharded = |optimizer: &'static str| {
        trial(&format!("{optimizer}_is_adamw"), Box::new(move || a_sharded_optimizer_is_adamw(optimizer)))
    };
    let sharded = [SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD].map(sharded);
    others.into_iter().chain(sharded).chain(GPU_FAULTS.iter().map(fault)).collect()
}

/// Every collective and dtype against its values, in order with computation, in the log.
fn selftest(backend: Backend, world_size: usize) -> Result<()> {
    let plan = Launch { backend, ..Launch::new(selftest::TASK.name, world_size, Duration::from_secs(120)) };
    let results = launch_program(Path::new(PROGRAM), &plan, &Value::Null)?;
    ensure!(results.len() == world_size, "{} results of {world_size} ranks", results.len());
    let timed = |result: &Value| result["all_reduce_1mb_s"].as_array().is_some_and(|times| times.len() == 50);
    ensure!(results.iter().all(|result| timed(result) && result["backend"] == backend.name()), "{results:?}");
    Ok(())
}

/// The official protocol, which asks for the very values of AdamW, with layers so wide that each stream has work while the
/// others go on: a stream that does not wait for another works with old values.
fn a_sharded_optimizer_is_adamw(optimizer: &str) -> Result<()> {
    let layer = |i: usize, d_out| Layer { bias: Bias::Trained, ..Layer::trained(format!("layer{i}"), 2048, d_out) };
    // The last bias cannot be cut in two where it lies.
    let layers =
        [2048, 2048, 2048, 2048, 2048, 2047].into_iter().enumerate().map(|(i, d_out)| layer(i, d_out)).collect();
    let blueprint = Blueprint { name: "wide".into(), fixed_parameter: false, layers };
    let cases = vec![Case::official(blueprint, Options { bucket_size_mb: 40.0 })];
    let input = serde_json::to_value(sharded_protocol::Input { optimizer: optimizer.into(), cases })?;
    let deadline = Duration::from_secs(120);
    let plan = Launch { backend: Backend::Nccl, ..Launch::new(sharded_protocol::TASK.name, 2, deadline) };
    for rank in launch_program(Path::new(PROGRAM), &plan, &input)? {
        let Seen { report, .. } = serde_json::from_value(rank)?;
        ensure!(report.comparisons > 0 && report.findings.is_empty(), "{:?}", report.findings);
    }
    Ok(())
}

/// Without a supervisor, as under torchrun, a rank ends itself when its peer does not come.
fn a_late_peer_ends_in_an_abort() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let start = |rank| by_hand(Backend::Nccl, Fault::Stall, folder.path(), rank, port, &[("CS336_DEADLINE_S", "15")]);
    let (waits, mut stalls) = (start(0)?, start(1)?);
    let outcome = waits.ended();
    stalls.child.kill()?;
    stalls.child.wait()?;
    let (status, words) = outcome?;
    ensure!(status.code() == Some(75), "{status}: {words}");
    says(&words, &["rank 0: all_reduce 2 of 4 Float, sum has not ended within 15.0 s; the communicator is aborted"])
}

fn fault_ends_the_run(backend: Backend, fault: Fault, words: &[&str]) -> Result<()> {
    match fault {
        Fault::Work => in_time(|deadline| fault_ends_by(deadline, backend, fault, words)),
        _ => fault_ends_by(Duration::from_secs(60), backend, fault, words),
    }
}

fn fault_ends_by(deadline: Duration, backend: Backend, fault: Fault, words: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let plan = Launch { backend, patience: Duration::from_secs(3), ..Launch::new(fault_test::TASK.name, 2, deadline) };
    let outcome = launch_program(Path::new(PROGRAM), &plan, &input(fault, folder.path())?);
    says(&format!("{:#}", outcome.err().context("the run succeeded")?), words)?;
    none_left(folder.path(), Duration::ZERO)?;
    the_next_run_works()
}

fn exit_before_the_ranks_meet() -> Result<()> {
    let words = wrapped("[ \"$RANK\" = 1 ] && exit 5")?;
    says(&words, &["rank 1 of 2 exited with status 5", "rank 0: it had called no collective"])
}

fn wrong_world_size() -> Result<()> {
    let words = wrapped("[ \"$RANK\" = 1 ] && export WORLD_SIZE=3")?;
    // Whichever rank comes second finds it, and its end may be the other's before that has found it too.
    let told = [
        "rank 0 has WORLD_SIZE 2 and backend gloo, but rank 1 has WORLD_SIZE 3 and backend gloo",
        "rank 1 has WORLD_SIZE 3 and backend gloo, but rank 0 has WORLD_SIZE 2 and backend gloo",
    ];
    ensure!(
        told.iter().any(|told| words.contains(told)),
        "neither rank says that they were told different things: {words}"
    );
    Ok(())
}

/// Runs ranks through a shell script that begins with `line`, and gives back the words of their failure.
fn wrapped(line: &str) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("cs336");
    std::fs::write(&script, format!("#!/bin/sh\n{line}\nexec '{PROGRAM}' \"$@\"\n"))?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    let plan = Launch::new(fault_test::TASK.name, 2, Duration::from_secs(60));
    let outcome = launch_program(&script, &plan, &input(Fault::None, folder.path())?);
    let words = format!("{:#}", outcome.err().context("the run succeeded")?);
    ensure!(pids(folder.path())?.into_iter().all(|pid| !is_alive(pid)), "a rank is left");
    the_next_run_works()?;
    Ok(words)
}

/// As under torchrun, where rank 0 serves the store at a port that it is given.
fn port_taken() -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let folder = tempfile::tempdir()?;
    let (status, words) = by_hand(Backend::Gloo, Fault::None, folder.path(), 0, port, &[])?.ended()?;
    ensure!(status.code() == Some(1), "{status}: {words}");
    says(&words, &["rank 0 listening on 127.0.0.1", &format!(":{port}"), "set MASTER_PORT to a port that is free"])?;
    drop(listener);
    // The same ranks, started by hand at the same port: nothing of the failed attempt is in their way.
    for rank in [
        by_hand(Backend::Gloo, Fault::None, folder.path(), 0, port, &[])?,
        by_hand(Backend::Gloo, Fault::None, folder.path(), 1, port, &[])?,
    ] {
        let (status, words) = rank.ended()?;
        ensure!(status.success(), "{status}: {words}");
    }
    let results: Value = serde_json::from_slice(&std::fs::read(folder.path().join("0.json"))?)?;
    ensure!(results == json!([3.0, 3.0]), "rank 0 wrote {results}, not the results of both");
    ensure!(!folder.path().join("1.json").exists(), "rank 1 wrote what is rank 0's to write");
    Ok(())
}

fn a_missing_rank_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let (status, words) =
        by_hand(Backend::Gloo, Fault::None, folder.path(), 0, port, &[("CS336_DEADLINE_S", "2")])?.ended()?;
    ensure!(status.code() == Some(1), "{status}: {words}");
    says(&words, &["rank 1 of 2 has not arrived within 2.0 s"])
}

fn an_unknown_task_is_named() -> Result<()> {
    let plan = Launch::new("no_such_task", 1, Duration::from_secs(60));
    let outcome = launch_program(Path::new(PROGRAM), &plan, &Value::Null);
    let words = format!("{:#}", outcome.err().context("the run succeeded")?);
    says(
        &words,
        &["rank 0 of 1 exited with status 1", "no rank task is called \"no_such_task\"", fault_test::TASK.name],
    )
}

/// Ctrl-C and SIGTERM: the supervisor says what the ranks were doing, ends them, and exits with 130.
fn signal_ends_a_launch(signal: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let supervisor = supervised_stall(folder.path())?;
    let sent = Command::new("/bin/sh").arg("-c").arg(format!("kill -{signal} {}", supervisor.child.id())).status()?;
    ensure!(sent.success(), "kill failed");
    let (status, words) = supervisor.ended()?;
    ensure!(status.code() == Some(130), "{status}: {words}");
    says(&words, &["interrupted", "rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called"])?;
    none_left(folder.path(), Duration::ZERO)?;
    the_next_run_works()
}

/// A supervisor that is killed cannot reap: the kernel must end its ranks.
fn a_killed_supervisor_takes_its_ranks_along() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut supervisor = supervised_stall(folder.path())?;
    supervisor.child.kill()?;
    supervisor.child.wait()?;
    none_left(folder.path(), Duration::from_secs(10))?;
    the_next_run_works()
}

fn the_next_run_works() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let plan = Launch::new(fault_test::TASK.name, 2, Duration::from_secs(60));
    let sums = launch_program(Path::new(PROGRAM), &plan, &input(Fault::None, folder.path())?);
    ensure!(sums.context("the run after the fault")? == [json!(3.0), json!(3.0)], "1 + 2 on two ranks is not 3");
    none_left(folder.path(), Duration::ZERO)
}

fn says(text: &str, words: &[&str]) -> Result<()> {
    let mut rest = text;
    for words in words {
        let at = rest.find(words).with_context(|| format!("{words:?} is not (or not there) in: {text}"))?;
        rest = &rest[at + words.len()..];
    }
    Ok(())
}
