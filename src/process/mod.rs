//! Child processes: lines on a socket of their own, printed text kept apart, bounded waits, and no process left behind.
//!
//! The socket is the child's standard input and carries jobs one way and replies the other. Standard output and standard
//! error are one pipe of text, so that nothing a library prints can damage a reply. A child leads a process group of its
//! own; however it ends, that group is killed first and the child is reaped then.

mod child;
mod death;
mod lines;
mod output;
mod parent;

pub use child::{Answer, ChildProcess, Event, wait_for_any, wait_until};
pub use death::{Cause, Death, after};
pub use parent::{Parent, has_parent};

/// The longest line that is read from a child, in bytes; a child that sends a longer one is killed.
pub const MAX_LINE_BYTES: usize = 64 << 20;

/// Names, in a child's environment, the process that started it.
pub const PARENT: &str = "CS336_PARENT";

#[cfg(test)]
mod tests;
