//! What sharding the optimizer's state saves in memory, what it costs in time, and what ZeRO stage 1 sends.

use anyhow::Result;
use serde::Serialize;

use super::measure::{Row, Sharding};
use super::memory::Moment;
use super::{BESIDE_SHARDED, SCHEMES};
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::tables::{StepSetting, StrategyNumbers, ending, steps_tables};
use crate::harness::answer::{
    Answer, Audience, Case, Claim, Quantity, Range, RecordSet, Records, SameRun, Style, Table, Unit,
};
use crate::parallel::overlap_bucketed;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

type ShardingCase = Case<Params, Row>;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
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

/// Bytes of rank 0.
#[derive(Serialize)]
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
    #[serde(skip)]
    in_use_before: Quantity,
    before: Quantity,
    /// The peaks before the first step and before a later one, each with what counting predicts.
    peak: Quantity,
    counted: Quantity,
    peak_later: Quantity,
    counted_later: Quantity,
    sharded_peak: Quantity,
    shard: Quantity,
    other: Quantity,
}

/// Steps of the case, and ratios of all cases.
#[derive(Serialize)]
struct StepNumbers {
    dtype: &'static str,
    #[serde(flatten)]
    sharded: StrategyNumbers,
    base: StrategyNumbers,
    zero1: StrategyNumbers,
    backward: StrategyNumbers,
    /// The share of AdamW's work that a rank no longer has, and that it keeps.
    spared: f64,
    kept: f64,
    more_bytes: Quantity,
    more_calls: u64,
    /// Over the step of bucketed data parallelism, in every measured case: ZeRO-1, and stepping in the backward pass.
    over: Range,
    ahead: Range,
    /// What the handout's scheme moves, and ZeRO-1, over what data parallelism does.
    volume: Quantity,
    of_zero1: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<Sharding>()?;
    let first = cases.iter().find_map(Case::measured);
    let numbers =
        first.and_then(|(case, row)| Some((MemoryNumbers::of(case, row)?, StepNumbers::of(case, row, &cases)?)));
    let ended = |case: &ShardingCase| format!("{}: {}", case.params.dtype.name(), ending(&case.outcome));
    let (memory, steps) = numbers.unzip();
    let quoted = Quoted {
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        bucket_mb: cases.first().and_then(|case| case.params.bucket_size_mb).unwrap_or(0.0).round() as u64,
        measured: memory.is_some(),
        endings: cases.iter().map(ended).collect(),
        memory,
        steps,
    };
    let mut answer = Answer::of(main, &quoted)?;
    if let (Some(memory), Some(steps), Some((case, row))) = (&quoted.memory, &quoted.steps, first) {
        memory.claims(&mut answer)?;
        steps.claims(&mut answer)?;
        answer.table("memory", memory_table(main, case, row))?;
        answer.table("volumes", volume_table(main, case, row))?;
    }
    let label = |p: &Params| format!("{}, {:.0} MB", p.dtype.name(), p.bucket_size_mb.unwrap_or(0.0));
    steps_tables(&mut answer, records, "arithmetic, buckets", label)?;
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

impl MemoryNumbers {
    fn of(case: &ShardingCase, row: &Row) -> Option<Self> {
        let quantity = |x: f64| case.quantity(x, Unit::Bytes);
        let bytes = |n: u64| quantity(n as f64);
        let less = |a: u64, b: u64| quantity(a as f64 - b as f64);
        let [plain, shared, zero] = SCHEMES.map(|scheme| moments(row, scheme));
        let (plain, shared, zero) = (plain?, shared?, zero?);
        let p = row.predicted;
        let ranks = row.memory.get(SHARDED_OPTIMIZER)?;
        Some(Self {
            parameters: bytes(p.parameters),
            state: bytes(p.optimizer_state),
            expected: quantity([p.parameters, p.gradients, p.optimizer_state].map(|n| n as f64).iter().sum()),
            unsharded: bytes(plain[2].in_use),
            saved: less(plain[2].in_use, shared[2].in_use),
            half: quantity(p.optimizer_state as f64 - 8.0 * ranks.first()?.owned_values as f64),
            owned: Range::of(ranks.iter().map(|rank| case.quantity(rank.owned_values as f64, Unit::One)))?,
            in_use_before: bytes(plain[1].in_use),
            before: bytes(shared[1].in_use.abs_diff(plain[1].in_use)),
            peak: bytes(plain[1].peak),
            counted: bytes(p.peak_before_first_step),
            peak_later: bytes(plain[3].peak),
            counted_later: bytes(p.peak_before_later_step),
            sharded_peak: bytes(shared[3].peak),
            shard: quantity(p.gradients as f64 / world_size(&case.params)?),
            other: less(zero[2].other, shared[2].other),
        })
    }

    fn claims(&self, answer: &mut Answer) -> Result<()> {
        let within = |id: &str, value: &Quantity, wanted: &Quantity, least: f64, most: f64| {
            let share = value.value() / wanted.value();
            let claim = Claim::new(id, share >= least && share < most).operand("measured", value);
            claim.operand("counted", wanted).operand_text("wanted", format!("{least} to {most} of it"))
        };
        // What is counted is there to the byte at the least.
        answer.claim(within("memory-is-as-counted", &self.unsharded, &self.expected, 1.0, 1.05))?;
        answer.claim(within("saves-the-others-state", &self.saved, &self.half, 0.9, 1.1))?;
        answer.claim(within("keeps-a-gradient-shard", &self.other, &self.shard, 0.95, 1.05))?;
        let (before, in_use) = (&self.before, &self.in_use_before);
        let claim = Claim::new("same-before-the-first-step", before.value() < 0.01 * in_use.value());
        answer.claim(claim.operand("difference before the first step", before).operand("in use then", in_use))
    }
}

impl StepNumbers {
    fn of(case: &ShardingCase, row: &Row, cases: &[ShardingCase]) -> Option<Self> {
        let of = |name| StrategyNumbers::of(case, &row.steps, name);
        let (base, sharded, zero1) = (of(BESIDE_SHARDED)?, of(SHARDED_OPTIMIZER)?, of(ZERO1)?);
        let volume = |numbers: &StrategyNumbers| Some(SameRun::of(&numbers.bus_bytes, &base.bus_bytes).ok()?.ratio());
        let kept = 1.0 / world_size(&case.params)?;
        Some(Self {
            dtype: case.params.dtype.name(),
            spared: 1.0 - kept,
            kept,
            more_bytes: SameRun::of(&sharded.bytes, &base.bytes).ok()?.difference(),
            more_calls: sharded.calls.saturating_sub(base.calls),
            over: over_bucketed(cases, ZERO1)?,
            ahead: over_bucketed(cases, ZERO1_IN_BACKWARD)?,
            volume: volume(&sharded)?,
            of_zero1: volume(&zero1)?,
            backward: of(ZERO1_IN_BACKWARD)?,
            base,
            sharded,
            zero1,
        })
    }

    fn claims(&self, answer: &mut Answer) -> Result<()> {
        let (sharded, zero1) = (&self.sharded.step, &self.zero1.step);
        let (volume, of_zero1, most) = (&self.volume, &self.of_zero1, &self.ahead.high);
        answer.claim(Claim::greater("sharding-costs-time", ("sharded", sharded), ("not sharded", &self.base.step)))?;
        let claim = Claim::new("zero1-is-faster", zero1.value() < 0.98 * sharded.value());
        answer.claim(claim.operand("ZeRO-1", zero1).operand("sharded", sharded))?;
        answer.claim(Claim::new("free-in-backward", most.value() <= 1.0).operand("largest ratio", most))?;
        let claim = Claim::new("zero1-moves-like-ddp", of_zero1.value() < 1.01 && volume.value() > 1.4);
        answer.claim(claim.operand("ZeRO-1's volume", of_zero1).operand("the handout's", volume))
    }
}

/// A strategy's step over that of bucketed data parallelism, in every measured case.
fn over_bucketed(cases: &[ShardingCase], strategy: &str) -> Option<Range> {
    Range::of(cases.iter().filter_map(|case| {
        let of = |name| StrategyNumbers::of(case, &case.row()?.steps, name);
        let (ours, buckets) = (of(strategy)?, of(overlap_bucketed::STRATEGY.name)?);
        Some(SameRun::of(&ours.step, &buckets.step).ok()?.ratio())
    }))
}

fn scheme_name(scheme: &str) -> &'static str {
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
fn memory_table(set: &RecordSet, case: &ShardingCase, row: &Row) -> Table {
    let (style, unit) = memory_style(set);
    let of = |scheme| moments(row, scheme).unwrap_or_default().iter().map(move |moment| (scheme, moment));
    let bytes =
        |of: fn(&Moment) -> u64| move |(_, moment): &(&str, &Moment)| case.quantity(of(moment) as f64, Unit::Bytes);
    let Params { dtype, world_size, context_length, .. } = &case.params;
    let StepSetting { size, sequences, .. } = StepSetting::of(&case.params);
    Table::of(SCHEMES.into_iter().flat_map(of))
        .text("scheme", |(scheme, _)| scheme_name(scheme))
        .text("moment", |(_, moment)| moment.name.as_str())
        .number(format!("peak until then ({unit})"), style, 2, bytes(|moment| moment.peak))
        .number(format!("in use ({unit})"), style, 2, bytes(|moment| moment.in_use))
        .number("parameters", style, 2, bytes(|moment| moment.parameters))
        .number("gradients", style, 2, bytes(|moment| moment.gradients))
        .number("optimizer state", style, 2, bytes(|moment| moment.optimizer_state))
        .number("other", style, 2, bytes(|moment| moment.other))
        .captioned(format!(
            "Memory of rank 0 around its optimizer steps, {size} model, {}, {world_size} ranks, {sequences} of \
             {context_length} tokens a rank. A peak is the most in use since the moment before.",
            dtype.name()
        ))
}

/// What one step hands to collectives on each rank, and memory after a later step.
fn volume_table(set: &RecordSet, case: &ShardingCase, row: &Row) -> Table {
    let (style, unit) = memory_style(set);
    let bytes = |n: u64| case.quantity(n as f64, Unit::Bytes);
    let of = |scheme| Some((scheme, StrategyNumbers::of(case, &row.steps, scheme)?, &moments(row, scheme)?[4]));
    Table::of(SCHEMES.into_iter().filter_map(of))
        .text("scheme", |(scheme, ..)| scheme_name(scheme))
        .number("handed to collectives (MB)", Style::Mb, 1, |(_, numbers, _)| numbers.bytes.clone())
        .number("carried by each link (MB)", Style::Mb, 1, |(_, numbers, _)| numbers.bus_bytes.clone())
        .right("calls", |(_, numbers, _)| numbers.calls.to_string())
        .number(format!("state on rank 0 ({unit})"), style, 2, |(.., after)| bytes(after.optimizer_state))
        .number(format!("in use after a step ({unit})"), style, 2, |(.., after)| bytes(after.in_use))
        .captioned(format!(
            "Volume of one step on each rank, counted where collectives are called, and memory after a later step ({}). What \
             a link carries in each direction follows by the bus factors of the operations: $2(n-1)/n$ for an all-reduce, \
             $(n-1)/n$ for a reduce-scatter or an all-gather, 1 for a broadcast. {}.",
            case.params.dtype.name(),
            set.source()
        ))
}

#[cfg(test)]
mod tests;
