//! FlashAttention-2 against plain attention and PyTorch's fused operators: the handout's grid, and its leaderboard.

mod answer;
mod calls;
mod checks;
mod compare;
mod flash_attention_4;
mod implementations;
mod measure;
pub mod subject;
mod task;
mod verify;

use self::measure::FlashBenchmarking;
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
    answer: answer::answer,
    reads: &[],
};
