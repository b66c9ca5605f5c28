//! The parent's side: a child process, its lines and its output, until it has been killed and reaped.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::Serialize;

use super::PARENT;
use super::death::{Cause, Death, is_out_of_memory, oom_kills};
use super::lines::Lines;
use super::output::Output;

/// How often a waiting parent looks for a child's exit and for an interrupt.
const TICK: Duration = Duration::from_millis(50);
/// How often one looks for what is about to happen and is announced by nothing, such as the exit of a child whose socket
/// is closed.
const SHORT_TICK: Duration = Duration::from_millis(2);
/// How long a child may take from closing its socket to its exit: Python and CUDA take seconds to shut down.
const EXIT_LIMIT: Duration = Duration::from_secs(5);
/// How long a killed process may take to be gone: the kernel first frees its memory and waits for its devices.
const REAP_LIMIT: Duration = Duration::from_secs(30);

/// A running child; dropping it kills its process group and reaps it.
pub struct ChildProcess {
    child: Child,
    group: Pid,
    lines: Lines,
    output: Output,
    closed_since: Option<Instant>,
    /// As of the last job, so that a kill can be told from those before.
    oom_kills: Option<u64>,
    is_reaped: bool,
    death: Option<Death>,
}

/// What [`ChildProcess::poll`] finds.
#[derive(Debug)]
pub enum Event {
    Line(String),
    /// The child has been reaped; every later call finds the same.
    Died(Death),
}

/// What [`ChildProcess::receive`] waited for. The child is dead unless it is a line.
#[derive(Debug)]
pub enum Answer {
    Line(String),
    Died(Death),
    /// The limit has passed; the child has been killed. Its last lines of output, or none.
    TimedOut {
        last_output: String,
    },
    Interrupted,
}

impl ChildProcess {
    /// Starts `command` in a process group of its own; its standard streams are this module's.
    ///
    /// # Errors
    /// If the program cannot be started; the error names it.
    pub fn start(mut command: Command) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        let (ours, theirs) = UnixStream::pair().context("making a socket for a child process")?;
        let (output, printed) = std::io::pipe().context("making a pipe for a child process")?;
        command.stdin(OwnedFd::from(theirs)).stdout(printed.try_clone()?).stderr(printed);
        // Ctrl-C at a terminal goes to the parent's group alone, which ends its children in its own way.
        command.process_group(0).env(PARENT, std::process::id().to_string());
        let (lines, output) = (Lines::new(ours)?, Output::new(output)?);
        let child = command.spawn().with_context(|| format!("failed to start {program}"))?;
        let group = Pid::from_child(&child);
        let (closed_since, oom_kills) = (None, oom_kills());
        Ok(Self { child, group, lines, output, closed_since, oom_kills, is_reaped: false, death: None })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Queues `message` as one line of JSON; [`ChildProcess::receive`] and [`ChildProcess::poll`] send it.
    pub fn send(&mut self, message: &impl Serialize) -> Result<()> {
        self.oom_kills = oom_kills();
        self.lines.queue(message)
    }

    /// Waits for a line, at most `limit`; `interrupted` is asked every 50 ms.
    pub fn receive(&mut self, limit: Duration, interrupted: &dyn Fn() -> bool) -> Answer {
        let started = Instant::now();
        loop {
            // The time is taken first: what the child did before the limit is found by the poll after it.
            let left = limit.saturating_sub(started.elapsed());
            match self.poll() {
                Some(Event::Line(line)) => return Answer::Line(line),
                Some(Event::Died(death)) => return Answer::Died(death),
                None if interrupted() => {
                    self.kill();
                    return Answer::Interrupted;
                }
                None if left.is_zero() => return self.time_out(),
                None => wait_for_any([&*self], left.min(TICK)),
            }
        }
    }

    /// Whether the child waits for a job: it runs, its socket is open, and it has sent nothing that was not asked for.
    pub fn is_idle(&mut self) -> bool {
        self.poll().is_none() && !self.lines.is_closed()
    }

    /// Moves lines and output without waiting, and ends a child that can give no more replies.
    pub fn poll(&mut self) -> Option<Event> {
        if let Some(death) = &self.death {
            return Some(Event::Died(death.clone()));
        }
        // Looked for first: all that an exited child has sent is there to be read.
        let exited = self.has_exited();
        if exited {
            self.start_kill();
        }
        self.output.drain();
        self.lines.transfer();
        if let Some(line) = self.lines.next() {
            return Some(Event::Line(line));
        }
        let closed = self.lines.is_closed().then(|| *self.closed_since.get_or_insert_with(Instant::now));
        let cause = match closed {
            _ if exited => None,
            _ if self.lines.is_too_long() => Some(Cause::LineTooLong),
            Some(since) if since.elapsed() >= EXIT_LIMIT => Some(Cause::ClosedSocket),
            _ => return None,
        };
        Some(Event::Died(self.die(cause)))
    }

    /// Sends the kill without waiting for the end, so that several children end at the same time.
    pub fn start_kill(&mut self) {
        if !self.is_reaped {
            // Fails only where no process of the group is left.
            let _ = kill_process_group(self.group, Signal::KILL);
        }
    }

    /// Kills the child's process group and reaps the child.
    pub fn kill(&mut self) {
        let _ = self.reap();
    }

    /// The last lines that the child has printed.
    pub fn last_output(&mut self) -> String {
        self.output.drain();
        self.output.last_lines()
    }

    /// Whether there is an exit status to fetch. It is left there: the number of a process that has been reaped may
    /// become another's, whose group must not be killed.
    fn has_exited(&self) -> bool {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.is_reaped || !matches!(waitid(WaitId::Pid(self.group), look), Ok(None))
    }

    fn time_out(&mut self) -> Answer {
        let closed = self.lines.is_closed();
        match self.reap() {
            // It has exited since it was last looked at.
            Some(status) if status.signal() != Some(9) => Answer::Died(self.die(None)),
            _ if closed => Answer::Died(self.die(Some(Cause::ClosedSocket))),
            _ => Answer::TimedOut { last_output: self.last_output() },
        }
    }

    /// Ends the child and tells why: `cause`, or its own exit.
    fn die(&mut self, cause: Option<Cause>) -> Death {
        let status = self.reap();
        let own = status.map_or(Cause::NotReaped, |status| Cause::Exited {
            status,
            out_of_memory: is_out_of_memory(status, self.oom_kills, oom_kills()),
        });
        let death = Death { cause: cause.unwrap_or(own), last_output: self.last_output() };
        self.death = Some(death.clone());
        death
    }

    /// Kills the group and reaps the child; no status when the kernel does not let go of it within [`REAP_LIMIT`].
    fn reap(&mut self) -> Option<ExitStatus> {
        self.start_kill();
        let mut ended = Ok(None);
        wait_until(REAP_LIMIT, || {
            ended = self.child.try_wait();
            !matches!(ended, Ok(None))
        });
        let status = ended.ok().flatten();
        self.is_reaped |= status.is_some();
        status
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until `is_so`, at most `limit`, and says whether it came to be.
pub fn wait_until(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !is_so() {
        if started.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(SHORT_TICK);
    }
    true
}

/// Waits until one of `children` may have an [`Event`], at most `at_most`.
pub fn wait_for_any<'a>(children: impl IntoIterator<Item = &'a ChildProcess>, at_most: Duration) {
    let mut at_most = at_most;
    let mut fds: Vec<PollFd> = Vec::new();
    for child in children.into_iter().filter(|child| !child.is_reaped) {
        fds.extend(child.lines.poll_fd().into_iter().chain(child.output.poll_fd()));
        if child.lines.is_closed() {
            at_most = at_most.min(SHORT_TICK);
        }
    }
    let timeout = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
    // An error is a signal's interruption: whoever waits looks again.
    let _ = poll(&mut fds, Some(&timeout));
}
