//! One rank's part: sums of known values by our collective and by PyTorch's, in turns, every one of them checked.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bench::all_reduce::Sums;
use crate::bench::interleave::Turns;
use crate::bench::peer::{Software, TorchPeer};
use crate::collective::Shared;
use crate::collective::ranks::{RankTask, parse_input};

pub const TASK: RankTask = RankTask { name: "all_reduce", run: on_rank };

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// float32, on every rank.
    pub elements: i64,
    pub turns: Turns,
    /// The store file of the peers' process group, which does not exist yet. `None`: no peers.
    pub store: Option<PathBuf>,
}

/// Seconds on one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    pub ours: Vec<f64>,
    pub c10d: Vec<f64>,
    pub software: Option<Software>,
}

fn on_rank(collective: &Shared, inputs: Value) -> Result<Value> {
    let inputs: Vec<Input> = parse_input(inputs)?;
    let output = |input: &Input| sums(collective, input).with_context(|| format!("{} elements", input.elements));
    Ok(serde_json::to_value(inputs.iter().map(output).collect::<Result<Vec<_>>>()?)?)
}

fn sums(collective: &Shared, input: &Input) -> Result<Output> {
    let &Input { elements, turns: Turns { rounds, warmup, iterations }, ref store } = input;
    let mut peer = store.as_ref().map(|store| open_peer(collective, store, elements)).transpose()?;
    let mut output =
        Output { ours: Vec::new(), c10d: Vec::new(), software: peer.as_ref().map(|peer| peer.software.clone()) };
    let ours = Sums::new(collective, elements)?;
    for _ in 0..rounds {
        output.ours.extend(ours.turn(warmup, iterations)?);
        if let Some(peer) = &mut peer {
            let laps = peer.turn("all_reduce", warmup, iterations)?;
            output.c10d.extend(laps.into_values().flatten());
        }
    }
    if let Some(peer) = &mut peer {
        peer.close(None)?;
    }
    Ok(output)
}

fn open_peer(collective: &Shared, store: &PathBuf, elements: i64) -> Result<TorchPeer> {
    let mut peer = TorchPeer::start(collective.device())?;
    let (backend, rank, world_size) = (collective.backend(), collective.rank(), collective.world_size());
    let group = json!({
        "elements": elements, "backend": backend, "rank": rank, "world_size": world_size, "store": store,
    });
    peer.open("all_reduce", group)?;
    Ok(peer)
}
