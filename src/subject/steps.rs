//! A subject's training steps on one rank, timed from here: by our clock, on tokens of ours, and its values sampled.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::json;
use tch::Tensor;

use super::SubjectProcess;
use super::rank::{Adapter, Trainee, left};
use crate::collective::Shared;
use crate::harness::subject::drawn_seed;
use crate::model::optim::AdamWOptions;
use crate::model::{Config, Precision};

/// Parameters whose values are copied within each timed step.
const COPIED: usize = 8;
/// At most so many values of each parameter, as `suites/peers/timed.py`.
const SAMPLED: i64 = 256;

/// What the subject's process had at the end of a turn.
pub struct Given {
    pub samples: BTreeMap<String, Tensor>,
    pub phase: f64,
    pub state_bytes: u64,
}

/// The subject's process on a rank, and its model during a turn.
pub struct TimedSteps {
    process: SubjectProcess,
    adapter: Adapter,
    fault_file: PathBuf,
    names: Vec<String>,
    /// Draws the parameters that are copied.
    state: u64,
}

impl TimedSteps {
    pub fn start(trainee: &Trainee, collective: &Shared) -> Result<Self> {
        let rank = collective.rank();
        let fault_file = trainee.faults.join(format!("rank {rank}"));
        let started = || -> Result<SubjectProcess> {
            let mut process = SubjectProcess::start(&trainee.subject, &trainee.folders, &format!("rank{rank}"))?;
            process.join(collective)?;
            Ok(process)
        };
        let process = left(&fault_file, started())?;
        let state = drawn_seed()?.unsigned_abs().max(1);
        Ok(Self { process, adapter: trainee.adapter.clone(), fault_file, names: Vec::new(), state })
    }

    /// Begins a turn with a new model; `values` are rank 0's, and on other ranks none.
    pub fn begin(
        &mut self,
        config: &Config,
        dtype: Precision,
        values: &[(String, Tensor)],
        names: Vec<String>,
    ) -> Result<()> {
        let bucket_size_mb = match self.adapter {
            Adapter::Bucketed { bucket_size_mb, .. } => Some(bucket_size_mb),
            _ => None,
        };
        let name = self.adapter.name();
        let settings = json!({
            "adapter": name, "hooks": self.adapter.hooks(), "config": config, "dtype": dtype,
            "adamw": AdamWOptions::default(), "bucket_size_mb": bucket_size_mb,
            "shards": matches!(self.adapter, Adapter::Sharded(..)),
        });
        let nothing = ("nothing".to_string(), Tensor::from_slice(&[0f32]));
        let given: Vec<(&str, &Tensor)> =
            values.iter().chain([&nothing]).map(|(name, value)| (name.as_str(), value)).collect();
        self.names = names;
        let begun = self.process.give("begin", settings, &given, name);
        left(&self.fault_file, begun)
    }

    /// Before a step, untimed: gives the subject the tokens.
    pub fn prepare(&mut self, tokens: &Tensor, targets: &Tensor) -> Result<()> {
        let given = [("tokens", tokens), ("targets", targets)];
        let prepared = self.process.give("tokens", json!({}), &given, "preparing a timed step");
        left(&self.fault_file, prepared)
    }

    /// Seconds of one step.
    pub fn run(&mut self) -> Result<f64> {
        let names: Vec<String> = (0..COPIED.min(self.names.len())).map(|_| self.drawn_name()).collect();
        let doing = format!("a timed step of {}", self.adapter.name());
        let start = Instant::now();
        let ran = self.process.call("run", json!({ "names": names }), &doing);
        let seconds = start.elapsed().as_secs_f64();
        left(&self.fault_file, ran).map(|_| seconds)
    }

    /// Seconds of a message to the process and back that asks for nothing.
    pub fn message(&mut self) -> Result<f64> {
        let start = Instant::now();
        let asked = self.process.call("nothing", json!({}), "a message");
        left(&self.fault_file, asked).map(|_| start.elapsed().as_secs_f64())
    }

    /// Ends the turn: [`sampled`] values of every parameter after the last step, in a phase that was drawn then, and the bytes of
    /// optimizer state on this rank.
    pub fn give(&mut self) -> Result<Given> {
        let taken = self.process.take("give", json!({}), "the values after a timed step");
        let rested = self.process.rest();
        let (value, samples) = left(&self.fault_file, taken)?;
        left(&self.fault_file, rested)?;
        let (phase, state_bytes) = (value["phase"].as_f64(), value["state_bytes"].as_u64());
        let phase = phase.filter(|phase| (0.0..1.0).contains(phase)).context("the peer sent no phase")?;
        Ok(Given { samples, phase, state_bytes: state_bytes.unwrap_or(0) })
    }

    /// Leaves the words of a fault that was found here.
    pub fn require<T>(&self, result: Result<T>) -> Result<T> {
        left(&self.fault_file, result)
    }

    fn drawn_name(&mut self) -> String {
        self.state = super::timed::next(self.state);
        self.names[(self.state % self.names.len() as u64) as usize].clone()
    }
}

/// Every n-th value, n odd so that it meets every column of a matrix; all of them where they are few. The first one is at the share
/// `phase`, below 1, of n.
pub fn sampled(t: &Tensor, phase: f64) -> Result<Tensor> {
    let flat = t.f_detach()?.f_contiguous()?.f_view([-1])?;
    let stride = (flat.numel() as i64 / SAMPLED).max(1) | 1;
    let first = (phase * stride as f64) as i64;
    Ok(flat.f_slice(0, first, None, stride)?.f_to_device(tch::Device::Cpu)?.f_detach_copy()?)
}
