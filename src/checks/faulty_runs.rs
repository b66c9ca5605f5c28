//! Runs of [`fault_test`] over either backend: their error messages, and that no process is left.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::fault_test::{self, FaultTest, RankFault, pids};
use super::selftest;
use crate::collective::Backend;
use crate::collective::ranks::{Launch, Placement, launch, program};
use crate::process::{PARENT, is_alive, wait_until};

/// A faulty run must end within this time. The machine may be busy with other tests.
pub const LIMIT: Duration = Duration::from_secs(40);

/// A process of this program, and the file with its standard error.
pub struct Process {
    pub child: Child,
    pub output: PathBuf,
}

impl Process {
    pub fn start(command: &mut Command, output: PathBuf) -> Result<Self> {
        let child = command.stdout(Stdio::null()).stderr(std::fs::File::create(&output)?).spawn()?;
        Ok(Self { child, output })
    }

    /// Waits until the process ends by itself, and returns its status and output.
    pub fn ended(mut self) -> Result<(ExitStatus, String)> {
        let ended = wait_until(LIMIT, || !matches!(self.child.try_wait(), Ok(None)));
        if !ended {
            self.child.kill()?;
        }
        let (status, message) = (self.child.wait()?, std::fs::read_to_string(&self.output)?);
        ensure!(ended, "the process did not end: {message}");
        Ok((status, message))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts one of two ranks with torchrun's variables and without a supervisor.
pub fn by_hand(
    backend: Backend,
    fault: RankFault,
    folder: &Path,
    rank: usize,
    port: u16,
    more: &[(&str, &str)],
) -> Result<Process> {
    let mut command = Command::new(program()?);
    command.args(["rank", "--task", fault_test::TASK.name, "--backend", backend.name(), "--input"]);
    command.arg(write_input(fault, folder)?);
    command.arg("--output").arg(folder.join(format!("{rank}.json")));
    command.envs([("RANK", rank), ("WORLD_SIZE", 2)].map(|(name, value)| (name, value.to_string())));
    command.envs(Placement::of_checks().variables(rank, 2));
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]).envs(more.iter().copied());
    // The rank must not inherit the socket of this process's own parent.
    Process::start(command.env_remove(PARENT), folder.join(format!("{rank}.output")))
}

/// The input of the ranks of a run.
pub fn input(fault: RankFault, folder: &Path) -> Result<Value> {
    Ok(serde_json::to_value(FaultTest { fault, folder: folder.into() })?)
}

/// [`input`] in a file.
pub fn write_input(fault: RankFault, folder: &Path) -> Result<PathBuf> {
    let file = folder.join("input.json");
    std::fs::write(&file, serde_json::to_vec(&input(fault, folder)?)?)?;
    Ok(file)
}

/// Fails unless both ranks of the run have ended after at most `patience`.
pub fn none_left(folder: &Path, patience: Duration) -> Result<()> {
    let pids = pids(folder)?;
    ensure!(pids.len() == 2, "{} ranks wrote their process id, not 2", pids.len());
    let all_ended = wait_until(patience, || !pids.iter().any(|&pid| is_alive(pid)));
    ensure!(all_ended, "of the ranks {pids:?} some are still alive");
    Ok(())
}

/// Fails unless a fault of the last of two ranks ends the run by `deadline` with the `expected` message, and the next run
/// works.
pub fn fault_ends_by(deadline: Duration, backend: Backend, fault: RankFault, expected: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (placement, patience) = (Placement::of_checks(), Duration::from_secs(3));
    let plan = Launch { backend, placement, patience, ..Launch::new(fault_test::TASK.name, 2, deadline) };
    let outcome = launch(&plan, &input(fault, folder.path())?);
    says(&format!("{:#}", outcome.err().context("the run succeeded")?), expected)?;
    none_left(folder.path(), Duration::ZERO)?;
    the_next_run_works()
}

/// Fails unless a run without a fault works, over Gloo.
pub fn the_next_run_works() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let plan = Launch::new(fault_test::TASK.name, 2, Duration::from_secs(60));
    let sums = launch(&plan, &input(RankFault::None, folder.path())?);
    ensure!(sums.context("the run after the fault")? == [json!(3.0), json!(3.0)], "1 + 2 on two ranks is not 3");
    none_left(folder.path(), Duration::ZERO)
}

/// Checks every collective and dtype: values, order with computation, and records. Returns rank 0's seconds for 1 MB.
pub fn selftest(backend: Backend, world_size: usize) -> Result<Vec<f64>> {
    let placement = Placement::of_checks();
    let plan = Launch { backend, placement, ..Launch::new(selftest::TASK.name, world_size, Duration::from_secs(120)) };
    let results = launch(&plan, &Value::Null)?;
    ensure!(results.len() == world_size, "{} results of {world_size} ranks", results.len());
    let timed = |result: &Value| result["all_reduce_1mb_s"].as_array().is_some_and(|times| times.len() == 50);
    ensure!(results.iter().all(|result| timed(result) && result["backend"] == backend.name()), "{results:?}");
    Ok(serde_json::from_value(results[0]["all_reduce_1mb_s"].clone())?)
}

/// Fails unless `text` contains the `expected` parts in this order.
pub fn says(text: &str, expected: &[&str]) -> Result<()> {
    let mut rest = text;
    for part in expected {
        let at = rest.find(part).with_context(|| format!("{part:?} is missing or out of order in: {text}"))?;
        rest = &rest[at + part.len()..];
    }
    Ok(())
}
