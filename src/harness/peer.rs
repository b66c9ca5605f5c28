//! A peer: a process in another language that serves jobs as lines of JSON, measured beside us in one run.
//!
//! It greets with one line, `{"protocol": 1, ..}`. A job is `{"id": .., "job": .., "settings": {..}}`, its reply
//! `{"id": .., "result": ..}` or `{"id": .., "error": {"kind": .., "message": ..}}`. What it prints for people goes to its
//! standard error, whose last lines an error carries.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::error::{Fault, fault_in_words};

/// How many of a peer's last lines of standard error an error message carries.
const LAST_WORDS: usize = 12;

/// A running peer; its whole process group is killed when this is dropped.
pub struct Peer {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    last_words: Arc<Mutex<VecDeque<String>>>,
    log: JoinHandle<()>,
    greeting: Value,
    next_id: u64,
    usable: bool,
}

#[derive(Serialize)]
struct Job<'a, S> {
    id: u64,
    job: &'a str,
    settings: S,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reply {
    id: u64,
    result: Option<Value>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refusal {
    kind: Kind,
    message: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    OutOfMemory,
    /// The peer's machine lacks a tool that the job needs.
    NotAvailable,
    Failed,
}

impl Peer {
    /// Starts `command` and waits for its greeting, which must be of protocol `version`.
    pub fn start(mut command: Command, version: u64, deadline: Duration) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        // A group of its own, because a peer has helpers (compilers) that must end with it.
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().with_context(|| format!("failed to start the peer {program}"))?;
        let stdin = child.stdin.take().context("a peer has no standard input")?;
        let stdout = child.stdout.take().context("a peer has no standard output")?;
        let stderr = child.stderr.take().context("a peer has no standard error")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        let words = Arc::clone(&last_words);
        let log = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
                words.push_back(line);
                if words.len() > LAST_WORDS {
                    words.pop_front();
                }
            }
        });
        let mut peer = Self { child, stdin, lines, last_words, log, greeting: Value::Null, next_id: 0, usable: true };
        peer.greeting = peer.receive(deadline).with_context(|| format!("waiting for the peer {program} to greet"))?;
        let spoken = &peer.greeting["protocol"];
        ensure!(
            spoken.as_u64() == Some(version),
            "the peer {program} speaks protocol {spoken}, this program {version}: use the peer of this version"
        );
        Ok(peer)
    }

    /// What the peer says of itself.
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Whether another job can be given: false once the peer has died, hung or answered what is no reply.
    pub fn is_usable(&self) -> bool {
        self.usable
    }

    /// Has `job` done, at most within `deadline`.
    ///
    /// Errors: [`Fault::OutOfMemory`] and [`Fault::NotAvailable`] as the peer names them, after which it can be used
    /// again, as after a job that failed; and the peer's own end, with its last words, after which it cannot.
    pub fn call<R: DeserializeOwned>(&mut self, job: &str, settings: impl Serialize, deadline: Duration) -> Result<R> {
        ensure!(self.usable, "the peer has ended; start another one");
        self.next_id += 1;
        let line = serde_json::to_string(&Job { id: self.next_id, job, settings })? + "\n";
        let result = self.exchange(&line, deadline).with_context(|| format!("in the peer's job {job:?}"))?;
        serde_json::from_value(result).with_context(|| format!("the peer's result of the job {job:?}"))
    }

    fn exchange(&mut self, line: &str, deadline: Duration) -> Result<Value> {
        // A peer that has died is told so by the missing reply, which knows more.
        let _ = self.stdin.write_all(line.as_bytes()).and_then(|()| self.stdin.flush());
        let reply = self.receive(deadline)?;
        let Reply { id, result, error } = Reply::deserialize(&reply).inspect_err(|_| self.usable = false)?;
        if id != self.next_id {
            self.usable = false;
            bail!("the peer answered job {id}, asked was job {}", self.next_id);
        }
        match (result, error) {
            (Some(result), None) => Ok(result),
            (None, Some(refusal)) => Err(refusal.into_error()),
            _ => {
                self.usable = false;
                bail!("a reply holds a result or an error, this one {reply}")
            }
        }
    }

    fn receive(&mut self, deadline: Duration) -> Result<Value> {
        match self.lines.recv_timeout(deadline) {
            Ok(line) => serde_json::from_str(&line).inspect_err(|_| self.usable = false).with_context(|| {
                format!("the peer wrote {:?}, which is no JSON", line.chars().take(200).collect::<String>())
            }),
            Err(RecvTimeoutError::Timeout) => {
                self.kill();
                Err(self.with_last_words(format!("the peer gave no answer within {} s", deadline.as_secs_f64())))
            }
            Err(RecvTimeoutError::Disconnected) => {
                // Its own end first, so that what is told is how it ended and not that it was killed.
                let status = self.child.wait();
                self.kill();
                let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                Err(self.with_last_words(format!("the peer ended early ({status})")))
            }
        }
    }

    fn with_last_words(&self, what: String) -> anyhow::Error {
        // Whoever inherited the peer's standard error may keep it open, so the wait for its end is short.
        for _ in 0..50 {
            if self.log.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        match words.is_empty() {
            true => anyhow!(what),
            false => anyhow!("{what}; its last words: {}", words.iter().cloned().collect::<Vec<_>>().join("\n")),
        }
    }

    fn kill(&mut self) {
        self.usable = false;
        if let Some(group) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Refusal {
    fn into_error(self) -> anyhow::Error {
        let message = self.message;
        match self.kind {
            Kind::OutOfMemory => {
                fault_in_words(&message).unwrap_or(Fault::OutOfMemory { requested_bytes: None, message }).into()
            }
            Kind::NotAvailable => {
                Fault::NotAvailable { needs: "a tool that the peer lacks".into(), has: message }.into()
            }
            Kind::Failed => anyhow!(message),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests;
