//! Each model size in float32 and under bfloat16 autocast: the ratio of their times, and how it develops with size.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::{Params, Row};
use super::MixedCase;
use crate::bench::training_step;
use crate::harness::answer::format::{distinct, listed};
use crate::harness::answer::{Answer, Case, Cell, Claim, Quantity, RecordSet, SameMachine, Style, Table, Turns};
use crate::harness::samples::Samples;
use crate::model::Precision;

type Pass = fn(&training_step::Row) -> Option<&Samples>;

const FORWARD: Pass = |row| row.forward.as_ref();
const BACKWARD: Pass = |row| row.backward.as_ref();

/// One size in both types.
pub(super) struct Pair<'a> {
    params: &'a training_step::Params,
    full: &'a MixedCase,
    low: Option<&'a MixedCase>,
    /// Time in float32 over time in bfloat16; none of a pass that was not measured in both, or is unstable in one.
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
            let times = stable(full, pass).zip(low.and_then(|low| stable(low, pass)));
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

fn turns(case: &MixedCase, pass: Pass) -> Option<Turns> {
    Some(Turns::single(&samples(case, pass)?.samples))
}

/// The median of a stable pass.
fn stable(case: &MixedCase, pass: Pass) -> Option<Quantity> {
    turns(case, pass).filter(Turns::is_stable)?;
    Some(case.median(samples(case, pass)?))
}

impl Pair<'_> {
    fn size(&self) -> &'static str {
        self.params.size.size().name
    }

    fn cases(&self) -> impl Iterator<Item = &MixedCase> {
        [Some(self.full), self.low].into_iter().flatten()
    }
}

/// What all cases have in common.
#[derive(Default, Serialize)]
pub(super) struct Setting {
    batch: i64,
    context: i64,
    steps: usize,
    warmup: usize,
    /// "one run" or "several runs".
    runs: &'static str,
}

impl Setting {
    pub fn of(pairs: &[Pair]) -> Self {
        let first = pairs.first().map(|pair| pair.params);
        first.map_or_else(Self::default, |p| Self {
            batch: p.batch_size,
            context: p.context_length,
            steps: p.steps,
            warmup: p.warmup,
            runs: match distinct(pairs.iter().flat_map(Pair::cases).map(|case| &case.id.run)).len() {
                1 => "one run",
                _ => "several runs",
            },
        })
    }
}

/// What bfloat16 gains, from the first size to the last.
#[derive(Serialize)]
pub(super) struct Gain {
    /// "every size", or those that are compared: "small, medium and large".
    sizes: String,
    /// "from 2.17 (forward) and 1.92 (backward) for small to 5.64 and 6.44 for 2.7B".
    ends: String,
    /// Whether both passes' ratios are larger at the end, and fall at no step of size.
    rises: bool,
    #[serde(skip)]
    claims: [Claim; 2],
}

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

impl Gain {
    /// None unless two sizes have stable times of both passes in both types.
    pub fn of(pairs: &[Pair]) -> Option<Self> {
        let ratios = pairs.iter().filter_map(|pair| {
            Some(Ratios { size: pair.size(), forward: pair.forward.clone()?, backward: pair.backward.clone()? })
        });
        let ratios: Vec<Ratios> = ratios.collect();
        let [first, .., last] = &ratios[..] else { return None };
        let least = Quantity::smallest(ratios.iter().flat_map(|size| [&size.forward, &size.backward]))?;
        let [a, b, c, d] =
            [&first.forward, &first.backward, &last.forward, &last.backward].map(|ratio| ratio.text(Style::Fixed, 2));
        let rises = last.both(first, f64::gt) && ratios.windows(2).all(|sizes| sizes[1].both(&sizes[0], f64::ge));
        let rises_with_size = Claim::new("ratio-rises-with-size", rises)
            .operand(&format!("forward, {}", first.size), &first.forward)
            .operand(&format!("forward, {}", last.size), &last.forward)
            .operand(&format!("backward, {}", first.size), &first.backward)
            .operand(&format!("backward, {}", last.size), &last.backward);
        let names: Vec<&str> = ratios.iter().map(|size| size.size).collect();
        Some(Self {
            sizes: if names.len() == pairs.len() { "every size".into() } else { listed(&names) },
            ends: format!("from {a} (forward) and {b} (backward) for {} to {c} and {d} for {}", first.size, last.size),
            rises,
            claims: [Claim::above("bfloat16-faster-everywhere", "smallest ratio", least, 1.0), rises_with_size],
        })
    }

    pub fn rises(&self) -> bool {
        self.rises
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        self.claims.iter().try_for_each(|claim| answer.claim(claim.clone()))
    }
}

/// The sizes whose forward pass in bfloat16 takes longer in every step of another run, and the first of them.
#[derive(Serialize)]
pub(super) struct Slower {
    /// "small and medium".
    sizes: String,
    /// "8.38", and there "9.3–12".
    first: &'static str,
    here: String,
    there: String,
}

impl Slower {
    /// Errors: records of another shape.
    pub fn of(pairs: &[Pair], other: Option<&RecordSet>) -> Result<Option<Self>> {
        let others: Vec<Case<training_step::Params, training_step::Row>> =
            other.map(RecordSet::cases_as).transpose()?.unwrap_or_default();
        let slower = pairs.iter().filter_map(|pair| {
            let (low, here) = (pair.low?, turns(pair.low?, FORWARD)?);
            let Params::Timing(wanted) = &low.params else { return None };
            let there = others.iter().find(|case| is_same_step(&case.params, wanted))?;
            let times = Turns::single(&FORWARD(there.row()?)?.samples);
            let (here_ms, there_ms) = (low.id.mark(&here.text()), there.id.mark(&times.text()));
            here.is_below(&times).then(|| (pair.size(), here_ms, there_ms))
        });
        let slower: Vec<_> = slower.collect();
        let sizes: Vec<String> = slower.iter().map(|(size, ..)| size.to_string()).collect();
        let first = slower.into_iter().next();
        Ok(first.map(|(first, here, there)| Self { sizes: listed(&sizes), first, here, there }))
    }
}

/// Whether two cases time the same eager step.
fn is_same_step(one: &training_step::Params, other: &training_step::Params) -> bool {
    let step = |p: &training_step::Params| {
        (p.size, p.context_length, p.batch_size, p.dtype, p.attention, p.execution, p.allow_tf32)
    };
    step(one) == step(other)
}

/// A line for each size.
pub(super) fn table(pairs: &[Pair]) -> Table {
    let time = |case: &MixedCase, pass| match turns(case, pass) {
        Some(turns) => Cell::text(turns.text()).of_case(&case.id),
        None => case.outcome.label().into(),
    };
    Table::of(pairs)
        .text("Size", |pair| pair.size())
        .right("Forward, float32 (ms)", |pair| time(pair.full, FORWARD))
        .right("Forward, bfloat16 (ms)", |pair| pair.low.map(|low| time(low, FORWARD)))
        .number("Ratio", Style::Fixed, 2, |pair| pair.forward.clone())
        .right("Backward, float32 (ms)", |pair| time(pair.full, BACKWARD))
        .right("Backward, bfloat16 (ms)", |pair| pair.low.map(|low| time(low, BACKWARD)))
        .number("Ratio", Style::Fixed, 2, |pair| pair.backward.clone())
        .into()
}
