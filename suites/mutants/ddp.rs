//! The grader graded, data parallelism: every broken strategy must be caught, and ranks that fail must end well.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cs336::collective::drill::{self, Drill, Fault};
use cs336::collective::ranks::{Launch, launch, set_program};
use cs336::harness::problem::Verdict;
use cs336::model::toy::Blueprint;
use cs336::parallel::mutants::MUTANTS;
use cs336::problems::naive_ddp;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

/// What the check of each mutant must find, in its own words, and on which of the official models.
const CAUGHT: &[(&str, &str, &str)] = &[
    ("mutant_summed", "toy", "away from single-process training"),
    ("mutant_only_first", "toy", "away from single-process training"),
    ("mutant_tied_twice", "tied", "fc2.weight is"),
    ("mutant_stale", "toy", "away from single-process training"),
    ("mutant_local", "toy", "away from single-process training"),
    ("mutant_no_broadcast", "toy", "construction left unbroadcast fc1.weight"),
    ("mutant_frozen_apart", "toy", "construction left unbroadcast fc2.fc.bias"),
    ("mutant_last_rank_leads", "toy", "construction changed fc1.weight"),
];

/// One test a mutant, the control, and one a way for a rank to fail.
pub fn trials() -> Vec<Trial> {
    set_program(env!("CARGO_BIN_EXE_cs336").into());
    let mut trials = vec![
        trial("mutants::ddp::every_mutant_is_listed", every_mutant_is_listed),
        trial("mutants::ddp::naive_is_the_control", naive_is_the_control),
        trial("mutants::ddp::golden_cases_catch_summed_gradients", || fails(naive_ddp::golden_cases("mutant_summed"))),
        trial("mutants::ddp::random_networks_catch_a_stale_gradient", || {
            fails(naive_ddp::random_networks("mutant_stale"))
        }),
        trial("ranks::a_rank_that_exits_early_ends_the_run", || fault_ends_the_run(Fault::Exit)),
        trial("ranks::a_rank_that_panics_ends_the_run", || fault_ends_the_run(Fault::Panic)),
        trial("ranks::a_rank_that_fails_ends_the_run", || fault_ends_the_run(Fault::Fail)),
        trial("ranks::a_rank_that_stalls_is_ended_at_the_deadline", || fault_ends_the_run(Fault::Stall)),
        trial("ranks::a_killed_supervisor_takes_its_ranks_along", a_killed_supervisor_takes_its_ranks_along),
        trial("ranks::an_unknown_task_is_named", an_unknown_task_is_named),
    ];
    trials.extend(CAUGHT.iter().map(|&(mutant, model, words)| {
        trial(&format!("mutants::ddp::{mutant}_is_caught"), move || mutant_is_caught(mutant, model, words))
    }));
    trials
}

fn trial(name: &str, body: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::test(name, || body().map_err(|error| Failed::from(format!("{error:#}"))))
}

fn every_mutant_is_listed() -> Result<()> {
    let listed: Vec<_> = CAUGHT.iter().map(|(mutant, ..)| *mutant).collect();
    let exist: Vec<_> = MUTANTS.iter().map(|mutant| mutant.name).collect();
    ensure!(listed == exist, "the table lists {listed:?}, but the mutants are {exist:?}");
    Ok(())
}

fn naive_is_the_control() -> Result<()> {
    for model in [Blueprint::toy(), Blueprint::tied()] {
        naive_ddp::verdict(naive_ddp::official("naive", model)?)?;
    }
    Ok(())
}

/// A mutant must lead to findings; a crash of its ranks would be an error, and proves nothing about the check.
fn mutant_is_caught(mutant: &str, model: &str, words: &str) -> Result<()> {
    let report = naive_ddp::official(mutant, Blueprint::by_name(model)?)?;
    let found = report.findings.iter().any(|finding| finding.contains(words));
    ensure!(found, "none of {} findings says {words:?}: {:#?}", report.findings.len(), report.findings);
    naive_ddp::verdict(report).err().context("the check passed")?;
    Ok(())
}

fn fails(outcome: Result<Verdict>) -> Result<()> {
    let words = format!("{:#}", outcome.err().context("the check passed")?);
    ensure!(words.contains("away from single-process training") || words.contains("comparisons failed"), "{words}");
    Ok(())
}

/// The last of two ranks misbehaves between two collectives: the error names it, no rank is left, and the next run works.
fn fault_ends_the_run(fault: Fault) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let started = Instant::now();
    let deadline = Duration::from_secs(if fault == Fault::Stall { 8 } else { 60 });
    let outcome = launch(&Launch { task: drill::TASK.name, world_size: 2, deadline }, &input(fault, folder.path())?);
    let words = format!("{:#}", outcome.err().context("the run succeeded")?);
    let expected: &[&str] = match fault {
        Fault::Exit => &["rank 1 of 2 exited with status 7"],
        Fault::Panic => &["rank 1 of 2 exited with status 101", "panicked at", "this rank panics"],
        Fault::Fail => &["rank 1 of 2 exited with status 1", "this rank gives up"],
        _ => &["the deadline of 8.0 s passed", "rank 1 of 2 was still running"],
    };
    for expected in expected {
        ensure!(words.contains(expected), "{expected:?} is not in: {words}");
    }
    ensure!(started.elapsed() < Duration::from_secs(30), "it took {:?}", started.elapsed());
    none_left(folder.path(), Duration::ZERO)?;

    let folder = tempfile::tempdir()?;
    let next = Launch { task: drill::TASK.name, world_size: 2, deadline: Duration::from_secs(60) };
    let sums = launch(&next, &input(Fault::None, folder.path())?).context("the run after the fault")?;
    ensure!(sums == [json!(3.0), json!(3.0)], "1 + 2 on two ranks is {sums:?}");
    none_left(folder.path(), Duration::ZERO)
}

/// A supervisor that is killed cannot reap: the kernel must end its ranks.
fn a_killed_supervisor_takes_its_ranks_along() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("input.json");
    std::fs::write(&file, serde_json::to_vec(&input(Fault::SuperviseStalled, folder.path())?)?)?;
    let port = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let mut supervisor = Command::new(env!("CARGO_BIN_EXE_cs336"))
        .args(["rank", "--task", drill::TASK.name, "--input"])
        .arg(&file)
        .arg("--output")
        .arg(folder.path().join("output.json"))
        .envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")])
        .env("MASTER_PORT", port.to_string())
        .spawn()?;
    let started = Instant::now();
    while pids(folder.path())?.len() < 2 && started.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let running = pids(folder.path())?.into_iter().filter(|&pid| is_alive(pid)).count();
    supervisor.kill()?;
    supervisor.wait()?;
    ensure!(running == 2, "{running} ranks were running when the supervisor was killed");
    none_left(folder.path(), Duration::from_secs(10))
}

fn an_unknown_task_is_named() -> Result<()> {
    let run = Launch { task: "no_such_task", world_size: 1, deadline: Duration::from_secs(60) };
    let words = format!("{:#}", launch(&run, &Value::Null).err().context("the run succeeded")?);
    ensure!(words.contains("no rank task \"no_such_task\"") && words.contains(drill::TASK.name), "{words}");
    Ok(())
}

fn input(fault: Fault, folder: &Path) -> Result<Value> {
    Ok(serde_json::to_value(Drill { fault, folder: folder.into() })?)
}

/// The processes that noted themselves in `folder`, as [`drill`] has every rank do.
fn pids(folder: &Path) -> Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "pid") {
            pids.extend(std::fs::read_to_string(path)?.parse::<u32>());
        }
    }
    Ok(pids)
}

/// Whether the process exists and is no zombie (whose parent is not ours to reap for).
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

fn none_left(folder: &Path, patience: Duration) -> Result<()> {
    let pids = pids(folder)?;
    ensure!(pids.len() == 2, "{} ranks noted themselves, not 2", pids.len());
    let started = Instant::now();
    while pids.iter().any(|&pid| is_alive(pid)) {
        ensure!(started.elapsed() < patience, "of the ranks {pids:?} some are still alive");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
