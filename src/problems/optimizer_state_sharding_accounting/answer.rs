//! What sharding the optimizer's state saves in memory, what it costs in time, and what ZeRO stage 1 sends.

use anyhow::Result;
use serde::Serialize;

use super::measure::{Row, Sharding};
use super::memory::Moment;
use super::{BESIDE_SHARDED, SCHEMES};
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::tables::{HasSteps, StepSetting, StrategyNumbers, ending, steps_table};
use crate::harness::answer::{
    Answer, Audience, Case, Cell, Claim, Column, Quantity, Range, RecordSet, Records, SameRun, Style, Table, Unit,
};
use crate::parallel::overlap_bucketed;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

impl HasSteps for Row {
    fn steps(&self) -> &crate::bench::ddp_step::Row {
        &self.steps
    }
}

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    gpu: bool,
    source: String,
    #[serde(flatten)]
    setting: Option<StepSetting>,
    bucket_mb: u64,
    /// Whether a case was measured; then the numbers of the first one follow.
    measured: bool,
    /// How each case ended where none was measured.
    endings: Vec<String>,
    #[serde(flatten)]
    memory: Option<MemoryNumbers>,
    #[serde(flatten)]
    steps: Option<StepNumbers>,
}

/// Bytes of rank 0 in the first measured case.
#[derive(Clone, Serialize)]
struct MemoryNumbers {
    parameters: Quantity,
    state: Quantity,
    /// Parameters, gradients and state by counting, and what is in use without sharding.
    expected: Quantity,
    unsharded: Quantity,
    saved: Quantity,
    half: Quantity,
    owned: Range,
    /// What is in use before there is any state, and by how much the two differ then.
    in_use_before: Quantity,
    before: Quantity,
    peak: Quantity,
    counted: Quantity,
    peak_later: Quantity,
    counted_later: Quantity,
    sharded_peak: Quantity,
    shard: Quantity,
    other: Quantity,
}

/// Steps of the first measured case, and ratios of all.
#[derive(Clone, Serialize)]
struct StepNumbers {
    dtype: &'static str,
    base: Quantity,
    sharded: Quantity,
    zero1: Quantity,
    base_tail: Quantity,
    sharded_tail: Quantity,
    zero1_tail: Quantity,
    ahead_tail: Quantity,
    /// The share of AdamW's work that a rank no longer has, and that it keeps.
    spared: f64,
    kept: f64,
    more_bytes: Quantity,
    more_calls: u64,
    /// Over the step of bucketed data parallelism.
    over: Range,
    ahead: Range,
    volume: Quantity,
    of_zero1: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<Sharding>()?;
    let first = cases.iter().find_map(|case| Some((case, case.row()?)));
    let memory = first.and_then(|(case, row)| memory_numbers(case, row));
    let steps = first.map(|(case, row)| step_numbers(case, row, &cases)).transpose()?.flatten();
    let ended = |case: &Case<Params, Row>| format!("{}: {}", case.params.dtype.name(), ending(&case.outcome));
    let mut answer = Answer::new(&Quoted {
        gpu: main.is_gpu(),
        source: main.source(),
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        bucket_mb: cases.first().and_then(|case| case.params.bucket_size_mb).unwrap_or(0.0).round() as u64,
        measured: memory.is_some() && steps.is_some(),
        endings: cases.iter().map(ended).collect(),
        memory: memory.clone(),
        steps: steps.clone(),
    })?;
    if let (Some(memory), Some(steps), Some((case, row))) = (&memory, &steps, first) {
        memory_claims(&mut answer, memory)?;
        step_claims(&mut answer, steps)?;
        answer.table("memory", memory_table(main, case, row))?;
        answer.table("volumes", volume_table(main, case, row))?;
    }
    for set in records.sets() {
        let cases = set.cases::<Sharding>()?;
        let label = |p: &Params| format!("{}, {:.0} MB", p.dtype.name(), p.bucket_size_mb.unwrap_or(0.0));
        let table = steps_table(set, "arithmetic, buckets", &cases.iter().collect::<Vec<_>>(), label);
        answer.table(format!("steps-{}", set.profile()), table)?;
    }
    Ok(answer)
}

/// Five moments of rank 0 under one scheme.
fn moments<'a>(row: &'a Row, scheme: &str) -> Option<&'a [Moment]> {
    row.memory.get(scheme)?.first().map(|rank| rank.moments.as_slice()).filter(|moments| moments.len() >= 5)
}

/// None of zero, which no share can be taken of.
fn world_size(params: &Params) -> Option<f64> {
    (params.world_size > 0).then_some(params.world_size as f64)
}

fn memory_numbers(case: &Case<Params, Row>, row: &Row) -> Option<MemoryNumbers> {
    let bytes = |n: u64| case.quantity(n as f64, Unit::Bytes);
    let quantity = |x: f64| case.quantity(x, Unit::Bytes);
    let less = |a: u64, b: u64| quantity(a as f64 - b as f64);
    let world_size = world_size(&case.params)?;
    let [plain, shared, zero] = SCHEMES.map(|scheme| moments(row, scheme));
    let (plain, shared, zero) = (plain?, shared?, zero?);
    let p = row.predicted;
    let ranks = row.memory.get(SHARDED_OPTIMIZER)?;
    let owned: Vec<_> = ranks.iter().map(|rank| case.quantity(rank.owned_values as f64, Unit::One)).collect();
    let of_rank_0 = ranks.first()?.owned_values;
    Some(MemoryNumbers {
        parameters: bytes(p.parameters),
        state: bytes(p.optimizer_state),
        expected: quantity([p.parameters, p.gradients, p.optimizer_state].map(|n| n as f64).iter().sum()),
        unsharded: bytes(plain[2].in_use),
        saved: less(plain[2].in_use, shared[2].in_use),
        half: quantity(p.optimizer_state as f64 - 8.0 * of_rank_0 as f64),
        owned: Range::of(&owned)?,
        in_use_before: bytes(plain[1].in_use),
        before: bytes(shared[1].in_use.abs_diff(plain[1].in_use)),
        peak: bytes(plain[1].peak),
        counted: bytes(p.peak_before_first_step),
        peak_later: bytes(plain[3].peak),
        counted_later: bytes(p.peak_before_later_step),
        sharded_peak: bytes(shared[3].peak),
        shard: quantity(p.gradients as f64 / world_size),
        other: less(zero[2].other, shared[2].other),
    })
}

fn memory_claims(answer: &mut Answer, memory: &MemoryNumbers) -> Result<()> {
    let MemoryNumbers { expected, unsharded, saved, half, before, shard, other, .. } = memory;
    let within = |id: &str, value: &Quantity, wanted: &Quantity, least: f64, most: f64| {
        let share = value.value() / wanted.value();
        let claim = Claim::new(id, share >= least && share < most).operand("measured", value);
        claim.operand("counted", wanted).operand_text("wanted", format!("{least} to {most} of it"))
    };
    // What is counted is there to the byte at the least.
    answer.claim(within("memory-is-as-counted", unsharded, expected, 1.0, 1.05))?;
    answer.claim(within("saves-the-others-state", saved, half, 0.9, 1.1))?;
    answer.claim(within("keeps-a-gradient-shard", other, shard, 0.95, 1.05))?;
    let in_use = &memory.in_use_before;
    let claim = Claim::new("same-before-the-first-step", before.value() < 0.01 * in_use.value());
    answer.claim(claim.operand("difference before the first step", before).operand("in use then", in_use))
}

fn step_numbers(case: &Case<Params, Row>, row: &Row, cases: &[Case<Params, Row>]) -> Result<Option<StepNumbers>> {
    let of = |name| Some(StrategyNumbers::of(case, row.steps.strategies.get(name)?));
    let (Some(base), Some(sharded)) = (of(BESIDE_SHARDED), of(SHARDED_OPTIMIZER)) else { return Ok(None) };
    let (Some(zero1), Some(in_backward)) = (of(ZERO1), of(ZERO1_IN_BACKWARD)) else { return Ok(None) };
    let (Some(over), Some(ahead)) = (over_bucketed(cases, ZERO1)?, over_bucketed(cases, ZERO1_IN_BACKWARD)?) else {
        return Ok(None);
    };
    let Some(world_size) = world_size(&case.params) else { return Ok(None) };
    let kept = 1.0 / world_size;
    Ok(Some(StepNumbers {
        dtype: case.params.dtype.name(),
        more_bytes: SameRun::of(&sharded.bytes, &base.bytes)?.difference(),
        more_calls: sharded.calls.saturating_sub(base.calls),
        volume: SameRun::of(&sharded.bus_bytes, &base.bus_bytes)?.ratio(),
        of_zero1: SameRun::of(&zero1.bus_bytes, &base.bus_bytes)?.ratio(),
        base: base.step,
        sharded: sharded.step,
        zero1: zero1.step,
        base_tail: base.tail,
        sharded_tail: sharded.tail,
        zero1_tail: zero1.tail,
        ahead_tail: in_backward.tail,
        spared: 1.0 - kept,
        kept,
        over,
        ahead,
    }))
}

/// A strategy's step over that of bucketed data parallelism, in every measured case.
fn over_bucketed(cases: &[Case<Params, Row>], strategy: &str) -> Result<Option<Range>> {
    let mut ratios = Vec::new();
    for case in cases {
        let Some(row) = case.row() else { continue };
        let of = |name| Some(StrategyNumbers::of(case, row.steps.strategies.get(name)?));
        let (Some(ours), Some(buckets)) = (of(strategy), of(overlap_bucketed::STRATEGY.name)) else { continue };
        ratios.push(SameRun::of(&ours.step, &buckets.step)?.ratio());
    }
    Ok(Range::of(&ratios))
}

fn step_claims(answer: &mut Answer, steps: &StepNumbers) -> Result<()> {
    let StepNumbers { base, sharded, zero1, volume, of_zero1, ahead, .. } = steps;
    let claim = Claim::new("sharding-costs-time", sharded.value() > base.value());
    answer.claim(claim.operand("sharded", sharded).operand("not sharded", base))?;
    let claim = Claim::new("zero1-is-faster", zero1.value() < 0.98 * sharded.value());
    answer.claim(claim.operand("ZeRO-1", zero1).operand("sharded", sharded))?;
    let most = &ahead.high;
    answer.claim(Claim::new("free-in-backward", most.value() <= 1.0).operand("largest ratio", most))?;
    let claim = Claim::new("zero1-moves-like-ddp", of_zero1.value() < 1.01 && volume.value() > 1.4);
    answer.claim(claim.operand("ZeRO-1's volume", of_zero1).operand("the handout's", volume))
}

fn scheme_name(scheme: &str) -> &str {
    match scheme {
        SHARDED_OPTIMIZER => "sharded",
        ZERO1 => "ZeRO-1",
        _ => "not sharded",
    }
}

/// The unit that tables of a machine's memory use.
fn memory_style(set: &RecordSet) -> (Style, &'static str) {
    if set.is_gpu() { (Style::Gib, "GiB") } else { (Style::Mib, "MiB") }
}

/// Rank 0, a line a moment; the ranks differ by what they own.
fn memory_table(set: &RecordSet, case: &Case<Params, Row>, row: &Row) -> Table {
    let (style, unit) = memory_style(set);
    let bytes = |head: String| Column::number(head, style, 2);
    let mut table = Table::new(vec![
        Column::text("scheme"),
        Column::text("moment"),
        bytes(format!("peak until then ({unit})")),
        bytes(format!("in use ({unit})")),
        bytes("parameters".into()),
        bytes("gradients".into()),
        bytes("optimizer state".into()),
        bytes("other".into()),
    ]);
    for scheme in SCHEMES {
        for m in moments(row, scheme).unwrap_or_default() {
            let numbers = [m.peak, m.in_use, m.parameters, m.gradients, m.optimizer_state, m.other];
            let cells = numbers.map(|n| Cell::from(case.quantity(n as f64, Unit::Bytes)));
            table.row([vec![scheme_name(scheme).into(), m.name.as_str().into()], cells.to_vec()].concat());
        }
    }
    let Params { dtype, world_size, context_length, .. } = &case.params;
    let StepSetting { size, sequences, .. } = StepSetting::of(&case.params);
    table.captioned(format!(
        "Memory of rank 0 around its optimizer steps, {size} model, {}, {world_size} ranks, {sequences} of {context_length} \
         tokens a rank. A peak is the most in use since the moment before.",
        dtype.name()
    ))
}

/// What one step hands to collectives on each rank, and memory after a later step.
fn volume_table(set: &RecordSet, case: &Case<Params, Row>, row: &Row) -> Table {
    let (style, unit) = memory_style(set);
    let mut table = Table::new(vec![
        Column::text("scheme"),
        Column::number("handed to collectives (MB)", Style::Mb, 1),
        Column::number("carried by each link (MB)", Style::Mb, 1),
        Column::right("calls"),
        Column::number(format!("state on rank 0 ({unit})"), style, 2),
        Column::number(format!("in use after a step ({unit})"), style, 2),
    ]);
    for scheme in SCHEMES {
        let (Some(column), Some(moments)) = (row.steps.strategies.get(scheme), moments(row, scheme)) else { continue };
        let numbers = StrategyNumbers::of(case, column);
        let bytes = |n: u64| Cell::from(case.quantity(n as f64, Unit::Bytes));
        let calls = numbers.calls.to_string().into();
        let (state, in_use) = (bytes(moments[4].optimizer_state), bytes(moments[4].in_use));
        table.row(vec![
            scheme_name(scheme).into(),
            numbers.bytes.into(),
            numbers.bus_bytes.into(),
            calls,
            state,
            in_use,
        ]);
    }
    table.captioned(format!(
        "Volume of one step on each rank, counted where collectives are called, and memory after a later step ({}). What a \
         link carries in each direction follows by the bus factors of the operations: $2(n-1)/n$ for an all-reduce, \
         $(n-1)/n$ for a reduce-scatter or an all-gather, 1 for a broadcast. {}.",
        case.params.dtype.name(),
        set.source()
    ))
}

#[cfg(test)]
mod tests;
