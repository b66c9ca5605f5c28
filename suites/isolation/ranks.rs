//! Fault tests: a rank that fails ends its whole run in time, the error names it, and no process is left.

use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cs336::checks::fault_test::{self, RankFault, pids};
use cs336::checks::faulty_runs::{
    LIMIT, Process, by_hand, fault_ends_by, input, none_left, says, selftest, the_next_run_works, write_input,
};
use cs336::collective::Backend;
use cs336::collective::ranks::{Launch, launch_program};
use cs336::process::{PARENT, is_alive, wait_until};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::in_time;
use crate::processes::{PROGRAM, supervised_stall};

/// A fault of the last of two ranks, and what the error must say, in order of appearance. `checks::device::nccl_ranks` has
/// the same of two GPUs.
const FAULTS: &[(RankFault, &[&str])] = &[
    (
        RankFault::Exit,
        &[
            "which rank 1 has ended without calling",
            "rank 1 of 2 exited with status 7; it was in no collective; its last was barrier 1",
        ],
    ),
    (RankFault::Leave, &["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has ended without calling"]),
    (
        RankFault::Fail,
        &["rank 1 of 2 exited with status 1; it was in no collective; its last was barrier 1", "gives up"],
    ),
    (
        RankFault::Panic,
        &["rank 1 of 2 exited with status 101; it was in no", "barrier 1", "panicked at", "rank panics"],
    ),
    (RankFault::PanicInBackward, &["rank 1 of 2 exited with status 1; it was in no", "barrier 1", "this hook panics"]),
    (
        RankFault::Stall,
        &["rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called: it stalls, idle for"],
    ),
    (
        RankFault::Work,
        &[
            "the deadline of ",
            "rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called: it works",
            "rank 1 of 2 was still running",
        ],
    ),
    (
        RankFault::NeverReady,
        &["rank 0 waits in all_reduce 2", "rank 1 has not called: it stalls", "last was barrier 1"],
    ),
    (
        RankFault::WrongCount,
        &["the ranks disagree on collective 2: rank 0 calls all_reduce of 4 Float, sum, rank 1 calls all_reduce of 8"],
    ),
    (
        RankFault::WrongOrder,
        &["the ranks disagree on collective 2: rank 0 calls all_reduce of 4 Float, sum, rank 1 calls broadcast of 4"],
    ),
];

type Body = fn() -> Result<()>;

fn name(fault: RankFault) -> String {
    format!("{fault:?}").chars().fold(String::new(), |name, letter| match letter.is_uppercase() && !name.is_empty() {
        true => format!("{name}_{}", letter.to_ascii_lowercase()),
        false => format!("{name}{}", letter.to_ascii_lowercase()),
    })
}

pub fn trials() -> Vec<Trial> {
    let trial = |name: String, run: Box<dyn Fn() -> Result<()> + Send>| {
        Trial::test(format!("ranks::{name}"), move || run().map_err(|error| format!("{error:#}").into()))
    };
    let fault = |&(fault, expected): &'static (RankFault, &'static [&str])| {
        trial(name(fault), Box::new(move || fault_ends_the_run(fault, expected)))
    };
    let others: [(&str, Body); 15] = [
        ("exit_before_the_ranks_meet", exit_before_the_ranks_meet),
        ("wrong_world_size", wrong_world_size),
        ("port_taken", port_taken),
        ("a_missing_rank_is_named", a_missing_rank_is_named),
        ("what_is_no_store_is_waited_for_in_sentences_of_ours_alone", what_is_no_store),
        ("an_unknown_task_is_named", an_unknown_task_is_named),
        ("doctor_examines_two_ranks", doctor_examines_two_ranks),
        ("doctor_says_what_it_waits_for", doctor_says_what_it_waits_for),
        ("doctor_says_that_a_single_rank_has_no_other_to_reach", doctor_of_one_rank),
        ("ranks_of_one_machine_ignore_the_network_that_its_shell_names", a_network_that_the_shell_names),
        ("ctrl_c", || signal_ends_a_launch("INT")),
        ("sigterm", || signal_ends_a_launch("TERM")),
        ("a_killed_supervisor_takes_its_ranks_along", a_killed_supervisor_takes_its_ranks_along),
        ("selftest_on_two_ranks", || selftest(Backend::Gloo, 2).map(drop)),
        ("selftest_on_three_ranks", || selftest(Backend::Gloo, 3).map(drop)),
    ];
    let others = others.into_iter().map(|(name, run)| trial(name.to_string(), Box::new(run)));
    FAULTS.iter().map(fault).chain(others).collect()
}

fn fault_ends_the_run(fault: RankFault, expected: &[&str]) -> Result<()> {
    match fault {
        RankFault::Work => in_time(|deadline| fault_ends_by(deadline, Backend::Gloo, fault, expected)),
        _ => fault_ends_by(Duration::from_secs(60), Backend::Gloo, fault, expected),
    }
}

fn exit_before_the_ranks_meet() -> Result<()> {
    let message = wrapped("[ \"$RANK\" = 1 ] && exit 5")?;
    says(&message, &["rank 1 of 2 exited with status 5", "rank 0: it had called no collective"])
}

fn wrong_world_size() -> Result<()> {
    let message = wrapped("[ \"$RANK\" = 1 ] && export WORLD_SIZE=3")?;
    says(
        &message,
        &["the ranks differ in WORLD_SIZE: rank 0 on ", " has 2, rank 1 on ", " has 3. Start all ranks with"],
    )
}

/// Runs ranks through a shell script that begins with `line`, and returns their error message.
fn wrapped(line: &str) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("cs336");
    std::fs::write(&script, format!("#!/bin/sh\n{line}\nexec '{PROGRAM}' \"$@\"\n"))?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    let plan = Launch::new(fault_test::TASK.name, 2, Duration::from_secs(60));
    let outcome = launch_program(&script, &plan, &input(RankFault::None, folder.path())?);
    let message = format!("{:#}", outcome.err().context("the run succeeded")?);
    ensure!(pids(folder.path())?.into_iter().all(|pid| !is_alive(pid)), "a rank is left");
    the_next_run_works()?;
    Ok(message)
}

/// As under torchrun, where rank 0 serves the store at a given port.
fn port_taken() -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let folder = tempfile::tempdir()?;
    let (status, message) = by_hand(Backend::Gloo, RankFault::None, folder.path(), 0, port, &[])?.ended()?;
    ensure!(status.code() == Some(1), "{status}: {message}");
    says(
        &message,
        &["rank 0 cannot serve the store at 127.0.0.1", &format!(":{port}"), "set MASTER_PORT to a port that is free"],
    )?;
    drop(listener);
    // The same ranks started by hand at the same port: the failed attempt left nothing behind.
    for rank in [
        by_hand(Backend::Gloo, RankFault::None, folder.path(), 0, port, &[])?,
        by_hand(Backend::Gloo, RankFault::None, folder.path(), 1, port, &[])?,
    ] {
        let (status, message) = rank.ended()?;
        ensure!(status.success(), "{status}: {message}");
    }
    let results: Value = serde_json::from_slice(&std::fs::read(folder.path().join("0.json"))?)?;
    ensure!(results == json!([3.0, 3.0]), "rank 0 wrote {results}, not the results of both");
    ensure!(!folder.path().join("1.json").exists(), "rank 1 wrote results that only rank 0 must write");
    Ok(())
}

fn a_missing_rank_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let (status, message) =
        by_hand(Backend::Gloo, RankFault::None, folder.path(), 0, port, &[("CS336_DEADLINE_S", "2")])?.ended()?;
    ensure!(status.code() == Some(1), "{status}: {message}");
    says(&message, &["rank 1 of 2 has not arrived within 2.0 s (CS336_DEADLINE_S)", &format!("MASTER_PORT={port}")])
}

/// Something answers at the store's address, and closes each connection.
fn what_is_no_store() -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            // It may be closed already.
            let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let folder = tempfile::tempdir()?;
    let (status, message) =
        by_hand(Backend::Gloo, RankFault::None, folder.path(), 1, port, &[("CS336_DEADLINE_S", "4")])?.ended()?;
    ensure!(status.code() == Some(1), "{status}: {message}");
    // Its own deadline ends it, or libtorch's, which is as long.
    says(&message, &["rank 1 of 2", "correct MASTER_ADDR and MASTER_PORT"])?;
    says(&message, &["store at ", &format!("127.0.0.1:{port}")])?;
    ensure!(message.lines().all(|line| line.starts_with("cs336: ")), "a line is not ours:\n{message}");
    Ok(())
}

fn an_unknown_task_is_named() -> Result<()> {
    let plan = Launch::new("no_such_task", 1, Duration::from_secs(60));
    let outcome = launch_program(Path::new(PROGRAM), &plan, &Value::Null);
    let message = format!("{:#}", outcome.err().context("the run succeeded")?);
    says(
        &message,
        &["rank 0 of 1 exited with status 1", "no rank task is called \"no_such_task\"", fault_test::TASK.name],
    )
}

/// One of two doctors, which send `large` MB to each other at last.
fn doctor(rank: &str, port: &str, large: &str) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["doctor", "--ranks", "--backend", "gloo", "--large", large]);
    command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("CS336_DEADLINE_S", "60")]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)]).env_remove(PARENT);
    command
}

fn doctor_says_what_it_waits_for() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port().to_string();
    let start =
        |rank: &str| Process::start(&mut doctor(rank, &port, "400"), folder.path().join(format!("{rank}.output")));
    let [waiting, mut stopped] = [start("0")?, start("1")?];
    let pid = stopped.child.id();
    // 900 MB are more than it has before the last all-reduce.
    let holds = || {
        let pages = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).is_some_and(|pages| pages > 230_000)
    };
    let held = wait_until(LIMIT, || holds() || !matches!(stopped.child.try_wait(), Ok(None)));
    let send = |signal: &str| Command::new("kill").args([signal, &pid.to_string()]).status();
    send("-STOP")?;
    let awaited = "cs336: rank 0 of 2 waits for all ranks at an all-reduce; it gives up in ";
    let says_so = || std::fs::read_to_string(&waiting.output).is_ok_and(|said| said.contains(awaited));
    let said = wait_until(LIMIT, says_so);
    send("-CONT")?;
    for rank in [waiting, stopped] {
        let (status, message) = rank.ended()?;
        ensure!(held && said && status.success(), "{held} {said} {status}: {message}");
    }
    Ok(())
}

fn doctor_examines_two_ranks() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port().to_string();
    let other = Process::start(&mut doctor("1", &port, "4"), folder.path().join("1.output"))?;
    let output = doctor("0", &port, "4").output()?;
    let (status, message) = other.ended()?;
    ensure!(status.success() && output.status.success(), "{message}{}", String::from_utf8_lossy(&output.stderr));
    says(
        &String::from_utf8(output.stdout)?,
        &[
            "2 ranks over gloo, of one version, commit and suites; all reach each other",
            "(127.0.0.1)",
            "+0.000 ms, +- 0.000 ms",
            "rank 0 to rank 1",
            "GB/s",
            "all-reduce of 1 MB",
            ", expected ",
            "all-reduce of 4 MB",
            ", expected ",
        ],
    )
}

/// As where a launcher has made a run of each task.
fn doctor_of_one_rank() -> Result<()> {
    let mut command = Command::new(PROGRAM);
    command.args(["doctor", "--ranks", "--backend", "gloo", "--large", "4"]);
    command.envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("CS336_DEADLINE_S", "60")]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]).env_remove(PARENT);
    let output = command.output()?;
    let message = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && output.stdout.is_empty(), "{}: {message}", output.status);
    says(&message, &["this run has one rank, and so no other rank to reach", "srun --ntasks 2"])
}

fn a_network_that_the_shell_names() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(PROGRAM);
    command.args(["launch", "--world-size", "2", "--task", fault_test::TASK.name, "--input"]);
    command.arg(write_input(RankFault::None, folder.path())?).env("GLOO_SOCKET_IFNAME", "nope0");
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(serde_json::from_slice::<Value>(&output.stdout)? == json!([3.0, 3.0]), "{:?}", output.stdout);
    Ok(())
}

/// On Ctrl-C and SIGTERM the supervisor reports the ranks' state, ends them, and exits with 130.
fn signal_ends_a_launch(signal: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let supervisor = supervised_stall(folder.path())?;
    let sent = Command::new("/bin/sh").arg("-c").arg(format!("kill -{signal} {}", supervisor.child.id())).status()?;
    ensure!(sent.success(), "kill failed");
    let (status, message) = supervisor.ended()?;
    ensure!(status.code() == Some(130), "{status}: {message}");
    says(&message, &["interrupted", "rank 0 waits in all_reduce 2 of 4 Float, sum, which rank 1 has not called"])?;
    none_left(folder.path(), Duration::ZERO)?;
    the_next_run_works()
}

/// A killed supervisor cannot end its ranks: the operating system must do it.
fn a_killed_supervisor_takes_its_ranks_along() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut supervisor = supervised_stall(folder.path())?;
    supervisor.child.kill()?;
    supervisor.child.wait()?;
    none_left(folder.path(), Duration::from_secs(10))?;
    the_next_run_works()
}
