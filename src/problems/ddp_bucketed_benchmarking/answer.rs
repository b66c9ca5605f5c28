//! Which bucket size is best, what a model of calls and bandwidth says of it, and all strategies side by side.

use anyhow::{Context as _, Result};
use serde::Serialize;

use self::strategies::side_by_side;
use super::measure::{Bucketed, Row};
use super::{COALESCED, STRATEGY};
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::tables::{StepCase, StepSetting, StrategyNumbers, steps_table};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::grouped;
use crate::harness::answer::{
    Answer, Audience, Case, Claim, Quantity, RecordSet, Records, SameMachine, SameRun, Style, Table, Unit,
};
use crate::harness::record::{Machine, Profile};
use crate::model::sizes::{TABLE_1, VOCAB_SIZE};
use crate::model::{Config, Precision};

mod strategies;

/// The problems whose records the table of all strategies reads.
pub const READS: &[&str] = &[NAIVE, FLAT, OVERLAPPED, SHARDED];
const NAIVE: &str = "naive_ddp_benchmarking";
const FLAT: &str = "minimal_ddp_flat_benchmarking";
const OVERLAPPED: &str = "ddp_overlap_individual_parameters_benchmarking";
const SHARDED: &str = "optimizer_state_sharding_accounting";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted<'a> {
    #[serde(flatten)]
    setting: Option<StepSetting>,
    /// Whether steps in bfloat16 were measured, too.
    bfloat16: bool,
    /// Of the token embedding of the XL model, whose gradient is the last to be ready.
    last_ready: Quantity,
    /// The bucket sizes in MB that another machine measured, so that no sentence compares them.
    left_out: Vec<String>,
    sizes: Option<Sizes<'a>>,
}

/// What the float32 cases say of the bucket size.
#[derive(Serialize)]
struct Sizes<'a> {
    smallest: &'a Size<'a>,
    #[serde(skip)]
    largest: &'a Size<'a>,
    /// The sizes with the shortest step, the longest step, and the least predicted overhead.
    best: &'a Size<'a>,
    worst: &'a Size<'a>,
    predicted: &'a Size<'a>,
    several: bool,
    /// The worst step over the best, less one.
    differ: Quantity,
    /// What the best step saves without the copies into buckets.
    spared: Quantity,
    /// Communication over the best step.
    share: Quantity,
    overhead: Quantity,
    bandwidth: Quantity,
    model_bucket: Option<Quantity>,
}

/// One measured bucket size.
#[derive(Serialize)]
struct Size<'a> {
    #[serde(skip)]
    case: &'a Case<Params, Row>,
    #[serde(skip)]
    row: &'a Row,
    mb: f64,
    bucketed: StrategyNumbers,
    coalesced: StrategyNumbers,
    naive: StrategyNumbers,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<Bucketed>()?;
    let (measured, left_out) = of_one_machine(measured(&cases));
    let xl = Config::of_size(&TABLE_1[3], VOCAB_SIZE, 512);
    let (_, shape) = xl.parameter_shapes().next().context("a model has parameters")?;
    let is_bfloat16 = |case: &Case<Params, Row>| case.params.dtype == Precision::Bfloat16 && case.row().is_some();
    let quoted = Quoted {
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        bfloat16: cases.iter().any(is_bfloat16),
        last_ready: Quantity::constant(4.0 * shape.iter().product::<i64>() as f64, Unit::Bytes),
        left_out: left_out.iter().map(|size| grouped(size.mb, 1)).collect(),
        sizes: Sizes::of(&measured)?,
    };
    let mut answer = Answer::of(main, &quoted)?;
    for set in records.sets() {
        let cases: Vec<StepCase> = set.cases_as()?;
        let dtypes = if set.is_gpu() { &[Precision::Float32, Precision::Bfloat16][..] } else { &[Precision::Float32] };
        for dtype in dtypes {
            let mut of_dtype: Vec<_> = cases.iter().filter(|case| case.params.dtype == *dtype).collect();
            of_dtype.sort_by(|a, b| mb(&a.params).total_cmp(&mb(&b.params)));
            let table = steps_table(set, "bucket (MB)", &of_dtype, |params| grouped(mb(params), 1));
            answer.table(format!("steps-{}-{}", set.profile(), dtype.name()), table)?;
        }
    }
    if let Some(sizes) = &quoted.sizes {
        sizes.claims(&mut answer)?;
        answer.table("predictions", predictions(main, &measured))?;
        if sizes.several {
            answer.figure("model", model_figure(&measured))?;
        }
    }
    strategies(&mut answer, records)?;
    Ok(answer)
}

fn mb(params: &Params) -> f64 {
    params.bucket_size_mb.unwrap_or(0.0)
}

/// The float32 cases that were measured, by bucket size.
fn measured<'a>(cases: &'a [Case<Params, Row>]) -> Vec<Size<'a>> {
    let size = |case: &'a Case<Params, Row>| {
        let (case, row) = case.measured()?;
        let of = |name| StrategyNumbers::of(case, &row.steps, name);
        Some(Size {
            mb: mb(&case.params),
            bucketed: of(STRATEGY)?,
            coalesced: of(COALESCED)?,
            naive: of("naive")?,
            case,
            row,
        })
    };
    let float32 = cases.iter().filter(|case| case.params.dtype == Precision::Float32);
    let mut sizes: Vec<Size> = float32.filter_map(size).collect();
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

impl<'a> Sizes<'a> {
    /// `None` of no size; `sizes` ascend.
    fn of(sizes: &'a [Size<'a>]) -> Result<Option<Self>> {
        let Some(smallest) = sizes.first() else { return Ok(None) };
        let by = |key: fn(&Size) -> f64| sizes.iter().fold(smallest, |a, b| if key(b) < key(a) { b } else { a });
        let (best, worst) = (by(|size| size.bucketed.step.value()), by(|size| -size.bucketed.step.value()));
        let (case, row, fast) = (best.case, best.row, &best.bucketed.step);
        let longer = SameMachine::of(&worst.bucketed.step, fast)?.difference();
        Ok(Some(Self {
            smallest,
            largest: by(|size| -size.mb),
            best,
            worst,
            predicted: by(|size| size.row.model.predicted_overhead_s),
            several: sizes.len() > 1,
            differ: SameMachine::of(&longer, fast)?.ratio(),
            spared: SameRun::of(fast, &best.coalesced.step)?.difference(),
            share: SameRun::of(&best.bucketed.communication, fast)?.ratio(),
            overhead: case.quantity(row.steps.link.overhead_s, Unit::Seconds),
            bandwidth: case.quantity(row.steps.link.bytes_per_s, Unit::BytesPerSecond),
            model_bucket: row.model.best.as_ref().map(|model| case.quantity(model.bucket_bytes, Unit::Bytes)),
        }))
    }

    fn claims(&self, answer: &mut Answer) -> Result<()> {
        let Self { smallest, largest, best, predicted, spared, share, .. } = self;
        let megabytes = |size: &Size| format!("{} MB", size.mb);
        answer.claim(
            Claim::new("middle-is-best", best.mb != smallest.mb && best.mb != largest.mb)
                .operand_text("best size", megabytes(best))
                .operand_text("smallest", megabytes(smallest))
                .operand_text("largest", megabytes(largest)),
        )?;
        let (calls, tensors) = (smallest.bucketed.calls, smallest.naive.calls);
        answer.claim(
            Claim::new("at-the-smallest-size-nearly-every-matrix-travels-alone", calls as f64 > 0.6 * tensors as f64)
                .operand_text("calls", calls.to_string())
                .operand_text("tensors", tensors.to_string()),
        )?;
        answer.claim(Claim::above("no-copies-is-faster", "spared", spared, 0.0))?;
        answer.claim(Claim::below("little-to-gain", "communication over the step", share, 0.15))?;
        answer.claim(
            Claim::new("model-finds-the-best", predicted.mb == best.mb)
                .operand_text("the model's best", megabytes(predicted))
                .operand_text("fastest", megabytes(best)),
        )
    }
}

/// What the model says of each bucket size, beside what was measured.
fn predictions(set: &RecordSet, sizes: &[Size]) -> Table {
    let seconds = |size: &Size, s: f64| size.case.quantity(s, Unit::Seconds);
    Table::of(sizes)
        .right("bucket (MB)", |size| grouped(size.mb, 1))
        .right("calls $n_b$", |size| size.bucketed.calls.to_string())
        .number("$o$ (µs)", Style::Us, 0, |size| seconds(size, size.row.steps.link.overhead_s))
        .number("$w$ (GB/s)", Style::Gb, 1, |size| {
            size.case.quantity(size.row.steps.link.bytes_per_s, Unit::BytesPerSecond)
        })
        .number("predicted overhead (ms)", Style::Ms, 2, |size| seconds(size, size.row.model.predicted_overhead_s))
        .number("measured tail (ms)", Style::Ms, 2, |size| size.bucketed.tail.clone())
        .number("beyond single (ms)", Style::Ms, 2, |size| size.bucketed.beyond_single.clone())
        .number("best $n_b$", Style::Fixed, 1, |size| size.row.model.best.as_ref().map(|best| best.calls))
        .number("best bucket (MB)", Style::Mb, 1, |size| {
            let best = size.row.model.best.as_ref()?;
            Some(size.case.quantity(best.bucket_bytes, Unit::Bytes))
        })
        .captioned(format!(
            "The model with each case's own $o$ and $w$, from all-reduces of 64 KiB upwards on the same ranks just before \
             their steps, against what was measured. {}.",
            set.source()
        ))
}

fn model_figure(sizes: &[Size]) -> Figure {
    let series = |name: &str, value: fn(&Size) -> f64| {
        Series::over_numbers(name, sizes.iter().map(|size| (size.mb, Some(1e3 * value(size)))).collect::<Vec<_>>())
    };
    let predicted = series("predicted", |size| size.row.model.predicted_overhead_s);
    let tail = series("measured tail", |size| size.bucketed.tail.value());
    let plot = Plot::new(PlotKind::Line, "bucket size (MB)", "after the backward pass (ms)", vec![predicted, tail]);
    let alt = "Overhead after the backward pass against the bucket size: the model's prediction and the tail that was \
               measured.";
    Figure::plot(alt, Plot { log_x: true, ..plot })
}

/// Each strategy from the record of its own problem.
fn strategies(answer: &mut Answer, records: &Records) -> Result<()> {
    let sharded = records.other(SHARDED)?;
    let entries = [
        ("naive", records.other(NAIVE)?),
        ("flat", records.other(FLAT)?),
        ("overlap_individual_parameters", records.other(OVERLAPPED)?),
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
