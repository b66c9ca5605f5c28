//! How a child ended: its exit status or signal, whether memory ran out, and the last lines that it printed.

use std::fmt::{self, Display};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use super::MAX_LINE_BYTES;

/// How a child ended, and its last output.
#[derive(Debug, Clone, PartialEq)]
pub struct Death {
    pub cause: Cause,
    /// The last lines that the child printed; empty where it printed none.
    pub last_output: String,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cause {
    /// It exited, or a signal ended it. `out_of_memory`: the kernel killed it because memory ran out.
    Exited { status: ExitStatus, out_of_memory: bool },
    /// It closed its socket, so that no reply could come, and went on running until it was killed.
    ClosedSocket,
    /// It sent more than [`MAX_LINE_BYTES`] without a line break and was killed.
    LineTooLong,
    /// It was killed, but the kernel has not ended it.
    NotReaped,
}

impl Death {
    pub fn is_success(&self) -> bool {
        matches!(self.cause, Cause::Exited { status, .. } if status.success())
    }

    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.cause, Cause::Exited { out_of_memory: true, .. })
    }
}

impl Display for Death {
    /// A predicate: "exited with status 3; its last output: ..".
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}{}", self.cause, after(&self.last_output))
    }
}

/// The last output as the end of a message about a child; empty where there is none.
pub fn after(last_output: &str) -> String {
    if last_output.is_empty() { String::new() } else { format!("; its last output:\n{last_output}") }
}

impl Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Exited { out_of_memory: true, .. } => {
                write!(f, "was killed by the kernel (signal 9): the machine ran out of memory")
            }
            Self::Exited { status, .. } => match (status.code(), status.signal()) {
                (Some(code), _) => write!(f, "exited with status {code}"),
                (None, Some(signal)) => write!(f, "was ended by signal {signal}{}", name(signal)),
                (None, None) => write!(f, "ended with {status}"),
            },
            Self::ClosedSocket => write!(f, "closed its end of the socket without exiting, and was killed"),
            Self::NotReaped => write!(f, "was killed, but the kernel has not ended it (a device may hold it)"),
            Self::LineTooLong => {
                write!(f, "sent {} MiB without a line break, and was killed", MAX_LINE_BYTES >> 20)
            }
        }
    }
}

/// The signals by which programs end, with their names.
fn name(signal: i32) -> &'static str {
    match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        13 => " (SIGPIPE)",
        15 => " (SIGTERM)",
        25 => " (SIGXFSZ)",
        31 => " (SIGSYS)",
        _ => "",
    }
}

/// Whether the kernel killed the process because memory ran out: by SIGKILL, while its count of such kills rose.
pub fn is_out_of_memory(status: ExitStatus, kills_before: Option<u64>, kills_now: Option<u64>) -> bool {
    status.signal() == Some(9) && matches!((kills_before, kills_now), (Some(before), Some(now)) if now > before)
}

/// How many processes the kernel has killed since it started because memory ran out; `None` if it reports no count.
pub fn oom_kills() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").ok()?;
    text.lines().find_map(|l| l.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sigkill_that_the_kernel_counted_is_out_of_memory() {
        let (killed, crashed) = (ExitStatus::from_raw(9), ExitStatus::from_raw(11));
        assert!(is_out_of_memory(killed, Some(1), Some(2)));
        assert!(!is_out_of_memory(killed, Some(1), Some(1)) && !is_out_of_memory(killed, None, None));
        assert!(!is_out_of_memory(crashed, Some(1), Some(2)));
    }

    #[test]
    fn a_death_names_its_status_signal_or_lack_of_memory_and_the_last_output() {
        let message = |raw: i32, out_of_memory, last_output: &str| {
            let cause = Cause::Exited { status: ExitStatus::from_raw(raw), out_of_memory };
            Death { cause, last_output: last_output.into() }.to_string()
        };
        assert_eq!(message(3 << 8, false, ""), "exited with status 3");
        assert_eq!(message(11, false, "a\nb"), "was ended by signal 11 (SIGSEGV); its last output:\na\nb");
        assert!(message(9, true, "").contains("ran out of memory"));
    }
}
