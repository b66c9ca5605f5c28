//! Ranks on two hosts: they train as on one, and each fault ends in a sentence that names rank and host.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cs336::checks::data_parallel::official;
use cs336::checks::faulty_runs::{LIMIT, Process, says};
use cs336::checks::protocol::{self, Report};
use cs336::checks::selftest;
use cs336::checks::sharded_protocol::{self, Seen};
use cs336::model::toy::Blueprint;
use cs336::parallel::overlap_bucketed;
use cs336::parallel::trainer::ZERO1;
use cs336::problems::optimizer_state_sharding;
use cs336::process::{PARENT, wait_until};
use libtest_mimic::{Completion, Trial};
use serde_json::{Value, json};

use crate::namespaces::{Hosts, UNSHARE, are_permitted, run};
use crate::processes::PROGRAM;

/// An address of the same network that no host has.
const NOBODY: &str = "192.168.99.77";

type Body = fn(&Hosts, &Path) -> Result<()>;

const TESTS: &[(&str, Body)] = &[
    ("a_link_that_goes_down_at_the_rendezvous_ends_both_ranks", a_link_that_goes_down_at_the_rendezvous),
    ("a_rank_that_never_comes_is_awaited_by_name_and_address", a_rank_that_never_comes),
    ("a_rank_that_is_the_first_process_of_a_container_ends_at_a_signal", |_, folder| first_process(folder)),
    ("selftest_on_two_hosts", |hosts, folder| {
        let results: Vec<Value> = hosts.results(folder, selftest::TASK.name, &Value::Null, &[])?;
        ensure!(results.iter().all(|result| result["backend"] == "gloo"), "{results:?}");
        Ok(())
    }),
    ("selftest_of_six_ranks_on_two_hosts", |hosts, folder| {
        let results: Vec<Value> = hosts.results_of_six(folder, selftest::TASK.name, &Value::Null)?;
        ensure!(results.iter().all(|result| result["backend"] == "gloo"), "{results:?}");
        Ok(())
    }),
    ("a_bucketed_step_on_two_hosts_is_that_of_a_single_process", |hosts, folder| {
        let trial = official(overlap_bucketed::STRATEGY.name, &Blueprint::toy(), &[0.0016]);
        let reports: Vec<Vec<Report>> =
            hosts.results(folder, protocol::TASK.name, &serde_json::to_value([trial])?, &[])?;
        reports.iter().flatten().try_for_each(require_no_finding)
    }),
    ("a_zero1_step_on_two_hosts_is_that_of_adamw", |hosts, folder| {
        let trial = optimizer_state_sharding::official(ZERO1, &Blueprint::toy());
        let seen: Vec<Vec<Seen>> =
            hosts.results(folder, sharded_protocol::TASK.name, &serde_json::to_value([trial])?, &[])?;
        seen.iter().flatten().try_for_each(|seen| require_no_finding(&seen.report))
    }),
    ("a_host_whose_own_name_is_a_loopback_address_can_serve_others", |hosts, folder| {
        let master = [("MASTER_ADDR", "127.0.1.1")];
        hosts.results::<Value>(folder, selftest::TASK.name, &Value::Null, &master).map(drop)
    }),
    ("an_interface_of_the_hosts_own_network_is_found", |hosts, folder| {
        let interface = [("GLOO_SOCKET_IFNAME", "veth")];
        hosts.results::<Value>(folder, selftest::TASK.name, &Value::Null, &interface).map(drop)
    }),
    ("a_link_that_goes_down_is_named_with_the_rank_behind_it", a_link_that_goes_down),
    ("a_killed_far_rank_is_named_with_its_host", |hosts, folder| {
        a_lost_rank(
            hosts,
            folder,
            1,
            "rank 0 on near (192.168.99.1) of 2 ranks failed; rank 1 on far (192.168.99.2) has ended",
        )
    }),
    ("a_killed_rank_0_is_named_with_its_host", |hosts, folder| {
        a_lost_rank(
            hosts,
            folder,
            0,
            "rank 1 on far (192.168.99.2) of 2 ranks failed; rank 0 on near (192.168.99.1) has ended",
        )
    }),
    ("a_stopped_far_rank_is_told_from_a_lost_one", a_stopped_rank),
    ("a_wrong_address_is_named_by_every_rank_without_a_stack", a_wrong_address),
    ("an_interface_that_leads_to_no_other_host_ends_both_ranks", a_wrong_interface),
    ("a_launch_without_a_loopback_interface_ends_at_once", a_launch_without_loopback),
    ("another_version_on_the_far_host_ends_both_ranks", another_version),
    ("another_task_on_the_far_host_ends_both_ranks", another_task),
    ("a_trace_that_one_rank_alone_is_to_write_ends_both_ranks", a_trace_of_one_rank),
    ("doctor_names_the_pair_that_a_firewall_parts", doctor_behind_a_firewall),
];

pub fn trials() -> Vec<Trial> {
    let trial = |&(name, body): &'static (&str, Body)| {
        Trial::ignorable_test(format!("hosts::{name}"), move || {
            if let Err(reason) = are_permitted() {
                return Ok(Completion::ignored_with(format!("no network namespaces here: {reason:#}")));
            }
            let run = || body(&Hosts::new()?, tempfile::tempdir()?.path());
            run().map(|()| Completion::Completed).map_err(|error| format!("{error:#}").into())
        })
    };
    TESTS.iter().map(trial).collect()
}

/// The kernel lets no signal end the first process of a namespace that does not handle it.
fn first_process(folder: &Path) -> Result<()> {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", PROGRAM, "rank", "--task"]);
    command.arg(selftest::TASK.name).env_remove(PARENT);
    command.envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("CS336_DEADLINE_S", "60")]);
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]);
    let rank = Process::start(&mut command, folder.join("output"))?;
    let outer = rank.child.id();
    let children = || std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap_or_default();
    let handles = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", children().trim())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> 14 & 1 == 1)
    };
    ensure!(wait_until(LIMIT, handles), "it never handled SIGTERM");
    run(Command::new("kill").args(["-TERM", children().trim()]))?;
    let (status, message) = rank.ended()?;
    ensure!(status.code() == Some(130), "{status}: {message}");
    Ok(())
}

fn require_no_finding(report: &Report) -> Result<()> {
    ensure!(report.comparisons > 0 && report.findings.is_empty(), "{:?}", report.findings);
    Ok(())
}

/// Requires that the rank ends with exit code 1 and `expected`, and that it prints no stack.
fn fails_with(rank: Process, expected: &[&str]) -> Result<()> {
    let (status, message) = rank.ended()?;
    ensure!(status.code() == Some(1), "{status}: {message}");
    ensure!(!message.contains("frame #"), "a stack is printed: {message}");
    says(&message, expected)
}

fn a_link_that_goes_down(hosts: &Hosts, folder: &Path) -> Result<()> {
    let [near, far] = hosts.endless_sums(folder, "5")?;
    hosts.0[0].ip("link set veth down")?;
    let ended = fails_with(
        near,
        &[
            "rank 0 on near (192.168.99.1) of 2 ranks failed; rank 1 on far (192.168.99.2) cannot be reached (",
            "all_reduce",
        ],
    );
    fails_with(
        far,
        &[
            "rank 1 on far (192.168.99.2) of 2 ranks failed; rank 0 on near (192.168.99.1) cannot be reached (",
            "all_reduce",
        ],
    )?;
    ended
}

/// Both ranks wait for a third when the link goes down. libtorch itself would wait for the store for a quarter of an hour.
fn a_link_that_goes_down_at_the_rendezvous(hosts: &Hosts, folder: &Path) -> Result<()> {
    let of_three = [("WORLD_SIZE", "3"), ("CS336_DEADLINE_S", "14")];
    let start = |rank| hosts.start(folder, rank, selftest::TASK.name, &Value::Null, &of_three);
    let [near, far] = [start(0)?, start(1)?];
    let said = |rank: &Process| std::fs::read_to_string(&rank.output).unwrap_or_default();
    let both_wait = || [&near, &far].iter().all(|rank| said(rank).contains("waits for rank 2 at the store"));
    ensure!(wait_until(LIMIT, both_wait), "{}{}", said(&near), said(&far));
    hosts.0[0].ip("link set veth down")?;
    let ended = fails_with(near, &["rank 2 of 3 has not arrived within 14.0 s (CS336_DEADLINE_S)"]);
    fails_with(far, &["rank 1 of 3 on far waited for rank 2 at the store 192.168.99.1:29500 in vain for 14.0 s"])?;
    ended
}

fn a_lost_rank(hosts: &Hosts, folder: &Path, lost: usize, expected: &str) -> Result<()> {
    let [near, far] = hosts.endless_sums(folder, "30")?;
    let (mut killed, left) = if lost == 0 { (near, far) } else { (far, near) };
    killed.child.kill()?;
    killed.child.wait()?;
    fails_with(left, &[expected, "all_reduce"])
}

fn a_stopped_rank(hosts: &Hosts, folder: &Path) -> Result<()> {
    let [near, mut far] = hosts.endless_sums(folder, "24")?;
    run(Command::new("sh").arg("-c").arg(format!("kill -STOP {}", far.child.id())))?;
    let ended = fails_with(
        near,
        &[
            "rank 0 of 2 has waited for rank 1 on far (192.168.99.2) for ",
            " in all_reduce ",
            "; CS336_DEADLINE_S is the limit of each transfer in it",
            "rank 0 on near (192.168.99.1) of 2 ranks failed; rank 1 on far (192.168.99.2) has not ended",
        ],
    );
    far.child.kill()?;
    far.child.wait()?;
    ended
}

fn a_wrong_address(hosts: &Hosts, folder: &Path) -> Result<()> {
    let wrong = [("MASTER_ADDR", NOBODY), ("CS336_DEADLINE_S", "5")];
    let start = |rank| hosts.start(folder, rank, selftest::TASK.name, &Value::Null, &wrong);
    let [near, far] = [start(0)?, start(1)?];
    let remedy = "Set MASTER_ADDR to an address of rank 0's host; near does not have this one";
    let ended = fails_with(near, &["rank 0 cannot serve the store at 192.168.99.77:29500", remedy]);
    fails_with(
        far,
        &["rank 1 of 2 on far cannot reach rank 0's store at 192.168.99.77:29500", "No route to host", "MASTER_ADDR"],
    )?;
    ended
}

/// Both ranks offer their loopback address: the one that connects is refused, and the other one may see it end.
fn a_wrong_interface(hosts: &Hosts, folder: &Path) -> Result<()> {
    let start = |rank| hosts.start(folder, rank, selftest::TASK.name, &Value::Null, &[("GLOO_SOCKET_IFNAME", "lo")]);
    let [near, far] = [start(0)?, start(1)?];
    let remedy = "Open all ports between these hosts, or name their network in GLOO_SOCKET_IFNAME";
    let ended = fails_with(
        near,
        &["rank 0 on near (192.168.99.1) of 2 ranks failed; rank 1 on far (192.168.99.2) has ", remedy],
    );
    fails_with(far, &["rank 1 on far (192.168.99.2) of 2 ranks failed; rank 0 on near (192.168.99.1) has ", remedy])?;
    ended
}

/// In a new namespace, whose loopback interface is down.
fn a_launch_without_loopback(_: &Hosts, folder: &Path) -> Result<()> {
    let mut command = Command::new("unshare");
    command.args(UNSHARE).arg(PROGRAM).env_remove(PARENT);
    command.args(["launch", "--world-size", "2", "--task", selftest::TASK.name]);
    fails_with(Process::start(&mut command, folder.join("launch.output"))?, &["the loopback interface"])
}

fn a_rank_that_never_comes(hosts: &Hosts, folder: &Path) -> Result<()> {
    let near = hosts.start(folder, 0, selftest::TASK.name, &Value::Null, &[("CS336_DEADLINE_S", "13")])?;
    fails_with(
        near,
        &[
            "rank 0 of 2 waits for rank 1 at the store 192.168.99.1:29500; it gives up in",
            "rank 1 of 2 has not arrived within 13.0 s (CS336_DEADLINE_S). Start it with MASTER_ADDR=192.168.99.1",
        ],
    )
}

/// The far host has a bundle of another commit.
fn another_version(hosts: &Hosts, folder: &Path) -> Result<()> {
    for name in ["suites", "templates"] {
        std::fs::create_dir(folder.join(name))?;
    }
    std::fs::write(
        folder.join("bundle.json"),
        json!({ "commit": "another", "dirty": false, "files": {} }).to_string(),
    )?;
    let root = folder.to_str().context("the temporary folder is not UTF-8")?;
    let start = |rank, more: &[_]| hosts.start(folder, rank, selftest::TASK.name, &Value::Null, more);
    let ranks = [start(0, &[])?, start(1, &[("CS336_ROOT", root)])?];
    differ(
        ranks,
        &[
            "the ranks differ in commit: rank 0 on near (192.168.99.1) has ",
            ", rank 1 on far (192.168.99.2) has another with changes.",
        ],
    )
}

fn another_task(hosts: &Hosts, folder: &Path) -> Result<()> {
    let start = |rank, task| hosts.start(folder, rank, task, &Value::Null, &[]);
    let ranks = [start(0, selftest::TASK.name)?, start(1, protocol::TASK.name)?];
    differ(
        ranks,
        &[
            "the ranks differ in task: rank 0 on near (192.168.99.1) has nccl_selftest, rank 1 on far (192.168.99.2) has \
             data_parallel_protocol. Start all ranks with the same task",
        ],
    )
}

fn a_trace_of_one_rank(hosts: &Hosts, folder: &Path) -> Result<()> {
    let start = |rank: usize, options: &[&OsStr]| {
        let mut command = hosts.rank(rank, &[]);
        command
            .args(["rank", "--task", selftest::TASK.name, "--output"])
            .arg(folder.join("results.json"))
            .args(options);
        Process::start(&mut command, folder.join(format!("{rank}.output")))
    };
    let trace = folder.join("trace.json.gz");
    let ranks = [start(0, &["--trace".as_ref(), trace.as_os_str()])?, start(1, &[])?];
    differ(
        ranks,
        &[
            "the ranks differ in options: rank 0 on near (192.168.99.1) has --trace, rank 1 on far (192.168.99.2) has none. \
             Start all ranks with the same options",
        ],
    )
}

/// Requires that both ranks end with the same sentence.
fn differ([near, far]: [Process; 2], expected: &[&str]) -> Result<()> {
    let ended = fails_with(near, expected);
    fails_with(far, expected)?;
    ended
}

/// The far host reaches the store on the near host, but no other port.
fn doctor_behind_a_firewall(hosts: &Hosts, folder: &Path) -> Result<()> {
    hosts.0[0].ip("rule add priority 100 ipproto tcp sport 29500 lookup main")?;
    hosts.0[0].ip("rule add priority 200 ipproto tcp to 192.168.99.2 unreachable")?;
    let start = |rank: usize| {
        let mut command = hosts.rank(rank, &[]);
        Process::start(command.args(["doctor", "--ranks"]), folder.join(format!("{rank}.output")))
    };
    let [near, far] = [start(0)?, start(1)?];
    let expected =
        ["rank 0 on near (192.168.99.1) cannot reach rank 1 on far (192.168.99.2): ", "Open all ports between"];
    differ([near, far], &expected)
}
