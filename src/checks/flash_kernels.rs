//! Checks of the attention kernels for `flash_forward` and `flash_backward`, in the emulator, on any machine.

use anyhow::Result;
use proptest::strategy::Strategy as _;
use serde::Serialize;
use tch::{Device, Kind};

use crate::attention::Attention;
use crate::attention::cases::{self, Tally as _};
use crate::attention::flash::DIMENSIONS;
use crate::attention::flash::hopper::Hopper;
use crate::attention::flash::portable::{Fused, Portable};
use crate::attention::flash::textbook::{self, Textbook};
use crate::attention::flash::variant::{Element, Variant};
use crate::attention::flash_tolerance::{self, Case, ErrorShares, Passes};
use crate::harness::problem::Verdict;

/// Cases of each variant. The emulator needs some tenths of a second for a case.
pub const RANDOM_CASES: u32 = 12;

/// Algorithm 1 with the handout's grid.
pub fn textbook(passes: Passes) -> Result<Verdict> {
    check(&[&Textbook], passes, &[(64, Kind::Float, true), (16, Kind::BFloat16, false)], &[])
}

/// The kernels for Hopper.
pub fn hopper(passes: Passes) -> Result<Verdict> {
    let variants = [(64, Kind::BFloat16, true), (80, Kind::BFloat16, false), (128, Kind::BFloat16, false)];
    check(&Hopper::SIZES, passes, &variants, &[3])
}

/// The kernels for every GPU from compute capability 8.0 on.
pub fn portable(passes: Passes) -> Result<Verdict> {
    let sets: &[&dyn Attention] = match passes {
        Passes::Forward => &[&Portable],
        Passes::Both => &[&Portable, &Fused],
    };
    check(sets, passes, &[(64, Kind::Float, true), (32, Kind::BFloat16, true)], &[3])
}

/// Random lengths and numbers of heads, and adversarial inputs, by [`flash_tolerance`], for each d, kind and mask of
/// `variants`, and query heads in `groups` of these sizes. Every variant is compiled separately, which takes seconds.
fn check(
    implementations: &[&dyn Attention],
    passes: Passes,
    variants: &[(i64, Kind, bool)],
    groups: &[i64],
) -> Result<Verdict> {
    let shares = cases::in_threads(variants, |&(d, kind, is_causal)| {
        let shapes = (1..4i64, 1..260i64, 1..260i64).prop_map(|(heads, queries, keys)| [heads, queries, keys]);
        let mut shares: ErrorShares = cases::over(RANDOM_CASES, shapes, |&[heads, n_queries, n_keys]| {
            let case = Case::draw(Device::Cpu, &[heads], [n_queries, n_keys, d], kind, is_causal, 1.0)?;
            case.check_each(implementations, passes)
        })?;
        let adversarial = flash_tolerance::adversarial(Device::Cpu, d, kind)?;
        for case in adversarial.iter().filter(|case| case.is_causal == is_causal) {
            shares.merge(&case.check_each(implementations, passes)?);
        }
        // A mask that begins again with every head of a group.
        for group_size in if is_causal { groups } else { &[] } {
            let case = Case::draw(Device::Cpu, &[2, 2 * group_size], [150, 140, d], kind, is_causal, 1.0)?;
            shares.merge(&case.grouped(*group_size)?.check_each(implementations, passes)?);
        }
        Ok(shares)
    })?;
    Verdict::passed(shares.to_string())
}

/// The readable kernels' threads per block, and their tiles for each d, as text.
#[derive(Debug, Serialize)]
pub struct TextbookFacts {
    pub threads: u32,
    /// "64 by 64 at $d = 16$" for each d.
    pub tiles: Vec<String>,
}

impl TextbookFacts {
    pub fn of(tiles: impl Fn(Variant) -> textbook::TileConfig) -> Self {
        let shown = Variant::all(DIMENSIONS, [Element::Float]).filter(|variant| variant.is_causal);
        let words = shown.map(|variant| {
            let textbook::TileConfig { queries, keys, .. } = tiles(variant);
            format!("{queries} by {keys} at $d = {}$", variant.d)
        });
        Self { threads: textbook::THREADS, tiles: words.collect() }
    }
}
