//! Two hosts: network namespaces with host names of their own, joined by a veth pair, and ranks on them.
//!
//! A namespace exists as long as a process in it, which ends when this program does: nothing is left, and two runs do not
//! meet.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use cs336::checks::fault_test::{self, RankFault};
use cs336::checks::faulty_runs::{LIMIT, Process, input};
use cs336::process::{PARENT, wait_until};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::processes::PROGRAM;

/// A host, by the process that keeps its namespaces.
pub struct Host {
    keeper: Child,
    name: &'static str,
    address: &'static str,
}

/// Rank 0's host and rank 1's.
pub struct Hosts(pub [Host; 2]);

/// Above 127.0.0.1: of two ranks, Gloo lets the one with the greater address connect to the other.
const NEAR: &str = "192.168.99.1";
const FAR: &str = "192.168.99.2";

/// Becomes root of a user namespace, which may make the others without being root outside.
pub const UNSHARE: [&str; 3] = ["--user", "--map-root-user", "--net"];

/// Fails with the reason where this program may not make namespaces.
pub fn are_permitted() -> Result<()> {
    run(Command::new("unshare").args(UNSHARE).args(["--uts", "ip", "link", "show", "lo"]))
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{program} does not run"))?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

impl Host {
    /// Runs `command` in new namespaces, in which `cat` then waits for its input to end.
    fn start(mut command: Command, name: &'static str, address: &'static str) -> Result<Self> {
        command
            .args(["--uts", "sh", "-c"])
            .arg(format!("hostname {name} && ip link set lo up && echo made && exec cat"));
        let mut keeper = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = String::new();
        BufReader::new(keeper.stdout.take().context("its output is a pipe")?).read_line(&mut said)?;
        ensure!(said == "made\n", "host {name} was not made");
        Ok(Self { keeper, name, address })
    }

    /// A command that runs `program` on this host.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.keeper.id().to_string(), "--user", "--net", "--uts", "--preserve-credentials"]);
        command.arg(program);
        command
    }

    /// Runs `ip` with these words on this host.
    pub fn ip(&self, arguments: &str) -> Result<()> {
        run(self.command("ip").args(arguments.split(' '))).with_context(|| format!("ip {arguments} on {}", self.name))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

impl Hosts {
    pub fn new() -> Result<Self> {
        let mut unshare = Command::new("unshare");
        unshare.args(UNSHARE);
        let near = Host::start(unshare, "near", NEAR)?;
        let mut inside = Command::new("nsenter");
        inside.args([
            "--target",
            &near.keeper.id().to_string(),
            "--user",
            "--preserve-credentials",
            "unshare",
            "--net",
        ]);
        let far = Host::start(inside, "far", FAR)?;
        near.ip(&format!("link add veth type veth peer name veth netns {}", far.keeper.id()))?;
        for host in [&near, &far] {
            host.ip(&format!("addr add {}/24 dev veth", host.address))?;
            host.ip("link set veth up")?;
        }
        Ok(Self([near, far]))
    }

    /// This program as a rank on its host, with torchrun's variables; `more` comes last.
    pub fn rank(&self, rank: usize, more: &[(&str, &str)]) -> Command {
        self.rank_on(rank, rank, more)
    }

    fn rank_on(&self, host: usize, rank: usize, more: &[(&str, &str)]) -> Command {
        let mut command = self.0[host].command(PROGRAM);
        let numbers = [("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)];
        command.envs(numbers.map(|(name, value)| (name, value.to_string())));
        command.envs([("MASTER_ADDR", NEAR), ("MASTER_PORT", "29500"), ("CS336_DEADLINE_S", "30")]);
        command.envs(more.iter().copied()).env_remove(PARENT);
        command
    }

    /// Starts that rank with a task.
    pub fn start(
        &self,
        folder: &Path,
        rank: usize,
        task: &str,
        input: &Value,
        more: &[(&str, &str)],
    ) -> Result<Process> {
        self.start_on(rank, folder, rank, task, input, more)
    }

    fn start_on(
        &self,
        host: usize,
        folder: &Path,
        rank: usize,
        task: &str,
        input: &Value,
        more: &[(&str, &str)],
    ) -> Result<Process> {
        let file = folder.join(format!("{rank}.input"));
        std::fs::write(&file, serde_json::to_vec(input)?)?;
        let mut command = self.rank_on(host, rank, more);
        command.args(["rank", "--task", task, "--input"]).arg(file).arg("--output").arg(folder.join("results.json"));
        Process::start(&mut command, folder.join(format!("{rank}.output")))
    }

    /// The results of six ranks, three on each host.
    pub fn results_of_six<R: DeserializeOwned>(&self, folder: &Path, task: &str, input: &Value) -> Result<Vec<R>> {
        let start = |rank: usize| {
            let local = (rank % 3).to_string();
            let numbers = [("WORLD_SIZE", "6"), ("LOCAL_RANK", &local), ("LOCAL_WORLD_SIZE", "3")];
            self.start_on(rank / 3, folder, rank, task, input, &numbers)
        };
        results((0..6).map(start).collect::<Result<_>>()?, folder)
    }

    /// The results of both ranks; rank 0 has the variables `of_rank_0` too.
    pub fn results<R: DeserializeOwned>(
        &self,
        folder: &Path,
        task: &str,
        input: &Value,
        of_rank_0: &[(&str, &str)],
    ) -> Result<Vec<R>> {
        let ranks = [self.start(folder, 0, task, input, of_rank_0)?, self.start(folder, 1, task, input, &[])?];
        results(ranks.into(), folder)
    }

    /// Starts two ranks that sum until a sum fails, and waits until both have summed once.
    pub fn endless_sums(&self, folder: &Path, deadline: &str) -> Result<[Process; 2]> {
        let input = input(RankFault::SumForever, folder)?;
        let start = |rank| self.start(folder, rank, fault_test::TASK.name, &input, &[("CS336_DEADLINE_S", deadline)]);
        let ranks = [start(0)?, start(1)?];
        let sum = || [0, 1].iter().all(|rank| folder.join(format!("{rank}.fault")).exists());
        if !wait_until(LIMIT, sum) {
            let said = ranks.map(|rank| std::fs::read_to_string(&rank.output));
            bail!("the ranks do not sum: {said:?}");
        }
        Ok(ranks)
    }
}

/// What ranks that must all succeed have left, one result for each.
fn results<R: DeserializeOwned>(ranks: Vec<Process>, folder: &Path) -> Result<Vec<R>> {
    let count = ranks.len();
    for rank in ranks {
        let (status, message) = rank.ended()?;
        ensure!(status.success(), "{status}: {message}");
    }
    let results: Vec<R> = serde_json::from_slice(&std::fs::read(folder.join("results.json"))?)?;
    ensure!(results.len() == count, "{} results of {count} ranks", results.len());
    Ok(results)
}
