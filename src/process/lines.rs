//! The parent's end of the socket: whole lines of bounded length, sent and received without waiting.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use anyhow::Result;
use rustix::event::{PollFd, PollFlags};
use serde::Serialize;

use super::MAX_LINE_BYTES;

/// A non-blocking socket, with its unsent and its unread bytes.
pub struct Lines {
    socket: UnixStream,
    unsent: Vec<u8>,
    received: Vec<u8>,
    /// How many received bytes were already searched for a line break.
    searched: usize,
    closed: bool,
}

impl Lines {
    pub fn new(socket: UnixStream) -> Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, unsent: Vec::new(), received: Vec::new(), searched: 0, closed: false })
    }

    /// Queues `message` as one line of JSON; [`Lines::transfer`] sends it.
    pub fn queue(&mut self, message: &impl Serialize) -> Result<()> {
        serde_json::to_writer(&mut self.unsent, message)?;
        self.unsent.push(b'\n');
        Ok(())
    }

    /// Sends what the socket accepts. Receives until it is empty or closed, or holds a whole line or a line that is too
    /// long.
    pub fn transfer(&mut self) {
        while !self.closed && !self.unsent.is_empty() {
            match self.socket.write(&self.unsent) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The other end accepts no more; the read below finds out whether it is closed.
                Err(_) => self.unsent.clear(),
            }
        }
        let mut chunk = [0; 1 << 16];
        while !self.closed && !self.is_too_long() && self.line_break().is_none() {
            match self.socket.read(&mut chunk) {
                Ok(0) => self.closed = true,
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.closed = true,
            }
        }
    }

    /// The next whole line that has been received, without its line break; bytes that are not UTF-8 are replaced.
    pub fn next_line(&mut self) -> Option<String> {
        let end = self.line_break()?;
        let line = String::from_utf8_lossy(&self.received[..end]).into_owned();
        self.received.drain(..=end);
        self.searched = 0;
        Some(line)
    }

    pub fn is_too_long(&self) -> bool {
        self.received.len() > MAX_LINE_BYTES
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The descriptor to poll; `None` once the other end is closed.
    pub fn poll_fd(&self) -> Option<PollFd<'_>> {
        let flags = if self.unsent.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        (!self.closed).then(|| PollFd::new(&self.socket, flags))
    }

    fn line_break(&mut self) -> Option<usize> {
        let found = self.received[self.searched..].iter().position(|&byte| byte == b'\n').map(|at| self.searched + at);
        self.searched = found.unwrap_or(self.received.len());
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_a_line_without_end_is_bounded() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            let mut theirs = theirs;
            while theirs.write_all(&[b'x'; 1 << 16]).is_ok() {}
        });
        let mut lines = Lines::new(ours).unwrap();
        while !lines.is_too_long() {
            lines.transfer();
        }
        assert!(lines.received.len() <= MAX_LINE_BYTES + (1 << 16) && lines.next_line().is_none());
        drop(lines);
        writer.join().unwrap();
    }

    #[test]
    fn lines_are_returned_one_by_one_and_only_when_whole() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut lines = Lines::new(ours).unwrap();
        theirs.write_all(b"one\n\xff two\nhal").unwrap();
        lines.transfer();
        assert_eq!(lines.next_line().as_deref(), Some("one"));
        assert_eq!(lines.next_line().as_deref(), Some("\u{fffd} two"));
        assert_eq!(lines.next_line(), None);
        theirs.write_all(b"f\n").unwrap();
        drop(theirs);
        lines.transfer();
        assert_eq!(lines.next_line().as_deref(), Some("half"));
        lines.transfer();
        assert!(lines.is_closed() && lines.next_line().is_none());
    }
}
