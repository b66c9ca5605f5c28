//! Processes of the product that misbehave on request, and what must be left of them: nothing.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use cs336::checks::fault_test::{self, Fault, FaultTest, is_alive, pids};
use cs336::collective::Backend;
use cs336::process::wait_until;
use serde_json::Value;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_cs336");

/// Within this a faulty run must have ended; the machine may be busy with other tests.
pub const LIMIT: Duration = Duration::from_secs(40);

/// A process of the product and the file that takes its words.
pub struct Process {
    pub child: Child,
    words: PathBuf,
}

impl Process {
    fn start(command: &mut Command, words: PathBuf) -> Result<Self> {
        let child = command.stdout(Stdio::null()).stderr(std::fs::File::create(&words)?).spawn()?;
        Ok(Self { child, words })
    }

    /// Waits for its end, which it must find by itself.
    pub fn ended(mut self) -> Result<(ExitStatus, String)> {
        let ended = wait_until(LIMIT, || !matches!(self.child.try_wait(), Ok(None)));
        if !ended {
            self.child.kill()?;
        }
        let (status, words) = (self.child.wait()?, std::fs::read_to_string(&self.words)?);
        ensure!(ended, "it goes on and on: {words}");
        Ok((status, words))
    }
}

/// A supervisor of two ranks of which the second stalls and the first already waits for it.
pub fn supervised_stall(folder: &Path) -> Result<Process> {
    let mut command = Command::new(PROGRAM);
    command.args(["launch", "--world-size", "2", "--task", fault_test::TASK.name, "--input"]);
    let mut supervisor =
        Process::start(command.arg(write_input(Fault::Stall, folder)?), folder.join("supervisor.words"))?;
    let stalls = || folder.join("1.fault").exists();
    wait_until(LIMIT, || stalls() || !matches!(supervisor.child.try_wait(), Ok(None)));
    if !stalls() {
        supervisor.child.kill()?;
        bail!("the ranks did not come to their stall: {}", std::fs::read_to_string(&supervisor.words)?);
    }
    Ok(supervisor)
}

/// One of two ranks under torchrun's variables and no supervisor.
pub fn by_hand(
    backend: Backend,
    fault: Fault,
    folder: &Path,
    rank: usize,
    port: u16,
    more: &[(&str, &str)],
) -> Result<Process> {
    let mut command = Command::new(PROGRAM);
    command.args(["rank", "--task", fault_test::TASK.name, "--backend", backend.name(), "--input"]);
    command.arg(write_input(fault, folder)?);
    command.arg("--output").arg(folder.join(format!("{rank}.json")));
    command
        .envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)].map(|(name, value)| (name, value.to_string())));
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]).envs(more.iter().copied());
    Process::start(&mut command, folder.join(format!("{rank}.words")))
}

pub fn input(fault: Fault, folder: &Path) -> Result<Value> {
    Ok(serde_json::to_value(FaultTest { fault, folder: folder.into() })?)
}

fn write_input(fault: Fault, folder: &Path) -> Result<PathBuf> {
    let file = folder.join("input.json");
    std::fs::write(&file, serde_json::to_vec(&input(fault, folder)?)?)?;
    Ok(file)
}

pub fn none_left(folder: &Path, patience: Duration) -> Result<()> {
    let pids = pids(folder)?;
    ensure!(pids.len() == 2, "{} ranks noted themselves, not 2", pids.len());
    let all_ended = wait_until(patience, || !pids.iter().any(|&pid| is_alive(pid)));
    ensure!(all_ended, "of the ranks {pids:?} some are still alive");
    Ok(())
}
