//! Stands between this program and a confined one: however that one ends, everything that it has started ends with it.
//!
//! A process can leave its group and session, clear its environment, and start another one and end faster than anybody
//! lists them. It cannot leave its ancestors: what loses its parent becomes a child of the guard (PR_SET_CHILD_SUBREAPER).
//! And where Landlock keeps the guard's signals inside, one call of kill(2) ends all at once, so that none can flee.

use std::collections::BTreeMap;
use std::io::stderr;
use std::process::{ExitStatus, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use landlock::{
    AccessFs, CompatLevel, Compatible as _, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, Scope,
    path_beneath_rules,
};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, WaitStatus, getpid, getppid, kill_process, kill_process_group,
    set_child_subreaper, setrlimit, test_kill_process, wait,
};
use rustix::thread::nanosleep;

use super::child::wait_until;
use super::proc::{descendants_of, folder_of, is_stopped, processor_time_of, read_lossy};
use crate::units::GIB;

/// How often it looks for the end of the program, of its own parent, and of their patience.
const TICK: Duration = Duration::from_millis(20);
/// Every so many ticks it looks at the memory, or stops again what is to be stopped.
const LONG_TICK: u64 = 10;
/// How long the processes may take to end once they are killed: the kernel first frees their memory.
const END_LIMIT: Duration = Duration::from_secs(20);
/// How long it waits for room in the pipe for its words.
const WORDS_LIMIT: Duration = Duration::from_secs(1);
/// The most children that it reaps between two looks.
const MOST_REAPED: usize = 10_000;

/// How long a guard that was asked to end may take.
pub const LIMIT: Duration = Duration::from_secs(25);

/// By these it is asked to stop what it guards, and to let it go on.
pub const STOP: Signal = Signal::USR1;
pub const GO_ON: Signal = Signal::USR2;

/// The variable that a guard has in its environment, and what it guards has not.
pub const GUARD: &str = "CS336_GUARD";

/// Of this process, which starts no other program than the guarded one.
pub struct Guard {
    parent: Option<Pid>,
    /// Set by SIGTERM.
    is_asked: Arc<AtomicBool>,
    /// 1 from [`STOP`] until [`GO_ON`].
    is_stopping: Arc<AtomicUsize>,
    /// Whether no signal of this thread leaves what it has started.
    is_inside: bool,
}

impl Guard {
    /// Makes this process the guard of what this thread, and those that it starts, start from now on.
    pub fn new() -> Result<Self> {
        let parent = getppid();
        set_child_subreaper(Some(getpid())).context("becoming the parent of orphans")?;
        let is_asked = Arc::default();
        signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&is_asked))?;
        let is_stopping = Arc::default();
        for (signal, value) in [(STOP, 1), (GO_ON, 0)] {
            signal_hook::flag::register_usize(signal.as_raw(), Arc::clone(&is_stopping), value)?;
        }
        // Both tests, since without Landlock a signal to everybody would end every process of this user.
        let reaches_parent = || parent.map(test_kill_process);
        let reached = reaches_parent() == Some(Ok(()));
        let is_inside = reached && keep_signals_inside().is_ok() && reaches_parent() == Some(Err(Errno::PERM));
        Ok(Self { parent, is_asked, is_stopping, is_inside })
    }

    /// Waits for the end of `child`, ends what is left of it, and ends as it ended. Ends it by SIGKILL when this process gets
    /// SIGTERM, when its parent is gone, and when a process of it has more than `most_bytes` of memory, which it then prints.
    /// Stops it between [`STOP`] and [`GO_ON`].
    pub fn watch(&self, child: Pid, most_bytes: Option<u64>) -> ! {
        let (mut ended, mut words, mut has_stopped) = (None, None, false);
        for tick in 0_u64.. {
            let is_stopping = self.is_stopping.load(Ordering::Relaxed) == 1;
            let is_long_tick = tick.is_multiple_of(LONG_TICK);
            // Now and then again: one of them may have been made to go on.
            if is_stopping != has_stopped || is_stopping && is_long_tick {
                self.signal_all(if is_stopping { Signal::STOP } else { Signal::CONT });
            }
            has_stopped = is_stopping;
            reap(|pid, status| ended = ended.or((pid == child).then_some(status)));
            if ended.is_some() || self.is_asked.load(Ordering::Relaxed) || getppid() != self.parent {
                break;
            }
            // What is stopped takes no memory, and a look at many processes would take time from the turns of others.
            let looks = !is_stopping && is_long_tick;
            if let Some(most) = most_bytes.filter(|most| looks && has_more_than(*most)) {
                let gib = most as f64 / GIB;
                let had = format!("a process had more than {gib} GiB of memory with what it shares");
                words = Some(format!("{had} (--memory sets the limit)\n"));
                break;
            }
            // A signal ends it early.
            let _ = nanosleep(&Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() });
        }
        wait_until(END_LIMIT, || {
            self.signal_all(Signal::KILL);
            reap(|_, _| ())
        });
        if let Some(words) = words {
            print_without_waiting(&words);
        }
        end_as(ended.map(|status| std::os::unix::process::ExitStatusExt::from_raw(status.as_raw())))
    }

    fn signal_all(&self, signal: Signal) {
        if self.is_inside {
            // kill(-1, ..): every process that this one may signal, itself excepted.
            let _ = kill_process_group(Pid::INIT, signal);
        } else {
            for pid in descendants_of(getpid()) {
                let _ = kill_process(pid, signal);
            }
        }
    }
}

/// Calls `body` with each child that has ended; whether no child is left.
fn reap(mut body: impl FnMut(Pid, WaitStatus)) -> bool {
    // Processes that fork and end without end must not keep the guard here.
    for _ in 0..MOST_REAPED {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => body(pid, status),
            ended => return matches!(ended, Err(Errno::CHILD)),
        }
    }
    false
}

/// Keeps the signals of this thread, and of what it starts, among these.
///
/// Errors: this kernel's Landlock cannot.
fn keep_signals_inside() -> Result<()> {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement).scope(Scope::Signal)?;
    // A restriction that does not grant them refuses renames from one folder to another (landlock(7)).
    let ruleset = ruleset.handle_access(AccessFs::Refer)?.create()?;
    ruleset.add_rules(path_beneath_rules(["/"], AccessFs::Refer))?.restrict_self()?;
    Ok(())
}

/// Whether a process below this one has more memory than that, alone or shared with others; files that it maps are not counted.
fn has_more_than(most_bytes: u64) -> bool {
    let kib_of = |pid: Pid| -> Option<u64> {
        let status = read_lossy(&format!("{}/status", folder_of(pid)))?;
        let lines = status.lines().filter_map(|line| {
            line.strip_prefix("RssAnon:").or_else(|| line.strip_prefix("RssShmem:"))?.split_whitespace().next()
        });
        lines.map(|kib| kib.parse::<u64>().ok()).sum()
    };
    descendants_of(getpid()).into_iter().filter_map(kib_of).any(|kib| kib << 10 > most_bytes)
}

/// How long each process that a guard has started has run on a processor; `None` where one of them is not stopped.
pub fn processor_times_if_stopped(guard: Pid) -> Option<BTreeMap<i32, Duration>> {
    let below = descendants_of(guard).into_iter().filter_map(|pid| Some((pid, is_stopped(pid)?)));
    let time =
        |(pid, is_stopped): (Pid, bool)| is_stopped.then(|| (pid.as_raw_nonzero().get(), processor_time_of(pid)));
    below.map(time).collect()
}

/// Prints to the pipe that the guarded processes had too, so that it may be full, without a reader, blocking or not: the words
/// are lost where it stays full.
fn print_without_waiting(words: &str) {
    let _ = rustix::io::ioctl_fionbio(stderr(), true);
    let is_tried = || !matches!(rustix::io::write(stderr(), words.as_bytes()), Err(Errno::AGAIN | Errno::INTR));
    wait_until(WORDS_LIMIT, is_tried);
}

/// Ends this process with the exit status or signal of another one, or by SIGKILL.
fn end_as(status: Option<ExitStatus>) -> ! {
    use std::os::unix::process::ExitStatusExt as _;
    if let Some(code) = status.and_then(|status| status.code()) {
        exit(code);
    }
    // The other one has left the core, if there is one.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let signal = status.and_then(|status| status.signal()).unwrap_or(9);
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    // Not reached but for a signal that has no name.
    exit(128 + signal)
}
