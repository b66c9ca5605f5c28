//! A peer: a process in another language that serves jobs as lines of JSON, measured beside us in one run.
//!
//! It greets with one line, `{"protocol": 1, ..}`. A job is `{"id": .., "job": .., "settings": {..}}`, its reply
//! `{"id": .., "result": ..}` or `{"id": .., "error": {"kind": .., "message": ..}}`. Both travel on the socket that is the
//! peer's standard input ([`crate::process`]); an error carries the last lines of what the peer prints.

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
    pub fn start(command: Command, version: u64, deadline: Duration) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        let process = ChildProcess::start(command).context("starting the peer")?;
        let mut peer = Self { process, greeting: Value::Null, next_id: 0, usable: true };
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
    /// again, as after a job that failed; and the peer's own end, with its last output, after which it cannot.
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
        // Nobody interrupts: Ctrl-C ends the worker that waits here, and with it the peer.
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

#[cfg(test)]
mod tests;
