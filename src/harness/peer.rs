//! A peer: a process in another language that serves jobs as lines of JSON and is measured in the same run.
//!
//! It first sends one line, the greeting `{"protocol": 1, ..}`. A job is `{"id": .., "job": .., "settings": {..}}`; its
//! reply is `{"id": .., "result": ..}` or `{"id": .., "error": {"kind": .., "message": ..}}`. Both use the socket that is
//! the peer's standard input ([`crate::process`]). An error includes the last lines that the peer printed.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::error::{Fault, fault_in_words};
use crate::process::{Answer, ChildProcess, after};

/// A running peer; its whole process group is killed when this is dropped.
pub struct Peer {
    process: ChildProcess,
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
    kind: RefusalKind,
    message: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum RefusalKind {
    OutOfMemory,
    /// The peer's machine lacks a tool that the job needs.
    NotAvailable,
    Failed,
}

impl Peer {
    /// Starts `command` and waits for its greeting, which must be of protocol `version`.
    pub fn start(command: Command, version: u64, deadline: Duration) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        let process = ChildProcess::start(command).context("starting the peer")?;
        let mut peer = Self { process, greeting: Value::Null, next_id: 0, usable: true };
        peer.greeting = peer.receive(deadline).with_context(|| format!("waiting for the peer {program} to greet"))?;
        let spoken = &peer.greeting["protocol"];
        ensure!(
            spoken.as_u64() == Some(version),
            "the peer {program} has protocol {spoken}, this program {version}: use the peer of this version"
        );
        Ok(peer)
    }

    /// The peer's first message.
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Whether the peer can take another job: false once it has died, hung or sent an invalid reply.
    pub fn is_usable(&self) -> bool {
        self.usable
    }

    /// Sends `job` and waits for its result, at most `deadline`.
    ///
    /// Errors: [`Fault::OutOfMemory`], [`Fault::NotAvailable`] or a failed job, after which the peer can be used again; or
    /// the peer's death, with its last output, after which it cannot.
    pub fn call<R: DeserializeOwned>(&mut self, job: &str, settings: impl Serialize, deadline: Duration) -> Result<R> {
        ensure!(self.usable, "the peer has ended; start another one");
        self.next_id += 1;
        self.process.send(&Job { id: self.next_id, job, settings })?;
        let result = self.exchange(deadline).with_context(|| format!("in the peer's job {job:?}"))?;
        serde_json::from_value(result).with_context(|| format!("the peer's result of the job {job:?}"))
    }

    fn exchange(&mut self, deadline: Duration) -> Result<Value> {
        let reply = self.receive(deadline)?;
        let Reply { id, result, error } = Reply::deserialize(&reply).inspect_err(|_| self.usable = false)?;
        if id != self.next_id {
            self.usable = false;
            bail!("the peer answered job {id}, expected was job {}", self.next_id);
        }
        match (result, error) {
            (Some(result), None) => Ok(result),
            (None, Some(refusal)) => Err(refusal.into_error()),
            _ => {
                self.usable = false;
                bail!("a reply must hold a result or an error, this one is {reply}")
            }
        }
    }

    fn receive(&mut self, deadline: Duration) -> Result<Value> {
        // No interrupt flag is needed: Ctrl-C ends the worker that waits here, and with it the peer.
        let error = match self.process.receive(deadline, &|| false) {
            Answer::Line(line) => match serde_json::from_str(&line) {
                Ok(reply) => return Ok(reply),
                Err(error) => {
                    let start: String = line.chars().take(200).collect();
                    anyhow!(error).context(format!("the peer sent {start:?}, which is not JSON"))
                }
            },
            Answer::Died(death) => anyhow!("the peer {death}"),
            Answer::TimedOut { last_output } => {
                anyhow!("the peer gave no answer within {} s{}", deadline.as_secs_f64(), after(&last_output))
            }
            Answer::Interrupted => anyhow!("interrupted"),
        };
        self.usable = false;
        self.process.kill();
        Err(error)
    }
}

impl Refusal {
    fn into_error(self) -> anyhow::Error {
        let message = self.message;
        match self.kind {
            RefusalKind::OutOfMemory => {
                fault_in_words(&message).unwrap_or(Fault::OutOfMemory { requested_bytes: None, message }).into()
            }
            RefusalKind::NotAvailable => {
                Fault::NotAvailable { needs: "a tool that the peer lacks".into(), has: message }.into()
            }
            RefusalKind::Failed => anyhow!(message),
        }
    }
}

#[cfg(test)]
mod tests;
