//! Each model size in float32 and under bfloat16 autocast: the ratio of their times, and how it develops with size.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::{Params, Row};
use super::MixedCase;
use crate::bench::training_step;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{NOTHING, print};
use crate::harness::answer::{Answer, Cell, Claim, Column, Quantity, Range, SameMachine, Style, Table, Unit};
use crate::harness::samples::Samples;
use crate::harness::stats::Summary;
use crate::model::Precision;

/// A table shows no ratio of passes whose standard deviation exceeds this share of the median.
const STEADY: f64 = 0.25;

/// One size in both types.
pub(super) struct Pair<'a> {
    params: &'a training_step::Params,
    full: &'a MixedCase,
    low: Option<&'a MixedCase>,
}

#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Backward,
}

/// The float32 cases in the record's order, each with the bfloat16 case of its size.
pub(super) fn pairs(cases: &[MixedCase]) -> Vec<Pair<'_>> {
    let pairs = timed(cases, Precision::Float32).map(|(params, full)| {
        let low = timed(cases, Precision::Bfloat16).find(|(other, _)| other.size == params.size);
        Pair { params, full, low: low.map(|(_, case)| case) }
    });
    pairs.collect()
}

fn timed(cases: &[MixedCase], dtype: Precision) -> impl Iterator<Item = (&training_step::Params, &MixedCase)> {
    cases.iter().filter_map(move |case| match &case.params {
        Params::Timing(params) if params.dtype == dtype => Some((params, case)),
        _ => None,
    })
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
        compare(&self.forward.value(), &other.forward.value())
            && compare(&self.backward.value(), &other.backward.value())
    }
}

impl Trend {
    /// None of a single size.
    fn of(ratios: &[Ratios]) -> Option<Self> {
        let [first, .., last] = ratios else { return None };
        let two = |quantity: &Quantity| print(quantity.value(), Style::Fixed, 2);
        let [a, b] = [two(&first.forward), two(&first.backward)];
        let [c, d] = [two(&last.forward), two(&last.backward)];
        Some(Self {
            ends: format!("from {a} forward and {b} backward for {} to {c} and {d} for {}", first.size, last.size),
            rises: last.both(first, f64::gt),
            steady: ratios.iter().zip(ratios.iter().skip(1)).all(|(before, after)| after.both(before, f64::ge)),
            first: first.clone(),
            last: last.clone(),
        })
    }
}

impl Gain {
    /// None where no size was timed in both types.
    pub fn of(pairs: &[Pair]) -> Result<Option<Self>> {
        let mut ratios = Vec::new();
        for pair in pairs {
            if let (Some(forward), Some(backward)) = (pair.ratio(Pass::Forward)?, pair.ratio(Pass::Backward)?) {
                ratios.push(Ratios { size: pair.params.size.size().name, forward, backward });
            }
        }
        let all: Vec<Quantity> = ratios.iter().flat_map(|r| [r.forward.clone(), r.backward.clone()]).collect();
        let spreads: Vec<Quantity> = pairs.iter().flat_map(Pair::spreads).collect();
        let (Some(range), Some(spread)) = (Range::of(&all), Quantity::largest(&spreads)) else { return Ok(None) };
        Ok(Some(Self { ratios: range, spread: spread.clone(), trend: Trend::of(&ratios) }))
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

/// One pass of one case.
struct PassTiming<'a> {
    case: &'a MixedCase,
    samples: &'a Samples,
}

impl<'a> PassTiming<'a> {
    /// None where the pass was not measured.
    fn of(case: &'a MixedCase, pass: Pass) -> Option<Self> {
        let Row::Timing(row) = case.row()? else { return None };
        let samples = match pass {
            Pass::Forward => row.forward.as_ref()?,
            Pass::Backward => row.backward.as_ref()?,
        };
        Some(Self { case, samples })
    }

    fn median(&self) -> Quantity {
        self.case.median(self.samples)
    }

    /// None for a single sample.
    fn std(&self) -> Option<f64> {
        Summary::of(&self.samples.samples)?.std
    }

    /// The standard deviation over the median; a single sample has none.
    fn spread(&self) -> Quantity {
        self.case.quantity(self.std().unwrap_or(0.0) / self.median().value(), Unit::One)
    }
}

impl<'a> Pair<'a> {
    fn both(&self, pass: Pass) -> Option<[PassTiming<'a>; 2]> {
        Some([PassTiming::of(self.full, pass)?, PassTiming::of(self.low?, pass)?])
    }

    /// Time in float32 over time in bfloat16.
    fn ratio(&self, pass: Pass) -> Result<Option<Quantity>> {
        let Some([full, low]) = self.both(pass) else { return Ok(None) };
        Ok(Some(SameMachine::of(&full.median(), &low.median())?.ratio()))
    }

    /// Of every pass that was measured.
    fn spreads(&self) -> Vec<Quantity> {
        let cases = [Some(self.full), self.low].into_iter().flatten();
        let timings = cases.flat_map(|case| [Pass::Forward, Pass::Backward].map(|pass| PassTiming::of(case, pass)));
        timings.flatten().map(|timing| timing.spread()).collect()
    }
}

/// A line a size; times have as many digits after the point.
pub(super) fn table(pairs: &[Pair], digits: usize) -> Result<Table> {
    let ratio = || Column::number("Ratio", Style::Fixed, 2);
    let mut table = Table::new(vec![
        Column::text("Size"),
        Column::right("Forward, float32 (ms)"),
        Column::right("Forward, bfloat16 (ms)"),
        ratio(),
        Column::right("Backward, float32 (ms)"),
        Column::right("Backward, bfloat16 (ms)"),
        ratio(),
    ]);
    let time = |case: Option<&MixedCase>, pass: Pass| -> Cell {
        let Some(case) = case else { return Cell::Missing };
        let Some(timing) = PassTiming::of(case, pass) else { return case.outcome.label().into() };
        let ms = |seconds: f64| print(seconds, Style::Ms, digits);
        format!("{} ± {}", ms(timing.median().value()), timing.std().map_or(NOTHING.into(), ms)).into()
    };
    for pair in pairs {
        let mut cells = vec![Cell::from(pair.params.size.size().name)];
        for pass in [Pass::Forward, Pass::Backward] {
            let steady = |both: &[PassTiming; 2]| both.iter().all(|timing| timing.spread().value() <= STEADY);
            let shown = pair.both(pass).is_some_and(|both| steady(&both));
            let ratio = pair.ratio(pass)?.filter(|_| shown);
            cells.extend([time(Some(pair.full), pass), time(pair.low, pass), ratio.into()]);
        }
        table.row(cells);
    }
    Ok(table)
}

/// The ratios of every size, whatever their spread.
pub(super) fn figure(pairs: &[Pair]) -> Result<Figure> {
    let bars = |name: &str, pass: Pass| -> Result<Series> {
        let ratio = |pair: &Pair| Ok((pair.params.size.size().name, pair.ratio(pass)?.map(|ratio| ratio.value())));
        Ok(Series::over_categories(name, pairs.iter().map(ratio).collect::<Result<Vec<_>>>()?))
    };
    let series = vec![bars("forward", Pass::Forward)?, bars("backward", Pass::Backward)?];
    let alt = "Bars for each model size, one for the forward and one for the backward pass: how many times as long float32 \
               takes as bfloat16. The numbers are the ratios of the table above.";
    Ok(Figure::plot(alt, Plot::new(PlotKind::Bar, "model size", "float32 time / bfloat16 time", series)))
}
