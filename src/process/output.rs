//! What a child prints: its newest bytes, read without waiting, and the last lines for error messages.

use std::collections::VecDeque;
use std::io::{ErrorKind, PipeReader, Read as _};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags};

/// How much of the output is kept, and how many of its lines a message repeats.
const KEPT_BYTES: usize = 16 << 10;
const LINES: usize = 12;
/// The most bytes that one call reads: a child may print faster than they are read.
const READ_BYTES: usize = 1 << 20;

/// The reading end of the pipe of a child's standard output and standard error.
pub struct Output {
    pipe: PipeReader,
    kept: VecDeque<u8>,
    closed: bool,
}

impl Output {
    pub fn new(pipe: PipeReader) -> Result<Self> {
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok(Self { pipe, kept: VecDeque::new(), closed: false })
    }

    /// Reads what has been printed since the last time.
    pub fn drain(&mut self) {
        let mut chunk = [0; 1 << 16];
        let mut read = 0;
        while !self.closed && read < READ_BYTES {
            match self.pipe.read(&mut chunk) {
                Ok(0) => self.closed = true,
                Ok(count) => {
                    read += count;
                    self.kept.extend(&chunk[..count]);
                    self.kept.drain(..self.kept.len().saturating_sub(KEPT_BYTES));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.closed = true,
            }
        }
    }

    /// Leaves out of [`Self::last_lines`] what has been printed so far.
    pub fn forget(&mut self) {
        self.drain();
        self.kept.clear();
    }

    /// The descriptor to poll; `None` once the pipe is closed.
    pub fn poll_fd(&self) -> Option<PollFd<'_>> {
        (!self.closed).then(|| PollFd::new(&self.pipe, PollFlags::IN))
    }

    /// The last lines, or those from the last panic on: its message comes before its backtrace, which may be long.
    pub fn last_lines(&self) -> String {
        let bytes: Vec<u8> = self.kept.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let panic = lines.iter().rposition(|line| line.contains("panicked at"));
        let from = panic.unwrap_or(lines.len().saturating_sub(LINES));
        lines[from..].iter().take(LINES).copied().collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn last_lines(printed: &[u8]) -> String {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut output = Output::new(reader).unwrap();
        for part in printed.chunks(1 << 15) {
            writer.write_all(part).unwrap();
            output.drain();
        }
        assert!(output.kept.len() <= KEPT_BYTES);
        output.last_lines()
    }

    #[test]
    fn the_last_lines_or_those_of_a_panic_are_kept() {
        let many: String = (1..=100_000).map(|i| format!("{i}\n")).collect();
        let last = last_lines(many.as_bytes());
        assert!(last.ends_with("\n99999\n100000") && last.lines().count() == LINES, "{last}");
        let backtrace: String = (1..=100).map(|i| format!("{i}: frame\n")).collect();
        let panic = last_lines(format!("before\nthread 'main' panicked at x.rs:1\nwhy\n{backtrace}").as_bytes());
        assert!(panic.starts_with("thread 'main' panicked at x.rs:1\nwhy\n1: frame"), "{panic}");
    }

    #[test]
    fn bytes_that_are_not_utf8_are_replaced() {
        assert_eq!(last_lines(b"\n\xff\n"), "\u{fffd}");
    }
}
