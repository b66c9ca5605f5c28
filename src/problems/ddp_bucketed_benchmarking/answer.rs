//! Which bucket size is best, what a model of calls and bandwidth says of it, and all strategies side by side.

use anyhow::Result;
use serde::Serialize;

use self::fused_steps::{FusedStep, Way, fused_steps};
use self::scaling::Scaling;
use self::sizes::{BucketCase, Sizes, measured, of_one_machine, prediction_table, size_table};
use self::strategies::{StrategyRecords, side_by_side};
use self::wheel::Wheel;
use super::measure::Bucketed;
use super::{COALESCED, STRATEGY};
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::numbers::NAIVE;
use crate::bench::ddp_step::tables::{Shown, StepCase, Unstable, by_ranks, on_fewest_ranks, size_mb, steps_table};
use crate::harness::answer::{Answer, Audience, Claim, Paired, Quantity, RecordSet, Records};
use crate::harness::record::Profile;
use crate::model::Precision;

mod fused_steps;
mod scaling;
mod sizes;
mod strategies;
mod wheel;

/// The problems whose records the table of all strategies reads.
pub const READS: &[&str] = &[NAIVE_PROBLEM, FLAT_PROBLEM, OVERLAP_PROBLEM, SHARDED_PROBLEM, FUSED_PROBLEM];
const NAIVE_PROBLEM: &str = "naive_ddp_benchmarking";
const FLAT_PROBLEM: &str = "minimal_ddp_flat_benchmarking";
const OVERLAP_PROBLEM: &str = "ddp_overlap_individual_parameters_benchmarking";
const SHARDED_PROBLEM: &str = "optimizer_state_sharding_accounting";
const FUSED_PROBLEM: &str = "torch_compile";
const SINGLE_CALLS: &str = "overlap_individual_parameters";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted<'a> {
    #[serde(flatten)]
    unstable: Unstable,
    /// The fewest ranks that were measured.
    ranks: Option<usize>,
    /// Whether a size is stable there; then the numbers of the sizes follow.
    sized: bool,
    #[serde(flatten)]
    sizes: Option<Sizes<'a>>,
    single_calls: Option<SingleCalls>,
    fused: Option<Fused>,
    wheel: Option<Wheel>,
    /// Whether steps on several numbers of ranks are stable.
    scaled: bool,
}

/// The fused step with buckets, captured with its collectives.
#[derive(Serialize)]
struct Fused {
    step: Quantity,
    /// What it takes longer than without communication.
    adds: Quantity,
}

impl Fused {
    /// Of a GPU's bfloat16 steps, if they are stable.
    fn of(set: Option<&RecordSet>) -> Result<Option<Self>> {
        let steps = set.map(fused_steps).transpose()?.unwrap_or_default();
        let buckets = steps.into_iter().find(|step| step.dtype == Precision::Bfloat16 && step.way == Way::Buckets);
        Ok(buckets
            .filter(|step| step.adds.stable)
            .map(|FusedStep { step, adds, .. }| Self { step: step.all, adds: adds.all }))
    }
}

/// Buckets and single parameters in turns of one case, of another problem.
#[derive(Serialize)]
struct SingleCalls {
    mb: f64,
    /// What buckets take longer than single parameters.
    longer: Paired,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let sharded = records.other(SHARDED_PROBLEM)?;
    let cases = on_fewest_ranks(main.cases::<Bucketed>()?);
    let (measured, left_out) = of_one_machine(measured(&cases));
    let scaling = Scaling::of(&[records, sharded], main.profile())?;
    let quoted = Quoted {
        unstable: Unstable::of(&on_fewest_ranks(main.cases_as()?), |params| params.dtype.name().into()),
        ranks: cases.first().map(|case| case.params.world_size),
        sized: !measured.is_empty(),
        sizes: Sizes::of(&measured, records)?,
        wheel: Wheel::of(&cases),
        single_calls: single_calls(sharded.of(main.profile()))?,
        fused: Fused::of(records.other(FUSED_PROBLEM)?.gpu().filter(|_| main.is_gpu()))?,
        scaled: scaling.is_some(),
    };
    let mut answer = Answer::of(main, &quoted)?;
    for set in records.sets() {
        steps_tables(&mut answer, set)?;
        wheel::table(&mut answer, set, &on_fewest_ranks(set.cases::<Bucketed>()?))?;
    }
    if let Some(claim) = quoted.wheel.as_ref().and_then(|wheel| wheel.claim.clone()) {
        answer.claim(claim)?;
    }
    if let Some(sizes) = &quoted.sizes {
        sizes.claims(&mut answer)?;
        answer.table("sizes", size_table(&measured, &left_out))?;
        answer.table("predictions", prediction_table(&measured, &sizes.link))?;
        let longer = quoted.single_calls.as_ref().map(|calls| &calls.longer);
        let claim = Claim::new("single-calls-win", longer.is_some_and(Paired::is_positive));
        answer.claim(match longer {
            Some(longer) => claim.operand("buckets longer by at least", &longer.range.low),
            None => claim,
        })?;
    }
    strategies(&mut answer, records)?;
    if let Some(scaling) = scaling {
        answer.table(format!("strategies-{}-ranks", main.profile()), scaling.table())?;
        answer.figure("scaling", scaling.figure())?;
    }
    Ok(answer)
}

fn mb(params: &Params) -> f64 {
    params.bucket_size_mb.unwrap_or(0.0)
}

/// All steps of a profile, one table for each dtype.
fn steps_tables(answer: &mut Answer, set: &RecordSet) -> Result<()> {
    let cases: Vec<StepCase> = set.cases_as()?;
    for dtype in [Precision::Float32, Precision::Bfloat16] {
        for (ranks, mut cases) in by_ranks(&cases) {
            cases.retain(|case| case.params.dtype == dtype);
            cases.sort_by(|a, b| mb(&a.params).total_cmp(&mb(&b.params)));
            if cases.is_empty() {
                continue;
            }
            let table = steps_table(&cases, "bucket (MB)", |params| size_mb(mb(params)), Shown::All);
            let caption = format!("{}: {}", dtype.name(), table.caption.clone().unwrap_or_default());
            answer.table(format!("steps-{}-{}{ranks}", set.profile(), dtype.name()), table.captioned(caption))?;
        }
    }
    Ok(())
}

/// Of the first stable case on the fewest ranks that has both strategies.
fn single_calls(set: Option<&RecordSet>) -> Result<Option<SingleCalls>> {
    let cases: Vec<StepCase> = on_fewest_ranks(set.map(RecordSet::cases_as).transpose()?.unwrap_or_default());
    Ok(cases.iter().find_map(|case| {
        let steps = case.row()?.steps();
        let rounds = |name| Some(steps.strategies.get(name)?.step.turns(case.params.rounds));
        let longer = Paired::difference(&case.id, &rounds(STRATEGY)?, &rounds(SINGLE_CALLS)?)?;
        longer.stable.then(|| SingleCalls { mb: mb(&case.params), longer })
    }))
}

/// Each strategy from the record of its own problem.
fn strategies(answer: &mut Answer, records: &Records) -> Result<()> {
    let sharded = records.other(SHARDED_PROBLEM)?;
    let entries: [StrategyRecords; 8] = [
        (NAIVE, records.other(NAIVE_PROBLEM)?),
        ("flat", records.other(FLAT_PROBLEM)?),
        (SINGLE_CALLS, records.other(OVERLAP_PROBLEM)?),
        (STRATEGY, records),
        (COALESCED, records),
        ("sharded_optimizer", sharded),
        ("zero1", sharded),
        ("zero1_in_backward", sharded),
    ];
    let main = records.main()?.profile();
    for profile in [Profile::Gpu, Profile::Cpu] {
        let machines = side_by_side(&entries, records.other(FUSED_PROBLEM)?, profile)?;
        for (i, machine) in machines.iter().enumerate() {
            answer.table(format!("strategies-{profile}-{i}"), machine.table())?;
        }
        let chart = machines.first().filter(|_| profile == main).and_then(|machine| machine.chart());
        if let Some(chart) = chart {
            answer.figure("summary", chart.in_place())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
