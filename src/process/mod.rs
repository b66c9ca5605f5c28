//! Child processes with a socket for jobs and replies, separate printed output, bounded waits and guaranteed clean-up.
//!
//! The socket is the child's standard input; it carries jobs one way and replies the other. Standard output and
//! standard error are one pipe of text, so that nothing a library prints can damage a reply. A child leads its own
//! process group. However the child ends, that group and all other descendants are killed, and the child is reaped. Of a
//! confined child the guard above it does that ([`confinement`]).

use std::io;

mod child;
pub mod confinement;
mod death;
mod guard;
mod lines;
mod output;
mod parent;
mod proc;
mod program;
mod system_calls;
mod temporary;

pub use child::{Answer, ChildProcess, Event, wait_for_any, wait_until};
pub use death::{Cause, Death, after, oom_kills};
pub use lines::Lines;
pub use parent::{Parent, has_parent};
pub use proc::{is_alive, processes_with};
pub use program::{output_within, program};
#[cfg(test)]
pub use temporary::tests::become_an_owner;
pub use temporary::{
    IN_MEMORY, LEAST_ROOM, LockedFolder, TEMPORARY_FOLDER, is_open, remove, remove_unlocked, require_closed, room,
};

/// The longest line that is read from a child, in bytes; a child that sends a longer one is killed.
pub const MAX_LINE_BYTES: usize = 64 << 20;

/// The variable in a child's environment that holds its parent's process id.
pub const PARENT: &str = "CS336_PARENT";

/// The remedy where no thread or program can start.
pub const MORE_PROCESSES: &str = "raise the limit on processes (ulimit -u)";

/// Why a thread or a program did not start, with the remedy.
pub fn not_started(what: &str, error: io::Error) -> anyhow::Error {
    let is_too_many = error.kind() == io::ErrorKind::WouldBlock;
    let remedy = if is_too_many { format!("; {MORE_PROCESSES}") } else { String::new() };
    anyhow::Error::new(error).context(format!("failed to start {what}{remedy}"))
}

/// The remedy for the limit of this process that an error names; a library in C++ passes on the system's words alone.
pub fn remedy_for_limit(error: &anyhow::Error) -> Option<&'static str> {
    let error = format!("{error:#}");
    let limits = [
        ("Resource temporarily unavailable", MORE_PROCESSES),
        ("Too many open files", "raise the limit on open files (ulimit -n)"),
        ("Cannot allocate memory", "free memory, or raise the limit on it (ulimit -v)"),
    ];
    limits.into_iter().find_map(|(words, remedy)| error.contains(words).then_some(remedy))
}

#[cfg(test)]
mod tests;
