//! Part (c): the same measurement after none, one, two and the sweep's warm-up steps.

use anyhow::Result;
use serde::Serialize;

use super::{Part, SWEEP, StepCase, TOTAL, cell, digits, mean, median, noise, of_grid, ratio, sizes};
use crate::bench::training_step::{Params, Row};
use crate::harness::answer::format::print;
use crate::harness::answer::{Answer, Case, Claim, Quantity, RecordSet, SameRun, Style, Table, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats;

const GRID: &str = "warmup";
const FORWARD: Part = |row| row.forward.as_ref();

#[derive(Serialize)]
pub(super) struct WarmUp {
    size: &'static str,
    /// Whole steps without warm-up: the first with its parts ("forward 364.0"), over the median, and the second.
    first: Quantity,
    parts: Vec<String>,
    start: Quantity,
    second: Quantity,
    #[serde(skip)]
    slowest: Quantity,
    /// The forward pass without warm-up and with the sweep's.
    cold_mean: Quantity,
    cold_std: Quantity,
    warm_mean: Quantity,
    warm_std: Quantity,
    /// Medians in ms after one warm-up step and two, and after the sweep's, with their number.
    medians: Vec<String>,
    warm: Quantity,
    warmup: usize,
    /// How far the first counted step is from its run's median after one, two and the sweep's, at most.
    apart: Quantity,
    /// Runs of the study, and those of them in whose process other cases had run before: "small with 1".
    #[serde(skip)]
    runs: usize,
    shared: Vec<String>,
}

/// Two or more measured steps of one case.
struct Steps<'a> {
    case: &'a StepCase,
    row: &'a Row,
    forward: &'a Samples,
}

impl<'a> Steps<'a> {
    fn of(case: &'a StepCase) -> Option<Self> {
        let row = case.row()?;
        let forward = row.forward.as_ref().filter(|samples| samples.samples.len() > 1)?;
        Some(Self { case, row, forward })
    }

    fn forward(&self, statistic: fn(&[f64]) -> f64) -> Quantity {
        self.case.statistic(self.forward, statistic)
    }

    fn median(&self) -> Quantity {
        self.case.median(&self.row.total)
    }

    fn total(&self, at: usize) -> Option<Quantity> {
        sample(self.case, &self.row.total, at)
    }

    /// The first step over the median.
    fn start(&self) -> Option<Quantity> {
        Some(SameRun::of(&self.total(0)?, &self.median()).ok()?.ratio())
    }

    /// How far the two are apart.
    fn apart(&self) -> Option<Quantity> {
        Some(self.case.quantity((self.start()?.value() - 1.0).abs(), Unit::One))
    }
}

fn sample(case: &StepCase, samples: &Samples, at: usize) -> Option<Quantity> {
    Some(case.quantity(*samples.samples.get(at)?, Unit::Seconds))
}

fn ms(time: &Quantity) -> String {
    print(time.value(), Style::Ms, 1)
}

impl WarmUp {
    /// None where a case of the first size is missing, or has one step alone.
    pub(super) fn of(cases: &[StepCase]) -> Option<Self> {
        let studied = of_grid(cases, GRID);
        let p = &studied.first()?.params;
        let find = |grid: &str, wanted: &dyn Fn(&Params) -> bool| {
            let same = |q: &Params| (q.size, q.context_length) == (p.size, p.context_length) && wanted(q);
            Steps::of(cases.iter().find(|case| case.grid == grid && same(&case.params))?)
        };
        let after = |warmup| find(GRID, &|q| q.warmup == warmup);
        let (cold, one, two, warm) = (after(0)?, after(1)?, after(2)?, find(SWEEP, &|_| true)?);
        let named = [("forward", &cold.row.forward), ("backward", &cold.row.backward), ("AdamW", &cold.row.optimizer)];
        let parts = named
            .iter()
            .filter_map(|(name, samples)| Some(format!("{name} {}", ms(&sample(cold.case, samples.as_ref()?, 0)?))));
        let measured: Vec<_> = studied.iter().filter_map(|case| Case::measured(case)).collect();
        let shared = measured.iter().filter(|(_, row)| !row.first_in_process).map(|(case, _)| &case.params);
        Some(Self {
            size: p.size.size().name,
            first: cold.total(0)?,
            parts: parts.collect(),
            start: cold.start()?,
            second: cold.total(1)?,
            slowest: cold.case.statistic(&cold.row.total, stats::max),
            cold_mean: cold.forward(stats::mean),
            cold_std: cold.forward(stats::std),
            warm_mean: warm.forward(stats::mean),
            warm_std: warm.forward(stats::std),
            medians: [&one, &two].map(|steps| ms(&steps.median())).to_vec(),
            warm: warm.median(),
            warmup: warm.case.params.warmup,
            apart: Quantity::largest([one.apart()?, two.apart()?, warm.apart()?])?,
            runs: measured.len(),
            shared: shared.map(|p| format!("{} with {}", p.size.size().name, p.warmup)).collect(),
        })
    }

    /// Adds the claims.
    pub(super) fn conclude(&self, answer: &mut Answer) -> Result<()> {
        let Self { first, slowest, cold_mean, cold_std, warm_mean, warm_std, .. } = self;
        let above = |cold, warm, least| ratio(cold, warm).is_some_and(|ratio| ratio.value() > least);
        answer.claim(
            Claim::new("cold-mean-is-higher", above(cold_mean, warm_mean, 1.05) && above(cold_std, warm_std, 1.0))
                .operand("mean without warm-up", cold_mean)
                .operand("with", warm_mean)
                .operand("deviation without", cold_std)
                .operand("with", warm_std)
                .operand_text("wanted", "a mean above 1.05 times"),
        )?;
        let name = "largest distance of a first counted step from its run's median";
        answer.claim(Claim::below("warm-after-one-step", name, &self.apart, 0.02))?;
        answer.claim(
            Claim::new("first-step-is-slowest", first.value() >= slowest.value())
                .operand("first step without warm-up", first)
                .operand("slowest", slowest),
        )?;
        let own = self.runs.saturating_sub(self.shared.len());
        answer.claim(Claim::all("every-start-is-cold", "runs in a process of their own", own, self.runs))
    }
}

/// The studied sizes after each number of warm-up steps, the sweep's last; none where there is no case.
pub(super) fn table(set: &RecordSet, cases: &[StepCase]) -> Option<Table> {
    let studied = of_grid(cases, GRID);
    let p = &studied.first()?.params;
    let digits = digits(set);
    let swept = of_grid(cases, SWEEP).into_iter().filter(|case| case.params.context_length == p.context_length);
    let all: Vec<&StepCase> = studied.iter().copied().chain(swept).collect();
    let of_size = |size| all.iter().copied().filter(move |case| case.params.size == size);
    let table = Table::of(sizes(&studied).into_iter().flat_map(of_size))
        .text("size", |case| case.params.size.size().name)
        .right("warm-up steps", |case| case.params.warmup.to_string())
        .right("forward: mean ± std", |case| mean(case, FORWARD, digits))
        .number("median", Style::Ms, digits, |case| median(case, FORWARD))
        .number("first whole step", Style::Ms, 1, |case| cell(case, TOTAL, |case, samples| sample(case, samples, 0)))
        .number("whole step, median", Style::Ms, 1, |case| median(case, TOTAL));
    Some(table.captioned(format!(
        "The same measurement after different numbers of warm-up steps, context {}, batch {}; \"first whole step\" is the \
         first one that is counted. All times in ms.{} {}.",
        p.context_length,
        p.batch_size,
        noise(set),
        set.source()
    )))
}
