//! Which bucket size is best, what a model of calls and bandwidth says of it, and all strategies side by side.

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::measure::{Bucketed, Row};
use super::{COALESCED, STRATEGY};
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::tables::{HasSteps, StepSetting, StrategyNumbers, steps_table};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::grouped;
use crate::harness::answer::{
    Answer, Audience, Case, Claim, Column, Quantity, RecordSet, Records, SameMachine, SameRun, Style, Table, Unit,
};
use crate::harness::record::{Machine, Profile};
use crate::model::sizes::{TABLE_1, VOCAB_SIZE};
use crate::model::{Config, Precision};

mod strategies;

use strategies::side_by_side;

/// The problems whose records the table of all strategies reads.
pub const READS: &[&str] = &[NAIVE, FLAT, OVERLAPPED, SHARDED];
const NAIVE: &str = "naive_ddp_benchmarking";
const FLAT: &str = "minimal_ddp_flat_benchmarking";
const OVERLAPPED: &str = "ddp_overlap_individual_parameters_benchmarking";
const SHARDED: &str = "optimizer_state_sharding_accounting";

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
    /// Whether steps in bfloat16 were measured, too.
    bfloat16: bool,
    /// Of the token embedding of the XL model, whose gradient is the last to be ready.
    last_ready: Quantity,
    /// The bucket sizes in MB that another machine measured, so that no sentence compares them.
    left_out: Vec<String>,
    sizes: Option<Sizes>,
}

/// What the float32 cases say of the bucket size.
#[derive(Serialize)]
struct Sizes {
    best_mb: f64,
    worst_mb: f64,
    /// The worst step over the best, less one.
    differ: Quantity,
    smallest_calls: u64,
    tensors: u64,
    /// What the step saves without the copies into buckets, and its ratio to the step without communication.
    spared: Quantity,
    without_copies: Quantity,
    /// Communication over the best step, and how much of it is hidden.
    share: Quantity,
    hidden: Quantity,
    overhead: Quantity,
    bandwidth: Quantity,
    model_bucket: Option<Quantity>,
    predicted_mb: f64,
    several: bool,
}

/// One measured bucket size.
struct Size<'a> {
    case: &'a Case<Params, Row>,
    row: &'a Row,
    mb: f64,
    bucketed: StrategyNumbers,
    coalesced: StrategyNumbers,
    naive: StrategyNumbers,
    single: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<Bucketed>()?;
    let (measured, left_out) = of_one_machine(measured(&cases));
    let xl = Config::of_size(&TABLE_1[3], VOCAB_SIZE, 512);
    let (_, shape) = xl.parameter_shapes().next().context("a model has parameters")?;
    let last_ready = Quantity::constant(4.0 * shape.iter().product::<i64>() as f64, Unit::Bytes);
    let is_bfloat16 = |case: &Case<Params, Row>| case.params.dtype == Precision::Bfloat16 && case.row().is_some();
    let mut answer = Answer::new(&Quoted {
        gpu: main.is_gpu(),
        source: main.source(),
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        bfloat16: cases.iter().any(is_bfloat16),
        last_ready,
        left_out: left_out.iter().map(|size| grouped(size.mb, 1)).collect(),
        sizes: sizes(&measured)?,
    })?;
    claims(&mut answer, &measured)?;
    for set in records.sets() {
        let cases = set.cases::<Bucketed>()?;
        let dtypes = if set.is_gpu() { &[Precision::Float32, Precision::Bfloat16][..] } else { &[Precision::Float32] };
        for dtype in dtypes {
            let mut of_dtype: Vec<_> = cases.iter().filter(|case| case.params.dtype == *dtype).collect();
            of_dtype.sort_by(|a, b| mb(&a.params).total_cmp(&mb(&b.params)));
            let table = steps_table(set, "bucket (MB)", &of_dtype, |params| grouped(mb(params), 1));
            answer.table(format!("steps-{}-{}", set.profile(), dtype.name()), table)?;
        }
    }
    if !measured.is_empty() {
        answer.table("predictions", predictions(main, &measured))?;
    }
    if measured.len() > 1 {
        answer.figure("model", model_figure(&measured))?;
    }
    strategies(&mut answer, records)?;
    Ok(answer)
}

fn mb(params: &Params) -> f64 {
    params.bucket_size_mb.unwrap_or(0.0)
}

/// The float32 cases that were measured, by bucket size.
fn measured(cases: &[Case<Params, Row>]) -> Vec<Size<'_>> {
    let size = |case| {
        let row: &Row = Case::row(case)?;
        let of = |name| Some(StrategyNumbers::of(case, row.steps.strategies.get(name)?));
        Some(Size {
            case,
            row,
            mb: mb(&case.params),
            bucketed: of(STRATEGY)?,
            coalesced: of(COALESCED)?,
            naive: of("naive")?,
            single: case.median(&row.steps.single.last_rank),
        })
    };
    let mut sizes: Vec<Size> =
        cases.iter().filter(|case| case.params.dtype == Precision::Float32).filter_map(size).collect();
    sizes.sort_by(|a, b| a.mb.total_cmp(&b.mb));
    sizes
}

/// The sizes of the machine that measured the most of them, and the others: steps of two machines cannot be compared.
fn of_one_machine(sizes: Vec<Size<'_>>) -> (Vec<Size<'_>>, Vec<Size<'_>>) {
    let count = |machine: &Machine| sizes.iter().filter(|size| size.case.id.machine() == machine).count();
    let Some(machine) = sizes.iter().map(|size| size.case.id.machine()).max_by_key(|machine| count(machine)).cloned()
    else {
        return (sizes, Vec::new());
    };
    sizes.into_iter().partition(|size| *size.case.id.machine() == machine)
}

/// The sizes with the shortest step, the longest step, and the least predicted overhead.
struct Extremes<'a> {
    best: &'a Size<'a>,
    worst: &'a Size<'a>,
    predicted: &'a Size<'a>,
}

impl<'a> Extremes<'a> {
    fn of(sizes: &'a [Size<'a>]) -> Option<Self> {
        let by = |key: fn(&Size) -> f64| sizes.iter().reduce(|a, b| if key(b) < key(a) { b } else { a });
        Some(Self {
            best: by(|size| size.bucketed.step.value())?,
            worst: by(|size| -size.bucketed.step.value())?,
            predicted: by(|size| size.row.model.predicted_overhead_s)?,
        })
    }
}

fn sizes(sizes: &[Size]) -> Result<Option<Sizes>> {
    let (Some(Extremes { best, worst, predicted }), Some(smallest)) = (Extremes::of(sizes), sizes.first()) else {
        return Ok(None);
    };
    let (fast, slow) = (&best.bucketed.step, &worst.bucketed.step);
    let longer = SameMachine::of(slow, fast)?.difference();
    let link = &best.row.steps.link;
    Ok(Some(Sizes {
        best_mb: best.mb,
        worst_mb: worst.mb,
        differ: SameMachine::of(&longer, fast)?.ratio(),
        smallest_calls: smallest.bucketed.calls,
        tensors: smallest.naive.calls,
        spared: SameRun::of(fast, &best.coalesced.step)?.difference(),
        without_copies: SameRun::of(&best.coalesced.step, &best.single)?.ratio(),
        share: SameRun::of(&best.bucketed.communication, fast)?.ratio(),
        hidden: best.bucketed.hidden.clone(),
        overhead: best.case.quantity(link.overhead_s, Unit::Seconds),
        bandwidth: best.case.quantity(link.bytes_per_s, Unit::BytesPerSecond),
        model_bucket: best.row.model.best.as_ref().map(|model| best.case.quantity(model.bucket_bytes, Unit::Bytes)),
        predicted_mb: predicted.mb,
        several: sizes.len() > 1,
    }))
}

fn claims(answer: &mut Answer, measured: &[Size]) -> Result<()> {
    let (Some(quoted), Some(Extremes { best, predicted, .. })) = (sizes(measured)?, Extremes::of(measured)) else {
        return Ok(());
    };
    let (Some(smallest), Some(largest)) = (measured.first(), measured.last()) else { return Ok(()) };
    let megabytes = |size: &Size| format!("{} MB", size.mb);
    answer.claim(
        Claim::new("middle-is-best", best.mb != smallest.mb && best.mb != largest.mb)
            .operand_text("best size", megabytes(best))
            .operand_text("smallest", megabytes(smallest))
            .operand_text("largest", megabytes(largest)),
    )?;
    let (calls, tensors) = (quoted.smallest_calls, quoted.tensors);
    answer.claim(
        Claim::new("at-the-smallest-size-nearly-every-matrix-travels-alone", calls as f64 > 0.6 * tensors as f64)
            .operand_text("calls", calls.to_string())
            .operand_text("tensors", tensors.to_string()),
    )?;
    answer.claim(Claim::above("no-copies-is-faster", "spared", &quoted.spared, 0.0))?;
    answer.claim(Claim::below("little-to-gain", "communication over the step", &quoted.share, 0.15))?;
    answer.claim(
        Claim::new("model-finds-the-best", predicted.mb == best.mb)
            .operand_text("the model's best", megabytes(predicted))
            .operand_text("fastest", megabytes(best)),
    )
}

/// What the model says of each bucket size, beside what was measured.
fn predictions(set: &RecordSet, sizes: &[Size]) -> Table {
    let ms = |head: &str| Column::number(head, Style::Ms, 2);
    let mut table = Table::new(vec![
        Column::right("bucket (MB)"),
        Column::right("calls $n_b$"),
        Column::number("$o$ (µs)", Style::Us, 0),
        Column::number("$w$ (GB/s)", Style::Gb, 1),
        ms("predicted overhead (ms)"),
        ms("measured tail (ms)"),
        ms("beyond single (ms)"),
        Column::number("best $n_b$", Style::Fixed, 1),
        Column::number("best bucket (MB)", Style::Mb, 1),
    ]);
    for size in sizes {
        let Size { case, row, bucketed, single, .. } = size;
        let (link, best) = (&row.steps.link, row.model.best.as_ref());
        table.row(vec![
            grouped(size.mb, 1).into(),
            bucketed.calls.to_string().into(),
            case.quantity(link.overhead_s, Unit::Seconds).into(),
            case.quantity(link.bytes_per_s, Unit::BytesPerSecond).into(),
            case.quantity(row.model.predicted_overhead_s, Unit::Seconds).into(),
            (&bucketed.tail).into(),
            case.quantity(bucketed.step.value() - single.value(), Unit::Seconds).into(),
            best.map(|best| case.quantity(best.calls, Unit::One)).into(),
            best.map(|best| case.quantity(best.bucket_bytes, Unit::Bytes)).into(),
        ]);
    }
    table.captioned(format!(
        "The model with each case's own $o$ and $w$, from all-reduces of 64 KiB upwards on the same ranks just before their \
         steps, against what was measured. {}.",
        set.source()
    ))
}

fn model_figure(sizes: &[Size]) -> Figure {
    let series = |name: &str, value: fn(&Size) -> f64| {
        Series::over_numbers(name, sizes.iter().map(|size| (size.mb, Some(1e3 * value(size)))).collect::<Vec<_>>())
    };
    let predicted = series("predicted", |size| size.row.model.predicted_overhead_s);
    let tail = series("measured tail", |size| size.bucketed.tail.value());
    let mut plot = Plot::new(PlotKind::Line, "bucket size (MB)", "after the backward pass (ms)", vec![predicted, tail]);
    plot.log_x = true;
    let alt = "Overhead after the backward pass against the bucket size: the model's prediction and the tail that was \
               measured.";
    Figure::plot(alt, plot)
}

/// Each strategy from the record of its own problem.
fn strategies(answer: &mut Answer, records: &Records) -> Result<()> {
    let (naive, flat, overlapped) = (records.other(NAIVE)?, records.other(FLAT)?, records.other(OVERLAPPED)?);
    let sharded = records.other(SHARDED)?;
    let entries = [
        ("naive", naive),
        ("flat", flat),
        ("overlap_individual_parameters", overlapped),
        (STRATEGY, records),
        (COALESCED, records),
        ("sharded_optimizer", sharded),
        ("zero1", sharded),
        ("zero1_in_backward", sharded),
    ];
    for profile in [Profile::Gpu, Profile::Cpu] {
        for (i, table) in side_by_side(&entries, profile)?.into_iter().enumerate() {
            answer.table(format!("strategies-{profile}-{i}"), table)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
