//! Processes that tests start: a supervisor of ranks that fail on request, and a Python peer.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};
use cs336::checks::fault_test::{self, RankFault};
use cs336::checks::faulty_runs::{LIMIT, Process, write_input};
use cs336::process::wait_until;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_cs336");

/// Where the package of the Python peers lies.
pub const SUITES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/suites");

/// Our Python.
pub fn python() -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python"))
}

/// A supervisor of two ranks. The second stalls and the first already waits for it.
pub fn supervised_stall(folder: &Path) -> Result<Process> {
    let mut command = Command::new(PROGRAM);
    command.args(["launch", "--world-size", "2", "--task", fault_test::TASK.name, "--input"]);
    let mut supervisor =
        Process::start(command.arg(write_input(RankFault::Stall, folder)?), folder.join("supervisor.output"))?;
    let stalls = || folder.join("1.fault").exists();
    wait_until(LIMIT, || stalls() || !matches!(supervisor.child.try_wait(), Ok(None)));
    if !stalls() {
        supervisor.child.kill()?;
        bail!("the ranks did not stall: {}", std::fs::read_to_string(&supervisor.output)?);
    }
    Ok(supervisor)
}
