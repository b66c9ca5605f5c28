//! The accounting in figures: memory, devices and batch sizes, computed from the handout's constants.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::formulas::{ACCOUNTING, Chip, Mesh, Model, Reading, StaticBytes, Times, best_split, optimum_x, splits};
use super::{H100_GB, MESH, V5P, V5P_GB, XXL};
use crate::harness::answer::{Answer, Audience, Cell, Claim, Column, Quantity, Records, Style, Table, Unit};
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
    /// The GiB of the model divided by 80, which mixes units.
    h100s_mixed: f64,
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
    let d_ff = XXL.d_ff as f64;
    answer.claim(
        Claim::new("tensor-axis-short-enough", quoted.tensor_condition < d_ff)
            .operand("alpha Y / M_Y", &number(quoted.tensor_condition))
            .operand("F", &number(d_ff)),
    )?;
    let (best, given) = (quoted.best.batch.per_chip, quoted.added.per_chip);
    answer.claim(
        Claim::new("given-split-not-best", best < given)
            .operand("tokens per device of the best split", &number(best))
            .operand("of the given one", &number(given)),
    )?;
    answer.table("memory", memory_table(&quoted.fixed))?;
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
    let all = splits(MESH.chips(), MESH.m_x, MESH.m_y);
    let too_long = "the tensor axis is too long for d_ff";
    let added = threshold(&MESH, Reading::Added).context(too_long)?;
    let overlapped = threshold(&MESH, Reading::Overlapped).context(too_long)?;
    let (best, best_tokens) = best_split(&ACCOUNTING, &XXL, &V5P, &all, Reading::Added).context("no split works")?;
    let (freest, freest_tokens) =
        best_split(&ACCOUNTING, &XXL, &V5P, &all, Reading::Overlapped).context("no split works")?;
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
        h100s_mixed: bytes / GIB / H100_GB,
        none_held: held(TOKENS[0]),
        some_held: held(TOKENS[2]),
        most_held: held(TOKENS[4]),
        most_tokens: (2.0 * V5P_GB * GB / per_token as f64).ceil() as u64 - 1,
        added,
        overlapped,
        tensor_condition: V5P.flops_per_byte() * MESH.y as f64 / MESH.m_y as f64,
        times: (ACCOUNTING.times)(&XXL, &V5P, &MESH, overlapped.all),
        optimum,
        optimum_x: optimum_x(&XXL, optimum.all, MESH.chips(), MESH.m_x, MESH.m_y),
        best: SplitBatch { x: best.x, y: best.y, batch: batch(best_tokens) },
        freest: SplitBatch { x: freest.x, y: freest.y, batch: batch(freest_tokens) },
        one_byte_added: threshold(&one_byte, Reading::Added).context(too_long)?,
        one_byte_overlapped: threshold(&one_byte, Reading::Overlapped).context(too_long)?,
        ring_added: ring_added().context(too_long)?,
        sequences_of_8192: added.all / 8192.0,
        pipeline: pipeline(),
        fixed,
        per_token,
    })
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

fn number(x: f64) -> Quantity {
    Quantity::constant(x, Unit::One)
}

fn memory_table(fixed: &StaticBytes) -> Table {
    let mut table = Table::new(vec![
        Column::text("What one device would hold"),
        Column::text("Bytes"),
        Column::number("GB", Style::Gb, 2),
        Column::number("GiB", Style::Gib, 2),
    ]);
    for (what, formula, bytes) in [
        ("Master weights, float32", "$4 P$", fixed.weights),
        ("Accumulated gradients, float32", "$4 P$", fixed.gradients),
        ("Adam's two moments, float32", "$8 P$", fixed.optimizer),
        ("Together", "$16 P$", fixed.total),
    ] {
        let bytes = Cell::from(Quantity::constant(bytes as f64, Unit::Bytes));
        table.row(vec![what.into(), formula.into(), bytes.clone(), bytes]);
    }
    table
}

fn device_table(held: &[Held]) -> Table {
    let count = |head: String| Column::number(head, Style::Fixed, 0);
    let mut table = Table::new(vec![
        Column::number("Tokens $T$", Style::Grouped, 0),
        Column::number("$A$ (GB)", Style::Gb, 2),
        count(format!("$N_\\mathrm{{FSDP}}$ at {V5P_GB} GB")),
        Column::number("Each (GB)", Style::Gb, 3),
        count(format!("$N_\\mathrm{{FSDP}}$ at {V5P_GB} GiB")),
        count("$N_\\mathrm{FSDP}$, half not kept".into()),
    ]);
    for row in held {
        let whole = |n: Option<u64>| Cell::from(n.map(|n| number(n as f64)));
        let bytes = |bytes: f64| Quantity::constant(bytes, Unit::Bytes);
        table.row(vec![
            number(row.tokens as f64).into(),
            bytes(row.activation_bytes as f64).into(),
            whole(row.n_fsdp),
            row.bytes_per_device.map(bytes).into(),
            whole(row.n_fsdp_binary),
            whole(row.n_fsdp_half_dropped),
        ]);
    }
    table
}

/// Every split of the chips, and the tokens that it needs in both readings.
fn split_table() -> Table {
    let mut table = Table::new(vec![
        Column::right("$X$ (FSDP)"),
        Column::right("$Y$ (tensor)"),
        Column::number("Per device, added", Style::Grouped, 1),
        Column::number("All, added", Style::Grouped, 0),
        Column::number("Per device, overlapped", Style::Grouped, 1),
        Column::number("All, overlapped", Style::Grouped, 0),
    ]);
    for mesh in splits(MESH.chips(), MESH.m_x, MESH.m_y) {
        let cells = |reading| match threshold(&mesh, reading) {
            Some(Batch { per_chip, all }) => [per_chip, all].map(|x| Cell::from(number(x))),
            None => ["none"; 2].map(Cell::from),
        };
        let [added, added_all] = cells(Reading::Added);
        let [overlapped, overlapped_all] = cells(Reading::Overlapped);
        let [x, y] = [mesh.x, mesh.y].map(|n| Cell::text(n.to_string()));
        table.row(vec![x, y, added, added_all, overlapped, overlapped_all]);
    }
    table
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
    fn claims_hold_and_every_split_has_a_row() {
        let answer = answer(&Records::default(), Audience::Ours).unwrap();
        assert_eq!(answer.holds("tensor-axis-short-enough"), Some(true));
        assert_eq!(answer.holds("given-split-not-best"), Some(true));
        assert_eq!(answer.tables()["splits"].rows.len(), splits(MESH.chips(), MESH.m_x, MESH.m_y).len());
    }
}
