//! Part (a): the forward pass in the profile against the host's clock.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::Params;
use super::{ProfileCase, Profiled, context, lines, n_of, noun};
use crate::harness::answer::format::{Style, print};
use crate::harness::answer::{Answer, Cell, Claim, Column, Quantity, RecordSet, Table};
use crate::harness::stats;

/// The two agree where they differ by less than this share of the clock's time.
const AGREES: f64 = 0.1;
/// The GPU hardly waits where kernels run for this share of the span.
const BUSY: f64 = 0.9;

#[derive(Serialize)]
pub struct Clock {
    /// The longest and the shortest pass of those that agree, or of all where none does: "12.5 ms (xl at context 512)".
    slow: String,
    quick: String,
    /// Where the two differ most, and by how much.
    worst: String,
    off: Quantity,
    /// "16 of 20", and "4 (small at 128, ..)".
    agreeing: String,
    differing: String,
    #[serde(skip)]
    far: usize,
    /// Of those that differ, where the GPU hardly waits.
    #[serde(skip)]
    busy: usize,
}

/// The forward pass by the host's clock.
fn host_s(profile: &Profiled) -> f64 {
    stats::median(&profile.row.host.inference.samples)
}

fn timed(profile: &Profiled) -> String {
    format!("{} ms ({})", print(profile.inference().span_s, Style::Ms, 1), profile.place())
}

/// "small at context 128, whose kernels need only 4.9 of the 23.1 ms".
fn idle(profile: &Profiled) -> String {
    let work = profile.inference();
    let [kernels, span] = [work.seconds, work.span_s].map(|seconds| print(seconds, Style::Ms, 1));
    format!("{}, whose kernels need only {kernels} of the {span} ms", profile.place())
}

impl Clock {
    /// None of nothing.
    pub fn of(profiles: &[Profiled]) -> Option<Self> {
        let span = |profile: &Profiled| profile.inference().span_s;
        let off = |profile: &Profiled| profile.number((span(profile) / host_s(profile) - 1.0).abs());
        let all: Vec<(Profiled, Quantity)> = profiles.iter().map(|profile| (*profile, off(profile))).collect();
        let (agreeing, differing): (Vec<_>, Vec<_>) = all.iter().partition(|(_, off)| off.value() < AGREES);
        let (worst, off) = all.iter().reduce(|a, b| if b.1.value() > a.1.value() { b } else { a })?;
        let place =
            |(profile, _): &&(Profiled, Quantity)| format!("{} at {}", profile.size(), context(profile.params()));
        let places: Vec<String> = differing.iter().map(place).collect();
        let shown = if agreeing.is_empty() { &differing } else { &agreeing };
        let shown = || shown.iter().map(|(profile, _)| profile);
        let by_span = |a: &&Profiled, b: &&Profiled| span(a).total_cmp(&span(b));
        Some(Self {
            slow: timed(shown().max_by(by_span)?),
            quick: timed(shown().min_by(by_span)?),
            worst: idle(worst),
            off: off.clone(),
            agreeing: n_of(agreeing.len(), profiles.len()),
            differing: format!("{} ({})", differing.len(), places.join(", ")),
            far: differing.len(),
            busy: differing.iter().filter(|(p, _)| p.inference().busy_s >= BUSY * span(p)).count(),
        })
    }

    pub fn claims(&self, answer: &mut Answer, gpu: bool) -> Result<()> {
        answer.claim(Claim::below("profile-matches-the-clock", "largest difference", &self.off, AGREES))?;
        if self.far > 0 {
            let claim = Claim::new("off-where-the-gpu-waits", gpu && self.busy == 0);
            let claim = claim.count("profiles that differ by 10% or more", self.far);
            answer.claim(claim.count("of them with kernels in 90% of the span", self.busy))?;
        }
        Ok(())
    }
}

/// The profile's times of every case beside the clock's.
pub fn table(set: &RecordSet, cases: &[&ProfileCase]) -> Table {
    let span = if set.is_gpu() { "GPU span" } else { "profiled" };
    let ms = |head: &str| Column::number(head, Style::Ms, 2);
    let columns = vec![
        ms(&format!("{span} (ms)")),
        ms("host clock (ms)"),
        Column::number("ratio", Style::Fixed, 2),
        ms(&format!("{}s (ms)", noun(set.is_gpu()))),
        Column::number("idle", Style::Percent, 0),
        ms("backward (ms)"),
        ms("optimizer (ms)"),
    ];
    let table = lines(columns, cases, |profile| {
        let work = profile.inference();
        let host_s = host_s(&profile);
        let idle = profile.number(1.0 - profile.over(work.busy_s, work.span_s).value());
        let [backward, optimizer] = match profile.step() {
            Some([_, backward, optimizer]) => [backward, optimizer].map(|pass| Some(profile.seconds(pass.span_s))),
            None => [None, None],
        };
        let ratio = profile.over(work.span_s, host_s).into();
        let [span, host, kernels] = [work.span_s, host_s, work.seconds].map(|s| Cell::from(profile.seconds(s)));
        vec![span, host, ratio, kernels, idle.into(), backward.into(), optimizer.into()]
    });
    let setting = cases.first().map(|case| {
        let Params { steps, warmup, dtype, batch_size, .. } = &case.params;
        format!(" (median of {steps} after {warmup} warm-up steps), {}, batch {batch_size}", dtype.name())
    });
    let shared = if set.is_gpu() { "" } else { " The cores are shared with others." };
    let setting = setting.unwrap_or_default();
    table.captioned(format!(
        "Profiled passes, and the forward pass by the host's clock{setting}.{shared} {}.",
        set.source()
    ))
}
