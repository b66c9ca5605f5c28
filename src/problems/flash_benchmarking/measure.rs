//! Measures one cell of the grid, or the leaderboard's function.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::comparison::{ImplementationOutcome, Launch, Task, compare};
use super::implementations::{KERNELS, columns};
use super::inputs::Inputs;
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::bench::timing::{Cache, Protocol};
use crate::bench::work::AttentionPass;
use crate::error::Fault;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;

pub struct FlashBenchmarking;

/// One cell of the grid, or the leaderboard's function.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Cell(Cell),
    Leaderboard(Leaderboard),
}

/// Causal attention of one head, forward, backward and both.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    pub dtype: Dtype,
    pub d_model: i64,
    pub seq: i64,
    pub batch: i64,
    pub cache: Cache,
    pub launch: Launch,
    /// Turns of each implementation; every second round goes the other way.
    pub rounds: usize,
    /// Of each turn.
    pub warmup_ms: f64,
    pub rep_ms: f64,
    pub most_repeats: usize,
}

/// The handout's `flash_forward_backward` under `do_bench`, one implementation after the other.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaderboard {
    pub dtype: Dtype,
    pub n_heads: i64,
    pub d_head: i64,
    pub seq: i64,
    pub warmup_ms: f64,
    pub rep_ms: f64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub columns: BTreeMap<String, ImplementationOutcome>,
}

impl Cell {
    fn task(&self) -> Task {
        let Self { cache, warmup_ms, rep_ms, most_repeats, .. } = *self;
        Task {
            shape: [self.batch, 1, self.seq, self.d_model],
            dtype: self.dtype,
            launch: self.launch,
            passes: &[AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both],
            protocol: Protocol { cache, warmup_ms, rep_ms, most_repeats },
            rounds: self.rounds,
            draw: |task, seq, generator| {
                let [batch, heads, _, d] = task.shape;
                Inputs::draw([batch, heads, seq, d], task.dtype.kind(), generator)
            },
        }
    }
}

impl Leaderboard {
    fn task(&self) -> Task {
        let Self { warmup_ms, rep_ms, .. } = *self;
        Task {
            shape: [1, self.n_heads, self.seq, self.d_head],
            dtype: self.dtype,
            launch: Launch::Eager,
            passes: &[AttentionPass::Summed],
            protocol: Protocol { cache: Cache::Cold, warmup_ms, rep_ms, most_repeats: 0 },
            rounds: 1,
            draw: |task, seq, generator| {
                let [_, n_heads, _, d_head] = task.shape;
                Inputs::draw_unpacked(n_heads, seq, d_head, task.dtype.kind(), generator)
            },
        }
    }
}

impl Params {
    fn task(&self) -> Task {
        match self {
            Self::Cell(cell) => cell.task(),
            Self::Leaderboard(leaderboard) => leaderboard.task(),
        }
    }
}

impl Measure for FlashBenchmarking {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = KERNELS;

    fn validate(params: &Params) -> Result<()> {
        let task = params.task();
        let [batch, heads, seq, d] = task.shape;
        for (key, value, most) in [("batch", batch, 1 << 10), ("n_heads", heads, 1 << 10), ("seq", seq, 1 << 20)] {
            ensure!((1..=most).contains(&value), "{key} is {value}: it must lie in 1..{most}");
        }
        ensure!((8..=256).contains(&d) && d % 8 == 0, "d is {d}: it must be a multiple of 8 up to 256");
        ensure!((1..=1000).contains(&task.rounds), "rounds is {}: it must lie in 1..1000", task.rounds);
        task.protocol.validate()
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        if let (Params::Leaderboard(_), Profile::Cpu) = (params, profile) {
            let needs = "a GPU, on which the handout times it".to_string();
            return Err(Fault::NotAvailable { needs, has: "a CPU".into() }.into());
        }
        Ok(Row { columns: compare(&params.task(), &columns(), device)? })
    }
}
