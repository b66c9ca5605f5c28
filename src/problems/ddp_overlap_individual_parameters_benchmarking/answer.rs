//! What is left of the communication when it runs beside the backward pass, and the timelines that show it.

use anyhow::Result;
use serde::Serialize;

use crate::bench::ddp_step::Row;
use crate::bench::ddp_step::tables::{StepCase, StrategyNumbers, steps_answer};
use crate::bench::ddp_step::timeline::{self, Timeline};
use crate::harness::answer::figure::{self, Figure, Lane, Span};
use crate::harness::answer::{Answer, Audience, Claim, Records};

const OVERLAP: &str = "overlap_individual_parameters";

/// What the sentences quote of the first measured case.
#[derive(Serialize)]
struct Quoted {
    dtype: &'static str,
    #[serde(flatten)]
    overlapped: StrategyNumbers,
    naive: StrategyNumbers,
    flat: StrategyNumbers,
    #[serde(skip)]
    timelines: [figure::Timeline; 2],
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let (mut answer, quoted) = steps_answer(records, Quoted::of)?;
    let Some(Quoted { overlapped, naive, flat, timelines, .. }) = quoted else { return Ok(answer) };
    let fastest = [&naive, &flat].iter().all(|other| overlapped.step.value() < other.step.value());
    answer.claim(
        Claim::new("overlap-beats-both", fastest)
            .operand("overlapped", &overlapped.step)
            .operand("a call a parameter", &naive.step)
            .operand("one call", &flat.step),
    )?;
    let hidden = &overlapped.hidden;
    answer.claim(Claim::above("overlap-hides-most", "hidden", hidden, 0.5))?;
    answer.claim(Claim::greater("overlap-is-seen", ("hidden with overlap", hidden), ("without", &naive.hidden)))?;
    let [plain, overlap] = timelines;
    let alt = "Two lanes of one training step under plain data parallelism: the communication lane is empty until the \
               backward pass has ended, then busy while the compute lane waits.";
    answer.figure("naive", Figure::timeline(alt, plain))?;
    let alt = "Two lanes of one training step with overlap: the communication lane is busy while the backward pass runs on \
               the compute lane.";
    answer.figure("overlap", Figure::timeline(alt, overlap))?;
    Ok(answer)
}

impl Quoted {
    fn of(case: &StepCase, row: &Row) -> Option<Self> {
        let of = |name| StrategyNumbers::of(case, row, name);
        let timelines = [&row.strategies.get("naive")?.timeline, &row.strategies.get(OVERLAP)?.timeline];
        let spans = timelines.iter().flat_map(|timeline| timeline.compute.iter().chain(&timeline.communication));
        let end_s = spans.map(|span| span.end_s).fold(0.0, f64::max);
        Some(Self {
            dtype: case.params.dtype.name(),
            overlapped: of(OVERLAP)?,
            naive: of("naive")?,
            flat: of("flat")?,
            timelines: timelines.map(|timeline| drawn(timeline, end_s)),
        })
    }
}

/// The last step of rank 0, on an axis that ends at `end_s`.
fn drawn(timeline: &Timeline, end_s: f64) -> figure::Timeline {
    let span = |span: &timeline::Span| Span { name: span.name.clone(), start_s: span.start_s, end_s: span.end_s };
    let lane =
        |name: &str, spans: &[timeline::Span]| Lane { name: name.into(), spans: spans.iter().map(span).collect() };
    let lanes = vec![lane("computing", &timeline.compute), lane("communicating", &timeline.communication)];
    figure::Timeline { x_label: "time (ms)".into(), end_s, lanes }
}

#[cfg(test)]
mod tests;
