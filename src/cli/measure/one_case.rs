//! `cs336 measure P --set key=value`: one case that no suite declares.

use anyhow::{Context as _, Result};

use super::Limits;
use crate::bench::machine;
use crate::cli::progress::short;
use crate::cli::subject::checked;
use crate::cli::{Ended, interrupted, watch_for_interrupt};
use crate::harness::case::{CaseEnding, Measurement, MeasurementContext, Runner};
use crate::harness::conditions::{Reading, in_words};
use crate::harness::problem::Problem;
use crate::harness::provenance::open_run;
use crate::harness::record::{Outcome, Profile};
use crate::harness::samples::{Unit, each_samples};
use crate::harness::schedule::Clock;
use crate::harness::store::Layout;
use crate::harness::worker::Worker;
use crate::harness::{stats, suite};
use crate::units::human_seconds;

/// Measures one case and prints it. It is not recorded: no suite declares it, so its record would be stale.
pub fn run(
    layout: &Layout,
    problem: &'static Problem,
    profile: Profile,
    settings: &[String],
    Limits { case: limit, .. }: Limits,
) -> Result<Ended> {
    let suite = suite::load(&layout.root, problem)?.with_context(|| format!("{} measures nothing", problem.name))?;
    let measured = problem.measured.as_ref().context("the problem measures nothing")?;
    let params = suite::override_case(&suite, profile, settings, problem)?;
    watch_for_interrupt();
    let Some(layout) = &checked(layout, &[problem])? else { return Ok(Ended::Interrupted) };
    layout.require_graded(problem.name)?;
    let run = open_run(&layout.root, &suite.hash, &machine::facts(profile)?, &interrupted)?;
    let sensor = || machine::reading(profile);
    let runner = Runner { limit, sensor: &sensor, ..Runner::new(layout, &interrupted) };
    let mut context = MeasurementContext { problem, measured, profile, worker: Worker::new(layout), run };
    eprintln!("{}: {}", problem.name, short(&params));
    match runner.measure_case(&mut context, &params, &Clock::start(None))? {
        CaseEnding::Interrupted | CaseEnding::OutOfTime => Ok(Ended::Interrupted),
        CaseEnding::Ended(measurement) => print_case(&measurement),
    }
}

/// The statistics on standard error, the whole row on standard output.
fn print_case(measurement: &Measurement) -> Result<Ended> {
    if let Some(conditions) = &measurement.conditions {
        let describe =
            |r: &Reading| format!("{:.0} MHz, {:.0} W, {:.0} °C", r.sm_clock_hz / 1e6, r.power_w, r.temperature_c);
        eprintln!("  before: {}; after: {}", describe(&conditions.before), describe(&conditions.after));
        if let Some(during) = &conditions.during {
            let (clock, power) = (during.sm_clock_hz, during.power_w);
            let reasons = if during.throttle.is_empty() { "nothing".into() } else { in_words(&during.throttle) };
            eprintln!(
                "  meanwhile: SM clock {:.0} MHz (from {:.0}), {:.0} W (to {:.0}); throttled by {reasons}",
                clock.median / 1e6,
                clock.min / 1e6,
                power.median,
                power.max
            );
        }
    }
    let Outcome::Measured { row } = &measurement.outcome else {
        println!("{}", serde_json::to_string_pretty(&measurement.outcome)?);
        return Ok(Ended::WithFindings);
    };
    each_samples(row, &mut |path, samples| {
        if let (Unit::Seconds, Some(s)) = (samples.unit, stats::Summary::of(&samples.samples)) {
            let spread = s.std.map_or(String::new(), |std| format!(" +- {}", human_seconds(std)));
            eprintln!(
                "  {path}: median {}, mean {}{spread}, n = {}",
                human_seconds(s.median),
                human_seconds(s.mean),
                s.n
            );
        }
        Ok(())
    })?;
    println!("{}", serde_json::to_string_pretty(row)?);
    Ok(match measurement.outcome.failure() {
        None => Ended::Well,
        Some(error) => {
            eprintln!("  a column failed: {error}");
            Ended::WithFindings
        }
    })
}
