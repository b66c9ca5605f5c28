//! The memory of rank 0 around its optimizer steps, and what counting explains of it.

use anyhow::Result;
use serde::Serialize;

use super::super::SCHEMES;
use super::super::measure::Row;
use super::super::memory::{Moment, RankMemory};
use super::{ShardingCase, machine, memory_style, rank_0, scheme_name};
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::tables::StepSetting;
use crate::collective::Backend;
use crate::harness::answer::format::print;
use crate::harness::answer::{Answer, Cell, Claim, Quantity, Table, Unit};
use crate::parallel::trainer::ZERO1;

/// Bytes of rank 0.
#[derive(Serialize)]
pub struct MemoryNumbers {
    /// Counted: parameters, and as much again of gradients; both moments of AdamW; all of them.
    parameters: Quantity,
    moments: Quantity,
    expected: Quantity,
    /// The peaks at the handout's three moments without sharding.
    init: Quantity,
    before: Quantity,
    after: Quantity,
    /// The last two with sharding.
    sharded_before: Quantity,
    sharded_after: Quantity,
    /// The measured optimizer state: alone, sharded, and their difference against what the rank does not own by counting.
    state: Quantity,
    own_state: Quantity,
    #[serde(skip)]
    saved: Quantity,
    #[serde(skip)]
    foreign: Quantity,
    /// The measured state less the counted one, and the part of it that one kind of matrix explains.
    rounding: Quantity,
    block: Option<Block>,
    /// What is in use after the first step without sharding.
    #[serde(skip)]
    in_use: Quantity,
}

/// A feed-forward matrix, the block that the caching allocator gives it, and what all such blocks of the state have too much.
#[derive(Serialize)]
struct Block {
    matrix: Quantity,
    block: Quantity,
    excess: Quantity,
}

impl MemoryNumbers {
    pub fn of(case: &ShardingCase, row: &Row) -> Option<Self> {
        let quantity = |x: f64| case.quantity(x, Unit::Bytes);
        let bytes = |n: u64| quantity(n as f64);
        let less = |a: u64, b: u64| quantity(a as f64 - b as f64);
        let [plain, shared, _] = SCHEMES.map(|scheme| rank_0(row, scheme));
        let (owned, [plain, shared]) = (shared?.owned_values, [&plain?.moments, &shared?.moments]);
        let p = row.predicted;
        Some(Self {
            parameters: bytes(p.parameters),
            moments: bytes(p.optimizer_state),
            expected: quantity([p.parameters, p.gradients, p.optimizer_state].map(|n| n as f64).iter().sum()),
            init: bytes(plain[0].peak),
            before: bytes(plain[1].peak),
            after: bytes(plain[2].peak),
            sharded_before: bytes(shared[1].peak),
            sharded_after: bytes(shared[2].peak),
            state: bytes(plain[2].optimizer_state),
            own_state: bytes(shared[2].optimizer_state),
            saved: less(plain[2].optimizer_state, shared[2].optimizer_state),
            foreign: quantity(p.optimizer_state as f64 - 8.0 * owned as f64),
            rounding: less(plain[2].optimizer_state, p.optimizer_state),
            block: Block::of(&case.params),
            in_use: bytes(plain[2].in_use),
        })
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        let within = |id: &str, value: &Quantity, wanted: &Quantity, least: f64, most: f64| {
            let share = value.value() / wanted.value();
            let claim = Claim::new(id, share >= least && share < most).operand("measured", value);
            claim.operand("counted", wanted).operand_text("wanted", format!("{least} to {most} of it"))
        };
        // No tensor takes fewer bytes than are counted.
        answer.claim(within("as-counted", &self.in_use, &self.expected, 1.0, 1.05))?;
        answer.claim(within("saves-state", &self.saved, &self.foreign, 0.9, 1.1))
    }
}

impl Block {
    /// None on a CPU, and where the rule gives the matrix a block of its size.
    fn of(params: &Params) -> Option<Self> {
        const MIB: u64 = 1 << 20;
        let config = params.config();
        let matrix = 4 * (config.d_model * config.d_ff) as u64;
        // libtorch's c10/cuda/CUDACachingAllocator.cpp: memory for 10 MiB and more is taken in multiples of 2 MiB, and a rest of at
        // most 1 MiB is not split off.
        let block = matrix.next_multiple_of(2 * MIB);
        let rest = block - matrix;
        let fits = params.backend == Backend::Nccl && matrix >= 10 * MIB && (1..=MIB).contains(&rest);
        // Three matrices a layer, two moments of each.
        let excess = 6 * config.num_layers as u64 * rest;
        let [matrix, block, excess] = [matrix, block, excess].map(|n| Quantity::constant(n as f64, Unit::Bytes));
        fits.then_some(Self { matrix, block, excess })
    }
}

/// One moment of a scheme; its peak is `None` where the record holds that of the scheme before.
struct Line<'a> {
    scheme: &'static str,
    moment: &'a Moment,
    peak: Option<u64>,
}

/// The moments of every scheme, in order.
fn lines<'a>(params: &Params, row: &'a Row) -> Vec<Line<'a>> {
    let line = |scheme: &'static str, rank: &'a RankMemory, at: usize| {
        let moment = &rank.moments[at];
        // The first scheme runs in a new process, and the CPU's counts begin with the tracker.
        let own = at > 0 || rank.peak_since_start || scheme == SCHEMES[0] || params.backend == Backend::Gloo;
        Line { scheme, moment, peak: own.then_some(moment.peak) }
    };
    let of =
        |scheme| rank_0(row, scheme).into_iter().flat_map(move |rank| (0..5).map(move |at| line(scheme, rank, at)));
    SCHEMES.into_iter().flat_map(of).collect()
}

/// The handout's three moments, with and without sharding.
pub fn table(case: &ShardingCase, row: &Row) -> Table {
    let lines: Vec<Line> = lines(&case.params, row).into_iter().filter(is_the_handouts).collect();
    let Params { dtype, world_size, context_length, .. } = &case.params;
    let StepSetting { size, sequences, .. } = StepSetting::of(&case.params);
    let (style, unit) = memory_style(case);
    let caption = format!(
        "Memory of rank 0: {size}, {}, {world_size} ranks with {sequences} of {context_length} tokens each, {}; parameters take \
         {} {unit} throughout. A peak is the highest since the moment before (before the step {} {unit} are counted, with \
         activations).{}",
        dtype.name(),
        machine(case),
        print(row.predicted.parameters as f64, style, 2),
        print(row.predicted.peak_before_first_step as f64, style, 2),
        missing(&lines)
    );
    moments_table(case, lines).captioned(caption)
}

/// What [`table`] leaves out: the moments of a later step, and ZeRO-1.
pub fn other_moments(case: &ShardingCase, row: &Row) -> Table {
    let lines: Vec<Line> = lines(&case.params, row).into_iter().filter(|line| !is_the_handouts(line)).collect();
    let later = row.predicted.peak_before_later_step as f64;
    let (style, unit) = memory_style(case);
    let caption = format!(
        "The other moments: a later step, when optimizer state and activations exist together (counted peak without sharding: \
         {} {unit}), and ZeRO-1. Parameters take {} {unit} throughout.{}",
        print(later, style, 2),
        print(row.predicted.parameters as f64, style, 2),
        missing(&lines)
    );
    moments_table(case, lines).captioned(caption)
}

fn is_the_handouts(line: &Line) -> bool {
    line.scheme != ZERO1 && !line.moment.name.contains("later")
}

fn missing(lines: &[Line]) -> &'static str {
    match lines.iter().all(|line| line.peak.is_some()) {
        true => "",
        false => {
            " The missing peak was not recorded, because the allocator's peak was not reset when that scheme began; up to this \
             moment all schemes run the same code."
        }
    }
}

fn moments_table(case: &ShardingCase, lines: Vec<Line>) -> Table {
    let (style, unit) = memory_style(case);
    let bytes = |n: u64| case.quantity(n as f64, Unit::Bytes);
    let of = |of: fn(&Moment) -> u64| move |line: &Line| bytes(of(line.moment));
    let head = |what: &str| format!("{what} ({unit})");
    Table::of(lines)
        .text("scheme", |line| scheme_name(line.scheme))
        .text("moment", |line| line.moment.name.as_str())
        .number(head("peak"), style, 2, |line| Cell::from(line.peak.map(bytes)))
        .number(head("in use"), style, 2, of(|moment| moment.in_use))
        .number(head("gradients"), style, 2, of(|moment| moment.gradients))
        .number(head("state"), style, 2, of(|moment| moment.optimizer_state))
        .number(head("other"), style, 2, of(|moment| moment.other))
        .into()
}
