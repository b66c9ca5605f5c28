//! What sharding costs in time, by the parts of a step, and what each scheme sends.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::Row;
use super::super::{BESIDE_SHARDED, SCHEMES};
use super::{ShardingCase, machine, memory_style, rank_0, scheme_name};
use crate::bench::all_reduce::bus_factor;
use crate::bench::ddp_step::link::PooledLink;
use crate::bench::ddp_step::numbers::{StrategyNumbers, is_stable};
use crate::bench::ddp_step::timeline::{PHASES, Span, Timeline};
use crate::harness::answer::{Answer, Claim, Paired, Quantity, Range, SameRun, Style, Table, Turns, Unit};
use crate::parallel::overlap_bucketed;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

/// Steps of one case, all stable.
#[derive(Serialize)]
pub struct StepNumbers {
    dtype: &'static str,
    /// Without sharding, with it, and under ZeRO-1 in both ways to step.
    base: Quantity,
    sharded: Quantity,
    zero1: Quantity,
    backward: Quantity,
    #[serde(flatten)]
    trade: Trade,
    /// The step of ZeRO-1 in backward over that of bucketed data parallelism, in paired turns.
    over_buckets: Range,
    #[serde(skip)]
    sharded_over_base: Range,
    /// What a link carries in a step of the handout's scheme, over that of ZeRO-1.
    volume: Quantity,
}

/// The parts of the last step of rank 0 that sharding changes.
#[derive(Serialize)]
struct Trade {
    /// AdamW on all parameters, and what is saved on those that the rank does not own.
    adamw: Quantity,
    saved_s: Quantity,
    /// From the first broadcast to the end of the step, and what the bytes take at the link's fitted bandwidth.
    broadcasts: Quantity,
    at_link: Quantity,
    bytes: Quantity,
    link: Quantity,
    calls: u64,
    /// The broadcasts less what is saved, and what the step takes longer.
    predicted: Quantity,
    longer: Quantity,
}

/// The ranges of turns in a case whose steps are not stable.
#[derive(Serialize)]
pub struct Unstable {
    dtype: &'static str,
    /// Of steps without communication.
    single: Range,
}

fn rounds(case: &ShardingCase, row: &Row, strategy: &str) -> Option<Turns> {
    Some(row.steps.strategies.get(strategy)?.step.turns(case.params.rounds))
}

impl Unstable {
    pub fn of(case: &ShardingCase, row: &Row) -> Option<Self> {
        let single = row.steps.single.turns(case.params.rounds);
        let single = Paired::median(&case.id, &single)?.range;
        (!is_stable(case, &row.steps)).then(|| Self { dtype: case.params.dtype.name(), single })
    }
}

impl StepNumbers {
    /// `None` of a case that is not stable.
    pub fn of(case: &ShardingCase, row: &Row, link: &PooledLink) -> Option<Self> {
        let of = |name| StrategyNumbers::of(case, &row.steps, name).filter(|_| is_stable(case, &row.steps));
        let over = |a, b| {
            let columns = [&rounds(case, row, a)?, &rounds(case, row, b)?];
            Some(Paired::of(&case.id, Unit::One, columns, |[a, b]| a / b)?.range)
        };
        let (base, sharded, zero1, backward) =
            (of(BESIDE_SHARDED)?, of(SHARDED_OPTIMIZER)?, of(ZERO1)?, of(ZERO1_IN_BACKWARD)?);
        Some(Self {
            dtype: case.params.dtype.name(),
            trade: Trade::of(case, row, &base, &sharded, link)?,
            over_buckets: over(ZERO1_IN_BACKWARD, overlap_bucketed::STRATEGY.name)?,
            sharded_over_base: over(SHARDED_OPTIMIZER, BESIDE_SHARDED)?,
            volume: SameRun::of(&sharded.bus_bytes, &zero1.bus_bytes).ok()?.ratio(),
            base: base.step,
            sharded: sharded.step,
            zero1: zero1.step,
            backward: backward.step,
        })
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        let least = &self.sharded_over_base.low;
        answer.claim(Claim::above("costs-time", "smallest ratio of the steps in paired turns", least, 1.0))?;
        let Trade { predicted, longer, .. } = &self.trade;
        let off = (predicted.value() - longer.value()).abs();
        let claim = Claim::new("trade-adds-up", off <= 0.1 * longer.value().abs());
        answer.claim(claim.operand("broadcasts less saving", predicted).operand("measured", longer))
    }
}

impl Trade {
    fn of(
        case: &ShardingCase,
        row: &Row,
        base: &StrategyNumbers,
        sharded: &StrategyNumbers,
        link: &PooledLink,
    ) -> Option<Self> {
        let ranks = case.params.world_size;
        let timeline = |scheme| row.steps.strategies.get(scheme).map(|column| &column.timeline);
        let seconds = |s: f64| case.quantity(s, Unit::Seconds);
        let (alone, shared) = (optimizer(timeline(BESIDE_SHARDED)?)?, optimizer(timeline(SHARDED_OPTIMIZER)?)?);
        let calls = timeline(SHARDED_OPTIMIZER)?.communication.iter();
        let first = calls.filter(|call| call.start_s >= shared.start_s).map(|call| call.start_s).reduce(f64::min)?;
        let (adamw, adamw_sharded) = (alone.end_s - alone.start_s, first - shared.start_s);
        let bytes = SameRun::of(&sharded.bytes, &base.bytes).ok()?.difference();
        let longer = SameRun::of(&sharded.step, &base.step).ok()?.difference();
        // The fit is of all-reduces; a broadcast sends each byte over each link once.
        let factor = bus_factor(ranks);
        let bandwidth = &link.bandwidth;
        (ranks > 1).then(|| Self {
            adamw: seconds(adamw),
            saved_s: seconds(adamw - adamw_sharded),
            broadcasts: seconds(shared.end_s - first),
            at_link: link.of_bytes(bytes.value() / factor),
            link: Quantity::new(bandwidth.value() * factor, Unit::BytesPerSecond, bandwidth.sources().to_vec()),
            calls: sharded.calls.saturating_sub(base.calls),
            predicted: seconds(shared.end_s - first - (adamw - adamw_sharded)),
            longer,
            bytes,
        })
    }
}

/// The last phase of a step.
fn optimizer(timeline: &Timeline) -> Option<&Span> {
    timeline.compute.iter().find(|span| span.name == PHASES[3])
}

/// What one step hands to collectives on each rank, and memory after a later step.
pub fn volume_table(case: &ShardingCase, row: &Row) -> Table {
    let (style, unit) = memory_style(case);
    let bytes = |n: u64| case.quantity(n as f64, Unit::Bytes);
    let of =
        |scheme| Some((scheme, StrategyNumbers::of(case, &row.steps, scheme)?, rank_0(row, scheme)?.moments.get(4)?));
    Table::of(SCHEMES.into_iter().filter_map(of))
        .text("scheme", |(scheme, ..)| scheme_name(scheme))
        .number("to collectives (MB)", Style::Mb, 0, |(_, numbers, _)| numbers.bytes.clone())
        .number("over each link (MB)", Style::Mb, 0, |(_, numbers, _)| numbers.bus_bytes.clone())
        .right("calls", |(_, numbers, _)| numbers.calls.to_string())
        .number(format!("state ({unit})"), style, 2, |(.., after)| bytes(after.optimizer_state))
        .number(format!("in use ({unit})"), style, 2, |(.., after)| bytes(after.in_use))
        .captioned(format!(
            "Bytes that one step hands to collectives on each rank, what each link carries of them in each direction, and the \
             memory of rank 0 after a later step ({}, {} ranks, {}).",
            case.params.dtype.name(),
            case.params.world_size,
            machine(case)
        ))
}
