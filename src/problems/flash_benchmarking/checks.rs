//! Checks before timing: the grid is the handout's, every column computes attention, and a wrong column is detected.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail, ensure};
use tch::{Device, Tensor};

use super::PROBLEM;
use super::implementations::{columns, takes_part};
use super::measure::{Launch, Params};
use super::task::Task;
use super::verify::{Expected, within};
use crate::attention::naive;
use crate::bench::attention::Inputs;
use crate::bench::device::device_for;
use crate::bench::dtype::Dtype;
use crate::bench::timing::{Cache, Pace, Protocol};
use crate::bench::tolerance;
use crate::bench::work::AttentionPass;
use crate::harness::problem::Verdict;
use crate::harness::record::Profile;
use crate::harness::store::Layout;
use crate::harness::suite;
use crate::torch::Generator;
use crate::torch::allocator_stats::AllocationTracker;
use crate::torch::autograd::backward_from;
use crate::torch::random::SEED;

const DTYPES: [Dtype; 2] = [Dtype::Bfloat16, Dtype::Float32];

/// In the suite, those that make up the handout's.
pub const GRIDS: [&str; 2] = ["grid", "long"];

/// The 80 cells, cold and launched by the host, each once; and the leaderboard's shape, types and times.
pub fn grid_is_the_handouts() -> Result<Verdict> {
    let Some(suite) = suite::load(&Layout::find()?.root, &PROBLEM)? else { bail!("the problem has no suite") };
    let (mut cells, mut rounds, mut leaderboards) = (BTreeSet::new(), BTreeMap::new(), 0);
    for (grid, case) in suite.cases(Profile::Gpu) {
        match serde_json::from_value::<Params>(case.clone())? {
            Params::Cell(c) if GRIDS.contains(&grid) => {
                let handouts =
                    c.batch == 1 && c.cache == Cache::Cold && c.launch == Launch::Eager && c.pace == Pace::Sustained;
                ensure!(handouts, "a cell of another batch, cache, launch or pace: {case}");
                ensure!(cells.insert((c.dtype.name(), c.d_model, c.seq)), "twice: {case}");
                ensure!(*rounds.entry(c.seq).or_insert(c.rounds) == c.rounds, "other cells as long: {case}");
            }
            Params::Cell(_) | Params::Calls(_) => {}
            Params::Leaderboard(l) => {
                let shape = (l.dtype, l.n_heads, l.d_head, l.seq, l.warmup_ms, l.rep_ms);
                ensure!(shape == (Dtype::Bfloat16, 16, 64, 16384, 1000.0, 10_000.0), "{case}");
                leaderboards += 1;
            }
        }
    }
    let powers = |from: u32, to: u32| (from..=to).map(|e| 1i64 << e);
    let handouts: BTreeSet<_> = DTYPES
        .iter()
        .flat_map(|t| powers(4, 7).flat_map(move |d| powers(7, 16).map(move |n| (t.name(), d, n))))
        .collect();
    ensure!(cells == handouts, "the grid differs in {:?}", cells.symmetric_difference(&handouts));
    // The template states this.
    let by_length: Vec<usize> = rounds.into_values().collect();
    ensure!(by_length.is_sorted_by(|a, b| a >= b), "longer cells take more rounds: {by_length:?}");
    ensure!(BTreeSet::from_iter(by_length).len() <= 2, "the cells take more than two numbers of rounds");
    ensure!(leaderboards == 1, "{leaderboards} cases of the leaderboard");
    Verdict::passed(format!("{} cells, lengths 128 to 65,536 by 16 to 128 by two types; one leaderboard", cells.len()))
}

fn task(shape: [i64; 4], dtype: Dtype, unpacked: bool) -> Task {
    let protocol = Protocol { cache: Cache::Warm, pace: Pace::Sustained, warmup_ms: 1.0, rep_ms: 1.0, most_repeats: 1 };
    let passes = &[AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Both];
    Task { shape, dtype, launch: Launch::Eager, passes, protocol, rounds: 1, unpacked, energy_s: 0.0 }
}

fn devices() -> Vec<Device> {
    std::iter::once(Device::Cpu).chain(device_for(Profile::Gpu).ok()).collect()
}

/// Every column on every device here that supports it, at every width, against the definition in float64. Lengths are so
/// short that "ours" is small tiles and the portable backward pass; the trials of flash_backward hold the others.
pub fn columns_agree() -> Result<Verdict> {
    let (mut ran, mut worst) = (BTreeSet::new(), Vec::new());
    for dtype in DTYPES {
        let mut largest = 0.0_f64;
        for device in devices() {
            let generator = Generator::new(device, SEED)?;
            for d in [16, 32, 64, 128] {
                for task in [task([1, 1, 256, d], dtype, false), task([1, 3, 128, d], dtype, true)] {
                    let inputs = task.draw(task.seq(), &generator)?;
                    for implementation in columns().iter().filter(|e| takes_part(e, dtype.kind(), device, d).is_ok()) {
                        largest = largest.max(within(implementation, &task, &inputs)?.largest());
                        ran.insert(implementation.name);
                    }
                }
            }
        }
        worst.push(format!("{} {largest:.1e} (at most {:.0e})", dtype.name(), tolerance::attention(dtype)));
    }
    ensure!(ran.len() >= 3, "only {ran:?} ran");
    let ran: Vec<_> = ran.into_iter().collect();
    Verdict::passed(format!("{}: largest relative error in {}", ran.join(", "), worst.join(", ")))
}

/// Attention with a typical error of a kernel must exceed the tolerance.
pub fn wrong_columns_are_not_timed() -> Result<Verdict> {
    type Wrong = fn(&Inputs) -> Result<Tensor>;
    let wrong: [(&str, Wrong); 4] = [
        ("no mask", |i| naive::attention(&i.q, &i.k, &i.v, false)),
        ("a scale that is off by a twentieth", |i| naive::attention(&i.q.f_mul_scalar(1.05)?, &i.k, &i.v, true)),
        ("the last 16 keys swapped for others", |i| {
            let (seq, moved) = (i.seq(), i.v.f_roll([16], [-2])?);
            let v = Tensor::f_cat(&[i.v.f_narrow(-2, 0, seq - 16)?, moved.f_narrow(-2, seq - 16, 16)?], -2)?;
            naive::attention(&i.q, &i.k, &v, true)
        }),
        ("queries that get no gradient", |i| naive::attention(&i.q.f_detach()?, &i.k, &i.v, true)),
    ];
    let generator = Generator::new(Device::Cpu, SEED)?;
    for dtype in DTYPES {
        for (name, attention) in wrong {
            let inputs = Inputs::draw(&[1, 1, 256, 32], dtype.kind(), &generator)?;
            let o = attention(&inputs)?;
            backward_from(&o, &inputs.d_o, false)?;
            for leaf in &inputs.leaves {
                if !leaf.f_grad()?.defined() {
                    crate::torch::autograd::set_grad(leaf, &leaf.f_zeros_like()?)?;
                }
            }
            let [dq, dk, dv] = inputs.take_gradients()?;
            let errors = Expected::of(&inputs)?.errors(&[o.f_detach()?, dq, dk, dv])?;
            let caught = errors.largest() > tolerance::attention(dtype);
            ensure!(caught, "{name} in {} passes for attention: {errors:?}", dtype.name());
        }
    }
    Verdict::passed(format!("{} wrong ways are caught in {} types", wrong.len(), DTYPES.len()))
}

/// Counted bytes of plain attention on every device here, compared with the formula used for out-of-memory cases.
///
/// The slack is for tensors without dimensions on the CPU, and for the workspaces and blocks of 512 bytes on CUDA.
pub fn memory_follows_the_formula() -> Result<Verdict> {
    let Some(naive) = columns().into_iter().find(|e| e.keeps_scores()) else { bail!("no column keeps score matrices") };
    for device in devices() {
        let slack = if device == Device::Cpu { 256 } else { 1 << 14 };
        let generator = Generator::new(device, SEED)?;
        for (shape, dtype) in [([1, 1, 256, 16], Dtype::Float32), ([2, 3, 160, 32], Dtype::Float32)] {
            let task = task(shape, dtype, false);
            let predicted = task.predicted_bytes(&naive, device);
            // The first pass also allocates what libraries keep.
            for counted in [false, true] {
                let meter = AllocationTracker::start(device)?;
                let inputs = task.draw(task.seq(), &generator)?;
                let run = naive.prepare_causal(shape[2], device)?;
                meter.reset_peak()?;
                let o = run(&inputs.q, &inputs.k, &inputs.v)?;
                let forward = meter.peak()?;
                meter.reset_peak()?;
                backward_from(&o, &inputs.d_o, true)?;
                let backward = meter.peak()?.max(forward);
                for (pass, bytes) in [(AttentionPass::Forward, forward), (AttentionPass::Backward, backward)] {
                    let predicted = predicted[&pass];
                    let fits = !counted || bytes.abs_diff(predicted) <= slack;
                    ensure!(fits, "{device:?} {shape:?} {pass:?}: {bytes} bytes, the formula says {predicted}");
                }
            }
        }
    }
    Verdict::passed(format!("two shapes, forward and backward, on {} device(s)", devices().len()))
}
