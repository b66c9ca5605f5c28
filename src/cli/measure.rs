//! `cs336 measure`: run grids on this machine into report/records.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::progress::{Bar, short};
use super::{Ended, interrupted, profile_or_default, selected, watch_for_interrupt};
use crate::harness::problem::Problem;
use crate::harness::provenance::open_run;
use crate::harness::record::{Outcome, Profile};
use crate::harness::run::{Pending, Plan, Runner, Scope, Tally, plan};
use crate::harness::samples::{Unit, each_samples};
use crate::harness::store::{Layout, Lock};
use crate::harness::worker::Pool;
use crate::harness::{stats, suite};
use crate::problems::machine;
use crate::units::human_seconds;

#[derive(clap::Args)]
pub struct Arguments {
    /// Problems to measure; all by default
    problems: Vec<String>,
    /// Which grids to run; gpu by default where there is one
    #[arg(long, value_enum)]
    profile: Option<Profile>,
    /// Go on where an earlier measuring stopped: only what is missing, stale or failed
    #[arg(long)]
    resume: bool,
    /// Print what would be measured, and an estimate, and stop
    #[arg(long)]
    dry_run: bool,
    /// Measure and print one case that is in no suite: the grid's first case with this key replaced (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with_all = ["resume", "dry_run"])]
    settings: Vec<String>,
    /// End a case that takes longer than this many seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    case_limit: u64,
}

pub fn run(layout: &Layout, arguments: &Arguments) -> Result<Ended> {
    let profile = profile_or_default(arguments.profile);
    let problems = selected(&arguments.problems)?;
    if !arguments.settings.is_empty() {
        ensure!(problems.len() == 1 && !arguments.problems.is_empty(), "--set needs exactly one problem");
        return one_case(layout, problems[0], profile, arguments);
    }
    let scope = if arguments.resume { Scope::Unfinished } else { Scope::All };
    if arguments.dry_run {
        return dry_run(layout, &problems, profile, scope);
    }
    let tally = measure(layout, &problems, profile, scope, Duration::from_secs(arguments.case_limit))?;
    Ok(match tally {
        Tally { interrupted: true, .. } => Ended::Interrupted,
        Tally { failed: 0, .. } => Ended::Well,
        _ => Ended::WithFindings,
    })
}

/// Measures what `scope` asks for and prints how the cases ended; shared with `writeup`.
pub fn measure(
    layout: &Layout,
    problems: &[&'static Problem],
    profile: Profile,
    scope: Scope,
    limit: Duration,
) -> Result<Tally> {
    let plans = || -> Result<Vec<Plan>> {
        problems.iter().filter_map(|p| plan(layout, p, profile, scope).transpose()).collect()
    };
    let mut tally = Tally::default();
    if plans()?.iter().all(|p| p.pending.is_empty()) {
        return Ok(tally);
    }
    let _lock = Lock::acquire(layout)?;
    // Whoever held the lock may have measured meanwhile: what is to do is read under it.
    let plans = plans()?;
    watch_for_interrupt();
    let facts = machine::facts(profile)?;
    let runner = Runner { layout, program: std::env::current_exe()?, limit, interrupted: &interrupted };
    for plan in plans.into_iter().filter(|p| !p.pending.is_empty()) {
        let pending = plan.pending.len();
        let mut bar = Bar::new(plan.problem.name, pending, plan.estimate().0);
        let one = runner.measure(plan, &facts, &mut bar);
        bar.finish();
        // One problem's failing check or unwritable record must not cost the others their figures.
        tally.add(one.unwrap_or_else(|error| {
            eprintln!("cs336: {error:#}");
            Tally { failed: pending, ..Tally::default() }
        }));
        if tally.interrupted {
            break;
        }
    }
    eprintln!(
        "{} measured, {} out of memory, {} not run, {} failed",
        tally.measured, tally.out_of_memory, tally.not_run, tally.failed
    );
    Ok(tally)
}

fn dry_run(layout: &Layout, problems: &[&'static Problem], profile: Profile, scope: Scope) -> Result<Ended> {
    let (mut seconds, mut unknown) = (0.0, 0);
    for problem in problems {
        let Some(plan) = plan(layout, problem, profile, scope)? else { continue };
        let (known_s, without) = plan.estimate();
        (seconds, unknown) = (seconds + known_s, unknown + without);
        for Pending { grid, params, last_elapsed_s } in &plan.pending {
            let last = last_elapsed_s.map_or("never measured".to_string(), human_seconds);
            println!("{} {profile}.{grid} {} ({last})", problem.name, short(params));
        }
    }
    println!("estimate: {} for the cases measured before; {unknown} were never measured", human_seconds(seconds));
    Ok(Ended::Well)
}

/// Measures one case and prints it; a record would be stale at once, since no suite declares the case.
fn one_case(layout: &Layout, problem: &'static Problem, profile: Profile, arguments: &Arguments) -> Result<Ended> {
    let suite = suite::load(&layout.root, problem)?.with_context(|| format!("{} measures nothing", problem.name))?;
    let measured = problem.measured.as_ref().context("the problem measures nothing")?;
    let params = suite::override_case(&suite, profile, &arguments.settings, problem)?;
    watch_for_interrupt();
    let run = open_run(&layout.root, &suite.hash, &machine::facts(profile)?)?;
    let limit = Duration::from_secs(arguments.case_limit);
    let runner = Runner { layout, program: std::env::current_exe()?, limit, interrupted: &interrupted };
    let mut pool = Pool::new(runner.program.clone(), layout.root.clone());
    eprintln!("{}: {}", problem.name, short(&params));
    match runner.measure_case(&mut pool, problem, measured, profile, &params, &run)? {
        None => Ok(Ended::Interrupted),
        Some(Outcome::Measured { row }) => {
            each_samples(&row, &mut |path, samples| {
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
            println!("{}", serde_json::to_string_pretty(&row)?);
            Ok(Ended::Well)
        }
        Some(other) => {
            println!("{}", serde_json::to_string_pretty(&other)?);
            Ok(Ended::WithFindings)
        }
    }
}
