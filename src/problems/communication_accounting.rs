//! `communication_accounting`: the memory of the XXL model, the devices it needs, and the batch that keeps them busy.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::harness::problem::{Check, Problem, Verdict};
use crate::units::{GB, GIB};

pub mod formulas;

use formulas::{ACCOUNTING, Accounting, Chip, Mesh, Model, Reading, best_split, optimum_x, splits};

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

/// The published figures for XXL, each to the digits they are known to.
pub fn check_memory(accounting: &Accounting) -> Result<Verdict> {
    let parameters = (accounting.parameters)(&XXL);
    ensure!(parameters == 219_848_638_464, "XXL has 219,848,638,464 parameters, not {parameters}");
    let bytes = (accounting.static_bytes)(parameters);
    near("weights in GB", bytes.weights as f64 / GB, 879.39, 0.005)?;
    near("gradients in GB", bytes.gradients as f64 / GB, 879.39, 0.005)?;
    near("optimizer state in GB", bytes.optimizer as f64 / GB, 1758.79, 0.005)?;
    near("static memory in GB", bytes.total as f64 / GB, 3517.58, 0.005)?;
    near("static memory in GiB", bytes.total as f64 / GIB, 3276.0, 1e-9)?;
    let per_token = (accounting.activation_bytes_per_token)(&XXL);
    ensure!(per_token == 17_547_264, "a token's activations are 17,547,264 bytes, not {per_token}");
    let h100s = |capacity| (accounting.devices)(bytes.total, capacity);
    let (decimal, binary) = (h100s(H100_GB * GB), h100s(H100_GB * GIB));
    ensure!((decimal, binary) == (44, 41), "44 H100s of 80 GB or 41 of 80 GiB, not {decimal} and {binary}");
    Verdict::passed("all figures equal the published ones")
}

/// Walks the blocks one by one and adds up what each stores.
pub fn check_memory_by_counting(accounting: &Accounting) -> Result<Verdict> {
    for model in [XXL, Model { d_model: 3, d_ff: 7, num_blocks: 2 }, Model { d_model: 64, d_ff: 5, num_blocks: 9 }] {
        let (mut parameters, mut saved) = (0, 0);
        for _ in 0..model.num_blocks {
            for (d_in, d_out) in [(model.d_model, model.d_ff), (model.d_ff, model.d_model)] {
                parameters += d_in * d_out;
                saved += d_in * size_of::<u16>() as u64;
            }
        }
        ensure!((accounting.parameters)(&model) == parameters, "{model:?} has {parameters} parameters");
        ensure!((accounting.activation_bytes_per_token)(&model) == saved, "{model:?} saves {saved} bytes a token");
        let bytes = (accounting.static_bytes)(parameters);
        let floats = size_of::<f32>() as u64 * parameters;
        ensure!([bytes.weights, bytes.gradients, bytes.optimizer] == [floats, floats, 2 * floats], "{bytes:?}");
        ensure!(
            bytes.total == bytes.weights + bytes.gradients + bytes.optimizer,
            "the total is not the sum: {bytes:?}"
        );
    }
    Verdict::passed("three models counted block by block")
}

/// Tries N = 1, 2, 3, ... until the memory per device fits, for several token counts.
pub fn check_smallest_fsdp(accounting: &Accounting) -> Result<Verdict> {
    let total = (accounting.static_bytes)((accounting.parameters)(&XXL)).total;
    let per_token = (accounting.activation_bytes_per_token)(&XXL);
    for tokens in [0, 1, 1000, 2048, 4096, 8192, 10_000, 10_827] {
        let activations = tokens * per_token;
        // Written out here rather than called: a wrong formula must not confirm itself.
        let half = activations as f64 / 2.0;
        let memory = |n: u64| (total as f64 + half) / n as f64 + half;
        let found = (1..1_000_000).find(|n| memory(*n) < V5P_GB * GB);
        let given = (accounting.smallest_fsdp)(total, activations, V5P_GB * GB);
        ensure!(given == found, "{tokens} tokens: the formula says {given:?}, the search {found:?}");
        let n = found.unwrap_or(1);
        near("memory per device", (accounting.bytes_per_device)(total, activations, n), memory(n), 1.0)?;
    }
    let of = |tokens: u64| (accounting.smallest_fsdp)(total, tokens * per_token, V5P_GB * GB);
    ensure!((of(0), of(2048)) == (Some(38), Some(46)), "38 devices without activations and 46 with 2048 tokens");
    ensure!(of(10_828).is_none(), "half the activations of 10,828 tokens fill a v5p, so no number of devices suffices");
    Verdict::passed("the formula agrees with a search over N for 8 token counts")
}

/// The published figures of part (c), under each reading.
pub fn check_batch(accounting: &Accounting) -> Result<Verdict> {
    near("alpha", V5P.flops_per_byte(), 2555.6, 0.05)?;
    let of = |mesh: &Mesh, reading| (accounting.threshold)(&XXL, &V5P, mesh, reading).context("never bound by compute");
    let chips = MESH.chips() as f64;
    let added = of(&MESH, Reading::Added)?;
    near("tokens per chip, communications added", added, 395.3, 0.05)?;
    near("tokens in all, communications added", added * chips, 25_302.0, 0.5)?;
    let overlapped = of(&MESH, Reading::Overlapped)?;
    near("tokens per chip, communications overlapped", overlapped, 319.4, 0.05)?;
    near("tokens in all, communications overlapped", overlapped * chips, 20_444.0, 0.5)?;
    let optimum = (accounting.optimum)(&XXL, &V5P, MESH.m_x, MESH.m_y);
    near("tokens per chip at the best real X", optimum, 245.3, 0.05)?;
    near("tokens in all at the best real X", optimum * chips, 15_699.0, 0.5)?;
    let eight = of(&Mesh { x: 8, y: 8, ..MESH }, Reading::Added)?;
    near("tokens per chip at X = Y = 8", eight, 259.3, 0.05)?;
    near("tokens in all at X = Y = 8", eight * chips, 16_593.0, 0.5)?;
    Verdict::passed("all figures equal the published ones")
}

/// At the threshold computing takes as long as communicating; below it less, above it more.
pub fn check_balance(accounting: &Accounting) -> Result<Verdict> {
    let mut balanced = 0;
    for mesh in splits(MESH.chips(), MESH.m_x, MESH.m_y).into_iter().chain([Mesh { m_y: 2, ..MESH }]) {
        for reading in [Reading::Added, Reading::Overlapped] {
            let slack = |tokens: f64| {
                let t = (accounting.times)(&XXL, &V5P, &mesh, tokens * mesh.chips() as f64);
                t.math / t.communication(reading) - 1.0
            };
            match (accounting.threshold)(&XXL, &V5P, &mesh, reading) {
                Some(tokens) if tokens > 0.0 => {
                    near(&format!("math over communication at {mesh:?}"), slack(tokens), 0.0, 1e-9)?;
                    ensure!(slack(tokens * 0.99) < 0.0 && slack(tokens * 1.01) > 0.0, "{mesh:?}: no crossing");
                    balanced += 1;
                }
                Some(_) => ensure!(slack(1e-3) > 0.0, "{mesh:?} is said to be bound by compute at any batch"),
                None => ensure!(slack(1e12) <= 0.0, "{mesh:?} is said never to be bound by compute"),
            }
        }
    }
    // One block done by hand, with numbers that make every term a whole number of seconds.
    let toy = (Model { d_model: 2, d_ff: 3, num_blocks: 1 }, Chip { flops_per_s: 4.0, bytes_per_s: 1.0 });
    let t = (accounting.times)(&toy.0, &toy.1, &Mesh { x: 2, y: 3, m_x: 2, m_y: 1 }, 12.0);
    ensure!((t.math, t.fsdp, t.tensor) == (12.0, 4.0, 48.0), "the worked block takes 12, 4 and 48 s, not {t:?}");
    Verdict::passed(format!("{balanced} thresholds balance to 1e-9"))
}

/// Searches the smallest batch over all whole splits and over a fine grid of real ones, by the times alone.
pub fn check_best_split(accounting: &Accounting) -> Result<Verdict> {
    let bound = |mesh: &Mesh, tokens: f64| {
        let t = (accounting.times)(&XXL, &V5P, mesh, tokens * mesh.chips() as f64);
        t.math >= t.communication(Reading::Added)
    };
    let meshes: Vec<Mesh> =
        splits(MESH.chips(), MESH.m_x, MESH.m_y).into_iter().filter(|m| m.x > 1 && m.y > 1).collect();
    let tenths = (1..20_000).map(|i| i as f64 / 10.0);
    let first = tenths.clone().find_map(|tokens| meshes.iter().find(|m| bound(m, tokens)).map(|m| (*m, tokens)));
    let (mesh, tokens) = first.context("no split is bound by compute below 2000 tokens per chip")?;
    let best = best_split(accounting, &XXL, &V5P, &meshes, Reading::Added).context("no split has a threshold")?;
    ensure!(best.0 == mesh, "the search finds {mesh:?}, the formula {:?}", best.0);
    near("tokens per chip at the best whole split", best.1, tokens, 0.1)?;
    // A real X, with N and so the product X Y fixed: written out here, since a mesh holds whole numbers.
    let (n, f, w) = (MESH.chips() as f64, XXL.d_ff as f64, V5P.bytes_per_s);
    let fits = |tokens: f64, x: f64| {
        let communication = f * x / (n * w * MESH.m_x as f64) + tokens * n / (x * w * MESH.m_y as f64);
        tokens * f / V5P.flops_per_s >= communication
    };
    let mut real = tenths.clone().filter(|tokens| (100..6400).any(|i| fits(*tokens, i as f64 / 100.0)));
    let optimum = (accounting.optimum)(&XXL, &V5P, MESH.m_x, MESH.m_y);
    near("tokens per chip at the best real X", optimum, real.next().context("no real X works")?, 0.1)?;
    Verdict::passed(format!("X = {}, Y = {} at {:.1} tokens per chip", best.0.x, best.0.y, best.1))
}

fn near(what: &str, value: f64, expected: f64, tolerance: f64) -> Result<()> {
    ensure!((value - expected).abs() <= tolerance, "{what} is {value}, expected {expected} within {tolerance}");
    Ok(())
}
