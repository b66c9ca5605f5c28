//! What the profiles show: which kernels take the time of a pass, and how far the profiler's times can be believed.

use anyhow::Result;
use serde::Serialize;

use super::measure::{NsysProfile, Params, Row};
use super::summary::{Kernel, Passes, RangeWork};
use crate::bench::kernels::Class;
use crate::harness::answer::format::grouped;
use crate::harness::answer::{
    Answer, Audience, Case, CaseOutcome, Cell, Column, Quantity, Records, Style, Table, Unit,
};
use crate::harness::record::Profile;
use crate::model::SizeName;

mod attention;
mod clock;
mod forward;
mod matmuls;
mod training;

use self::attention::AttentionTimes;
use self::clock::{Clock, Matmuls};
use self::forward::Forward;
use self::training::Training;

type ProfileCase = Case<Params, Row>;

/// The grid of the handout's sizes and contexts, and the one of a case with AdamW in plain tensor operations.
const GRID: &str = "profile";
const PLAIN: &str = "plain";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    /// Whether a case was measured, with a training step, and with products of attention known by their names.
    measured: bool,
    trained: bool,
    compared: bool,
    /// "20 of 20": the cases that did not run out of memory.
    fit: String,
    #[serde(flatten)]
    numbers: Option<Numbers>,
}

/// The numbers of all measured cases, and of the one that sentences are about.
#[derive(Serialize)]
struct Numbers {
    /// "xl at context 512".
    example: String,
    #[serde(flatten)]
    clock: Clock,
    #[serde(flatten)]
    matmuls: Matmuls,
    #[serde(flatten)]
    forward: Forward,
    #[serde(flatten)]
    training: Option<Training>,
    #[serde(flatten)]
    attention: Option<AttentionTimes>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<NsysProfile>()?;
    let cells = of_grid(&cases, GRID);
    let profiles: Vec<Profiled> = cells.iter().filter_map(|case| Profiled::of(case)).collect();
    let plain: Vec<Profiled> = of_grid(&cases, PLAIN).into_iter().filter_map(Profiled::of).collect();
    let trained: Vec<Profiled> = profiles.iter().copied().filter(|profile| profile.step().is_some()).collect();
    let example = example(&trained).or_else(|| example(&profiles));
    let numbers = example.and_then(|example| Numbers::of(&profiles, example, &plain));
    let lost = cells.iter().filter(|case| matches!(case.outcome, CaseOutcome::OutOfMemory { .. })).count();
    let quoted = Quoted {
        measured: numbers.is_some(),
        trained: numbers.as_ref().is_some_and(|numbers| numbers.training.is_some()),
        compared: numbers.as_ref().is_some_and(|numbers| numbers.attention.is_some()),
        fit: n_of(cells.len() - lost, cells.len()),
        numbers,
    };
    let mut answer = Answer::of(main, &quoted)?;
    for (i, set) in records.sets().enumerate() {
        let cases = set.cases::<NsysProfile>()?;
        answer.table(if i == 0 { "times" } else { "cpu-times" }, clock::table(set, &of_grid(&cases, GRID))?)?;
    }
    let (Some(numbers), Some(example)) = (&quoted.numbers, example) else { return Ok(answer) };
    answer.claim(numbers.matmuls.claim.clone())?;
    numbers.clock.claim.iter().cloned().try_for_each(|claim| answer.claim(claim))?;
    answer.table("kernels", forward::kernel_table(main, example, &matmuls::computed(&example))?)?;
    answer.figure("classes", forward::figure(main, &profiles, example)?)?;
    answer.table("top", forward::top_table(main, &cells)?)?;
    answer.table("shares", training::table(main, &cells)?)?;
    if numbers.attention.is_some() {
        answer.table("attention", attention::table(main, &cells)?)?;
    }
    Ok(answer)
}

impl Numbers {
    /// None where the example lists no kernel.
    fn of(profiles: &[Profiled], example: Profiled, plain: &[Profiled]) -> Option<Self> {
        Some(Self {
            example: example.place(),
            clock: Clock::of(profiles)?,
            matmuls: Matmuls::of(profiles),
            forward: Forward::of(profiles, example, &matmuls::computed(&example))?,
            training: Training::of(profiles, example, plain),
            attention: AttentionTimes::of(profiles, example),
        })
    }
}

/// "16 of 20".
fn n_of(fulfil: usize, of: usize) -> String {
    format!("{fulfil} of {of}")
}

/// A case that was measured.
#[derive(Clone, Copy)]
struct Profiled<'a> {
    case: &'a ProfileCase,
    row: &'a Row,
}

impl<'a> Profiled<'a> {
    fn of(case: &'a ProfileCase) -> Option<Self> {
        Some(Self { case, row: case.row()? })
    }

    fn is_gpu(&self) -> bool {
        self.case.id.profile == Profile::Gpu
    }

    /// What is counted: a GPU's kernels, or libtorch's operators on a CPU.
    fn noun(&self) -> &'static str {
        if self.is_gpu() { "kernel" } else { "operator" }
    }

    fn params(&self) -> &'a Params {
        &self.case.params
    }

    fn size(&self) -> &'static str {
        self.params().size.size().name
    }

    /// "xl at context 512".
    fn place(&self) -> String {
        format!("{} at context {}", self.size(), context(self.params()))
    }

    fn inference(&self) -> &'a RangeWork {
        &self.row.passes.inference
    }

    /// What takes the most time of the inference pass.
    fn top(&self) -> Option<&'a Kernel> {
        self.row.passes.inference.kernels.first()
    }

    /// Forward pass, backward pass and AdamW of the training step, where one was profiled.
    fn step(&self) -> Option<[&'a RangeWork; 3]> {
        let Passes { forward, backward, optimizer, .. } = &self.row.passes;
        Some([forward.as_ref()?, backward.as_ref()?, optimizer.as_ref()?])
    }

    fn seconds(&self, value: f64) -> Quantity {
        self.case.quantity(value, Unit::Seconds)
    }

    fn number(&self, value: f64) -> Quantity {
        self.case.quantity(value, Unit::One)
    }

    /// "1,200", with the mark of the case.
    fn count(&self, count: u64) -> String {
        self.number(count as f64).text(Style::Grouped, 0)
    }

    /// A share of zero seconds is zero.
    fn over(&self, part: f64, whole: f64) -> Quantity {
        self.number(if whole > 0.0 { part / whole } else { 0.0 })
    }
}

fn of_grid<'a>(cases: &'a [ProfileCase], grid: &str) -> Vec<&'a ProfileCase> {
    cases.iter().filter(|case| case.grid == grid).collect()
}

fn context(params: &Params) -> String {
    grouped(params.context_length as f64, 0)
}

/// xl at context 512; without it the last size at 512, or at the longest context.
fn example<'a>(profiles: &[Profiled<'a>]) -> Option<Profiled<'a>> {
    let contexts = || profiles.iter().map(|profile| profile.params().context_length);
    let shown = contexts().find(|context| *context == 512).or_else(|| contexts().max())?;
    let at_shown = || profiles.iter().filter(|profile| profile.params().context_length == shown);
    at_shown().find(|profile| profile.params().size == SizeName::Xl).or(at_shown().next_back()).copied()
}

fn of_class(work: &RangeWork, class: Class) -> f64 {
    work.classes.get(&class).map_or(0.0, |tally| tally.seconds)
}

fn is_product(kernel: &Kernel) -> bool {
    matches!(kernel.class, Class::Matmul | Class::MatmulHelper)
}

/// Seconds of matrix products, and of the kernels that sum the parts of split ones.
fn products(work: &RangeWork) -> f64 {
    of_class(work, Class::Matmul) + of_class(work, Class::MatmulHelper)
}

/// The first records hold the driver's copies, in every direction, and fills together and without a name.
fn named(kernel: &Kernel) -> String {
    if kernel.name.is_empty() { "the driver's copies and fills".into() } else { format!("`{}`", kernel.name) }
}

/// What a column shows of a profile.
type ProfiledCell = fn(&Profiled) -> Cell;

/// A line for each case: size, context and these columns; one that was not measured has its outcome instead.
fn lines<const N: usize>(cases: &[&ProfileCase], columns: [(Column, ProfiledCell); N]) -> Table {
    let (heads, cells): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
    let mut table = Table::new([vec![Column::text("size"), Column::right("context")], heads].concat());
    for case in cases {
        let mut line: Vec<Cell> = vec![case.params.size.size().name.into(), context(&case.params).into()];
        match Profiled::of(case) {
            Some(profile) => line.extend(cells.iter().map(|cell| cell(&profile))),
            None => line.push(case.outcome.label().into()),
        }
        line.resize(table.columns.len(), Cell::Missing);
        table.row(line);
    }
    table
}

#[cfg(test)]
mod tests;
