//! A program that prints and ends, such as git or a compiler, with bounded waiting.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process_group};

use super::child::wait_until;
use crate::printable::shown_path;
use crate::root::absolute;
use crate::units::human_bytes;

/// The folders of a user's own settings and modules, of which those of git and Python may name programs to run.
const HOMES: [&str; 2] = ["HOME", "XDG_CONFIG_HOME"];

/// The program of this name; it, what it starts and their settings are looked for in absolute folders alone: a relative one lies in
/// the working directory, where others may write.
pub fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", path());
    let is_relative = |home: &&str| std::env::var_os(home).is_some_and(|home| absolute(Some(home)).is_none());
    for home in HOMES.into_iter().filter(is_relative) {
        command.env_remove(home);
    }
    command
}

/// The absolute folders of `PATH`, which may be empty, and the system's own.
fn path() -> OsString {
    let named = std::env::var_os("PATH").unwrap_or_default();
    let named = std::env::split_paths(&named).filter(|folder| folder.is_absolute());
    // No folder of a split path holds what separates them.
    std::env::join_paths(named.chain(["/usr/bin", "/bin"].map(PathBuf::from))).unwrap_or_default()
}

/// What git prints of a large checkout is some megabytes. It is kept in memory.
const MOST_PRINTED: u64 = 256 << 20;

/// As [`Command::output`], with standard input empty: what `command` printed, and how it ended.
///
/// Errors: it does not start; it has not ended after `limit`, has printed more than [`MOST_PRINTED`], or `interrupted` holds, and its
/// process group was killed.
pub fn output_within(command: &mut Command, limit: Duration, interrupted: &dyn Fn() -> bool) -> io::Result<Output> {
    let name = shown_path(command.get_program());
    // In files, which unlike pipes need no reader and no end of all their writers.
    let [mut stdout, mut stderr] = [file()?, file()?];
    command.stdin(Stdio::null()).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
    // What it starts is killed with it.
    let mut child = command.process_group(0).spawn()?;
    let (started, mut ended) = (Instant::now(), Ok(None));
    let printed =
        || [&stdout, &stderr].map(|file| file.metadata().map_or(0, |file| file.len())).into_iter().sum::<u64>();
    let is_over = || {
        ended = child.try_wait();
        !matches!(ended, Ok(None)) || interrupted() || printed() > MOST_PRINTED
    };
    wait_until(limit, is_over);
    let is_flood = printed() > MOST_PRINTED;
    if let Some(status) = ended?.filter(|_| !is_flood) {
        return Ok(Output { status, stdout: text(&mut stdout)?, stderr: text(&mut stderr)? });
    }
    // Fails only where no such process is left.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    wait_until(super::child::REAP_LIMIT, || !matches!(child.try_wait(), Ok(None)));
    if is_flood {
        let most = human_bytes(MOST_PRINTED);
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("{name} printed more than {most} and was killed")));
    }
    Err(match started.elapsed() < limit {
        true => io::Error::new(ErrorKind::Interrupted, format!("{name} was interrupted")),
        false => {
            let limit = limit.as_secs_f64();
            io::Error::new(ErrorKind::TimedOut, format!("{name} did not end within {limit} s and was killed"))
        }
    })
}

fn file() -> io::Result<File> {
    Ok(memfd_create("output", MemfdFlags::CLOEXEC)?.into())
}

fn text(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}
