//! Trials of the attention kernels: errors by FlashAttention's rule, repeats, and reports of memory and race checkers.
//!
//! A record holds the hashes of the kernels that ran, so that a trial of a changed kernel is stale. On a CPU the same
//! trials run in the emulator, with fewer cases.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind};

use super::sanitizer::Tool;
use crate::attention::cases::{Tally as _, in_threads};
use crate::attention::flash::DIMENSIONS;
use crate::attention::flash::hopper::Hopper;
use crate::attention::flash::portable::{Fused, Portable};
use crate::attention::flash_tolerance::{self, Case, ErrorShares, Passes};
use crate::attention::{Attention, FLASH_KERNELS};
use crate::bench::device::device_for;
use crate::checks::attestation::{Implementation, Params, Row, Trial};
use crate::error::Fault;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::torch::stream::synchronize;

pub struct Attestation;

/// Few in the emulator, because each d, type and mask costs seconds of compiling.
const EMULATED_LENGTHS: [(i64, i64); 3] = [(1, 1), (63, 65), (113, 203)];
const EMULATED_DIMENSIONS: [i64; 1] = [64];

/// Runs of one case that must repeat; of the emulator, whose order of threads differs each time.
const REPEATS: u32 = 1000;
const EMULATED_REPEATS: u32 = 3;

/// Heads of as many queries as keys.
#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: i64,
    n: i64,
    is_causal: bool,
}

impl Shape {
    const fn new(heads: i64, n: i64, is_causal: bool) -> Self {
        Self { heads, n, is_causal }
    }

    /// In the emulator fewer and shorter: it has three multiprocessors, and its time grows with the square.
    fn on(self, device: Device) -> Self {
        match device {
            Device::Cpu => Self { heads: self.heads.min(3), n: self.n.min(150), ..self },
            _ => self,
        }
    }
}

/// What is tried of an implementation, and how.
struct Tried {
    attentions: &'static [&'static dyn Attention],
    /// Tried too in float32 with rows of 64 and 128, for which alone it has kernels of its own.
    in_float32: Option<&'static dyn Attention>,
    kernels: &'static [&'static str],
    /// What the names of its kernels on the device begin with: libtorch's take most of the time where a checker looks.
    prefix: &'static str,
    kinds: &'static [Kind],
    /// One of the two 16-bit types, whose programs differ in conversions alone; `attention/flash/*/tests.rs` run both.
    emulated_kinds: &'static [Kind],
    /// Head dimensions on a GPU.
    dimensions: &'static [i64],
    /// Of `[o, lse, dq, dk, dv]`, those that repeat in every bit.
    repeating: &'static [usize],
    /// Enough heads that tiles stay whole, and each so long that a block fills every buffer several times.
    whole_tiles: [Shape; 2],
    /// Heads so long that each part of a tile does.
    parts: Shape,
    /// Query heads of a group, and of which rows such groups are tried: of one type, under the mask.
    groups: &'static [(i64, i64)],
    /// More whole tiles than a device has places for them, so that blocks take their next ones from the counter.
    more_tiles_than_places: Option<Shape>,
}

/// Every shape runs with both tile sizes.
const HOPPER: Tried = Tried {
    attentions: &Hopper::SIZES,
    in_float32: None,
    kernels: &["flash_forward.cu", "flash_backward.cu"],
    prefix: "flash_",
    kinds: &[Kind::BFloat16, Kind::Half],
    emulated_kinds: &[Kind::BFloat16],
    // The kernels' own and, between them, one that runs in the kernels of the next.
    dimensions: &[16, 32, 40, 64, 80, 96, 128],
    // The partial sums of dq are added in any order.
    repeating: &[0, 1, 3, 4],
    whole_tiles: [Shape::new(16, 700, true), Shape::new(16, 700, false)],
    parts: Shape::new(2, 4096, true),
    groups: &[(2, 64), (8, 64), (4, 80), (3, 96), (4, 128)],
    more_tiles_than_places: Some(Shape::new(80, 300, true)),
};

const PORTABLE: Tried = Tried {
    attentions: &[&Portable],
    in_float32: Some(&Fused),
    kernels: &["portable_forward.cu", "portable_backward.cu"],
    prefix: "portable_",
    kinds: &[Kind::Float, Kind::BFloat16, Kind::Half],
    emulated_kinds: &[Kind::Float, Kind::BFloat16],
    dimensions: &DIMENSIONS,
    repeating: &[0, 1, 2, 3, 4],
    whole_tiles: [Shape::new(80, 300, true), Shape::new(80, 300, false)],
    parts: Shape::new(2, 2560, false),
    groups: &[(2, 16), (8, 64), (4, 128)],
    // They have no counter: a block is one tile's.
    more_tiles_than_places: None,
};

impl Implementation {
    fn tried(self) -> &'static Tried {
        match self {
            Self::Hopper => &HOPPER,
            Self::Portable => &PORTABLE,
        }
    }
}

impl Tried {
    fn attentions(&self, kind: Kind, d: i64) -> Vec<&'static dyn Attention> {
        let in_float32 = self.in_float32.filter(|_| kind == Kind::Float && d >= 64);
        self.attentions.iter().copied().chain(in_float32).collect()
    }

    fn attentions_of(&self, case: &Case) -> Vec<&'static dyn Attention> {
        self.attentions(case.q.kind(), case.q.size().last().copied().unwrap_or_default())
    }

    fn dimensions(&self, device: Device) -> &'static [i64] {
        if device == Device::Cpu { &EMULATED_DIMENSIONS } else { self.dimensions }
    }

    fn kinds(&self, device: Device) -> &'static [Kind] {
        if device == Device::Cpu { self.emulated_kinds } else { self.kinds }
    }
}

impl Measure for Attestation {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 3;
    const KERNELS: &'static [&'static str] = FLASH_KERNELS;
    const IS_EMULATED: bool = true;

    fn kernels(params: &Params) -> &'static [&'static str] {
        params.implementation.tried().kernels
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let Params { implementation, trial } = *params;
        let device = device_for(profile)?;
        let tried = implementation.tried();
        let supported = tried.attentions[0].supports(Kind::BFloat16, device, 64);
        if let (Device::Cuda(_), Err(needs)) = (device, supported) {
            return Err(Fault::NotAvailable { needs, has: "another GPU".into() }.into());
        }
        match trial {
            Trial::Ragged => ragged(tried, device),
            Trial::Adversarial => adversarial(tried, device),
            Trial::Repeats => repeats(tried, Shape::new(3, 777, true), device),
            Trial::Memcheck => sanitized(implementation, "adversarial", Tool::Memcheck, device),
            Trial::Racecheck => sanitized(implementation, "adversarial", Tool::Racecheck, device),
            Trial::Refills => refills(tried, device),
            Trial::RefillsRepeat => repeats(tried, tried.whole_tiles[0], device),
            Trial::RefillsMemcheck => sanitized(implementation, "refills", Tool::Memcheck, device),
            Trial::RefillsRacecheck => sanitized(implementation, "refills", Tool::Racecheck, device),
        }
    }
}

/// Checks every case, in the emulator several at a time, since compiling for it takes most of the time. On a GPU one after the
/// other: compute-sanitizer's racecheck, which also runs these trials, hangs where several threads launch kernels.
fn check_all(
    cases: impl Iterator<Item = Result<Case>> + Send,
    check: impl Fn(Result<Case>) -> Result<ErrorShares> + Sync,
    tried: &Tried,
    device: Device,
) -> Result<Row> {
    let mut shares = ErrorShares::default();
    match device {
        Device::Cpu => shares = in_threads(cases, check)?,
        _ => {
            for case in cases {
                shares.merge(&check(case)?);
            }
        }
    }
    row(shares, tried, device)
}

fn row(shares: ErrorShares, tried: &Tried, device: Device) -> Result<Row> {
    let dimensions = tried.dimensions(device).to_vec();
    Ok(Row { dimensions, cases: shares.cases, worst_share: Some(shares.largest()), findings: None })
}

fn ragged(tried: &Tried, device: Device) -> Result<Row> {
    let lengths = if device == Device::Cpu { &EMULATED_LENGTHS[..] } else { &flash_tolerance::RAGGED };
    let mut cases = Vec::new();
    // Neighbours in different kernels, so that these are compiled side by side.
    for &(n_queries, n_keys) in lengths {
        for &d in tried.dimensions(device) {
            for &kind in tried.kinds(device) {
                cases.extend([true, false].map(|is_causal| ([n_queries, n_keys, d], kind, is_causal)));
            }
        }
    }
    let check = |(shape, kind, is_causal)| {
        let case = Case::draw(device, &[2, 3], shape, kind, is_causal, 1.0)?;
        case.check_each(&tried.attentions_of(&case), Passes::Both)
    };
    row(in_threads(cases, check)?, tried, device)
}

/// Heads in groups: one of k and v, whose tiles are split, and so many that tiles stay whole; no more, since racecheck takes
/// minutes for 320 heads.
fn grouped(tried: &Tried, device: Device) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for &(group_size, d) in tried.groups {
        if !tried.dimensions(device).contains(&d) {
            continue;
        }
        let heads: &[i64] = if device == Device::Cpu { &[1] } else { &[1, 48 / group_size] };
        for &kv_heads in heads {
            let (leading, size) = ([2, kv_heads * group_size], [150, 300, d]);
            let case = Case::draw(device, &leading, size, tried.kinds(device)[0], true, 1.0)?;
            cases.push(case.grouped(group_size)?);
        }
    }
    Ok(cases)
}

fn adversarial(tried: &Tried, device: Device) -> Result<Row> {
    let mut cases = grouped(tried, device)?;
    for &d in tried.dimensions(device) {
        for &kind in tried.kinds(device) {
            cases.extend(flash_tolerance::adversarial(device, d, kind)?);
        }
    }
    let check = |case: Result<Case>| case.and_then(|case| case.check_each(&tried.attentions_of(&case), Passes::Both));
    check_all(cases.into_iter().map(Ok), check, tried, device)
}

/// Whole tiles of every d and type; parts, and tiles from the counter, of every d.
fn refills(tried: &Tried, device: Device) -> Result<Row> {
    let of_one_type = [Some(tried.parts), tried.more_tiles_than_places];
    let mut cases = Vec::new();
    for &d in tried.dimensions(device) {
        for &kind in tried.kinds(device) {
            cases.extend(tried.whole_tiles.map(|shape| (shape, d, kind)));
        }
        cases.extend(of_one_type.into_iter().flatten().map(|shape| (shape, d, tried.kinds[0])));
    }
    let draw = |(shape, d, kind): (Shape, i64, Kind)| {
        let Shape { heads, n, is_causal } = shape.on(device);
        Case::draw(device, &[1, heads], [n, n, d], kind, is_causal, 1.0)
    };
    let check = |case: Result<Case>| case.and_then(|case| case.check_against_processor(&tried.attentions_of(&case)));
    check_all(cases.into_iter().map(draw), check, tried, device)
}

fn repeats(tried: &Tried, shape: Shape, device: Device) -> Result<Row> {
    let runs = if device == Device::Cpu { EMULATED_REPEATS } else { REPEATS };
    let Shape { heads, n, is_causal } = shape.on(device);
    let kind = tried.kinds[0];
    for &d in tried.dimensions(device) {
        let case = Case::draw(device, &[1, heads], [n, n, d], kind, is_causal, 1.0)?;
        for attention in tried.attentions(kind, d) {
            let first = case.run(attention, kind)?;
            for run in 1..runs {
                let again = case.run(attention, kind)?;
                for &i in tried.repeating {
                    let result = flash_tolerance::RESULTS[i];
                    let name = attention.name();
                    ensure!(first[i].equal(&again[i]), "{name}, d = {d}: {result} of run {run} differs from run 0's");
                }
            }
        }
        synchronize(device)?;
    }
    let dimensions = tried.dimensions(device).to_vec();
    Ok(Row { dimensions, cases: runs, worst_share: None, findings: None })
}

/// The trial of that name in a process of its own, under `tool`.
fn sanitized(implementation: Implementation, trial: &str, tool: Tool, device: Device) -> Result<Row> {
    if device == Device::Cpu {
        let needs = "a GPU: the emulator checks accesses and their order by itself, in every trial".to_string();
        return Err(Fault::NotAvailable { needs, has: "a CPU".into() }.into());
    }
    let (setting, trial) = (format!("implementation={}", implementation.name()), format!("trial={trial}"));
    let mut program = Command::new(std::env::current_exe()?);
    program.args(["measure", "flash_backward", "--profile", "gpu", "--set", &trial, "--set", &setting]);
    let (printed, findings) = tool.watch(&program, implementation.tried().prefix)?;
    let start = printed.find('{').with_context(|| format!("the trial printed no row: {printed}"))?;
    let row: Row = serde_json::Deserializer::from_str(&printed[start..]).into_iter().next().context("no row")??;
    Ok(Row { findings: Some(findings), ..row })
}

#[cfg(test)]
mod tests;
