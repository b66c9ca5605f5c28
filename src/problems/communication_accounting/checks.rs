//! The formulas against published figures, against counting, and against searches that do not use them.

use anyhow::{Context as _, Result, ensure};

use super::formulas::{Accounting, Chip, Mesh, Model, Reading, best_split, splits};
use super::{H100_GB, MESH, V5P, V5P_GB, XXL};
use crate::harness::problem::Verdict;
use crate::units::{GB, GIB};

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
