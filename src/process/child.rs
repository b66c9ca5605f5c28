//! The parent's side: a child process, its lines and its output, until it has been killed and reaped.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use serde::Serialize;

use super::death::{Cause, Death, is_out_of_memory, oom_kills};
use super::guard::{self, GUARD};
use super::lines::Lines;
use super::output::Output;
use super::proc::{has_variable, processes_with};
use super::{PARENT, not_started};
use crate::printable::shown_path;

/// How often a waiting parent looks for a child's exit and for an interrupt.
const TICK: Duration = Duration::from_millis(50);
/// How often to poll for an event that no descriptor announces, such as the exit of a child whose socket is closed.
const SHORT_TICK: Duration = Duration::from_millis(2);
/// How long a child may take from closing its socket to its exit: Python and CUDA take seconds to shut down.
const EXIT_LIMIT: Duration = Duration::from_secs(5);
/// How long a killed process may take to disappear: the kernel first frees its memory and waits for its devices.
pub(super) const REAP_LIMIT: Duration = Duration::from_secs(30);

/// How long processes may take to stop: the kernel first ends what they asked of it.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// After this time a guard is asked again to stop what it has started.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// What stopped processes may still run: a thread shows as stopped shortly before it leaves its processor.
const MOST_WHILE_STOPPED: Duration = Duration::from_millis(1);

/// The variable that marks the descendants of a child: the numbers of its ancestors and its own, as a path. A descendant
/// may be in another process group: a Python peer is, and so is what detaches itself.
const MARK: &str = "CS336_CHILD";
/// The number of children that this process has started.
static STARTED: AtomicU64 = AtomicU64::new(0);

/// A running child; dropping it kills it and its descendants, and reaps it.
pub struct ChildProcess {
    child: Child,
    /// Also the id of its process group.
    pid: Pid,
    /// The variable that it and its descendants have in their environment.
    mark: String,
    lines: Lines,
    output: Output,
    closed_since: Option<Instant>,
    /// The kernel's count at the last job, so that a later kill can be detected.
    oom_kills: Option<u64>,
    is_reaped: bool,
    /// Whether it is a guard, which ends what it guards before itself.
    is_guard: bool,
    /// The processor times of what it guards when that was stopped, until it goes on.
    stopped: Option<BTreeMap<i32, Duration>>,
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
    /// Starts `command` in its own process group, with its standard streams connected to this parent.
    ///
    /// # Errors
    /// If the program cannot be started; the error names it.
    pub fn start(command: Command) -> Result<Self> {
        Self::start_with(command, false)
    }

    /// As [`ChildProcess::start`], but what it prints goes where this process prints, and no error repeats it.
    pub fn start_shown(command: Command) -> Result<Self> {
        Self::start_with(command, true)
    }

    fn start_with(mut command: Command, is_shown: bool) -> Result<Self> {
        let program = shown_path(command.get_program());
        let (ours, theirs) = UnixStream::pair().context("making a socket for a child process")?;
        let (output, printed) = std::io::pipe().context("making a pipe for a child process")?;
        command.stdin(OwnedFd::from(theirs));
        if !is_shown {
            command.stdout(printed.try_clone()?).stderr(printed);
        }
        // Ctrl-C at a terminal then signals only the parent, which ends its children itself.
        command.process_group(0).env(PARENT, std::process::id().to_string());
        let before = std::env::var(MARK).unwrap_or_default();
        let mark = format!("{before}/{}.{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        command.env(MARK, &mark);
        let is_guard = command.get_envs().any(|(name, _)| name == GUARD);
        let (lines, output) = (Lines::new(ours)?, Output::new(output)?);
        let child = command.spawn().map_err(|error| not_started(&program, error))?;
        let pid = Pid::from_child(&child);
        let (closed_since, oom_kills) = (None, oom_kills());
        Ok(Self {
            child,
            pid,
            mark: format!("{MARK}={mark}"),
            lines,
            output,
            closed_since,
            oom_kills,
            is_reaped: false,
            is_guard,
            stopped: None,
            death: None,
        })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Stops what a guard has started, until [`Self::go_on`]; false where something of it runs on.
    pub fn stop(&mut self) -> bool {
        if !self.is_guard || self.is_reaped || self.stopped.is_some() {
            return true;
        }
        let mut asked: Option<Instant> = None;
        wait_until(STOP_LIMIT, || {
            // Of two signals that wait for it the guard may handle the earlier one last, so that one to go on undoes this one.
            if asked.is_none_or(|at| at.elapsed() >= ASK_AGAIN) {
                let _ = kill_process(self.pid, guard::STOP);
                asked = Some(Instant::now());
            }
            // One that starts another and ends is missed by one look, but not by two.
            let before = std::mem::replace(&mut self.stopped, guard::processor_times_if_stopped(self.pid));
            self.stopped.is_some() && self.stopped == before
        })
    }

    /// Lets it run again; false where something of it has run since [`Self::stop`], as after a signal that it had the kernel send.
    pub fn go_on(&mut self) -> bool {
        if !self.is_guard || self.is_reaped {
            return true;
        }
        let was_stopped = self.stopped.take().is_none_or(|before| {
            let now = guard::processor_times_if_stopped(self.pid).unwrap_or_default();
            let ran = |(now, before): (&Duration, &Duration)| now.saturating_sub(*before);
            let in_all: Duration = now.values().zip(before.values()).map(ran).sum();
            // A stopped process neither ends nor starts another one.
            now.keys().eq(before.keys()) && in_all <= MOST_WHILE_STOPPED
        });
        let _ = kill_process(self.pid, guard::GO_ON);
        was_stopped
    }

    /// Queues `message` as one line of JSON; [`ChildProcess::receive`] and [`ChildProcess::poll`] send it.
    pub fn send(&mut self, message: &impl Serialize) -> Result<()> {
        self.oom_kills = oom_kills();
        self.lines.queue(message)
    }

    /// Waits for a line, at most `limit`; `interrupted` is called every 50 ms.
    pub fn receive(&mut self, limit: Duration, interrupted: &dyn Fn() -> bool) -> Answer {
        let started = Instant::now();
        loop {
            // The time is read before the poll, so that the last poll sees everything the child did within the limit.
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

    /// Whether the child is ready for a job: it runs, its socket is open, and it has sent nothing unrequested.
    pub fn is_idle(&mut self) -> bool {
        self.poll().is_none() && !self.lines.is_closed()
    }

    /// Transfers lines and output without waiting, and kills a child that can send no more replies.
    pub fn poll(&mut self) -> Option<Event> {
        if let Some(death) = &self.death {
            return Some(Event::Died(death.clone()));
        }
        // Checked before reading: everything that an exited child has sent can then be read.
        let exited = self.has_exited();
        if exited {
            self.start_kill();
        }
        self.output.drain();
        self.lines.transfer();
        if let Some(line) = self.lines.next_line() {
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

    /// Sends SIGKILL, or to a guard SIGTERM, without waiting, so that several children end at the same time.
    pub fn start_kill(&mut self) {
        if !self.is_reaped && self.is_guard {
            let _ = kill_process(self.pid, Signal::TERM);
        } else if !self.is_reaped {
            // Each fails only where no such process is left. A library may have moved the child to another group.
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = kill_process(self.pid, Signal::KILL);
        }
    }

    /// Kills the child and its descendants, and reaps the child.
    pub fn kill(&mut self) {
        let _ = self.reap();
    }

    /// The last lines that the child has printed.
    pub fn last_output(&mut self) -> String {
        self.output.drain();
        self.output.last_lines()
    }

    /// Leaves what the child has printed so far out of its last output.
    pub fn forget_output(&mut self) {
        self.output.forget();
    }

    /// Whether the child has exited. It is not reaped here: the process id of a reaped child may be reused, and another
    /// process's group must not be killed.
    fn has_exited(&self) -> bool {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.is_reaped || !matches!(waitid(WaitId::Pid(self.pid), look), Ok(None))
    }

    fn time_out(&mut self) -> Answer {
        let closed = self.lines.is_closed();
        match self.reap() {
            // The child exited after the last poll.
            Some(status) if status.signal() != Some(9) => Answer::Died(self.die(None)),
            _ if closed => Answer::Died(self.die(Some(Cause::ClosedSocket))),
            _ => Answer::TimedOut { last_output: self.last_output() },
        }
    }

    /// Kills the child and returns why it died: `cause`, or its exit status.
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

    /// Kills the child and its descendants, and reaps the child; `None` if the kernel has not ended it within [`REAP_LIMIT`].
    fn reap(&mut self) -> Option<ExitStatus> {
        self.start_kill();
        if self.is_guard && !wait_until(guard::LIMIT, || self.has_exited()) {
            self.is_guard = false;
            self.start_kill();
        }
        if wait_until(REAP_LIMIT, || self.has_exited()) && !self.is_reaped {
            // It starts no more processes now.
            self.end_descendants();
        }
        let status = self.child.try_wait().ok().flatten();
        self.is_reaped |= status.is_some();
        status
    }

    /// Kills its descendants until two looks in a row find none, except that a guard among them first ends what it guards. One
    /// that starts another and ends after a look has begun is missed by that look, with the other one.
    fn end_descendants(&self) {
        let (started, mut was_none) = (Instant::now(), false);
        wait_until(guard::LIMIT + REAP_LIMIT, || {
            let of_guard = if started.elapsed() < guard::LIMIT { Signal::TERM } else { Signal::KILL };
            let found = processes_with(&self.mark);
            for &pid in &found {
                let signal = if has_variable(pid, &format!("{GUARD}=1")) { of_guard } else { Signal::KILL };
                let pid = pid.try_into().ok().and_then(Pid::from_raw);
                let _ = pid.map(|pid| kill_process(pid, signal));
            }
            let is_none = found.is_empty();
            std::mem::replace(&mut was_none, is_none) && is_none
        });
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until `condition` holds, at most `limit`; returns whether it held.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !condition() {
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
    // An error means that a signal interrupted the wait; the caller polls again.
    let _ = poll(&mut fds, Some(&timeout));
}
