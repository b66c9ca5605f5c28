//! Part (a): the forward pass in the profile against the host's clock, and how many matmuls it calls and runs.

use anyhow::Result;
use serde::Serialize;

use super::super::measure::Params;
use super::{ProfileCase, Profiled, context, n_of};
use crate::bench::kernels::Units;
use crate::harness::answer::format::{distinct, grouped, listed, time};
use crate::harness::answer::table::TableBuilder;
use crate::harness::answer::{Cell, Claim, Quantity, RecordSet, Table, Turns};
use crate::harness::stats;
use crate::model::SizeName;

/// The two agree where the profile's time is less than this share beyond the range of the clock's.
const AGREES: f64 = 0.1;
/// The GPU hardly waits where kernels run for this share of the span.
const BUSY: f64 = 0.9;

#[derive(Serialize)]
pub struct Clock {
    /// The longest and the shortest pass of those that agree, or of all where none does: "12.5 ms (xl at context 512)".
    slow: String,
    quick: String,
    /// How far the profile is beyond the clock's range, at most.
    off: Quantity,
    /// "16 of 20", and "4 (small at 128, ..)" or nothing.
    agreeing: String,
    differing: String,
    #[serde(skip)]
    pub claim: Option<Claim>,
}

/// The fastest and the slowest forward pass by the host's clock.
fn host_s(profile: &Profiled) -> [f64; 2] {
    [stats::min, stats::max].map(|end| end(&profile.row.host.inference.samples))
}

/// How far the span lies beyond the clock's times, as a share of the nearest of them.
fn off(profile: &Profiled) -> Quantity {
    let (span, [fastest, slowest]) = (profile.inference().span_s, host_s(profile));
    profile.number((span / slowest - 1.0).max(1.0 - span / fastest).max(0.0))
}

fn timed(profile: &Profiled) -> String {
    let span = profile.seconds(profile.inference().span_s);
    format!("{} ms ({})", span.mark(&time(span.value())), profile.place())
}

impl Clock {
    /// None of nothing.
    pub fn of(profiles: &[Profiled]) -> Option<Self> {
        let all: Vec<(Profiled, Quantity)> = profiles.iter().map(|profile| (*profile, off(profile))).collect();
        let (agreeing, differing): (Vec<_>, Vec<_>) = all.iter().partition(|(_, off)| off.value() < AGREES);
        let (worst, off) = all.iter().reduce(|a, b| if b.1.value() > a.1.value() { b } else { a })?;
        let place =
            |(profile, _): &&(Profiled, Quantity)| format!("{} at {}", profile.size(), context(profile.params()));
        let places: Vec<String> = differing.iter().map(place).collect();
        let shown = if agreeing.is_empty() { &differing } else { &agreeing };
        let shown = || shown.iter().map(|(profile, _)| profile);
        let span = |profile: &Profiled| profile.inference().span_s;
        let by_span = |a: &&Profiled, b: &&Profiled| span(a).total_cmp(&span(b));
        let busy = differing.iter().filter(|(p, _)| p.inference().busy_s >= BUSY * span(p)).count();
        let claim = Claim::new("off-where-the-gpu-waits", worst.is_gpu() && busy == 0)
            .count("profiles that differ by 10% or more", differing.len())
            .count("of them with kernels in 90% of the span", busy);
        Some(Self {
            slow: timed(shown().max_by(by_span)?),
            quick: timed(shown().min_by(by_span)?),
            off: off.clone(),
            agreeing: n_of(agreeing.len(), profiles.len()),
            differing: if places.is_empty() {
                String::new()
            } else {
                format!("{} ({})", places.len(), listed(&places))
            },
            claim: (!places.is_empty()).then_some(claim),
        })
    }
}

/// Of all profiles.
#[derive(Serialize)]
pub struct Matmuls {
    /// Forward passes that call 9 L + 1 matmuls and run as many kernels, and the most kernels beyond that.
    run: String,
    split: u64,
    #[serde(skip)]
    pub claim: Claim,
}

impl Matmuls {
    pub fn of(profiles: &[Profiled]) -> Self {
        // Seven linear layers and two matmuls of attention in each layer, and the output head.
        let expected = |p: &Profiled| 9 * p.params().size.size().num_layers.unsigned_abs() + 1;
        let runs = |p: &&Profiled| [p.row.matmuls.operators, p.row.matmuls.kernels] == [expected(p); 2];
        let beyond = |p: &Profiled| p.row.matmuls.kernels.saturating_sub(expected(p));
        let names = |units| {
            let kernels = profiles.iter().flat_map(|profile| &profile.row.matmul_kernels);
            kernels.filter(|kernel| kernel.units == units).count()
        };
        let tensor_cores = names(Units::TensorCores);
        Self {
            run: n_of(profiles.iter().filter(runs).count(), profiles.len()),
            split: profiles.iter().map(beyond).max().unwrap_or(0),
            claim: Claim::new("no-tf32", tensor_cores == 0)
                .count("names of matmul kernels that use tensor cores", tensor_cores)
                .count("names that do not tell", names(Units::Unknown)),
        }
    }
}

/// The forward pass of every case in the profile, and by the clock: a line for each size, a column for each context.
pub fn table(set: &RecordSet, cases: &[&ProfileCase]) -> Result<Table> {
    let sizes: Vec<SizeName> = distinct(cases.iter().map(|case| case.params.size));
    let mut contexts = distinct(cases.iter().map(|case| case.params.context_length));
    contexts.sort_unstable();
    let add = |table: TableBuilder<SizeName>, length: i64| {
        table.right(format!("context {} (ms)", grouped(length as f64, 0)), |size| {
            let at = |case: &&&ProfileCase| (case.params.size, case.params.context_length) == (*size, length);
            cases.iter().find(at).map(|case| both_times(case))
        })
    };
    let table = Table::of(sizes).text("size", |size| size.size().name);
    let setting = cases.first().map(|case| {
        let Params { steps, warmup, dtype, batch_size, .. } = &case.params;
        format!("{}, batch {batch_size}, median of {steps} passes after {warmup}, or range", dtype.name())
    });
    let caption = format!(
        "The forward pass under no_grad in the profile, and in brackets by our timer; {}; {}.",
        setting.unwrap_or_default(),
        set.machine()?
    );
    Ok(contexts.into_iter().fold(table, add).captioned(caption))
}

/// "23.1 (11.9–12.9)", or how the case ended.
fn both_times(case: &ProfileCase) -> Cell {
    let Some(profile) = Profiled::of(case) else { return case.outcome.label().into() };
    let host = Turns::single(&profile.row.host.inference.samples).text();
    Cell::text(format!("{} ({host})", time(profile.inference().span_s))).of_case(&case.id)
}
