//! Confines a program: what it may read, where it may write, how much memory it may have, and which processes it may reach.
//!
//! Landlock (landlock(7)) and the filter of system calls hold for the program and all its descendants and cannot be undone.
//! `cs336 confine` starts the other program in a process that confines itself first, so that nothing of that one runs before,
//! and stays as its guard.

use std::ffi::OsString;
use std::fs::File;
use std::io::stdin;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::Builder;

use anyhow::{Context as _, Result};
use landlock::{
    ABI, Access as _, AccessFs, BitFlags, Ruleset, RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _,
    RulesetStatus, Scope, make_bitflags, path_beneath_rules,
};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use super::guard::{GUARD, Guard};
use super::{not_started, system_calls};
use crate::printable::shown_path;
use crate::root::open_without_links;

/// What a confined program may do. Of files and folders, those that do not exist are skipped.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Confinement {
    /// To read and execute, with all below. Their paths have no links: who puts one there makes nothing else readable.
    pub read: Vec<OsString>,
    /// To list, with all below.
    pub list: Vec<OsString>,
    /// To read and change, with all below.
    pub write: Vec<OsString>,
    /// The most bytes that each process may have in its own memory, and in its own and shared memory together.
    pub memory_bytes: Option<u64>,
    /// The most bytes of each file that it writes.
    pub file_bytes: Option<u64>,
    /// A file that is made once the program has started: where there is none, nothing of the program has run.
    pub started: Option<OsString>,
    /// Removed from the environment: this program may need them to start.
    pub without: Vec<OsString>,
    /// Whether it may do what CUDA and NCCL do: make Unix sockets of packets, name threads of the process, and reach sockets
    /// without a path, through which ranks hand each other memory.
    pub with_cuda: bool,
}

/// The newest of Landlock's versions whose restrictions are asked for: 6 keeps signals inside.
const VERSION: ABI = ABI::V6;

/// A device that root makes is another name of what it may not open.
const DEVICES: BitFlags<AccessFs> = make_bitflags!(AccessFs::{MakeChar | MakeBlock});

/// Why no further file can be opened, whichever it is.
const LIMITS: [Errno; 3] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];

/// The argument after which the program's own come.
pub const SEPARATOR: &str = "--";

impl Confinement {
    /// The command that starts `program` confined, for [`super::ChildProcess::start`]; it inherits no variable. `cs336` is this
    /// program's file.
    pub fn command(&self, cs336: &str, program: &Path) -> Result<Command> {
        let mut command = Command::new(cs336);
        command.env_clear().env(GUARD, "1");
        command.arg("confine").arg(serde_json::to_string(self)?).arg(SEPARATOR).arg(program);
        Ok(command)
    }

    /// Starts `program` confined, and ends as it ends; returns only with an error.
    pub fn execute(&self, program: &[OsString]) -> Result<()> {
        let (name, arguments) = program.split_first().context("no program to confine is named")?;
        if let Some(bytes) = self.memory_bytes {
            // Not RLIMIT_AS: CUDA reserves addresses for far more than it uses. Shared memory is the guard's.
            limit(Resource::Data, bytes).context("limiting the memory")?;
        }
        if let Some(bytes) = self.file_bytes {
            limit(Resource::Fsize, bytes).context("limiting the size of files")?;
        }
        let guard = Guard::new()?;
        let mut command = Command::new(name);
        for name in self.without.iter().map(OsString::as_os_str).chain([GUARD.as_ref()]) {
            command.env_remove(name);
        }
        let socket = stdin().as_fd().try_clone_to_owned().context("taking the socket from standard input")?;
        command.args(arguments).process_group(0).stdin(socket);
        // The parent must see it when the program closes its end of the socket.
        rustix::stdio::dup2_stdin(File::open("/dev/null").context("opening /dev/null")?)?;
        let ruleset = self.ruleset().context("confining the process")?;
        let with_cuda = self.with_cuda;
        let confine = move || enforce(ruleset.try_clone()?, with_cuda).map(drop).map_err(std::io::Error::other);
        // SAFETY: it runs between fork and exec. This process has no other thread that could hold a lock then.
        unsafe { command.pre_exec(confine) };
        let child = Pid::from_child(&command.spawn().map_err(|error| not_started(&shown_path(name), error))?);
        // The kernel forgets a folder of /proc that nobody holds, and a rule with it.
        let _held = File::open(format!("/proc/{}/task", child.as_raw_nonzero()));
        // From here on nothing may fail, since only the guard ends what was started.
        drop(command);
        // Where it cannot be made, the machine is at fault, as its absence will say.
        let _ = self.started.as_ref().map(File::create);
        guard.watch(child, self.memory_bytes)
    }

    /// Errors: this kernel takes no rule, or this process can open no more files.
    fn ruleset(&self) -> Result<RulesetCreated> {
        let read = AccessFs::from_read(VERSION);
        let inside = if self.with_cuda { Scope::Signal.into() } else { Scope::from_all(VERSION) };
        let ruleset = Ruleset::default().handle_access(AccessFs::from_all(VERSION))?.scope(inside)?;
        let mut ruleset = ruleset.create()?;
        for path in &self.read {
            let held = match open_without_links(path.as_ref()) {
                Err(error) if LIMITS.map(|errno| Some(errno.raw_os_error())).contains(&error.raw_os_error()) => {
                    return Err(error).with_context(|| format!("opening {}", shown_path(path)));
                }
                Err(_) => continue,
                Ok(held) => held,
            };
            ruleset = ruleset.add_rules(path_beneath_rules([format!("/proc/self/fd/{}", held.as_raw_fd())], read))?;
        }
        let ruleset = ruleset.add_rules(path_beneath_rules(&self.list, AccessFs::ReadDir))?;
        Ok(ruleset.add_rules(path_beneath_rules(&self.write, AccessFs::from_all(VERSION) & !DEVICES))?)
    }
}

/// Confines this thread; whether the kernel enforces all of the rules, a part or nothing, and whether it filters system calls.
fn enforce(ruleset: RulesetCreated, with_cuda: bool) -> Result<(RulesetStatus, bool)> {
    system_calls::drop_capabilities().context("dropping capabilities")?;
    let own_threads = with_cuda.then_some("/proc/self/task");
    let ruleset = ruleset.add_rules(path_beneath_rules(own_threads, AccessFs::WriteFile | AccessFs::Truncate))?;
    // The filter last, since it refuses what the rest may need.
    Ok((ruleset.restrict_self()?.ruleset, system_calls::refuse(with_cuda).is_ok()))
}

/// Limits this process and what it starts to so much, or to what its own parent allows, which only root could raise.
fn limit(resource: Resource, bytes: u64) -> rustix::io::Result<()> {
    let bytes = getrlimit(resource).maximum.map_or(bytes, |most| most.min(bytes));
    setrlimit(resource, Rlimit { current: Some(bytes), maximum: Some(bytes) })
}

/// What this kernel lacks for a whole confinement, as a sentence; `None` if it lacks nothing.
///
/// Confines a thread of its own to find out, which ends with it.
pub fn lacks() -> Option<String> {
    let probe = match Builder::new().spawn(|| enforce(Confinement::default().ruleset()?, false)) {
        Ok(probe) => probe,
        Err(error) => return Some(format!("{:#}", not_started("a thread to find out", error))),
    };
    let (rules, filters) = probe.join().ok().and_then(Result::ok).unwrap_or((RulesetStatus::NotEnforced, false));
    let rules = match rules {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => {
            Some("this kernel's Landlock is older than version 6 and enforces a part of the confinement")
        }
        RulesetStatus::NotEnforced => {
            Some("this kernel has no Landlock, so that nothing confines the process to its folder")
        }
    };
    let filter =
        (!filters).then_some("this kernel filters no system calls, so that the process can stop what grades it");
    let lacks: Vec<&str> = rules.into_iter().chain(filter).collect();
    (!lacks.is_empty()).then(|| lacks.join("; "))
}

/// The paths as they travel in JSON, which need not be UTF-8.
pub fn paths(paths: impl IntoIterator<Item = PathBuf>) -> Vec<OsString> {
    paths.into_iter().map(PathBuf::into_os_string).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A subject could put one there while it is graded.
    #[test]
    fn a_link_in_the_place_of_a_readable_folder_makes_nothing_else_readable() {
        let within = tempfile::tempdir().unwrap();
        let [own, secret, link] =
            ["own", "secret", "link"].map(|name| within.path().canonicalize().unwrap().join(name));
        for folder in [&own, &secret] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("file"), "").unwrap();
        }
        symlink(&secret, &link).unwrap();
        let confinement = Confinement { read: paths([own.clone(), link.clone()]), ..Confinement::default() };
        let reading = move || {
            let enforced = enforce(confinement.ruleset()?, false).map(|(status, _)| status)?;
            let can_read = [own, secret, link].map(|folder| fs::read(folder.join("file")).is_ok());
            anyhow::Ok((enforced, can_read))
        };
        let (enforced, can_read) = std::thread::spawn(reading).join().unwrap().unwrap();
        if enforced == RulesetStatus::NotEnforced {
            eprintln!("skipped: this kernel has no Landlock");
            return;
        }
        assert_eq!(can_read, [true, false, false]);
    }
}
