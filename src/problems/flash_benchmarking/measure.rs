//! One cell of the grid, the leaderboard's function, or the host's time of a call: parameters and rows.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::implementations::columns;
use super::task::Task;
use super::{calls, flash_attention_4};
use crate::attention::FLASH_KERNELS;
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::bench::energy::Energy;
use crate::bench::errors::AttentionErrors;
use crate::bench::interleave::ColumnOutcome;
use crate::bench::peer::drop_kept;
use crate::bench::timing::{Cache, Pace};
use crate::bench::work::AttentionPass;
use crate::error::Fault;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::samples::Samples;

pub struct FlashBenchmarking;

/// One cell of the grid, the leaderboard's function, or calls that the host limits.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Cell(Cell),
    Leaderboard(Leaderboard),
    Calls(calls::Params),
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
    #[serde(default, skip_serializing_if = "Pace::is_sustained")]
    pub pace: Pace,
    pub launch: Launch,
    /// Turns of each implementation; every second round goes the other way.
    pub rounds: usize,
    /// Of each turn.
    pub warmup_ms: f64,
    pub rep_ms: f64,
    pub most_repeats: usize,
    /// Seconds of calls back to back of each pass, after the timed ones, for joules a call and the clock; 0 for none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub energy_s: f64,
}

fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
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

/// Whether the host launches each kernel, or the whole pass as one CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Launch {
    Eager,
    Graph,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Row {
    Timings(Timings),
    Calls(Box<calls::Row>),
}

impl Row {
    /// Of a cell or the leaderboard's function.
    pub fn timings(&self) -> Option<&Timings> {
        match self {
            Self::Timings(timings) => Some(timings),
            Self::Calls(_) => None,
        }
    }

    pub fn calls(&self) -> Option<&calls::Row> {
        match self {
            Self::Timings(_) => None,
            Self::Calls(calls) => Some(calls),
        }
    }
}

/// How the implementations of a cell, or of the leaderboard's function, ended.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timings {
    pub columns: BTreeMap<String, ImplementationOutcome>,
    /// Why a pass has no energy though the suite asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_missing: Option<String>,
    /// Of a message to a subject's process and back, which the times of its functions include.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<Samples>,
}

/// How one implementation's part of a case ended.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImplementationOutcome {
    /// Of a library that is not among the run's software.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The largest over the lengths that were verified, as shares of the norm, to two digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors: Option<AttentionErrors>,
    /// The longest sequence on which it was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified_seq: Option<i64>,
    /// Bytes of tensors at the peak of each pass, where a formula knows them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub predicted_bytes: BTreeMap<AttentionPass, u64>,
    pub passes: BTreeMap<AttentionPass, ColumnOutcome<Samples>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub energy: BTreeMap<AttentionPass, Energy>,
}

impl Measure for FlashBenchmarking {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = FLASH_KERNELS;

    fn validate(params: &Params) -> Result<()> {
        let task = match params {
            Params::Calls(calls) => return calls.validate(),
            Params::Cell(cell) => Task::of_cell(cell),
            Params::Leaderboard(leaderboard) => Task::of_leaderboard(leaderboard),
        };
        let [batch, heads, seq, d] = task.shape;
        for (key, value, most) in [("batch", batch, 1 << 10), ("n_heads", heads, 1 << 10), ("seq", seq, 1 << 20)] {
            ensure!((1..=most).contains(&value), "{key} is {value}: it must lie in 1..{most}");
        }
        ensure!((8..=256).contains(&d) && d % 8 == 0, "d is {d}: it must be a multiple of 8 up to 256");
        ensure!((1..=1000).contains(&task.rounds), "rounds is {}: it must lie in 1..1000", task.rounds);
        ensure!((0.0..=60.0).contains(&task.energy_s), "energy_s is {}: it must lie between 0 and 60", task.energy_s);
        task.protocol.validate()
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        let is_of_calls = matches!(params, Params::Calls(_));
        ensure!(row.calls().is_some() == is_of_calls, "the row is one of another measure");
        Ok(())
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let device = device_for(profile)?;
        let task = match (params, profile) {
            (Params::Calls(calls), _) => {
                // The kept peer must not run beside theirs.
                drop_kept();
                return Ok(Row::Calls(Box::new(calls::measure(calls, device)?)));
            }
            (Params::Cell(cell), _) => Task::of_cell(cell),
            (Params::Leaderboard(_), Profile::Cpu) => {
                let needs = "a GPU, on which the handout times it".to_string();
                return Err(Fault::NotAvailable { needs, has: "a CPU".into() }.into());
            }
            (Params::Leaderboard(leaderboard), Profile::Gpu) => {
                // Its peer is done, and the leaderboard's tensors need the memory.
                drop_kept();
                Task::of_leaderboard(leaderboard)
            }
        };
        flash_attention_4::beside(&task, &columns(), device).map(Row::Timings)
    }
}

#[cfg(test)]
mod tests;
