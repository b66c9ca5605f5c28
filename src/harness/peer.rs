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
use crate::json;
use crate::printable::shown_path;
use crate::process::{Answer, ChildProcess, Death, after};

/// A peer; its whole process group is killed when this is dropped.
pub struct Peer {
    /// `None` once it has died, hung or sent an invalid reply.
    process: Option<ChildProcess>,
    greeting: Value,
    next_id: u64,
}

/// The peer was killed, since it gave no answer in time.
#[derive(Debug, thiserror::Error)]
#[error("the peer gave no answer within {} s{}", .limit.as_secs_f64(), after(.last_output))]
pub struct NoAnswer {
    pub limit: Duration,
    pub last_output: String,
}

/// The peer has died.
#[derive(Debug, thiserror::Error)]
#[error("the peer {0}")]
pub struct PeerDied(pub Death);

/// The peer sent what is no reply.
#[derive(Debug, thiserror::Error)]
#[error("the peer {0}")]
pub struct NoReply(pub String);

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
    /// What is not available, where the peer knows.
    needs: Option<String>,
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
        let program = shown_path(command.get_program());
        let mut process = ChildProcess::start(command).context("starting the peer")?;
        let greeting = receive(&mut process, deadline);
        let greeting = greeting.with_context(|| format!("waiting for the peer {program} to greet"))?;
        let spoken = &greeting["protocol"];
        ensure!(
            spoken.as_u64() == Some(version),
            "the peer {program} has protocol {spoken}, this program {version}: use the peer of this version"
        );
        Ok(Self { process: Some(process), greeting, next_id: 0 })
    }

    /// The peer's first message.
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Whether the peer can take another job: false once it has died, hung or sent an invalid reply.
    pub fn is_usable(&self) -> bool {
        self.process.is_some()
    }

    /// The last lines that the peer has printed; empty where it printed none, or has ended.
    pub fn last_output(&mut self) -> String {
        self.process.as_mut().map(ChildProcess::last_output).unwrap_or_default()
    }

    /// Stops it and all that it has started, where a guard stands above it, until [`Self::go_on`]; whether they are stopped.
    pub fn stop(&mut self) -> bool {
        self.process.as_mut().is_none_or(ChildProcess::stop)
    }

    /// As [`ChildProcess::go_on`].
    pub fn go_on(&mut self) -> bool {
        self.process.as_mut().is_none_or(ChildProcess::go_on)
    }

    /// Ends the process.
    pub fn end(&mut self) {
        self.process = None;
    }

    /// Sends `job` and waits for its result, at most `deadline`.
    ///
    /// Errors: [`Fault::OutOfMemory`], [`Fault::NotAvailable`] or a failed job, after which the peer can be used again; or
    /// the peer's death, with its last output, or [`NoAnswer`], after which it cannot.
    pub fn call<R: DeserializeOwned>(&mut self, job: &str, settings: impl Serialize, deadline: Duration) -> Result<R> {
        let mut process = self.process.take().context("the peer has ended; start another one")?;
        self.next_id += 1;
        process.send(&Job { id: self.next_id, job, settings })?;
        let in_job = || format!("in the peer's job {job:?}");
        let reply = receive(&mut process, deadline).and_then(|reply| read_reply(&reply, self.next_id));
        let reply = reply.with_context(in_job)?;
        if reply.is_err() {
            // It printed where it failed, which says nothing of a later job.
            process.forget_output();
        }
        self.process = Some(process);
        let result = reply.with_context(in_job)?;
        json::from_value(&result).with_context(|| format!("the peer's result of the job {job:?}"))
    }
}

/// The result in a peer's reply to job `id`, or the error that the peer reports.
///
/// Errors: it is not a reply to this job.
pub fn read_reply(reply: &Value, id: u64) -> Result<Result<Value>> {
    let Reply { id: answered, result, error } = json::from_value(reply)?;
    ensure!(answered == id, "the peer answered job {answered}, expected was job {id}");
    match (result, error) {
        (Some(result), None) => Ok(Ok(result)),
        (None, Some(refusal)) => Ok(Err(refusal.into_error())),
        _ => bail!("a reply must hold a result or an error, this one is {reply}"),
    }
}

fn receive(process: &mut ChildProcess, deadline: Duration) -> Result<Value> {
    // No interrupt flag is needed: Ctrl-C ends the worker that waits here, and with it the peer.
    match process.receive(deadline, &|| false) {
        Answer::Line(line) => json::from_str(&line).map_err(|error| {
            let start: String = line.chars().take(200).collect();
            NoReply(format!("sent {start:?}, which is not JSON that can be read: {error:#}")).into()
        }),
        Answer::Died(death) => Err(PeerDied(death).into()),
        Answer::TimedOut { last_output } => Err(NoAnswer { limit: deadline, last_output }.into()),
        Answer::Interrupted => bail!("interrupted"),
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
                let needs = self.needs.unwrap_or_else(|| "a tool that the peer lacks".into());
                Fault::NotAvailable { needs, has: message }.into()
            }
            RefusalKind::Failed => anyhow!(message),
        }
    }
}

#[cfg(test)]
mod tests;
