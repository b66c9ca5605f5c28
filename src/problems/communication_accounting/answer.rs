//! The accounting in figures: memory, devices and batch sizes, computed from the handout's constants.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::formulas::{ACCOUNTING, Chip, Mesh, Model, Reading, StaticBytes, Times, best_split, optimum_x, splits};
use super::{H100_GB, MESH, V5P, V5P_GB, XXL};
use crate::harness::answer::{Answer, Audience, Cell, Quantity, Records, Style, Table, Unit};
use crate::units::{GB, GIB};

/// Tokens held at once: none, and round numbers up to the last that half the activations leave room for.
const TOKENS: [u64; 5] = [0, 1024, 2048, 4096, 8192];

/// What the sentences quote; bytes, seconds and tokens, all computed.
#[derive(Serialize)]
struct Quoted {
    model: Model,
    mesh: Mesh,
    chips: u64,
    /// Operations per byte of a v5p.
    alpha: f64,
    parameters: u64,
    fixed: StaticBytes,
    per_token: u64,
    h100_gb: f64,
    v5p_gb: f64,
    h100s: u64,
    h100s_exact: f64,
    h100s_binary: u64,
    h100s_binary_exact: f64,
    none_held: Held,
    some_held: Held,
    most_held: Held,
    /// Above this many tokens half of their activations alone fill a v5p.
    most_tokens: u64,
    added: Batch,
    overlapped: Batch,
    tensor_condition: f64,
    times: Times,
    optimum: Batch,
    optimum_x: f64,
    best: SplitBatch,
    /// The split that needs the fewest tokens when both kinds of communication overlap.
    freest: SplitBatch,
    one_byte_added: Batch,
    one_byte_overlapped: Batch,
    ring_added: Batch,
    sequences_of_8192: f64,
    pipeline: Pipeline,
}

/// Part (a) and (b) for a number of tokens held at once.
#[derive(Debug, Clone, Serialize)]
struct Held {
    tokens: u64,
    activation_bytes: u64,
    h100s: u64,
    n_fsdp: Option<u64>,
    n_fsdp_binary: Option<u64>,
    bytes_per_device: Option<f64>,
    n_fsdp_half_dropped: Option<u64>,
}

/// Tokens from which on the forward pass is bound by compute.
#[derive(Debug, Clone, Copy, Serialize)]
struct Batch {
    per_chip: f64,
    all: f64,
}

#[derive(Debug, Serialize)]
struct SplitBatch {
    x: u64,
    y: u64,
    batch: Batch,
}

/// Pipeline stages in FSDP's place.
#[derive(Debug, Serialize)]
struct Pipeline {
    stages: f64,
    blocks_per_stage: f64,
    idle: f64,
    math_over_communication: f64,
    microbatches: f64,
    microbatches_interleaved: f64,
}

pub fn answer(_records: &Records, _audience: Audience) -> Result<Answer> {
    let quoted = quoted()?;
    let mut answer = Answer::new(&quoted)?;
    answer.table("devices", device_table(&TOKENS.map(|tokens| held(quoted.fixed.total, quoted.per_token, tokens))))?;
    answer.table("splits", split_table())?;
    Ok(answer)
}

fn quoted() -> Result<Quoted> {
    let parameters = (ACCOUNTING.parameters)(&XXL);
    let fixed = (ACCOUNTING.static_bytes)(parameters);
    let per_token = (ACCOUNTING.activation_bytes_per_token)(&XXL);
    let bytes = fixed.total as f64;
    let held = |tokens| held(fixed.total, per_token, tokens);
    let tokens = |mesh, how| threshold(mesh, how).context("the tensor axis is too long for d_ff");
    let overlapped = tokens(&MESH, Reading::Overlapped)?;
    let optimum = batch((ACCOUNTING.optimum)(&XXL, &V5P, MESH.m_x, MESH.m_y));
    // Sending weights in one byte an element halves FSDP's time and leaves the tensor axis alone: M_X counts double.
    let one_byte = Mesh { m_x: 2 * MESH.m_x, ..MESH };
    Ok(Quoted {
        model: XXL,
        mesh: MESH,
        chips: MESH.chips(),
        alpha: V5P.flops_per_byte(),
        parameters,
        h100_gb: H100_GB,
        v5p_gb: V5P_GB,
        h100s: (ACCOUNTING.devices)(fixed.total, H100_GB * GB),
        h100s_exact: bytes / (H100_GB * GB),
        h100s_binary: (ACCOUNTING.devices)(fixed.total, H100_GB * GIB),
        h100s_binary_exact: bytes / (H100_GB * GIB),
        none_held: held(TOKENS[0]),
        some_held: held(TOKENS[2]),
        most_held: held(TOKENS[4]),
        most_tokens: (2.0 * V5P_GB * GB / per_token as f64).ceil() as u64 - 1,
        added: tokens(&MESH, Reading::Added)?,
        overlapped,
        tensor_condition: V5P.flops_per_byte() * MESH.y as f64 / MESH.m_y as f64,
        times: (ACCOUNTING.times)(&XXL, &V5P, &MESH, overlapped.all),
        optimum,
        optimum_x: optimum_x(&XXL, optimum.all, MESH.chips(), MESH.m_x, MESH.m_y),
        best: SplitBatch::best(Reading::Added)?,
        freest: SplitBatch::best(Reading::Overlapped)?,
        one_byte_added: tokens(&one_byte, Reading::Added)?,
        one_byte_overlapped: tokens(&one_byte, Reading::Overlapped)?,
        ring_added: ring_added().context("the tensor axis is too long for d_ff")?,
        sequences_of_8192: tokens(&MESH, Reading::Added)?.all / 8192.0,
        pipeline: pipeline(),
        fixed,
        per_token,
    })
}

impl SplitBatch {
    fn best(how: Reading) -> Result<Self> {
        let all = splits(MESH.chips(), MESH.m_x, MESH.m_y);
        let (Mesh { x, y, .. }, tokens) = best_split(&ACCOUNTING, &XXL, &V5P, &all, how).context("no split works")?;
        Ok(Self { x, y, batch: batch(tokens) })
    }
}

fn held(fixed_bytes: u64, per_token: u64, tokens: u64) -> Held {
    let activations = tokens * per_token;
    let n = (ACCOUNTING.smallest_fsdp)(fixed_bytes, activations, V5P_GB * GB);
    Held {
        tokens,
        activation_bytes: activations,
        h100s: (ACCOUNTING.devices)(fixed_bytes + activations, H100_GB * GB),
        n_fsdp: n,
        n_fsdp_binary: (ACCOUNTING.smallest_fsdp)(fixed_bytes, activations, V5P_GB * GIB),
        bytes_per_device: n.map(|n| (ACCOUNTING.bytes_per_device)(fixed_bytes, activations, n)),
        n_fsdp_half_dropped: (ACCOUNTING.smallest_fsdp)(fixed_bytes + activations / 2, 0, V5P_GB * GB),
    }
}

fn batch(per_chip: f64) -> Batch {
    Batch { per_chip, all: per_chip * MESH.chips() as f64 }
}

fn threshold(mesh: &Mesh, reading: Reading) -> Option<Batch> {
    (ACCOUNTING.threshold)(&XXL, &V5P as &Chip, mesh, reading).map(batch)
}

/// The added reading where only the (n - 1) / n of each gathered array that is not yet in place moves.
fn ring_added() -> Option<Batch> {
    let share = |n: u64| (n as f64 - 1.0) / n as f64;
    let (alpha, f) = (V5P.flops_per_byte(), XXL.d_ff as f64);
    let tensor = alpha * MESH.y as f64 / MESH.m_y as f64 * share(MESH.y);
    let fsdp = alpha / (MESH.y * MESH.m_x) as f64 * share(MESH.x);
    (f > tensor).then(|| batch(f * fsdp / (f - tensor)))
}

/// Pipeline stages with a tenth of the time idle.
///
/// For b tokens a stage of L / p blocks does 4 b D F L / (p Y) operations a chip and sends 2 b D bytes divided over Y
/// chips: b cancels, so the ratio of the times, 2 F L / (p alpha), does not depend on the batch. The idle share of m
/// microbatches through p stages of v chunks each is (p - 1) / (v m + p - 1) (Narayanan et al. 2021).
fn pipeline() -> Pipeline {
    let (stages, idle) = (14.0, 0.1);
    let blocks = XXL.num_blocks as f64 / stages;
    let microbatches = |chunks: f64| ((stages - 1.0) * (1.0 - idle) / (idle * chunks)).ceil();
    Pipeline {
        stages,
        blocks_per_stage: blocks,
        idle,
        math_over_communication: 2.0 * XXL.d_ff as f64 * blocks / V5P.flops_per_byte(),
        microbatches: microbatches(1.0),
        microbatches_interleaved: microbatches(blocks),
    }
}

fn bytes(bytes: f64) -> Quantity {
    Quantity::constant(bytes, Unit::Bytes)
}

fn device_table(held: &[Held]) -> Table {
    let whole = |n: Option<u64>| n.map(|n| n as f64);
    Table::of(held)
        .number("Tokens $T$", Style::Grouped, 0, |held| held.tokens as f64)
        .number("$A$ (GB)", Style::Gb, 1, |held| bytes(held.activation_bytes as f64))
        .number(format!("$N_\\mathrm{{FSDP}}$ at {V5P_GB} GB"), Style::Fixed, 0, |held| whole(held.n_fsdp))
        .number("Each (GB)", Style::Gb, 1, |held| held.bytes_per_device.map(bytes))
        .number(format!("$N_\\mathrm{{FSDP}}$ at {V5P_GB} GiB"), Style::Fixed, 0, |held| whole(held.n_fsdp_binary))
        .number("$N_\\mathrm{FSDP}$, half not kept", Style::Fixed, 0, |held| whole(held.n_fsdp_half_dropped))
        .into()
}

/// Every split of the chips, and the tokens that it needs in both readings.
fn split_table() -> Table {
    let tokens = |how, number: fn(Batch) -> f64| {
        move |mesh: &Mesh| threshold(mesh, how).map_or("none".into(), |batch| Cell::from(number(batch)))
    };
    Table::of(splits(MESH.chips(), MESH.m_x, MESH.m_y))
        .right("$X$ (FSDP)", |mesh| mesh.x.to_string())
        .right("$Y$ (tensor)", |mesh| mesh.y.to_string())
        .number("Per device, added", Style::Grouped, 1, tokens(Reading::Added, |batch| batch.per_chip))
        .number("All, added", Style::Grouped, 0, tokens(Reading::Added, |batch| batch.all))
        .number("Per device, overlapped", Style::Grouped, 1, tokens(Reading::Overlapped, |batch| batch.per_chip))
        .number("All, overlapped", Style::Grouped, 0, tokens(Reading::Overlapped, |batch| batch.all))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headline_figures_are_the_published_ones() {
        let quoted = quoted().unwrap();
        // 16 bytes for each of 2 D F L = 219,848,638,464 parameters.
        assert_eq!((quoted.parameters, quoted.fixed.total), (219_848_638_464, 3_517_578_215_424));
        assert_eq!((quoted.h100s, quoted.none_held.n_fsdp), (44, Some(38)));
        assert!(quoted.overlapped.per_chip < quoted.added.per_chip);
        assert!(quoted.best.batch.per_chip <= quoted.added.per_chip);
        assert_eq!(quoted.best.x * quoted.best.y, quoted.chips);
        assert_eq!(quoted.freest.x * quoted.freest.y, quoted.chips);
    }

    #[test]
    fn half_of_the_activations_fills_a_device_beyond_the_most_tokens() {
        let quoted = quoted().unwrap();
        let n = |tokens| held(quoted.fixed.total, quoted.per_token, tokens).n_fsdp;
        assert!(n(quoted.most_tokens).is_some() && n(quoted.most_tokens + 1).is_none());
    }

    #[test]
    fn the_template_says_of_the_given_split_what_holds() {
        let quoted = quoted().unwrap();
        assert!(quoted.tensor_condition < XXL.d_ff as f64, "tensor parallelism is bound by compute at every batch");
        assert!(quoted.best.batch.per_chip < quoted.added.per_chip, "another split needs a smaller batch");
        assert!(quoted.optimum.per_chip < quoted.best.batch.per_chip);
    }

    #[test]
    fn every_split_has_a_row() {
        let answer = answer(&Records::default(), Audience::Ours).unwrap();
        assert_eq!(answer.tables()["splits"].rows.len(), splits(MESH.chips(), MESH.m_x, MESH.m_y).len());
    }
}
