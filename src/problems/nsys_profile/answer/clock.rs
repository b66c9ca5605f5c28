//! Part (a): the forward pass in the profile against the host's clock, and how many matrix products it calls and runs.

use serde::Serialize;

use super::super::kernels::Units;
use super::super::measure::Params;
use super::{ProfileCase, Profiled, context, lines, n_of};
use crate::harness::answer::format::{Style, print};
use crate::harness::answer::{Claim, Column, Quantity, RecordSet, Table};
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
    pub claims: Vec<Claim>,
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
        let mut claims = vec![Claim::below("profile-matches-the-clock", "largest difference", off, AGREES)];
        if !differing.is_empty() {
            let busy = differing.iter().filter(|(p, _)| p.inference().busy_s >= BUSY * span(p)).count();
            claims.push(
                Claim::new("off-where-the-gpu-waits", worst.is_gpu() && busy == 0)
                    .count("profiles that differ by 10% or more", differing.len())
                    .count("of them with kernels in 90% of the span", busy),
            );
        }
        Some(Self {
            slow: timed(shown().max_by(by_span)?),
            quick: timed(shown().min_by(by_span)?),
            worst: idle(worst),
            off: off.clone(),
            agreeing: n_of(agreeing.len(), profiles.len()),
            differing: format!("{} ({})", differing.len(), places.join(", ")),
            claims,
        })
    }
}

/// Of all profiles.
#[derive(Serialize)]
pub struct Matmuls {
    /// Forward passes that call 9 L + 1 products and run as many kernels, and the most kernels beyond that.
    run: usize,
    split: u64,
    #[serde(skip)]
    pub claims: [Claim; 3],
}

impl Matmuls {
    pub fn of(profiles: &[Profiled]) -> Self {
        // Seven linear layers and two products of attention in each layer, and the output layer.
        let expected = |p: &Profiled| 9 * p.params().size.size().num_layers.unsigned_abs() + 1;
        let call = |p: &&Profiled| p.row.matmuls.operators == expected(p);
        let run = |p: &&Profiled| call(p) && p.row.matmuls.kernels == expected(p);
        let [call, run] = [profiles.iter().filter(call).count(), profiles.iter().filter(run).count()];
        let beyond = |p: &Profiled| p.row.matmuls.kernels.saturating_sub(expected(p));
        let names = |units| {
            let kernels = profiles.iter().flat_map(|profile| &profile.row.matmul_kernels);
            kernels.filter(|kernel| kernel.units == units).count()
        };
        let tensor_cores = names(Units::TensorCores);
        Self {
            run,
            split: profiles.iter().map(beyond).max().unwrap_or(0),
            claims: [
                Claim::all("calls-are-9L-plus-1", "forward passes with as many calls", call, profiles.len()),
                Claim::all("products-are-9L-plus-1", "with as many kernels, too", run, profiles.len()),
                Claim::new("no-tf32", tensor_cores == 0)
                    .count("names of matmul kernels that use tensor cores", tensor_cores)
                    .count("names that do not tell", names(Units::Unknown)),
            ],
        }
    }
}

/// The profile's times of every case beside the clock's.
pub fn table(set: &RecordSet, cases: &[&ProfileCase]) -> Table {
    let (span, kernels) = if set.is_gpu() { ("GPU span", "kernels") } else { ("profiled", "operators") };
    let ms = |head: &str| Column::number(head, Style::Ms, 2);
    let table = lines(
        cases,
        [
            (ms(&format!("{span} (ms)")), |p| p.seconds(p.inference().span_s).into()),
            (ms("host clock (ms)"), |p| p.seconds(host_s(p)).into()),
            (Column::number("ratio", Style::Fixed, 2), |p| p.over(p.inference().span_s, host_s(p)).into()),
            (ms(&format!("{kernels} (ms)")), |p| p.seconds(p.inference().seconds).into()),
            (Column::number("idle", Style::Percent, 0), |p| {
                p.number(1.0 - p.over(p.inference().busy_s, p.inference().span_s).value()).into()
            }),
            (ms("backward (ms)"), |p| p.step().map(|[_, backward, _]| p.seconds(backward.span_s)).into()),
            (ms("optimizer (ms)"), |p| p.step().map(|[.., optimizer]| p.seconds(optimizer.span_s)).into()),
        ],
    );
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
