//! FlashAttention-4: the Python peer runs it and times it by the same protocol, on the same inputs.

use std::cell::RefCell;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tch::Device;

use super::compare::{LAP, compare};
use super::measure::{Launch, Timings};
use super::task::Task;
use super::verify::{Expected, Others, Runs, Verified, WHOLE, worse};
use crate::attention::implementations::Implementation;
use crate::bench::attention::Inputs;
use crate::bench::dtype::Dtype;
use crate::bench::errors::AttentionErrors;
use crate::bench::interleave::{ColumnOutcome, Laps};
use crate::bench::peer::{Installed, Reply, TorchPeer, with_kept_or_why};
use crate::bench::timing::{BusyCalls, Cache, Protocol};
use crate::bench::work::AttentionPass;
use crate::error::fault_of;
use crate::torch::Generator;

/// The widths at which it is compared: each costs seconds of compiling.
const WIDTHS: [i64; 2] = [64, 128];
/// The shortest sequence of one head on which it is compared; more heads may be shorter, with as many scores. In the cells in which its process took turns, passes that wait for launches
/// took up to three times as long as in the run before (records of 2026-11-24); whether it is the cause was not tested.
pub const LEAST_SEQ: i64 = 8192;

/// The peer that runs it, or why there is none.
pub type PeerOutcome<'p> = ColumnOutcome<RefCell<&'p mut TorchPeer>>;

/// It in the peer, with its case open and verified.
#[derive(Clone, Copy)]
pub struct InPeer<'p>(&'p RefCell<&'p mut TorchPeer>);

/// Compares `implementations`, with a peer if FlashAttention-4 has a part in the case.
pub fn beside(task: &Task, implementations: &[Implementation], device: Device) -> Result<Timings> {
    match absent(task, device) {
        Some(reason) => {
            let peer = &ColumnOutcome::NotRun { reason: reason.into() };
            compare(task, implementations, device, &Others { peer, subject: None })
        }
        None => with_kept_or_why(device, |peer| in_peer(task, implementations, device, peer)),
    }
}

/// As [`beside`], in a peer that was started, or why none was.
pub fn in_peer(
    task: &Task,
    implementations: &[Implementation],
    device: Device,
    peer: Result<&mut TorchPeer>,
) -> Result<Timings> {
    let peer = ColumnOutcome::of_any(peer.map(RefCell::new));
    let row = compare(task, implementations, device, &Others { peer: &peer, subject: None })?;
    if let Some(peer) = peer.measured() {
        // A peer that has ended frees its memory anyway.
        let _ = peer.borrow_mut().job::<Value>("close", json!({}));
    }
    Ok(row)
}

/// Why the case has no column for it; `None` if it has.
fn absent(task: &Task, device: Device) -> Option<&'static str> {
    let reasons = [
        (device == Device::Cpu, "it needs a GPU"),
        (task.unpacked, "compared in the cells, not in the leaderboard's function"),
        (task.launch == Launch::Graph, "launched by the host only"),
        (task.protocol.cache == Cache::Warm, "compared with cold caches only"),
        (task.dtype != Dtype::Bfloat16, "compared in bfloat16 only"),
        (!WIDTHS.contains(&task.shape[3]), "compared at d 64 and 128 only"),
        (
            task.scores() < LEAST_SEQ * LEAST_SEQ,
            "compared from one head of T = 8,192 on, where no pass waits for launches",
        ),
    ];
    reasons.into_iter().find(|(applies, _)| *applies).map(|(_, reason)| reason)
}

/// Its part in the case, or why it has none: not installed, refused by its own checks, or wrong.
pub fn verify<'p>(
    peer: &'p PeerOutcome<'p>,
    task: &Task,
    inputs: &Inputs,
    generator: &Generator,
) -> Result<ColumnOutcome<Verified<'p>>> {
    let peer = match peer {
        ColumnOutcome::Measured { row } => InPeer(row),
        ColumnOutcome::OutOfMemory { requested_bytes, message } => {
            return Ok(ColumnOutcome::OutOfMemory { requested_bytes: *requested_bytes, message: message.clone() });
        }
        ColumnOutcome::NotRun { reason } => return Ok(ColumnOutcome::NotRun { reason: reason.clone() }),
        ColumnOutcome::Failed { error } => return Ok(ColumnOutcome::Failed { error: error.clone() }),
    };
    match peer.verify(task, inputs, generator) {
        Ok(Reply::Accepted(verified)) => Ok(ColumnOutcome::Measured { row: verified }),
        Ok(Reply::Refused(reason)) => Ok(ColumnOutcome::NotRun { reason }),
        Err(error) => Ok(ColumnOutcome::of_any(Err(error))),
    }
}

impl<'p> InPeer<'p> {
    fn verify(self, task: &Task, inputs: &Inputs, generator: &Generator) -> Result<Reply<Verified<'p>>> {
        let open = json!({ "measure": "flash_attention_4" });
        let Installed { version } = match self.job("open", open)? {
            Reply::Accepted(installed) => installed,
            Reply::Refused(reason) => return Ok(Reply::Refused(reason)),
        };
        let small = (task.seq() > WHOLE).then(|| task.draw(WHOLE, generator)).transpose()?;
        let mut worst = AttentionErrors { o: 0.0, dq: 0.0, dk: 0.0, dv: 0.0 };
        // The last ones are what it is timed on.
        for inputs in small.iter().chain([inputs]) {
            match self.errors(inputs)? {
                Reply::Accepted(errors) => {
                    worst = worse(worst, errors.within_tolerance("FlashAttention-4", task.dtype)?);
                }
                Reply::Refused(reason) => return Ok(Reply::Refused(reason)),
            }
        }
        Ok(Reply::Accepted(Verified {
            errors: worst,
            seq: task.seq(),
            version: Some(version),
            runs: Runs::InPeer(self),
        }))
    }

    /// Gives the peer the inputs, and what is expected of them, by a file that lives no longer than its reading.
    fn errors(self, inputs: &Inputs) -> Result<Reply<AttentionErrors>> {
        let folder = tempfile::tempdir().context("making a folder for the peer's inputs")?;
        let file = folder.path().join("attention.safetensors");
        inputs.write(Expected::of(inputs)?.outputs(), &file)?;
        self.job("verify", json!({ "file": file }))
    }

    pub fn turn(self, pass: AttentionPass, protocol: &Protocol) -> Result<Laps> {
        let seconds: Vec<f64> = self.job("turn", json!({ "attention_pass": pass, "protocol": protocol }))?;
        Ok([(LAP.to_string(), seconds)].into())
    }

    pub fn busy(self, pass: AttentionPass, seconds: f64) -> Result<BusyCalls> {
        self.job("busy", json!({ "attention_pass": pass, "seconds": seconds }))
    }

    /// After an error that is no fault the peer ends: one of CUDA's would fail every later job too.
    fn job<T: serde::de::DeserializeOwned>(self, job: &str, settings: Value) -> Result<T> {
        let mut peer = self.0.borrow_mut();
        let result = peer.job(job, settings);
        if result.as_ref().is_err_and(|error| fault_of(error).is_none()) {
            peer.end();
        }
        result
    }
}

#[cfg(test)]
mod tests;
