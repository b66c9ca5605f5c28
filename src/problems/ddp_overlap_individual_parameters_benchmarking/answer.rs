//! What is left of the communication when it runs beside the backward pass, and the timelines that show it.

use anyhow::Result;
use serde::Serialize;

use super::Overlap;
use crate::bench::ddp_step::tables::{StepSetting, StrategyNumbers, steps_table};
use crate::bench::ddp_step::timeline::{self, Timeline};
use crate::bench::ddp_step::{Params, Row, Steps};
use crate::harness::answer::figure::{self, Figure, Lane, Span};
use crate::harness::answer::{Answer, Audience, Case, Claim, Quantity, Records};

const OVERLAP: &str = "overlap_individual_parameters";

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    gpu: bool,
    source: String,
    #[serde(flatten)]
    setting: Option<StepSetting>,
    /// Whether a case was measured; then the numbers of the first one follow.
    measured: bool,
    #[serde(flatten)]
    steps: Option<Compared>,
}

#[derive(Serialize)]
struct Compared {
    dtype: &'static str,
    step: Quantity,
    naive: Quantity,
    flat: Quantity,
    hidden: Quantity,
    naive_hidden: Quantity,
    tail: Quantity,
    naive_tail: Quantity,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let main = records.main()?;
    let cases = main.cases::<Steps<Overlap>>()?;
    let first = cases.iter().find_map(|case| Some((case, case.row()?)));
    let steps = first.and_then(|(case, row)| compared(case, row));
    let quoted = Quoted {
        gpu: main.is_gpu(),
        source: main.source(),
        setting: cases.first().map(|case| StepSetting::of(&case.params)),
        measured: steps.is_some(),
        steps,
    };
    let mut answer = Answer::new(&quoted)?;
    if let Some(Compared { step, naive, flat, hidden, naive_hidden, .. }) = &quoted.steps {
        let fastest = step.value() < naive.value() && step.value() < flat.value();
        let claim = Claim::new("overlap-beats-both", fastest).operand("overlapped", step);
        answer.claim(claim.operand("a call a parameter", naive).operand("one call", flat))?;
        answer.claim(Claim::above("overlap-hides-most", "hidden", hidden, 0.5))?;
        let seen = Claim::new("overlap-is-seen", hidden.value() > naive_hidden.value());
        answer.claim(seen.operand("hidden with overlap", hidden).operand("without", naive_hidden))?;
    }
    if let Some((_, row)) = first {
        figures(&mut answer, row)?;
    }
    for set in records.sets() {
        let cases = set.cases::<Steps<Overlap>>()?;
        let table = steps_table(set, "arithmetic", &cases.iter().collect::<Vec<_>>(), |p| p.dtype.name().into());
        answer.table(format!("steps-{}", set.profile()), table)?;
    }
    Ok(answer)
}

fn compared(case: &Case<Params, Row>, row: &Row) -> Option<Compared> {
    let of = |name| Some(StrategyNumbers::of(case, row.strategies.get(name)?));
    let (overlapped, naive, flat) = (of(OVERLAP)?, of("naive")?, of("flat")?);
    Some(Compared {
        dtype: case.params.dtype.name(),
        step: overlapped.step,
        naive: naive.step,
        flat: flat.step,
        hidden: overlapped.hidden,
        naive_hidden: naive.hidden,
        tail: overlapped.tail,
        naive_tail: naive.tail,
    })
}

/// The last step of rank 0 under both strategies, on one scale.
fn figures(answer: &mut Answer, row: &Row) -> Result<()> {
    let shown = [
        (
            "naive",
            "naive",
            "Two lanes of one training step under plain data parallelism: the communication lane is empty \
          until the backward pass has ended, then busy while the compute lane waits.",
        ),
        (
            "overlap",
            OVERLAP,
            "Two lanes of one training step with overlap: the communication lane is busy while the \
          backward pass runs on the compute lane.",
        ),
    ];
    let timelines: Vec<_> =
        shown.iter().filter_map(|(id, name, alt)| Some((id, &row.strategies.get(*name)?.timeline, alt))).collect();
    let spans = timelines.iter().flat_map(|(_, timeline, _)| timeline.compute.iter().chain(&timeline.communication));
    let end_s = spans.map(|span| span.end_s).fold(0.0, f64::max);
    for (id, timeline, alt) in timelines {
        answer.figure(*id, Figure::timeline(*alt, drawn(timeline, end_s)))?;
    }
    Ok(())
}

fn drawn(timeline: &Timeline, end_s: f64) -> figure::Timeline {
    let span = |span: &timeline::Span| Span { name: span.name.clone(), start_s: span.start_s, end_s: span.end_s };
    let lane =
        |name: &str, spans: &[timeline::Span]| Lane { name: name.into(), spans: spans.iter().map(span).collect() };
    let lanes = vec![lane("computing", &timeline.compute), lane("communicating", &timeline.communication)];
    figure::Timeline { x_label: "time (ms)".into(), end_s, lanes }
}

#[cfg(test)]
mod tests;
