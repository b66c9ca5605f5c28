//! A rank task that checks each collective's values, its order relative to computation and its timeline, and times an
//! all-reduce of 1 MB.
//!
//! Written for NCCL on two GPUs or more (`cs336 launch --task nccl_selftest --backend nccl --world-size 2`). Gloo
//! passes it too, so the task itself is tested on machines without a GPU.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::bench::all_reduce::Sums;
use crate::collective::consistency_check::require_equal_parameters;
use crate::collective::ranks::RankTask;
use crate::collective::timeline::busy_seconds;
use crate::collective::{Collective, Op, Operation, Shared};

pub const TASK: RankTask = RankTask { name: "nccl_selftest", run };

const KINDS: [Kind; 4] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Int64];

/// A size at which latency dominates, and how often it is timed.
const LATENCY_BYTES: i64 = 1_000_000;
const LATENCY_RUNS: usize = 50;
/// The first few set up connections and caches.
const LATENCY_WARMUP: usize = 5;

fn run(collective: &Shared, input: Value) -> Result<Value> {
    ensure!(input.is_null(), "this task takes no input: leave out --input");
    let group = collective.as_ref();
    for kind in KINDS {
        reductions(group, kind).with_context(|| format!("{kind:?}"))?;
        movements(group, kind).with_context(|| format!("{kind:?}"))?;
    }
    coalesced_operations(group)?;
    order_relative_to_computation(group)?;
    memory_is_kept_while_it_is_used(group)?;
    unequal_parameters_are_found(group)?;
    the_timeline_matches_the_calls(group)?;
    let seconds = Sums::new(collective, LATENCY_BYTES / 4)?.turn(LATENCY_WARMUP, LATENCY_RUNS)?;
    Ok(json!({ "backend": group.backend(), "device": format!("{:?}", group.device()), "all_reduce_1mb_s": seconds }))
}

fn reductions(group: &dyn Collective, kind: Kind) -> Result<()> {
    let (rank, n) = (group.rank() as i64, group.world_size() as i64);
    let ops: &[Op] = if kind == Kind::Int64 { &[Op::Sum] } else { &[Op::Sum, Op::Average] };
    for &op in ops {
        // Small whole numbers: their sums, and averages over 2, 4 or 8 ranks, are exact in every kind.
        let divisor = if op == Op::Average { n as f64 } else { 1.0 };
        let sum = (n * (n + 1) / 2) as f64 / divisor;
        let tensor = full(group, &[3, 5], rank + 1, kind)?;
        group.all_reduce(&tensor, op)?;
        require_values(&tensor, &[sum; 15]).with_context(|| format!("all_reduce, {op:?}"))?;
        let rows: Vec<Tensor> =
            (0..n).map(|row| full(group, &[1, 2], (rank + 1) * (row + 1), kind)).collect::<Result<_>>()?;
        let share = group.reduce_scatter(&Tensor::f_cat(&rows, 0)?, op)?;
        ensure!(share.size() == [1, 2], "reduce_scatter gave the shape {:?}", share.size());
        require_values(&share, &[sum * (rank + 1) as f64; 2]).with_context(|| format!("reduce_scatter, {op:?}"))?;
    }
    Ok(())
}

fn movements(group: &dyn Collective, kind: Kind) -> Result<()> {
    let (rank, n) = (group.rank() as i64, group.world_size() as i64);
    for root in 0..n {
        let tensor = full(group, &[7], rank + 1, kind)?;
        group.broadcast(&tensor, root as usize)?;
        require_values(&tensor, &[(root + 1) as f64; 7]).with_context(|| format!("broadcast from rank {root}"))?;
    }
    let gathered = group.all_gather(&full(group, &[2], rank + 1, kind)?)?;
    for (of, tensor) in gathered.iter().enumerate() {
        require_values(tensor, &[of as f64 + 1.0; 2]).with_context(|| format!("all_gather of rank {of}"))?;
    }
    group.barrier()
}

fn coalesced_operations(group: &dyn Collective) -> Result<()> {
    let (rank, n) = (group.rank() as i64, group.world_size() as i64);
    let numbered = || (1..=4).map(|i| full(group, &[i], i * (rank + 1), Kind::Float)).collect::<Result<Vec<_>>>();
    let tensors = numbered()?;
    group.all_reduce_coalesced_async(&tensors, Op::Sum)?.wait()?;
    for (i, tensor) in (1i64..).zip(&tensors) {
        let expected = (i * n * (n + 1) / 2) as f64;
        require_values(tensor, &vec![expected; i as usize]).context("several tensors at once")?;
    }
    // Rank r's tensor i holds i * (r + 1). All ranks gather the same tensors, so that the sum is n times as large.
    let zeros = |rows: i64| full(group, &[rows], 0, Kind::Float);
    let mine = numbered()?;
    let wholes = (1..=4).map(|i| zeros(i * n)).collect::<Result<Vec<_>>>()?;
    group.all_gather_coalesced_async(&wholes, &mine)?.wait()?;
    let shares = (1..=4).map(zeros).collect::<Result<Vec<_>>>()?;
    group.reduce_scatter_coalesced_async(&shares, &wholes, Op::Sum)?.wait()?;
    for (i, (whole, share)) in (1i64..).zip(wholes.iter().zip(&shares)) {
        let gathered: Vec<f64> = (1..=n).flat_map(|of| vec![(i * of) as f64; i as usize]).collect();
        require_values(whole, &gathered).context("several tensors gathered at once")?;
        let reduced = vec![(i * (rank + 1) * n) as f64; i as usize];
        require_values(share, &reduced).context("several tensors reduced and scattered at once")?;
    }
    Ok(())
}

/// A collective runs after earlier launches, and launches after its wait run after it.
fn order_relative_to_computation(group: &dyn Collective) -> Result<()> {
    let (n, width) = (group.world_size() as f64, if group.device() == Device::Cpu { 256 } else { 4096 });
    let ones = Tensor::f_ones([width, width], (Kind::Float, group.device()))?;
    for _ in 0..5 {
        let product = ones.f_matmul(&ones)?.f_matmul(&ones)?;
        let work = group.all_reduce_async(&product, Op::Sum)?;
        work.wait()?;
        let after = product.f_div_scalar((width * width) as f64)?;
        let (least, most) = (after.f_min()?.f_double_value(&[])?, after.f_max()?.f_double_value(&[])?);
        ensure!(least == n && most == n, "a product and its sum came out of order: {least} to {most}, not {n}");
    }
    Ok(())
}

/// A collective keeps its tensors' memory although the caller drops them.
fn memory_is_kept_while_it_is_used(group: &dyn Collective) -> Result<()> {
    let (rank, n) = (group.rank() as i64, group.world_size() as i64);
    let (rows, mut gathers) = (1 << 18, Vec::new());
    for _ in 0..8 {
        let output = Tensor::f_zeros([n, rows], (Kind::Float, group.device()))?;
        let work = group.all_gather_async(&output, &full(group, &[rows], rank + 1, Kind::Float)?)?;
        // The allocator would hand the dropped input's memory to these.
        drop(full(group, &[rows], -1, Kind::Float)?);
        gathers.push((output, work));
    }
    for (output, work) in gathers {
        work.wait()?;
        let wrong = (0..n).filter(|&of| {
            output.get(of).f_ne(of + 1).and_then(|ne| ne.f_any()).is_ok_and(|any| any.int64_value(&[]) != 0)
        });
        ensure!(wrong.count() == 0, "a collective read memory that had been freed");
    }
    Ok(())
}

fn unequal_parameters_are_found(group: &dyn Collective) -> Result<()> {
    let last = group.world_size() - 1;
    let named = |value: i64| {
        Ok([
            ("even".to_string(), full(group, &[3], 1, Kind::Float)?),
            ("odd".to_string(), full(group, &[3], value, Kind::BFloat16)?),
        ])
    };
    require_equal_parameters(group, &named(2)?)?;
    if last == 0 {
        return Ok(());
    }
    let unequal: Result<[_; 2]> = named(if group.rank() == last { 3 } else { 2 });
    let message =
        require_equal_parameters(group, &unequal?).err().context("unequal parameters passed as equal")?.to_string();
    ensure!(message.contains(&format!("rank {last} differs from rank 0 in odd")), "{message}");
    Ok(())
}

fn the_timeline_matches_the_calls(group: &dyn Collective) -> Result<()> {
    let tensor = full(group, &[1 << 16], 1, Kind::Float)?;
    group.barrier()?;
    group.timeline().start()?;
    let before = group.timeline().mark()?;
    let works = (0..3).map(|_| group.all_reduce_async(&tensor, Op::Sum)).collect::<Result<Vec<_>>>()?;
    works.into_iter().try_for_each(|work| work.wait())?;
    let after = group.timeline().mark()?;
    let (before, after) = (before.seconds()?, after.seconds()?);
    let entries = group.timeline().take()?;
    ensure!(entries.len() == 3, "{} entries of 3 collectives", entries.len());
    let mut free = before;
    for entry in &entries {
        ensure!(entry.operation == Operation::AllReduce && entry.bytes == 4 << 16, "{entry:?}");
        ensure!(entry.started_s >= free && entry.ended_s > entry.started_s, "{entry:?} does not follow {free} s");
        free = entry.ended_s;
    }
    ensure!(
        free <= after && entries.windows(2).all(|two| two[1].sequence == two[0].sequence + 1),
        "{entries:?}, {after}"
    );
    ensure!(busy_seconds(&entries) <= after - before, "{entries:?} in {} s", after - before);
    Ok(())
}

fn full(group: &dyn Collective, shape: &[i64], value: i64, kind: Kind) -> Result<Tensor> {
    Ok(Tensor::f_full(shape, value, (kind, group.device()))?)
}

fn require_values(tensor: &Tensor, expected: &[f64]) -> Result<()> {
    let values = Vec::<f64>::try_from(tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_view([-1])?)?;
    ensure!(values == expected, "the values are {values:?}, not {expected:?}");
    Ok(())
}
