//! FlashAttention-2 against plain attention and PyTorch's fused operators: the handout's grid, and its leaderboard.

mod checks;
pub mod comparison;
pub mod graph_replay;
pub mod implementations;
pub mod inputs;
pub mod measure;
pub mod memory;
pub mod published;
pub mod verify;

use anyhow::Result;
use serde_json::{Value, json};

use self::implementations::columns;
use self::measure::FlashBenchmarking;
use crate::bench::dtype::Dtype;
use crate::bench::timing::FLUSHED_BYTES;
use crate::bench::work::BACKWARD_OVER_FORWARD;
use crate::harness::problem::{Check, Measured, Problem};

pub const PROBLEM: Problem = Problem {
    name: "flash_benchmarking",
    answers: &["a"],
    checks: &[
        Check { name: "grid_is_the_handouts", part: "a", run: checks::grid_is_the_handouts },
        Check { name: "columns_agree", part: "a", run: checks::columns_agree },
        Check { name: "wrong_columns_are_not_timed", part: "a", run: checks::wrong_columns_are_not_timed },
        Check { name: "memory_follows_the_formula", part: "a", run: checks::memory_follows_the_formula },
    ],
    measured: Some(Measured::of::<FlashBenchmarking>()),
    facts,
    answer: crate::harness::problem::no_answer,
    reads: &[],
};

/// Who takes part, and the counts behind the figures.
fn facts() -> Result<Value> {
    Ok(json!({
        "entrants": columns(),
        "grids": checks::GRIDS,
        "memory": memory::facts()?,
        "whole": verify::WHOLE,
        "tail": verify::TAIL,
        "flushed_bytes": FLUSHED_BYTES,
        "backward_over_forward": BACKWARD_OVER_FORWARD,
        "flash_attention_3": published::FLASH_ATTENTION_3,
        "tolerance": {
            "float32": verify::tolerance(Dtype::Float32),
            "bfloat16": verify::tolerance(Dtype::Bfloat16),
        },
    }))
}
