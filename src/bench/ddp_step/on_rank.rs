//! The rank task of the data-parallel benchmarks: all columns in turns, round by round, between two probes of the link.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::trainer::{MakeTrainer, make_trainer};
use super::variant::ReplicaBench;
use super::{Params, Timeline, from_python};
use crate::bench::interconnect::{Probe, probe};
use crate::bench::peer::{Software, TorchPeer};
use crate::collective::Shared;
use crate::collective::ranks::{RankTask, parse_input};
use crate::units::{MB, MIB};

pub const TASK: RankTask =
    RankTask { name: "ddp_step", run: |collective, input| measure(collective, input, make_trainer) };

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub params: Params,
    pub strategies: Vec<String>,
    /// The store file of the process group of PyTorch's DDP, which does not exist yet. `None`: DDP is not measured.
    pub store: Option<PathBuf>,
}

/// The measurements of one rank.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// Probes of the link before the first turn and after the last.
    pub probes: Vec<Probe>,
    pub later_probes: Vec<Probe>,
    pub single: Vec<f64>,
    pub strategies: BTreeMap<String, StepOutput>,
    pub pytorch_ddp: Vec<f64>,
    /// Where the case has the wheel.
    pub from_python: Option<from_python::Output>,
    pub software: Option<Software>,
}

/// The timed steps of one strategy on one rank, in seconds. Fields that are not lists describe the last step.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepOutput {
    pub step: Vec<f64>,
    pub communication: Vec<f64>,
    pub tail: Vec<f64>,
    pub bytes: u64,
    pub calls: u64,
    /// Bytes that each link carries in each direction: all collectives, and all-reduces only.
    pub bus_bytes: f64,
    pub summed_bus_bytes: f64,
    pub timeline: Timeline,
}

/// Measures [`Input`] on this rank and returns [`Output`]. `make_trainer` makes a strategy's trainer by name.
pub fn measure(collective: &Shared, input: Value, make_trainer: MakeTrainer) -> Result<Value> {
    let Input { params, strategies, store } = parse_input(input)?;
    let look = || probe(collective, params.gradient_bytes());
    let mut output = Output { probes: look()?, ..Output::default() };
    let bench = ReplicaBench::new(&params, collective)?;
    let opened = store.map(|store| open_peer(collective, &params, &store)).transpose()?;
    if let Some((peer, about)) = &opened {
        output.software = Some(peer.software.clone());
        output.from_python = params.wheel.then(|| from_python::Output::of(peer, about.clone())).transpose()?;
    }
    let mut peer = opened.map(|(peer, _)| peer);
    for round in 0..params.rounds {
        output.single.extend(bench.single()?);
        for name in &strategies {
            let steps = output.strategies.entry(name.clone()).or_default();
            bench.under(name, make_trainer, steps).with_context(|| format!("in a turn of {name}"))?;
        }
        if let Some(peer) = &mut peer {
            let laps = peer.turn("ddp", params.warmup, params.steps)?;
            output.pytorch_ddp.extend(laps.into_values().flatten());
            if let Some(steps) = &mut output.from_python {
                steps.round(peer, &params, round)?;
            }
        }
    }
    if let Some(peer) = &mut peer {
        if let Some(steps) = &mut output.from_python {
            steps.compare(peer)?;
        }
        peer.close(None)?;
    }
    // The largest sums need the memory that the model occupies.
    drop(bench);
    output.later_probes = look()?;
    Ok(serde_json::to_value(output)?)
}

/// The rank's peer, and what it says of the wheel if the case has it.
pub fn open_peer(collective: &Shared, params: &Params, store: &Path) -> Result<(TorchPeer, Value)> {
    let mut peer = TorchPeer::start(collective.device())?;
    let settings = json!({
        "config": params.config(), "dtype": params.dtype, "batch_size": params.batch_size,
        // PyTorch counts buckets in MiB.
        "bucket_cap_mib": params.bucket_size_mb.map(|mb| mb * MB / MIB),
        "wheel": params.wheel, "backend": collective.backend(), "rank": collective.rank(),
        "world_size": collective.world_size(), "store": store,
    });
    let about = peer.open("ddp", settings)?;
    Ok((peer, about))
}
