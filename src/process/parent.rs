//! The child's side: the jobs that its parent sends, and the replies that it gives.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::AsFd as _;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::Serialize;

use super::PARENT;
use super::temporary::TEMPORARY_FOLDER;
use crate::root::absolute;

/// The process that started this one as a [`super::ChildProcess`].
pub struct Parent {
    jobs: BufReader<File>,
    /// Open until the process ends: the parent treats a closed socket as a fault, and an exit may take seconds.
    replies: ManuallyDrop<File>,
}

/// Whether this process was started as a [`super::ChildProcess`].
pub fn has_parent() -> bool {
    std::env::var_os(PARENT).is_some()
}

impl Parent {
    /// Takes the socket from standard input, makes the kernel kill this process when its parent dies, and makes temporary files
    /// where the parent removes them.
    ///
    /// The kernel sends the signal when the parent's *thread* that started this process ends (prctl(2),
    /// PR_SET_PDEATHSIG), so that thread must live as long. The socket moves to a descriptor that libraries do not use
    /// and children do not inherit.
    ///
    /// # Errors
    /// If no parent started this process, or it has died already.
    pub fn connect() -> Result<Self> {
        let parent =
            std::env::var(PARENT).ok().context("only cs336 itself starts this process: run `cs336 measure`")?;
        if let Some(folder) = absolute(std::env::var_os(TEMPORARY_FOLDER)) {
            // Fails only where it was done before.
            let _ = tempfile::env::override_temp_dir(&folder);
        }
        set_parent_process_death_signal(Some(Signal::KILL)).context("asking for a signal at the parent's death")?;
        let now = getppid().map_or(0, |pid| pid.as_raw_nonzero().get()).to_string();
        ensure!(now == parent, "process {parent}, which started this one, has died");
        let socket = std::io::stdin().as_fd().try_clone_to_owned().context("taking the socket from standard input")?;
        let nothing = File::open("/dev/null").context("opening /dev/null")?;
        rustix::stdio::dup2_stdin(&nothing).context("replacing standard input")?;
        let replies = ManuallyDrop::new(File::from(socket));
        Ok(Self { jobs: BufReader::new(replies.try_clone()?), replies })
    }

    /// Waits for the next line; `None` when the parent sends no more.
    pub fn receive(&mut self) -> Result<Option<String>> {
        let mut line = String::new();
        let count = self.jobs.read_line(&mut line).context("receiving a job")?;
        Ok((count > 0).then(|| line.trim_end().to_string()))
    }

    /// Sends `message` as one line of JSON.
    pub fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(message)? + "\n";
        self.replies.write_all(line.as_bytes()).context("sending a reply")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_started_by_hand_is_refused_with_the_command_to_run() {
        let error = Parent::connect().err().unwrap().to_string();
        assert!(!has_parent() && error.contains("run `cs336 measure`"), "{error}");
    }
}
