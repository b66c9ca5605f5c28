//! Each model size in float32 and under bfloat16 autocast: the ratio of their times, and how it develops with size.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::{Params, Row};
use super::MixedCase;
use crate::bench::training_step;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{print, with_deviation};
use crate::harness::answer::{Answer, Cell, Claim, Quantity, Range, SameMachine, Style, Table, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats;
use crate::model::Precision;

/// A table shows no ratio of passes whose standard deviation exceeds this share of the median.
const STEADY: f64 = 0.25;

type Pass = fn(&training_step::Row) -> Option<&Samples>;

const FORWARD: Pass = |row| row.forward.as_ref();
const BACKWARD: Pass = |row| row.backward.as_ref();

/// One size in both types.
pub(super) struct Pair<'a> {
    params: &'a training_step::Params,
    full: &'a MixedCase,
    low: Option<&'a MixedCase>,
    /// Time in float32 over time in bfloat16; none of a pass that was not measured in both.
    forward: Option<Quantity>,
    backward: Option<Quantity>,
}

/// The float32 cases in the record's order, each with the bfloat16 case of its size.
///
/// Errors: the two are of different machines.
pub(super) fn pairs<'a>(cases: &'a [MixedCase]) -> Result<Vec<Pair<'a>>> {
    let pair = |(params, full): (&'a training_step::Params, &'a MixedCase)| {
        let low = timed(cases, Precision::Bfloat16).find(|(other, _)| other.size == params.size);
        let low = low.map(|(_, case)| case);
        let ratio = |pass| {
            let times = median(full, pass).zip(low.and_then(|low| median(low, pass)));
            times.map(|(full, low)| Ok::<_, anyhow::Error>(SameMachine::of(&full, &low)?.ratio())).transpose()
        };
        Ok(Pair { params, full, low, forward: ratio(FORWARD)?, backward: ratio(BACKWARD)? })
    };
    timed(cases, Precision::Float32).map(pair).collect()
}

fn timed(cases: &[MixedCase], dtype: Precision) -> impl Iterator<Item = (&training_step::Params, &MixedCase)> {
    cases.iter().filter_map(move |case| match &case.params {
        Params::Timing(params) if params.dtype == dtype => Some((params, case)),
        _ => None,
    })
}

/// None where the pass was not measured.
fn samples(case: &MixedCase, pass: Pass) -> Option<&Samples> {
    let Row::Timing(row) = case.row()? else { return None };
    pass(row)
}

fn median(case: &MixedCase, pass: Pass) -> Option<Quantity> {
    Some(case.median(samples(case, pass)?))
}

impl Pair<'_> {
    fn size(&self) -> &'static str {
        self.params.size.size().name
    }

    /// The standard deviation over the median in each type that was measured; a single sample has none.
    fn spreads(&self, pass: Pass) -> impl Iterator<Item = Quantity> {
        [Some(self.full), self.low].into_iter().flatten().filter_map(move |case| {
            let x = &samples(case, pass)?.samples;
            let std = if x.len() > 1 { stats::std(x) } else { 0.0 };
            Some(case.quantity(std / stats::median(x), Unit::One))
        })
    }

    fn is_steady(&self, pass: Pass) -> bool {
        self.spreads(pass).all(|spread| spread.value() <= STEADY)
    }
}

/// What all cases have in common.
#[derive(Default, Serialize)]
pub(super) struct Setting {
    batch: i64,
    context: i64,
    steps: usize,
    warmup: usize,
}

impl Setting {
    pub fn of(pairs: &[Pair]) -> Self {
        let first = pairs.first().map(|pair| pair.params);
        first.map_or_else(Self::default, |p| Self {
            batch: p.batch_size,
            context: p.context_length,
            steps: p.steps,
            warmup: p.warmup,
        })
    }
}

/// What bfloat16 gains.
#[derive(Serialize)]
pub(super) struct Gain {
    /// Time in float32 over time in bfloat16, over every size and pass.
    ratios: Range,
    /// The worst standard deviation over its median.
    spread: Quantity,
    trend: Option<Trend>,
}

/// From the first size to the last.
#[derive(Serialize)]
struct Trend {
    /// "from 2.17 forward and 1.92 backward for small to 5.64 and 6.44 for 2.7B".
    ends: String,
    rises: bool,
    /// Whether neither pass's ratio falls at any step of size.
    steady: bool,
    #[serde(skip)]
    first: Ratios,
    #[serde(skip)]
    last: Ratios,
}

#[derive(Clone)]
struct Ratios {
    size: &'static str,
    forward: Quantity,
    backward: Quantity,
}

impl Ratios {
    /// Whether both passes' ratios compare so to those of another size.
    fn both(&self, other: &Self, compare: fn(&f64, &f64) -> bool) -> bool {
        let [forward, backward] = [(&self.forward, &other.forward), (&self.backward, &other.backward)]
            .map(|(ours, theirs)| compare(&ours.value(), &theirs.value()));
        forward && backward
    }
}

impl Trend {
    /// None of a single size.
    fn of(ratios: &[Ratios]) -> Option<Self> {
        let [first, .., last] = ratios else { return None };
        let [a, b, c, d] = [&first.forward, &first.backward, &last.forward, &last.backward]
            .map(|ratio| print(ratio.value(), Style::Fixed, 2));
        Some(Self {
            ends: format!("from {a} forward and {b} backward for {} to {c} and {d} for {}", first.size, last.size),
            rises: last.both(first, f64::gt),
            steady: ratios.windows(2).all(|sizes| sizes[1].both(&sizes[0], f64::ge)),
            first: first.clone(),
            last: last.clone(),
        })
    }
}

impl Gain {
    /// None where no size was timed in both types.
    pub fn of(pairs: &[Pair]) -> Option<Self> {
        let ratios = pairs.iter().filter_map(|pair| {
            Some(Ratios { size: pair.size(), forward: pair.forward.clone()?, backward: pair.backward.clone()? })
        });
        let ratios: Vec<Ratios> = ratios.collect();
        let spreads = pairs.iter().flat_map(|pair| pair.spreads(FORWARD).chain(pair.spreads(BACKWARD)));
        Some(Self {
            ratios: Range::of(ratios.iter().flat_map(|size| [&size.forward, &size.backward]))?,
            spread: Quantity::largest(spreads)?,
            trend: Trend::of(&ratios),
        })
    }

    pub fn rises(&self) -> bool {
        self.trend.as_ref().is_some_and(|trend| trend.rises)
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        answer.claim(Claim::above("bfloat16-faster-everywhere", "smallest ratio", &self.ratios.low, 1.0))?;
        let name = "worst standard deviation over its median";
        answer.claim(Claim::below("steps-are-steady", name, &self.spread, STEADY))?;
        let Some(Trend { first, last, rises, .. }) = &self.trend else { return Ok(()) };
        answer.claim(
            Claim::new("ratio-rises-with-size", *rises)
                .operand(&format!("forward, {}", first.size), &first.forward)
                .operand(&format!("forward, {}", last.size), &last.forward)
                .operand(&format!("backward, {}", first.size), &first.backward)
                .operand(&format!("backward, {}", last.size), &last.backward),
        )
    }
}

/// A line a size; times have as many digits after the point.
pub(super) fn table(pairs: &[Pair], digits: usize) -> Table {
    let time = |case: &MixedCase, pass| match samples(case, pass) {
        Some(samples) => Cell::text(with_deviation(&samples.samples, stats::median, digits)).of_case(&case.id),
        None => case.outcome.label().into(),
    };
    Table::of(pairs)
        .text("Size", |pair| pair.size())
        .right("Forward, float32 (ms)", |pair| time(pair.full, FORWARD))
        .right("Forward, bfloat16 (ms)", |pair| pair.low.map(|low| time(low, FORWARD)))
        .number("Ratio", Style::Fixed, 2, |pair| pair.forward.clone().filter(|_| pair.is_steady(FORWARD)))
        .right("Backward, float32 (ms)", |pair| time(pair.full, BACKWARD))
        .right("Backward, bfloat16 (ms)", |pair| pair.low.map(|low| time(low, BACKWARD)))
        .number("Ratio", Style::Fixed, 2, |pair| pair.backward.clone().filter(|_| pair.is_steady(BACKWARD)))
        .into()
}

/// The ratios of every size, whatever their spread.
pub(super) fn figure(pairs: &[Pair]) -> Figure {
    let bars = |name: &str, ratio: fn(&Pair) -> Option<f64>| {
        Series::over_categories(name, pairs.iter().map(|pair| (pair.size(), ratio(pair))))
    };
    let series = vec![
        bars("forward", |pair| Some(pair.forward.as_ref()?.value())),
        bars("backward", |pair| Some(pair.backward.as_ref()?.value())),
    ];
    let alt = "Bars for each model size, one for the forward and one for the backward pass: how many times as long float32 \
               takes as bfloat16. The numbers are the ratios of the table above.";
    Figure::plot(alt, Plot::new(PlotKind::Bar, "model size", "float32 time / bfloat16 time", series))
}
