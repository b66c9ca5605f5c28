//! `communication_accounting`: the memory of the XXL model, the devices it needs, and the batch that keeps them busy.

use crate::harness::problem::{Check, Problem};

mod answer;
pub mod checks;
pub mod formulas;

use checks::{
    check_balance, check_batch, check_best_split, check_memory, check_memory_by_counting, check_smallest_fsdp,
};
use formulas::{ACCOUNTING, Chip, Mesh, Model};

pub const PROBLEM: Problem = Problem {
    name: "communication_accounting",
    answers: &["a", "b", "c", "d"],
    checks: &[
        Check { name: "memory_golden_values", part: "a", run: || check_memory(&ACCOUNTING) },
        Check { name: "memory_counted_layer_by_layer", part: "a", run: || check_memory_by_counting(&ACCOUNTING) },
        Check { name: "smallest_fsdp_by_search", part: "b", run: || check_smallest_fsdp(&ACCOUNTING) },
        Check { name: "batch_golden_values", part: "c", run: || check_batch(&ACCOUNTING) },
        Check { name: "times_balance_at_the_threshold", part: "c", run: || check_balance(&ACCOUNTING) },
        Check { name: "best_split_by_search", part: "c", run: || check_best_split(&ACCOUNTING) },
    ],
    measured: None,
    answer: answer::answer,
    reads: &[],
};

pub const XXL: Model = Model { d_model: 16_384, d_ff: 53_248, num_blocks: 126 };

/// TPU v5p with the handout's constants.
pub const V5P: Chip = Chip { flops_per_s: 4.6e14, bytes_per_s: 2.0 * 9e10 };

/// The handout's mesh: FSDP over two axes, tensor parallelism over the third.
pub const MESH: Mesh = Mesh { x: 16, y: 4, m_x: 2, m_y: 1 };

/// The cards of the handout, in units of 10^9 bytes.
const H100_GB: f64 = 80.0;
const V5P_GB: f64 = 95.0;
