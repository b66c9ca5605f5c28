//! What is left of the communication when it runs beside the backward pass, and the timelines that show it.

use anyhow::Result;
use serde::Serialize;

use crate::bench::ddp_step::Row;
use crate::bench::ddp_step::link::PooledLink;
use crate::bench::ddp_step::numbers::StrategyNumbers;
use crate::bench::ddp_step::tables::{StepCase, steps_answer};
use crate::bench::ddp_step::timeline;
use crate::harness::answer::figure::{Figure, Lane, Span, Timeline};
use crate::harness::answer::{Answer, Audience, Claim, Paired, Records};

const OVERLAP: &str = "overlap_individual_parameters";

/// What the sentences quote of the first stable case.
#[derive(Serialize)]
struct Quoted {
    dtype: &'static str,
    #[serde(flatten)]
    overlapped: StrategyNumbers,
    naive: StrategyNumbers,
    flat: StrategyNumbers,
    /// How much shorter the step is than the naive and the flat one.
    #[serde(skip)]
    gains: [Paired; 2],
    #[serde(skip)]
    timelines: Vec<Timeline>,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let (mut answer, quoted) = steps_answer(records, Quoted::of)?;
    let Some(Quoted { overlapped, gains: [naive, flat], timelines, .. }) = quoted else { return Ok(answer) };
    answer.claim(
        Claim::new("overlap-wins", naive.is_positive() && flat.is_positive())
            .operand("shorter than naive at least by", &naive.range.low)
            .operand("than flat at least by", &flat.range.low),
    )?;
    let slowdown = &overlapped.slowdown;
    answer.claim(
        Claim::new("backward-is-slower", slowdown.is_positive())
            .operand("above single without the tail, at least", &slowdown.range.low),
    )?;
    let alt = "Two training steps on one time axis, each with a compute lane and a communication lane. Naive: communication \
               begins when the backward pass has ended, and the compute lane waits for it. Overlap: communication runs \
               during the backward pass.";
    answer.figure(
        "timelines",
        Figure::timelines(alt, ["naive", "overlap"].map(String::from).into_iter().zip(timelines).collect()).in_place(),
    )?;
    Ok(answer)
}

impl Quoted {
    fn of(case: &StepCase, row: &Row, _link: &PooledLink) -> Option<Self> {
        let of = |name| StrategyNumbers::of(case, row, name);
        let rounds = |name| Some(row.strategies.get(name)?.step.turns(case.params.rounds));
        let timeline = |name| Some(drawn(&row.strategies.get(name)?.timeline));
        let gain = |name| Paired::difference(&case.id, &rounds(name)?, &rounds(OVERLAP)?);
        Some(Self {
            dtype: case.params.dtype.name(),
            overlapped: of(OVERLAP)?,
            naive: of("naive")?,
            flat: of("flat")?,
            gains: [gain("naive")?, gain("flat")?],
            timelines: vec![timeline("naive")?, timeline(OVERLAP)?],
        })
    }
}

/// One step of a rank, with the wait for gradients named as such.
fn drawn(step: &timeline::Timeline) -> Timeline {
    let shown =
        |name: &str| name.replace("synchronisation", "synchronisation (waiting)").replace("all_reduce", "all-reduce");
    let span = |span: &timeline::Span| Span { name: shown(&span.name), start_s: span.start_s, end_s: span.end_s };
    let lane =
        |name: &str, spans: &[timeline::Span]| Lane { name: name.into(), spans: spans.iter().map(span).collect() };
    let end_s = step.compute.iter().chain(&step.communication).map(|span| span.end_s).fold(0.0, f64::max);
    let lanes = vec![lane("compute", &step.compute), lane("communication", &step.communication)];
    Timeline { x_label: "time (ms)".into(), end_s, lanes }
}

#[cfg(test)]
mod tests;
