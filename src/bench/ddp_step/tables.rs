//! Tables of data-parallel training steps, with a row for each implementation of each case.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::link::PooledLink;
pub use super::numbers::StrategyNumbers;
use super::numbers::{hidden, is_stable};
use super::{Params, Row, StrategyColumn, WITHOUT_OVERLAP};
use crate::bench::all_reduce::RankTimes;
use crate::collective::Backend;
use crate::harness::answer::format::{distinct, grouped, print};
use crate::harness::answer::machines::machines_of;
use crate::harness::answer::{
    Answer, Case, CaseId, CaseOutcome, Cell, Paired, Quantity, RecordSet, Records, Style, Table, TableBuilder, Turns,
    Unit,
};
use crate::model::SizeName;
use crate::units::MB;

/// The strategies in the order of tables, each with its name there.
pub const TITLES: [(&str, &str); 8] = [
    ("naive", "naive"),
    ("flat", "flat"),
    ("overlap_individual_parameters", "overlap, single gradients"),
    ("overlap_bucketed", "overlap, buckets"),
    ("overlap_coalesced", "overlap, buckets without copies"),
    ("sharded_optimizer", "sharded optimizer"),
    ("zero1", "ZeRO-1"),
    ("zero1_in_backward", "ZeRO-1, step in backward"),
];

/// What tables call a strategy; its own name if it has no other.
pub fn title(strategy: &'static str) -> &'static str {
    TITLES.iter().find(|(name, _)| *name == strategy).map_or(strategy, |(_, title)| *title)
}

/// What they call PyTorch's data parallelism.
pub const PYTORCH: &str = "PyTorch DDP";

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
        Self::new(params.size, params.backend, params.batch_size, params.context_length, params.world_size)
    }

    pub fn new(size: SizeName, backend: Backend, batch_size: i64, context: i64, world_size: usize) -> Self {
        let sequences = format!("{batch_size} sequence{}", if batch_size == 1 { "" } else { "s" });
        Self { size: size.size().name.into(), backend: backend.title(), sequences, context, world_size }
    }

    /// "the xl model over NCCL, 2 sequences of 512 tokens per rank".
    pub fn per_rank(&self) -> String {
        let Self { size, backend, sequences, context, .. } = self;
        format!("the {size} model over {backend}, {sequences} of {context} tokens per rank")
    }

    /// "the xl model on 2 ranks over NCCL, 2 sequences of 512 tokens per rank".
    pub fn describe(&self) -> String {
        let Self { size, backend, sequences, context, world_size } = self;
        format!("the {size} model on {world_size} ranks over {backend}, {sequences} of {context} tokens per rank")
    }
}

/// The cases that no sentence quotes, because their steps are not stable.
#[derive(Debug, Serialize)]
pub struct Unstable {
    /// What tables call these cases, with the size of their buckets where cases of others are stable.
    unstable: Vec<String>,
    /// The largest ratio between the medians of two turns of one of their columns.
    spread: Option<Quantity>,
}

impl Unstable {
    pub fn of(cases: &[StepCase], label: fn(&Params) -> String) -> Self {
        let measured = cases.iter().filter_map(|case| Some((case, case.row()?.steps())));
        let (stable, unstable): (Vec<_>, Vec<_>) = measured.partition(|(case, steps)| is_stable(case, steps));
        let name = |params: &Params| {
            let name = label(params);
            let is_of_some = stable.iter().any(|(case, _)| label(&case.params) == name);
            match params.bucket_size_mb.filter(|_| is_of_some) {
                Some(mb) => format!("{name} ({} MB)", size_mb(mb)),
                None => name,
            }
        };
        let lines = unstable.iter().flat_map(|(case, _)| lines(case).into_iter().map(move |line| (case, line)));
        let spreads = lines.filter_map(|(case, line)| Some(case.quantity(line.turns?.spread(), Unit::One)));
        let spread = Quantity::largest(spreads);
        Self { unstable: distinct(unstable.iter().map(|(case, _)| name(&case.params))), spread }
    }
}

/// "1,000" or "0.1".
pub fn size_mb(mb: f64) -> String {
    grouped(mb, if mb < 1.0 { 1 } else { 0 })
}

/// The answer of a problem that measures steps alone. Its template sees the setting, [`Unstable`], and
/// `answer.stable`, whether a stable case has the `numbers`; then it sees those of the first one, and the caller gets them.
///
/// On a GPU the tables are `steps-gpu`, what the handout asks for, and `streams-gpu`, the rest; of a CPU `steps-cpu` has all. Each
/// number of ranks has tables of its own ([`by_ranks`]), and all that is quoted is of the fewest.
///
/// Errors: no records, or rows of another shape.
pub fn steps_answer<N: Serialize>(
    records: &Records,
    numbers: impl Fn(&StepCase, &Row, &PooledLink) -> Option<N>,
) -> Result<(Answer, Option<N>)> {
    #[derive(Serialize)]
    struct Quoted<N> {
        #[serde(flatten)]
        setting: Option<StepSetting>,
        #[serde(flatten)]
        unstable: Unstable,
        stable: bool,
        #[serde(flatten)]
        numbers: Option<N>,
    }
    let main = records.main()?;
    let cases: Vec<StepCase> = on_fewest_ranks(main.cases_as()?);
    let label = |params: &Params| params.dtype.name().to_string();
    let rows = cases.iter().filter_map(|case| Some((case, case.row()?.steps())));
    let of_case = |(case, steps): (&StepCase, &Row)| -> Result<Option<N>> {
        Ok(PooledLink::of(records, case)?.and_then(|link| numbers(case, steps, &link)))
    };
    let mut stable = rows.filter(|(case, steps)| is_stable(case, steps));
    let numbers = stable.find_map(|case| of_case(case).transpose()).transpose()?;
    let quoted = Quoted {
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        unstable: Unstable::of(&cases, label),
        stable: numbers.is_some(),
        numbers,
    };
    let mut answer = Answer::of(main, &quoted)?;
    if let Some(set) = records.gpu() {
        let cases: Vec<StepCase> = set.cases_as()?;
        for (ranks, cases) in by_ranks(&cases) {
            answer.table(format!("steps-gpu{ranks}"), steps_table(&cases, "dtype", label, Shown::Asked))?;
            if cases.iter().any(|case| case.row().is_some()) {
                answer.table(format!("streams-gpu{ranks}"), steps_table(&cases, "dtype", label, Shown::Rest))?;
            }
        }
    }
    if let Some(set) = records.cpu() {
        steps_tables_of(&mut answer, set, "dtype", label)?;
    }
    Ok((answer, quoted.numbers))
}

/// Adds the table `steps-<profile>` of each profile, with all columns; `label` names a case.
pub fn steps_tables(answer: &mut Answer, records: &Records, head: &str, label: fn(&Params) -> String) -> Result<()> {
    records.sets().try_for_each(|set| steps_tables_of(answer, set, head, label))
}

fn steps_tables_of(answer: &mut Answer, set: &RecordSet, head: &str, label: fn(&Params) -> String) -> Result<()> {
    let cases: Vec<StepCase> = set.cases_as()?;
    by_ranks(&cases).into_iter().try_for_each(|(ranks, cases)| {
        answer.table(format!("steps-{}{ranks}", set.profile()), steps_table(&cases, head, label, Shown::All))
    })
}

/// The cases on each number of ranks, fewest first, each with the end of its table's name, which those on the fewest have not.
pub fn by_ranks<R>(cases: &[Case<Params, R>]) -> Vec<(String, Vec<&Case<Params, R>>)> {
    let mut numbers = distinct(cases.iter().map(|case| case.params.world_size));
    numbers.sort_unstable();
    let of = |ranks| cases.iter().filter(|case| case.params.world_size == ranks).collect();
    let end = |at: usize, ranks| if at == 0 { String::new() } else { format!("-{ranks}") };
    numbers.iter().enumerate().map(|(at, ranks)| (end(at, ranks), of(*ranks))).collect()
}

/// The cases on the fewest ranks, which sentences are about.
pub fn on_fewest_ranks<R>(mut cases: Vec<Case<Params, R>>) -> Vec<Case<Params, R>> {
    let fewest = cases.iter().map(|case| case.params.world_size).min();
    cases.retain(|case| Some(case.params.world_size) == fewest);
    cases
}

/// Which columns a table has: those that the handout asks for, the others, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    Asked,
    Rest,
    All,
}

/// Every implementation of every case; `label` names a case.
pub fn steps_table(cases: &[&StepCase], head: &str, label: fn(&Params) -> String, shown: Shown) -> Table {
    let mut lines: Vec<Line> = cases.iter().flat_map(|case| lines(case)).collect();
    if shown == Shown::Rest && lines.iter().any(|line| line.turns.is_some()) {
        lines.retain(|line| line.turns.is_some());
    }
    let hides = lines.iter().any(|line| line.hidden.is_some());
    let mut table =
        Table::of(lines).text(head, |line| label(&line.case.params)).text("implementation", |line| line.title.clone());
    if shown != Shown::Rest {
        table = asked(table, hides);
    }
    if shown != Shown::Asked {
        table = rest(table);
    }
    table.captioned(caption(cases, shown))
}

fn asked<'a>(table: TableBuilder<Line<'a>>, hides: bool) -> TableBuilder<Line<'a>> {
    let table = table
        .number("step (ms)", Style::Ms, 1, |line| {
            let step = line.turns.as_ref().and_then(|turns| Paired::median(&line.case.id, turns));
            step.map(|step| step.ms())
        })
        .number("above single (ms)", Style::Ms, 1, |line| line.beyond.as_ref().map(|beyond| beyond.ms()));
    let table = if hides {
        table.number("hidden", Style::Percent, 0, |line| line.hidden.as_ref().map(|hidden| hidden.all.clone()))
    } else {
        table
    };
    table.number("communication (ms)", Style::Ms, 1, |line| line.lane(|column| &column.communication))
}

fn rest<'a>(table: TableBuilder<Line<'a>>) -> TableBuilder<Line<'a>> {
    table
        .right("max/min of turns", |line| {
            line.turns.as_ref().map(|turns| {
                let spread = line.case.quantity(turns.spread(), Unit::One);
                let number = spread.mark(&print(spread.value(), Style::Fixed, 3));
                if turns.is_stable() { number } else { format!("unstable, {number}") }
            })
        })
        .number("exposed tail (ms)", Style::Ms, 1, |line| line.lane(|column| &column.tail))
        .number("stream overlap", Style::Percent, 0, |line| {
            line.column.map(|column| line.case.quantity(column.overlap, Unit::One))
        })
        .right("calls", |line| line.column.map(|column| column.calls.to_string()))
}

/// One row of a table of steps: an implementation in a case, or how the case ended.
struct Line<'a> {
    case: &'a StepCase,
    title: String,
    turns: Option<Turns>,
    /// The step less the one without communication.
    beyond: Option<Paired>,
    hidden: Option<Paired>,
    /// Of one of our strategies.
    column: Option<&'a StrategyColumn>,
}

/// Whether the strategy with this title hides nothing.
fn is_late(title: &str) -> bool {
    TITLES.iter().any(|(name, named)| *named == title && WITHOUT_OVERLAP.contains(name))
}

impl<'a> Line<'a> {
    fn lane(&self, of: fn(&StrategyColumn) -> &super::OverRanks) -> Option<Cell> {
        let turns = Turns::of(&of(self.column?).mean.samples, self.case.params.rounds);
        Some(Paired::median(&self.case.id, &turns)?.ms())
    }
}

fn lines<'a>(case: &'a StepCase) -> Vec<Line<'a>> {
    let empty = |title: String| Line { case, title, turns: None, beyond: None, hidden: None, column: None };
    let Some(steps) = case.row().map(AnyRow::steps) else { return vec![empty(ending(&case.outcome))] };
    let turns = |times: &RankTimes| times.turns(case.params.rounds);
    let single = turns(&steps.single);
    let line = |title: &str, times: &'a RankTimes, column: Option<&'a StrategyColumn>| Line {
        beyond: Paired::difference(&case.id, &turns(times), &single),
        hidden: hidden(case, steps, times).filter(|_| !is_late(title)),
        turns: Some(turns(times)),
        column,
        ..empty(title.into())
    };
    let mut lines = vec![Line { turns: Some(single.clone()), ..empty("single (no communication)".into()) }];
    for (name, title) in TITLES {
        lines.extend(steps.strategies.get(name).map(|column| line(title, &column.step, Some(column))));
    }
    lines.extend(steps.pytorch_ddp.as_ref().map(|theirs| line(PYTORCH, theirs, None)));
    lines
}

/// "not run: needs 6 GPUs, has 2".
pub fn ending<R>(outcome: &CaseOutcome<R>) -> String {
    match outcome {
        CaseOutcome::NotRun { needs, has, .. } => format!("{}: needs {needs}, has {has}", outcome.label()),
        _ => outcome.label().into(),
    }
}

/// The setting with the machine, how often it was timed, and what every strategy sends.
fn caption(cases: &[&StepCase], shown: Shown) -> String {
    let Some(first) = cases.first() else { return "No case is recorded.".into() };
    let mut ran: Vec<&CaseId> = cases.iter().filter(|case| case.row().is_some()).map(|case| &case.id).collect();
    if ran.is_empty() {
        ran = cases.iter().map(|case| &case.id).collect();
    }
    let setting = format!("{}, {}", StepSetting::of(&first.params).describe(), machines_of(ran));
    if shown == Shown::Rest {
        return format!("Further columns of the table of steps: {setting}.");
    }
    let columns = cases.iter().filter_map(|case| case.row()).flat_map(|row| row.steps().strategies.values());
    let sent = match distinct(columns.map(|column| column.bytes))[..] {
        [bytes] => format!(" Every strategy sends {} MB per step.", grouped(bytes as f64 / MB, 0)),
        _ => String::new(),
    };
    let runs = match distinct(cases.iter().map(|case| &case.id.run)).len() {
        1 => String::new(),
        runs => format!(" The cases come from {runs} runs."),
    };
    // A case may have more turns than the others.
    let any = |count: fn(&Params) -> usize| {
        let counts = distinct(cases.iter().map(|case| count(&case.params)));
        counts.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ")
    };
    let (steps, turns) = (any(|params| params.rounds * params.steps), any(|params| params.rounds));
    format!(
        "Training steps of {setting}: medians of {steps} steps, or ranges over {turns} turns where unstable.{sent}{runs}"
    )
}

#[cfg(test)]
mod tests;
