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
use crate::attention::flash::portable::Portable;
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
/// The kernels' own and, between them, two that run in the kernels of the next.
const HOPPER_DIMENSIONS: [i64; 6] = [16, 32, 40, 64, 80, 128];

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
    /// In the emulator fewer and shorter: it has three multiprocessors, and its time grows with the square.
    fn on(self, device: Device) -> Self {
        match device {
            Device::Cpu => Self { heads: self.heads.min(3), n: self.n.min(150), ..self },
            _ => self,
        }
    }
}

impl Implementation {
    /// Hopper's in both sizes of tiles, whatever the shape.
    fn attentions(self) -> &'static [&'static dyn Attention] {
        match self {
            Self::Hopper => &Hopper::SIZES,
            Self::Portable => &[&Portable],
        }
    }

    /// In the emulator one of the two 16-bit types, whose programs differ in conversions alone; `suites/kernels.rs` has both.
    fn kinds(self, device: Device) -> &'static [Kind] {
        match (device, self) {
            (Device::Cpu, Self::Hopper) => &[Kind::BFloat16],
            (Device::Cpu, Self::Portable) => &[Kind::BFloat16, Kind::Float],
            (_, Self::Hopper) => &[Kind::BFloat16, Kind::Half],
            (_, Self::Portable) => &[Kind::BFloat16, Kind::Half, Kind::Float],
        }
    }

    /// Of a head's columns, those that are tried.
    fn dimensions(self, device: Device) -> &'static [i64] {
        match (device, self) {
            (Device::Cpu, _) => &EMULATED_DIMENSIONS,
            (_, Self::Hopper) => &HOPPER_DIMENSIONS,
            (_, Self::Portable) => &DIMENSIONS,
        }
    }

    /// Enough heads that tiles stay whole, and each so long that a block fills every buffer several times.
    fn whole_tiles(self) -> [Shape; 2] {
        let (heads, n) = match self {
            Self::Hopper => (16, 700),
            Self::Portable => (80, 300),
        };
        [true, false].map(|is_causal| Shape { heads, n, is_causal })
    }

    /// More whole tiles than a device has places for them, so that blocks take their next ones from the counter. The portable
    /// kernels have none: a block there is one tile's.
    fn more_tiles_than_places(self) -> Option<Shape> {
        (self == Self::Hopper).then_some(Shape { heads: 80, n: 300, is_causal: true })
    }

    /// Heads so long that each part of a tile does.
    fn parts(self) -> Shape {
        match self {
            Self::Hopper => Shape { heads: 2, n: 4096, is_causal: true },
            Self::Portable => Shape { heads: 2, n: 2560, is_causal: false },
        }
    }

    /// Of `[o, lse, dq, dk, dv]`, those that repeat in every bit.
    fn repeating(self) -> &'static [usize] {
        match self {
            // The partial sums of dq are added in any order.
            Self::Hopper => &[0, 1, 3, 4],
            Self::Portable => &[0, 1, 2, 3, 4],
        }
    }

    /// What the names of its kernels on the device begin with: libtorch's take most of the time where a checker looks.
    fn prefix(self) -> &'static str {
        match self {
            Self::Hopper => "flash_",
            Self::Portable => "portable_",
        }
    }

    fn kernels(self) -> &'static [&'static str] {
        match self {
            Self::Hopper => &["flash_forward.cu", "flash_backward.cu"],
            Self::Portable => &["portable_forward.cu", "portable_backward.cu"],
        }
    }
}

impl Measure for Attestation {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 3;
    const KERNELS: &'static [&'static str] = FLASH_KERNELS;

    fn kernels(params: &Params) -> &'static [&'static str] {
        params.implementation.kernels()
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let Params { implementation, trial } = *params;
        let device = device_for(profile)?;
        let supported = implementation.attentions()[0].supports(Kind::BFloat16, device, 64);
        if let (Device::Cuda(_), Err(needs)) = (device, supported) {
            return Err(Fault::NotAvailable { needs, has: "another GPU".into() }.into());
        }
        match trial {
            Trial::Ragged => ragged(implementation, device),
            Trial::Adversarial => adversarial(implementation, device),
            Trial::Repeats => repeats(implementation, Shape { heads: 3, n: 777, is_causal: true }, device),
            Trial::Memcheck => sanitized(implementation, "adversarial", Tool::Memcheck, device),
            Trial::Racecheck => sanitized(implementation, "adversarial", Tool::Racecheck, device),
            Trial::Refills => refills(implementation, device),
            Trial::RefillsRepeat => repeats(implementation, implementation.whole_tiles()[0], device),
            Trial::RefillsMemcheck => sanitized(implementation, "refills", Tool::Memcheck, device),
            Trial::RefillsRacecheck => sanitized(implementation, "refills", Tool::Racecheck, device),
        }
    }
}

type Compare = fn(&Case, &[&dyn Attention]) -> Result<ErrorShares>;

fn compare_on_device(case: &Case, implementations: &[&dyn Attention]) -> Result<ErrorShares> {
    case.check_each(implementations, Passes::Both)
}

/// Compares every case. On a CPU each has a thread, since compiling for the emulator takes most of the time.
fn compare_all(
    cases: impl IntoIterator<Item = Result<Case>>,
    compare: Compare,
    implementation: Implementation,
    device: Device,
) -> Result<Row> {
    let attentions = implementation.attentions();
    let compare = |case: Result<Case>| compare(&case?, attentions);
    let shares = match device {
        Device::Cpu => in_threads(cases, compare)?,
        _ => cases.into_iter().try_fold(ErrorShares::default(), |mut shares, case| {
            shares.merge(&compare(case)?);
            anyhow::Ok(shares)
        })?,
    };
    let dimensions = implementation.dimensions(device).to_vec();
    Ok(Row { dimensions, cases: shares.cases, worst_share: Some(shares.largest()), findings: None })
}

fn ragged(implementation: Implementation, device: Device) -> Result<Row> {
    let lengths = if device == Device::Cpu { &EMULATED_LENGTHS[..] } else { &flash_tolerance::RAGGED };
    let mut cases = Vec::new();
    for &d in implementation.dimensions(device) {
        for &kind in implementation.kinds(device) {
            for is_causal in [true, false] {
                cases.extend(lengths.iter().map(|&(n_queries, n_keys)| ([n_queries, n_keys, d], kind, is_causal)));
            }
        }
    }
    let draw = |(shape, kind, is_causal)| Case::draw(device, &[2, 3], shape, kind, is_causal, 1.0);
    compare_all(cases.into_iter().map(draw), compare_on_device, implementation, device)
}

fn adversarial(implementation: Implementation, device: Device) -> Result<Row> {
    let mut cases = Vec::new();
    for &d in implementation.dimensions(device) {
        for &kind in implementation.kinds(device) {
            cases.extend(flash_tolerance::adversarial(device, d, kind)?.into_iter().map(Ok));
        }
    }
    compare_all(cases, compare_on_device, implementation, device)
}

/// Whole tiles of every d and type; parts, and tiles from the counter, of every d.
fn refills(implementation: Implementation, device: Device) -> Result<Row> {
    let whole = implementation.whole_tiles();
    let of_one_type = [Some(implementation.parts()), implementation.more_tiles_than_places()];
    let mut cases = Vec::new();
    for &d in implementation.dimensions(device) {
        for &kind in implementation.kinds(device) {
            cases.extend(whole.map(|shape| (shape, d, kind)));
        }
        cases.extend(of_one_type.into_iter().flatten().map(|shape| (shape, d, implementation.kinds(device)[0])));
    }
    let draw = |(shape, d, kind): (Shape, i64, Kind)| {
        let Shape { heads, n, is_causal } = shape.on(device);
        Case::draw(device, &[1, heads], [n, n, d], kind, is_causal, 1.0)
    };
    compare_all(cases.into_iter().map(draw), Case::check_against_processor, implementation, device)
}

fn repeats(implementation: Implementation, shape: Shape, device: Device) -> Result<Row> {
    let runs = if device == Device::Cpu { EMULATED_REPEATS } else { REPEATS };
    let Shape { heads, n, is_causal } = shape.on(device);
    let kind = implementation.kinds(device)[0];
    for &d in implementation.dimensions(device) {
        let case = Case::draw(device, &[1, heads], [n, n, d], kind, is_causal, 1.0)?;
        for attention in implementation.attentions() {
            let first = case.run(*attention, kind)?;
            for run in 1..runs {
                let again = case.run(*attention, kind)?;
                for &i in implementation.repeating() {
                    let result = flash_tolerance::RESULTS[i];
                    let name = attention.name();
                    ensure!(first[i].equal(&again[i]), "{name}, d = {d}: {result} of run {run} differs from run 0's");
                }
            }
        }
        synchronize(device)?;
    }
    let dimensions = implementation.dimensions(device).to_vec();
    Ok(Row { dimensions, cases: runs, worst_share: None, findings: None })
}

/// The trial of that name in a process of its own, under `tool`.
fn sanitized(implementation: Implementation, trial: &str, tool: Tool, device: Device) -> Result<Row> {
    if device == Device::Cpu {
        let needs = "a GPU: the emulator checks accesses and their order by itself, in every trial".to_string();
        return Err(Fault::NotAvailable { needs, has: "a CPU".into() }.into());
    }
    let name = serde_json::to_value(implementation)?;
    let setting = format!("implementation={}", name.as_str().context("an implementation has a name")?);
    let mut program = Command::new(std::env::current_exe()?);
    let trial = format!("trial={trial}");
    program.args(["measure", "flash_backward", "--profile", "gpu", "--set", &trial, "--set", &setting]);
    let (printed, findings) = tool.watch(&program, implementation.prefix())?;
    let start = printed.find('{').with_context(|| format!("the trial printed no row: {printed}"))?;
    let row: Row = serde_json::Deserializer::from_str(&printed[start..]).into_iter().next().context("no row")??;
    Ok(Row { findings: Some(findings), ..row })
}

#[cfg(test)]
mod tests;
