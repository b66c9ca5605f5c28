//! `cs336 measure`: run grids on this machine into report/records.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::progress::{Bars, short};
use super::subject::{SubjectArguments, checked, measured_problems};
use super::{Chosen, Ended, interrupted, profile_or_default, selected, watch_for_interrupt};
use crate::bench::machine;
use crate::harness::case::{CASE_LIMIT, Runner};
use crate::harness::plan::{Pending, Plan, Scope, plan};
use crate::harness::problem::Problem;
use crate::harness::provenance::Commit;
use crate::harness::record::Profile;
use crate::harness::records_lock::lock_records;
use crate::harness::run::{MeasureSummary, Tally};
use crate::harness::schedule::{PendingTable, parse_duration};
use crate::harness::store::Layout;
use crate::harness::subject::Subject;
use crate::printable::{indented, one_line};
use crate::units::human_seconds;

mod one_case;

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    chosen: Chosen,
    /// Continue an earlier measurement: measure only missing, stale, failed and not-run cases, and those of another type of machine
    #[arg(long)]
    resume: bool,
    /// Stop after this time, as in 90s, 8m or 1h; tables that fit are measured first
    #[arg(long, value_name = "TIME", value_parser = |text: &str| parse_duration(text).map_err(|e| format!("{e:#}")))]
    budget: Option<Duration>,
    /// Only print what would be measured, with an estimate of the time
    #[arg(long)]
    dry_run: bool,
    /// Measure and print one case without recording it: the suite's first case with this key of
    /// any case replaced, as in attention=flash (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with_all = ["resume", "dry_run", "budget"])]
    settings: Vec<String>,
    /// End a case that takes longer than this many seconds
    #[arg(long, default_value_t = CASE_LIMIT.as_secs(), value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    case_limit: u64,
    #[command(flatten)]
    subject: SubjectArguments,
}

pub fn run(layout: &Layout, arguments: &Arguments) -> Result<Ended> {
    let Chosen { problems: names, profile } = &arguments.chosen;
    let profile = profile_or_default(*profile);
    let layout = &arguments.subject.layout(layout)?;
    let problems = if layout.subject.is_some() { measured_problems(names)? } else { selected(names)? };
    if let Some(problem) = problems.iter().find(|problem| !names.is_empty() && problem.measured.is_none()) {
        let name = problem.name;
        bail!("{name} measures nothing: it has only checks, which `cs336 grade {name}` runs");
    }
    let limits = Limits { case: Duration::from_secs(arguments.case_limit), budget: arguments.budget };
    if !arguments.settings.is_empty() {
        let ([_], [problem]) = (names.as_slice(), problems.as_slice()) else {
            bail!(
                "--set changes a case of one problem, but {} are named: use `cs336 measure P --set key=value`",
                names.len()
            );
        };
        return one_case::run(layout, problem, profile, &arguments.settings, limits);
    }
    let here = arguments.resume.then(|| machine::here(profile)).transpose()?;
    let scope = here.as_ref().map_or(Scope::All, |here| Scope::Unfinished { here });
    let (first, mut faults) = plans(layout, &problems, profile, scope);
    let last = if first.is_empty() { faults.pop() } else { None };
    faults.iter().for_each(|fault| eprintln!("not measured: {}", indented(&format!("{fault:#}"), 4)));
    if let Some(fault) = last {
        return Err(fault);
    }
    if arguments.dry_run {
        dry_run(&first, profile);
        return Ok(if faults.is_empty() { Ended::Well } else { Ended::WithFindings });
    }
    let visit = measure(layout, &first, profile, scope, limits)?;
    print_left(layout, &visit, profile, arguments)?;
    Ok(match faults.is_empty() && !visit.has_faults() {
        _ if visit.tally.interrupted => Ended::Interrupted,
        true => Ended::Well,
        false => Ended::WithFindings,
    })
}

/// Time limits of one case and of all cases.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub case: Duration,
    pub budget: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { case: CASE_LIMIT, budget: None }
    }
}

/// Measures what `scope` asks for of the problems of these plans, and prints how the cases ended; shared with `writeup`.
pub fn measure(
    layout: &Layout,
    first: &[Plan<'static>],
    profile: Profile,
    scope: Scope<'_>,
    Limits { case: limit, budget }: Limits,
) -> Result<MeasureSummary> {
    if first.iter().all(Plan::is_done) {
        say_nothing_to_measure(recorded(first), profile);
        return Ok(MeasureSummary::default());
    }
    let _lock = lock_records(layout)?;
    // Plan again: the process that held the lock may have measured some of these cases.
    let problems: Vec<_> = first.iter().map(|plan| plan.problem).collect();
    let (plans, faults) = plans(layout, &problems, profile, scope);
    if let Some(fault) = faults.into_iter().next() {
        return Err(fault);
    }
    if plans.iter().all(Plan::is_done) {
        say_nothing_to_measure(recorded(&plans), profile);
        return Ok(MeasureSummary::default());
    }
    watch_for_interrupt();
    let started = Instant::now();
    let pending: Vec<_> = plans.iter().filter(|plan| !plan.pending.is_empty()).map(|plan| plan.problem).collect();
    let Some(layout) = checked(layout, &pending)? else {
        return Ok(MeasureSummary {
            tally: Tally { interrupted: true, ..Tally::default() },
            ..MeasureSummary::default()
        });
    };
    // A subject's checks take their time from the budget.
    let checking = started.elapsed();
    if let (Some(budget), true) = (budget, layout.subject.is_some()) {
        let [took, of] = [checking, budget].map(|time| human_seconds(time.as_secs_f64()));
        eprintln!("the checks of the subject took {took} of the budget of {of}");
    }
    let budget = budget.map(|budget| budget.saturating_sub(checking));
    warn_of_an_unknown_commit(&layout);
    let facts = machine::facts(profile)?;
    let sensor = || machine::reading(profile);
    let runner = Runner { limit, budget, sensor: &sensor, ..Runner::new(&layout, &interrupted) };
    let recorded = recorded(&plans);
    let visit = runner.measure(plans, &facts, &mut Bars::default());
    if pending.is_empty() && visit.refused == 0 {
        say_nothing_to_measure(recorded, profile);
    } else {
        eprintln!("{}: {}", visit.tally.words(), layout.display(&layout.records(profile)));
    }
    Ok(visit)
}

fn recorded(plans: &[Plan]) -> usize {
    plans.iter().map(|plan| plan.record.cases.len()).sum()
}

fn say_nothing_to_measure(recorded: usize, profile: Profile) {
    match recorded {
        0 => eprintln!("nothing to measure: no suite has a {profile} grid; --profile takes another"),
        _ => eprintln!("nothing to measure: all {recorded} {profile} cases are recorded"),
    }
}

/// Says before the first case what git says. Where it does not end, the run's error tells it.
fn warn_of_an_unknown_commit(layout: &Layout) {
    if let Ok(Some(why)) = Commit::why_unknown(&layout.root, &interrupted) {
        eprintln!("the commit is unknown, so that no record of now can be accepted; git: {}", one_line(&why));
    }
}

/// Prints the cases that the budget left out, and the command that continues after the budget or an interrupt.
fn print_left(layout: &Layout, visit: &MeasureSummary, profile: Profile, arguments: &Arguments) -> Result<()> {
    if visit.left.is_empty() && !visit.tally.interrupted {
        return Ok(());
    }
    if !visit.left.is_empty() {
        eprintln!("{}", if visit.tally.interrupted { "left to measure:" } else { "the budget left out:" });
    }
    let mut kept_earlier = false;
    for table in &visit.left {
        let PendingTable { problem, grid, pending, .. } = table;
        // Measuring has moved a record aside that cannot be read.
        let record = layout.read_local(profile, super::registered(problem)?).ok().flatten();
        let kept = |case: &&Pending| record.as_ref().is_some_and(|file| file.case(&case.params).is_some());
        let earlier = match pending.iter().filter(kept).count() {
            0 => String::new(),
            n => {
                kept_earlier = true;
                format!("; {n} of them keep their earlier record")
            }
        };
        let about = table.estimate_s().map_or(String::new(), |seconds| format!(", about {}", human_seconds(seconds)));
        eprintln!("  {problem} {profile}.{grid}: {} cases{about}{earlier}", pending.len());
    }
    let names = arguments.chosen.problems.iter().map(|name| format!(" {name}")).collect::<String>();
    let budget = repeated(arguments.budget, &visit.tally);
    let limit = match arguments.case_limit {
        seconds if seconds == CASE_LIMIT.as_secs() => String::new(),
        seconds => format!(" --case-limit {seconds}"),
    };
    let of = layout.subject.as_ref().map_or(String::new(), Subject::argument);
    let of = of + &arguments.subject.repeated();
    eprintln!("continue with: cs336 measure{names} --profile {profile}{budget}{limit}{of} --resume");
    if kept_earlier && !arguments.resume {
        eprintln!("  --resume leaves fresh cases of this type of machine as they are");
    }
    Ok(())
}

fn dry_run(plans: &[Plan], profile: Profile) {
    for plan in plans {
        plan.unreadable.iter().for_each(|why| eprintln!("{}", indented(why, 4)));
        if plan.left_suite > 0 {
            let (name, left) = (plan.problem.name, plan.left_suite);
            let what = if plan.record.cases.is_empty() { "moved aside" } else { "copied and lose them" };
            eprintln!("{left} cases of {name} have left the suite: their record would be {what}");
        }
        for Pending { grid, params, last_elapsed_s } in &plan.pending {
            let last = last_elapsed_s.map_or("never measured".to_string(), human_seconds);
            println!("{} {profile}.{grid} {} ({last})", plan.problem.name, short(params));
        }
    }
    println!("estimate: {}", describe(plans));
}

/// The plans of the problems that measure something under this profile, and why others have none: a damaged suite costs its own
/// problem alone.
pub fn plans(
    layout: &Layout,
    problems: &[&'static Problem],
    profile: Profile,
    scope: Scope<'_>,
) -> (Vec<Plan<'static>>, Vec<anyhow::Error>) {
    let (mut plans, mut faults) = (Vec::new(), Vec::new());
    for problem in problems {
        match plan(layout, problem, profile, scope) {
            Ok(plan) => plans.extend(plan),
            Err(fault) => faults.push(fault),
        }
    }
    (plans, faults)
}

/// How many cases are to be measured, and how long that may take.
pub fn describe(plans: &[Plan]) -> String {
    let estimates = plans.iter().map(Plan::estimate);
    let (seconds, unknown) = estimates.fold((0.0, 0), |(s, n), (seconds, unknown)| (s + seconds, n + unknown));
    let cases: usize = plans.iter().map(|plan| plan.pending.len()).sum();
    estimate(seconds, cases - unknown, unknown)
}

/// "12.0 min for the 40 cases measured before; 2 were never measured". Only cases with a known time are counted in it.
fn estimate(seconds: f64, known: usize, unknown: usize) -> String {
    match (known, unknown) {
        (0, 0) => "nothing to measure".into(),
        (0, n) => format!("{n} cases; no earlier time is known"),
        (n, 0) => format!("{} for {n} cases, all measured before", human_seconds(seconds)),
        (n, m) => format!("{} for the {n} cases measured before; {m} were never measured", human_seconds(seconds)),
    }
}

/// The option that gives the next run the same budget; none where it was not enough for one case, as it would not be again.
fn repeated(budget: Option<Duration>, tally: &Tally) -> String {
    let ended = tally.measured + tally.out_of_memory + tally.not_run + tally.failed;
    match budget.filter(|_| ended > 0).map(|budget| budget.as_secs()) {
        Some(seconds) if seconds % 60 == 0 => format!(" --budget {}m", seconds / 60),
        Some(seconds) => format!(" --budget {seconds}s"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_counts_only_cases_with_a_known_time() {
        assert_eq!(estimate(0.0, 0, 0), "nothing to measure");
        assert_eq!(estimate(0.0, 0, 4), "4 cases; no earlier time is known");
        assert_eq!(estimate(3.0, 2, 0), "3.0 s for 2 cases, all measured before");
        assert_eq!(estimate(720.0, 40, 2), "12.0 min for the 40 cases measured before; 2 were never measured");
    }

    #[test]
    fn a_budget_that_was_not_enough_for_one_case_is_not_advised_again() {
        let of =
            |measured, seconds| repeated(Some(Duration::from_secs(seconds)), &Tally { measured, ..Tally::default() });
        assert_eq!([of(1, 120), of(1, 90), of(0, 90)], [" --budget 2m", " --budget 90s", ""]);
    }
}
