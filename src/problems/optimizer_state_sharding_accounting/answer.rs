//! What sharding the optimizer's state saves in memory, what it costs in time, and what ZeRO stage 1 sends.

use anyhow::Result;
use serde::Serialize;

use self::memory::MemoryNumbers;
use self::steps::{StepNumbers, Unstable};
use super::measure::{Row, Sharding};
use super::memory::RankMemory;
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::link::PooledLink;
use crate::bench::ddp_step::tables::{StepSetting, ending, on_fewest_ranks, steps_tables};
use crate::harness::answer::machines::machines_of;
use crate::harness::answer::{Answer, Audience, Case, Records, Style};
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1};

mod memory;
mod steps;

type ShardingCase = Case<Params, Row>;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    #[serde(flatten)]
    setting: Option<StepSetting>,
    /// Whether a case was measured; then the memory of the first one follows.
    measured: bool,
    #[serde(flatten)]
    memory: Option<MemoryNumbers>,
    /// Whether the steps of a case are stable; then those of the first such case follow.
    timed: bool,
    #[serde(flatten)]
    steps: Option<StepNumbers>,
    /// The first measured case whose steps are not stable.
    unstable: Option<Unstable>,
    /// How each case ended where none was measured.
    endings: Vec<String>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = on_fewest_ranks(main.cases::<Sharding>()?);
    let measured = || cases.iter().filter_map(Case::measured);
    let first = measured().next();
    let ended = |case: &ShardingCase| format!("{}: {}", case.params.dtype.name(), ending(&case.outcome));
    let memory = first.and_then(|(case, row)| MemoryNumbers::of(case, row));
    let steps = |(case, row): (&ShardingCase, &Row)| -> Result<Option<StepNumbers>> {
        Ok(PooledLink::of(records, case)?.and_then(|link| StepNumbers::of(case, row, &link)))
    };
    let steps = measured().find_map(|case| steps(case).transpose()).transpose()?;
    let quoted = Quoted {
        measured: memory.is_some(),
        timed: steps.is_some(),
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        memory,
        steps,
        unstable: measured().find_map(|(case, row)| Unstable::of(case, row)),
        endings: if first.is_none() { cases.iter().map(ended).collect() } else { Vec::new() },
    };
    let mut answer = Answer::of(main, &quoted)?;
    if let (Some(memory), Some((case, row))) = (&quoted.memory, first) {
        memory.claims(&mut answer)?;
        answer.table("memory", memory::table(case, row))?;
        answer.table("moments", memory::other_moments(case, row))?;
        answer.table("volumes", steps::volume_table(case, row))?;
    }
    if let Some(steps) = &quoted.steps {
        steps.claims(&mut answer)?;
    }
    let label = |p: &Params| format!("{}, {:.0} MB", p.dtype.name(), p.bucket_size_mb.unwrap_or(0.0));
    steps_tables(&mut answer, records, "dtype, buckets", label)?;
    Ok(answer)
}

/// Rank 0 under one scheme, with its five moments.
fn rank_0<'a>(row: &'a Row, scheme: &str) -> Option<&'a RankMemory> {
    row.memory.get(scheme)?.first().filter(|rank| rank.moments.len() >= 5)
}

fn scheme_name(scheme: &str) -> &'static str {
    match scheme {
        SHARDED_OPTIMIZER => "sharded",
        ZERO1 => "ZeRO-1",
        _ => "not sharded",
    }
}

fn machine(case: &ShardingCase) -> String {
    machines_of([&case.id])
}

/// The unit that tables of a machine's memory use.
fn memory_style(case: &ShardingCase) -> (Style, &'static str) {
    if case.id.machine().gpus.is_empty() { (Style::Mib, "MiB") } else { (Style::Gib, "GiB") }
}

#[cfg(test)]
mod tests;
