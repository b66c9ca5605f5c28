//! `communication_accounting`: the memory of the XXL model, the devices it needs, and the batch that keeps them busy.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::harness::problem::{Check, Problem};
use crate::units::{GB, GIB};

pub mod checks;
pub mod formulas;

use checks::{
    check_balance, check_batch, check_best_split, check_memory, check_memory_by_counting, check_smallest_fsdp,
};
use formulas::{ACCOUNTING, Chip, Mesh, Model, Reading, best_split, optimum_x, splits};

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
    facts,
    answer: crate::harness::problem::no_answer,
    reads: &[],
};

pub const XXL: Model = Model { d_model: 16_384, d_ff: 53_248, num_blocks: 126 };

/// TPU v5p with the handout's constants.
pub const V5P: Chip = Chip { flops_per_s: 4.6e14, bytes_per_s: 2.0 * 9e10 };

/// The handout's mesh: FSDP over two axes, tensor parallelism over the third.
pub const MESH: Mesh = Mesh { x: 16, y: 4, m_x: 2, m_y: 1 };

const H100_GB: f64 = 80.0;
const V5P_GB: f64 = 95.0;

/// Tokens held at once: none, and round numbers up to the last that half the activations leave room for.
const TOKENS: [u64; 5] = [0, 1024, 2048, 4096, 8192];

fn facts() -> Result<Value> {
    let parameters = (ACCOUNTING.parameters)(&XXL);
    let bytes = (ACCOUNTING.static_bytes)(parameters);
    let per_token = (ACCOUNTING.activation_bytes_per_token)(&XXL);
    Ok(json!({
        "model": XXL, "chip": V5P, "mesh": MESH,
        "chips": MESH.chips(),
        "alpha": V5P.flops_per_byte(),
        "parameters": parameters,
        "static_bytes": bytes,
        "activation_bytes_per_token": per_token,
        "h100_gb": H100_GB,
        "v5p_gb": V5P_GB,
        "h100s_decimal": bytes.total as f64 / (H100_GB * GB),
        "h100s_decimal_whole": (ACCOUNTING.devices)(bytes.total, H100_GB * GB),
        "h100s_binary": bytes.total as f64 / (H100_GB * GIB),
        "h100s_binary_whole": (ACCOUNTING.devices)(bytes.total, H100_GB * GIB),
        "by_tokens": TOKENS.map(|tokens| by_tokens(bytes.total, per_token, tokens)),
        "most_tokens": (2.0 * V5P_GB * GB / per_token as f64).ceil() as u64 - 1,
        "batch": batch_facts()?,
    }))
}

/// Part (a) and (b) for a number of tokens held at once.
fn by_tokens(static_bytes: u64, per_token: u64, tokens: u64) -> Value {
    let activations = tokens * per_token;
    let n = (ACCOUNTING.smallest_fsdp)(static_bytes, activations, V5P_GB * GB);
    json!({
        "tokens": tokens,
        "activation_bytes": activations,
        "total_bytes": static_bytes + activations,
        "h100s": (ACCOUNTING.devices)(static_bytes + activations, H100_GB * GB),
        "n_fsdp": n,
        "n_fsdp_binary": (ACCOUNTING.smallest_fsdp)(static_bytes, activations, V5P_GB * GIB),
        "bytes_per_device": n.map(|n| (ACCOUNTING.bytes_per_device)(static_bytes, activations, n)),
        "n_fsdp_other_half_dropped": (ACCOUNTING.smallest_fsdp)(static_bytes + activations / 2, 0, V5P_GB * GB),
    })
}

/// Part (c), and the levers of part (d) as changes to its equation.
fn batch_facts() -> Result<Value> {
    let all = splits(MESH.chips(), MESH.m_x, MESH.m_y);
    let of = |chip: &Chip, mesh: &Mesh, reading| (ACCOUNTING.threshold)(&XXL, chip, mesh, reading);
    let pair = |tokens: Option<f64>| tokens.map(|t| json!({"per_chip": t, "all": t * MESH.chips() as f64}));
    let row = |mesh: &Mesh| {
        json!({"x": mesh.x, "y": mesh.y, "added": pair(of(&V5P, mesh, Reading::Added)),
               "overlapped": pair(of(&V5P, mesh, Reading::Overlapped))})
    };
    let (best, best_tokens) = best_split(&ACCOUNTING, &XXL, &V5P, &all, Reading::Added).context("no split works")?;
    let optimum = (ACCOUNTING.optimum)(&XXL, &V5P, MESH.m_x, MESH.m_y);
    let optimum_all = optimum * MESH.chips() as f64;
    // Sending weights in one byte an element halves FSDP's time and leaves the tensor axis alone: M_X counts double.
    let one_byte = Mesh { m_x: 2 * MESH.m_x, ..MESH };
    let overlapped = of(&V5P, &MESH, Reading::Overlapped).context("the tensor axis is too long for d_ff")?;
    let times = (ACCOUNTING.times)(&XXL, &V5P, &MESH, overlapped * MESH.chips() as f64);
    Ok(json!({
        "added": pair(of(&V5P, &MESH, Reading::Added)),
        "overlapped": pair(Some(overlapped)),
        "tensor_condition": V5P.flops_per_byte() * MESH.y as f64 / MESH.m_y as f64,
        "times_at_overlapped": times,
        "optimum": pair(Some(optimum)),
        "optimum_x": optimum_x(&XXL, optimum_all, MESH.chips(), MESH.m_x, MESH.m_y),
        "best_split": {"x": best.x, "y": best.y, "tokens": pair(Some(best_tokens))},
        "splits": all.iter().map(row).collect::<Vec<_>>(),
        "one_byte_added": pair(of(&V5P, &one_byte, Reading::Added)),
        "one_byte_overlapped": pair(of(&V5P, &one_byte, Reading::Overlapped)),
        "ring_exact_added": pair(ring_exact()),
        "context_8192_sequences": of(&V5P, &MESH, Reading::Added).map(|t| t * MESH.chips() as f64 / 8192.0),
        "pipeline": pipeline_facts(),
    }))
}

/// The added reading where only the (n - 1) / n of each gathered array that is not yet in place moves.
fn ring_exact() -> Option<f64> {
    let share = |n: u64| (n as f64 - 1.0) / n as f64;
    let (alpha, f) = (V5P.flops_per_byte(), XXL.d_ff as f64);
    let tensor = alpha * MESH.y as f64 / MESH.m_y as f64 * share(MESH.y);
    let fsdp = alpha / (MESH.y * MESH.m_x) as f64 * share(MESH.x);
    (f > tensor).then_some(f * fsdp / (f - tensor))
}

/// Pipeline stages in FSDP's place, with a tenth of the time idle.
///
/// For b tokens a stage of L / p blocks does 4 b D F L / (p Y) operations a chip and sends 2 b D bytes divided over Y
/// chips: b cancels, so the ratio of the times, 2 F L / (p alpha), does not depend on the batch. The idle share of m
/// microbatches through p stages of v chunks each is (p - 1) / (v m + p - 1) (Narayanan et al. 2021).
fn pipeline_facts() -> Value {
    let (stages, idle) = (14.0, 0.1);
    let blocks = XXL.num_blocks as f64 / stages;
    let microbatches = |chunks: f64| ((stages - 1.0) * (1.0 - idle) / (idle * chunks)).ceil();
    json!({
        "stages": stages,
        "blocks_per_stage": blocks,
        "idle": idle,
        "math_over_communication": 2.0 * XXL.d_ff as f64 * blocks / V5P.flops_per_byte(),
        "microbatches": microbatches(1.0),
        "microbatches_interleaved": microbatches(blocks),
    })
}
