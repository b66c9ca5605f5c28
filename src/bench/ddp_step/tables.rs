//! Tables of data-parallel training steps, with a line a column of each case.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{Params, Row};
use crate::bench::all_reduce::RankTimes;
use crate::collective::Backend;
use crate::harness::answer::{Answer, Case, CaseOutcome, Quantity, RecordSet, Records, SameRun, Style, Table, Unit};
use crate::harness::stats;

/// The strategies in the order of tables, each with its name there.
pub const TITLES: [(&str, &str); 8] = [
    ("naive", "naive: a call a parameter"),
    ("flat", "flat: one call"),
    ("overlap_individual_parameters", "overlapped: a call a parameter"),
    ("overlap_bucketed", "overlapped: buckets"),
    ("overlap_coalesced", "overlapped: buckets, no copies"),
    ("sharded_optimizer", "overlapped, sharded optimizer"),
    ("zero1", "ZeRO-1"),
    ("zero1_in_backward", "ZeRO-1, stepping in backward"),
];

/// A row of any problem on data parallelism.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum AnyRow {
    Within { steps: Row },
    Alone(Row),
}

impl AnyRow {
    pub fn steps(&self) -> &Row {
        match self {
            Self::Within { steps } | Self::Alone(steps) => steps,
        }
    }
}

pub type StepCase = Case<Params, AnyRow>;

/// The setting of a record's cases, as sentences describe it.
#[derive(Debug, Clone, Serialize)]
pub struct StepSetting {
    pub size: String,
    pub backend: &'static str,
    /// Sequences of one rank in a step: "1 sequence", "2 sequences".
    pub sequences: String,
    /// Tokens in a sequence.
    pub context: i64,
    pub world_size: usize,
}

impl StepSetting {
    pub fn of(params: &Params) -> Self {
        Self {
            size: params.size.size().name.into(),
            backend: match params.backend {
                Backend::Gloo => "Gloo",
                Backend::Nccl => "NCCL",
            },
            sequences: format!("{} sequence{}", params.batch_size, if params.batch_size == 1 { "" } else { "s" }),
            context: params.context_length,
            world_size: params.world_size,
        }
    }

    /// "the xl model on 2 ranks over NCCL (GPU), 2 sequences of 512 tokens a rank".
    pub fn describe(&self) -> String {
        let Self { size, backend, sequences, context, world_size } = self;
        let device = if *backend == "Gloo" { "CPU" } else { "GPU" };
        format!(
            "the {size} model on {world_size} ranks over {backend} ({device}), {sequences} of \
             {context} tokens a rank"
        )
    }
}

/// The quantities of one strategy in one case.
#[derive(Serialize)]
pub struct StrategyNumbers {
    pub step: Quantity,
    /// The step without communication, and PyTorch's DDP.
    pub single: Quantity,
    pub pytorch: Option<Quantity>,
    /// The step less that without communication, and its ratio to it.
    pub beyond_single: Quantity,
    pub over_single: Quantity,
    pub communication: Quantity,
    pub tail: Quantity,
    pub hidden: Quantity,
    pub bytes: Quantity,
    pub bus_bytes: Quantity,
    pub calls: u64,
}

impl StrategyNumbers {
    /// `None` if the case, whose row holds `steps`, did not measure the strategy.
    pub fn of<R>(case: &Case<Params, R>, steps: &Row, strategy: &str) -> Option<Self> {
        let column = steps.strategies.get(strategy)?;
        let (step, single) = (case.median(&column.step.last_rank), case.median(&steps.single.last_rank));
        Some(Self {
            pytorch: steps.pytorch_ddp.as_ref().map(|theirs| case.median(&theirs.last_rank)),
            beyond_single: SameRun::of(&step, &single).ok()?.difference(),
            over_single: SameRun::of(&step, &single).ok()?.ratio(),
            communication: case.median(&column.communication.mean),
            tail: case.median(&column.tail.mean),
            hidden: case.quantity(column.overlap, Unit::One),
            bytes: case.quantity(column.bytes as f64, Unit::Bytes),
            bus_bytes: case.quantity(column.bus_bytes, Unit::Bytes),
            calls: column.calls,
            step,
            single,
        })
    }
}

/// The answer of a problem that measures steps alone, with the tables `steps-<profile>`. Its template sees the setting and
/// `answer.measured`, whether a case has the `numbers`; then it sees those of the first one, and the caller gets them.
///
/// Errors: no records, or rows of another shape.
pub fn steps_answer<N: Serialize>(
    records: &Records,
    numbers: impl Fn(&StepCase, &Row) -> Option<N>,
) -> Result<(Answer, Option<N>)> {
    #[derive(Serialize)]
    struct Quoted<N> {
        #[serde(flatten)]
        setting: Option<StepSetting>,
        measured: bool,
        #[serde(flatten)]
        numbers: Option<N>,
    }
    let main = records.main()?;
    let cases: Vec<StepCase> = main.cases_as()?;
    let setting = cases.first().map(|case| StepSetting::of(&case.params));
    let numbers = cases.iter().find_map(|case| numbers(case, case.row()?.steps()));
    let quoted = Quoted { setting, measured: numbers.is_some(), numbers };
    let mut answer = Answer::of(main, &quoted)?;
    steps_tables(&mut answer, records, "arithmetic", |params| params.dtype.name().into())?;
    Ok((answer, quoted.numbers))
}

/// Adds the table `steps-<profile>` of each profile; `label` names a case.
pub fn steps_tables(answer: &mut Answer, records: &Records, head: &str, label: fn(&Params) -> String) -> Result<()> {
    for set in records.sets() {
        let cases = set.cases_as()?;
        answer.table(
            format!("steps-{}", set.profile()),
            steps_table(set, head, &cases.iter().collect::<Vec<_>>(), label),
        )?;
    }
    Ok(())
}

/// Every column of every case; `label` names a case.
pub fn steps_table(set: &RecordSet, head: &str, cases: &[&StepCase], label: fn(&Params) -> String) -> Table {
    let p99 = |samples: &[f64]| stats::quantile(samples, 0.99);
    let of = |number: fn(&StrategyNumbers) -> &Quantity| move |line: &Line| line.numbers.as_ref().map(number).cloned();
    Table::of(cases.iter().flat_map(|case| lines(case)))
        .text(head, |line| label(&line.case.params))
        .text("column", |line| line.title.clone())
        .number("step (ms)", Style::Ms, 1, |line| line.times.map(|times| line.case.median(&times.last_rank)))
        .number("p99 (ms)", Style::Ms, 1, |line| line.times.map(|times| line.case.statistic(&times.last_rank, p99)))
        .number("beyond single (ms)", Style::Ms, 1, |line| line.beyond.clone())
        .number("communication (ms)", Style::Ms, 1, of(|numbers| &numbers.communication))
        .number("exposed tail (ms)", Style::Ms, 1, of(|numbers| &numbers.tail))
        .number("hidden", Style::Percent, 0, of(|numbers| &numbers.hidden))
        .number("MB sent", Style::Mb, 1, of(|numbers| &numbers.bytes))
        .right("calls", |line| line.numbers.as_ref().map(|numbers| numbers.calls.to_string()))
        .captioned(caption(set, cases))
}

/// One line of a table of steps: a column of a case, or how the case ended.
struct Line<'a> {
    case: &'a StepCase,
    title: String,
    times: Option<&'a RankTimes>,
    /// The step less the one without communication.
    beyond: Option<Quantity>,
    numbers: Option<StrategyNumbers>,
}

fn lines<'a>(case: &'a StepCase) -> Vec<Line<'a>> {
    let ended = Line { case, title: ending(&case.outcome), times: None, beyond: None, numbers: None };
    let Some(steps) = case.row().map(AnyRow::steps) else { return vec![ended] };
    let single = stats::median(&steps.single.last_rank.samples);
    let line = |title: &str, times: &'a RankTimes| {
        let beyond = case.quantity(stats::median(&times.last_rank.samples) - single, Unit::Seconds);
        Line { title: title.into(), times: Some(times), beyond: Some(beyond), numbers: None, case }
    };
    let mut lines = vec![Line { beyond: None, ..line("single process", &steps.single) }];
    for (name, title) in TITLES {
        let Some(column) = steps.strategies.get(name) else { continue };
        lines.push(Line { numbers: StrategyNumbers::of(case, steps, name), ..line(title, &column.step) });
    }
    lines.extend(steps.pytorch_ddp.as_ref().map(|theirs| line("PyTorch DDP", theirs)));
    lines
}

/// "not run: needs 6 GPUs, has 2".
pub fn ending<R>(outcome: &CaseOutcome<R>) -> String {
    match outcome {
        CaseOutcome::NotRun { needs, has, .. } => format!("{}: needs {needs}, has {has}", outcome.label()),
        _ => outcome.label().into(),
    }
}

fn caption(set: &RecordSet, cases: &[&StepCase]) -> String {
    let Some(first) = cases.first() else { return format!("{}.", set.source()) };
    let Params { rounds, steps, warmup, .. } = first.params;
    format!(
        "Training steps of {}: medians of {} steps a column, taken in {rounds} rounds of turns, each after {warmup} \
         untimed. {}.",
        StepSetting::of(&first.params).describe(),
        rounds * steps,
        set.source()
    )
}

#[cfg(test)]
mod tests;
