//! The product as a process that supervises ranks which misbehave on request.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};
use cs336::checks::fault_test::{self, Fault};
use cs336::checks::faulty_runs::{LIMIT, Process, write_input};
use cs336::process::wait_until;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_cs336");

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
