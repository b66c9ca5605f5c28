//! Checks before a sum is timed: every rank has every sum, a wrong sum is detected, and the peers compute sums too.

use anyhow::{Context as _, Result, ensure};
use tch::Device;

use super::measure::run;
use super::ranks::Input;
use crate::bench::all_reduce::{base, fill, require_sum};
use crate::bench::interleave::Turns;
use crate::collective::Backend;
use crate::harness::problem::Verdict;

/// Lengths around those that the ranks can and cannot share equally.
const LENGTHS: [i64; 4] = [1, 2, 1000, 65_537];
const WORLD_SIZES: [usize; 3] = [2, 3, 4];

/// Our collective over Gloo, for lengths and numbers of ranks that do and do not divide.
pub fn sums_are_exact_on_every_rank() -> Result<Verdict> {
    let mut sums = 0;
    for world_size in WORLD_SIZES {
        let turns = Turns { rounds: 1, warmup: 1, iterations: 2 };
        let inputs = LENGTHS.map(|elements| Input { elements, turns, store: None });
        sums += run(Backend::Gloo, world_size, &inputs)?.iter().map(|output| output.ours.len()).sum::<usize>();
    }
    let expected = 2 * LENGTHS.len() * WORLD_SIZES.iter().sum::<usize>();
    ensure!(sums == expected, "{sums} sums were timed, {expected} asked for");
    Verdict::passed(format!("{sums} timed sums, every element right"))
}

/// A sum without one rank, an average, or the previous sum must be refused.
pub fn wrong_sums_are_seen() -> Result<Verdict> {
    let base = base(1000, Device::Cpu)?;
    let sum_of = |ranks: std::ops::Range<i64>, k: i64| -> Result<tch::Tensor> {
        let mut sum = base.f_zeros_like()?;
        for rank in ranks {
            let values = base.f_empty_like()?;
            fill(&values, &base, rank, k)?;
            let _ = sum.f_add_(&values)?;
        }
        Ok(sum)
    };
    require_sum(&sum_of(0..3, 5)?, &base, 3, 5).context("a right sum")?;
    let one_off = sum_of(0..3, 5)?;
    let _ = one_off.f_get(999)?.f_add_scalar_(1)?;
    let wrong = [
        ("nothing was sent", sum_of(1..2, 5)?),
        ("a rank is missing", sum_of(0..2, 5)?),
        ("an average", sum_of(0..3, 5)?.f_div_scalar(3)?),
        ("the sum before", sum_of(0..3, 4)?),
        ("the last element is off", one_off),
        ("not a number", sum_of(0..3, 5)?.f_mul_scalar(f64::NAN)?),
    ];
    let count = wrong.len();
    for (what, sum) in wrong {
        ensure!(require_sum(&sum, &base, 3, 5).is_err(), "{what} was accepted as the sum");
    }
    Verdict::passed(format!("{count} wrong sums"))
}

/// A Python process beside each rank, whose own group sums the same values.
pub fn c10d_takes_its_turns() -> Result<Verdict> {
    let folder = tempfile::tempdir().context("making a folder for the peers' meeting place")?;
    let store = Some(folder.path().join("store"));
    let input = Input { elements: 10_000, turns: Turns { rounds: 2, warmup: 1, iterations: 3 }, store };
    let outputs = run(Backend::Gloo, 2, &[input])?;
    for (rank, output) in outputs.iter().enumerate() {
        let counts = (output.ours.len(), output.c10d.len());
        ensure!(counts == (6, 6), "rank {rank} timed {counts:?} sums of ours and of c10d's");
    }
    Verdict::passed("2 ranks and their peers, 6 sums each")
}
