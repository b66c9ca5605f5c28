//! `cs336 writeup`: measures missing cases, renders every answer, builds the PDF, and checks committed records for drift.

use anyhow::{Context as _, Result, bail, ensure};

use super::document::{RecordSource, accepted_markdown, document, problem_input, with_problems};
use super::interrupt::end_at_an_interrupt;
use super::subject::{SubjectArguments, measured_problems};
use super::{Ended, device, interrupted, measure, profile_or_default};
use crate::harness::answer::{RecordSet, Records};
use crate::harness::manifest::{is_bundle, restoring};
use crate::harness::plan::{Plan, Scope, staleness};
use crate::harness::problem::Problem;
use crate::harness::record::Profile;
use crate::harness::run::MeasureSummary;
use crate::harness::store::{Layout, dangling};
use crate::harness::suite::{self, Suite};
use crate::printable::indented;
use crate::problems::REGISTRY;
use crate::report::{self, Fault, Rendered};
use crate::root::{read, read_text};

#[derive(clap::Args)]
pub struct Arguments {
    /// Render from snapshots/ only and compare with snapshots/rendered; measures and writes nothing
    #[arg(long, conflicts_with_all = ["fresh", "no_measure", "profile", "subject"])]
    check: bool,
    /// Fail unless report/writeup.pdf is up to date with the records; measures and writes nothing
    #[arg(long, conflicts_with_all = ["no_measure", "profile", "subject"])]
    fresh: bool,
    /// Render the existing records and measure nothing
    #[arg(long)]
    no_measure: bool,
    /// Which grids to measure; gpu by default if there is a GPU
    #[arg(long, value_enum)]
    profile: Option<Profile>,
    #[command(flatten)]
    subject: SubjectArguments,
}

pub fn run(layout: &Layout, arguments: &Arguments) -> Result<Ended> {
    let layout = &arguments.subject.layout(layout)?;
    if arguments.check {
        return check(layout);
    }
    if arguments.fresh {
        return fresh(layout);
    }
    let mut measured = MeasureSummary::default();
    if !arguments.no_measure {
        let problems = if layout.subject.is_some() { measured_problems(&[])? } else { REGISTRY.iter().collect() };
        let profile = profile_or_default(arguments.profile);
        // The report names the faults of the others.
        let (plans, _) = measure::plans(layout, &problems, profile, Scope::Outdated);
        if !plans.iter().all(Plan::is_done) {
            println!("{}, from the existing records", build(layout)?.0);
            if plans.iter().any(|plan| !plan.pending.is_empty()) {
                println!(
                    "measuring this machine now: {}; Ctrl-C keeps this report and all finished cases",
                    measure::describe(&plans)
                );
            }
            measured = measure::measure(layout, &plans, profile, Scope::Outdated, measure::Limits::default())?;
            end_at_an_interrupt();
            if measured.tally.interrupted || interrupted() {
                return Ok(Ended::Interrupted);
            }
        }
    }
    let (sentence, faults) = build(layout)?;
    println!("{sentence}");
    faults.iter().for_each(|fault| println!("  {}", indented(&fault.to_string(), 4)));
    if measured.tally.failed > 0 {
        println!("  cases that failed when they were measured now, as said above: {}", measured.tally.failed);
    }
    Ok(if faults.is_empty() && !measured.has_faults() { Ended::Well } else { Ended::WithFindings })
}

/// Renders the existing records, writes the report's files, and returns a sentence about the result and what it lacks.
fn build(layout: &Layout) -> Result<(String, Vec<Fault>)> {
    let document = document(layout, RecordSource::Here)?;
    let rendered = report::render(&document)?;
    let pdf = report::pdf(&rendered, &frame(layout)?)?;
    report::write(&layout.report(), &rendered, Some(&pdf))?;
    report::html::write(&layout.report(), &report::html::page(&document, &rendered)?)?;
    let points: f64 = rendered.answered.iter().map(|a| a.points).sum();
    let held = rendered.claims.iter().filter(|(_, claim)| claim.held).count();
    let sentence = format!(
        "{}, writeup.html and writeup.md are ready: {} points answered, {held} of {} claims hold",
        layout.display(&layout.report().join("writeup.pdf")),
        crate::harness::grade::points(points),
        rendered.claims.len()
    );
    Ok((sentence, rendered.faults))
}

/// Fails unless the PDF is up to date with the records.
fn fresh(layout: &Layout) -> Result<Ended> {
    let document = document(layout, RecordSource::Here)?;
    let pdf = report::pdf(&report::render(&document)?.complete()?, &frame(layout)?)?;
    let mut records = document.problems.iter().flat_map(|p| p.records.sets().map(|r| (p.handout.name, r.stale.len())));
    let stale = records.find(|(_, stale)| *stale > 0);
    if let Some((name, count)) = stale {
        bail!("{count} cases of {name} are stale: run `cs336 writeup`, check the report, and try again");
    }
    let old = read(&layout.report().join("writeup.pdf")).unwrap_or_default();
    ensure!(old == pdf, "report/writeup.pdf is missing or stale: run `cs336 writeup`, check the report, and try again");
    Ok(Ended::Well)
}

/// The title page and page layout.
fn frame(layout: &Layout) -> Result<String> {
    let path = layout.root.join("report/writeup.typ");
    if let Some(link) = dangling(&path) {
        bail!("{}", layout.leads_nowhere(link));
    }
    read_text(&path).with_context(|| {
        let restored = restoring(&layout.root, "report/writeup.typ");
        format!("failed to read {}, the layout of pages; restore it: {restored}", layout.display(&path))
    })
}

/// What a problem's answer lacks.
#[derive(Default)]
pub struct Lacking {
    /// Why the records do not cover the suite, and why the template does not render with every claim true; empty if all is
    /// well.
    pub reasons: Vec<String>,
    /// Whether a record cannot be read, or the answer not be built from what is recorded. What was not measured is none.
    pub is_error: bool,
}

pub fn lacking(layout: &Layout, problem: &'static Problem) -> Result<Lacking> {
    let input = problem_input(layout, super::handout_problem(problem.name)?, RecordSource::Here);
    let missing = input.records.suite.as_ref().and_then(|suite| missing(suite, &input.records, problem.name));
    let is_unreadable = !input.records.unreadable.is_empty();
    let rendered = report::render(&with_problems(vec![input])).and_then(Rendered::complete);
    let broken = rendered.err().map(|e| format!("its answer does not render: {e:#}"));
    let is_error = is_unreadable || broken.is_some() && missing.is_none();
    Ok(Lacking { reasons: missing.into_iter().chain(broken).collect(), is_error })
}

/// How many of the suite's GPU cases have no fresh accepted record, with the first reason; `None` if all have one.
pub fn unattested(layout: &Layout, problem: &'static Problem) -> Result<Option<String>> {
    let Some(suite) = suite::load(&layout.root, problem)? else { return Ok(None) };
    let wanted = suite.cases(Profile::Gpu).count();
    if wanted == 0 {
        return Ok(None);
    }
    let file = match layout.read_accepted(Profile::Gpu, problem) {
        Ok(Some(file)) => file,
        Ok(None) => return Ok(Some(format!("unattested: there are no accepted GPU records of its {wanted} cases"))),
        Err(error) => return Ok(Some(format!("unattested: {error:#}"))),
    };
    let why_stale = staleness(layout, problem, &suite, Profile::Gpu)?;
    let (mut fresh, mut reason) = (0, None);
    for (_, params) in suite.cases(Profile::Gpu) {
        match file.case(params).map(|case| why_stale(&file, case)) {
            Some(None) => fresh += 1,
            Some(stale) => reason = reason.or(stale),
            None => reason = reason.or(Some("it was not measured".into())),
        }
    }
    let message =
        |reason| format!("unattested: {} of {wanted} cases of a GPU's accepted records; {reason}", wanted - fresh);
    Ok(reason.map(message))
}

fn missing(suite: &Suite, records: &Records, name: &str) -> Option<String> {
    let covered = |profile: Profile, records: &Option<RecordSet>| {
        let Some(records) = records else { return false };
        let fine = |c: &crate::harness::record::CaseRecord| c.outcome.failure().is_none();
        records.stale.is_empty() && suite.cases(profile).all(|(_, params)| records.file.case(params).is_some_and(fine))
    };
    let any = covered(Profile::Gpu, &records.gpu) || covered(Profile::Cpu, &records.cpu);
    (!any || !records.are_complete())
        .then(|| format!("no complete, fresh records without failures: run `cs336 measure {name} --resume`"))
}

/// Checks every problem, also after a fault of another.
fn check(layout: &Layout) -> Result<Ended> {
    let device = device::unproven(layout);
    match &device {
        Ok(unproven) => unproven.iter().for_each(|message| println!("device: {message}")),
        Err(error) => println!("device: {}", indented(&format!("{error:#}"), 4)),
    }
    for problem in REGISTRY {
        match unattested(layout, problem) {
            Ok(None) => {}
            Ok(Some(message)) => println!("{}: {message}", problem.name),
            Err(error) => println!("{}: {}", problem.name, indented(&format!("{error:#}"), 4)),
        }
    }
    let mut faults = 0;
    for (name, markdown) in accepted_markdown(layout) {
        if let Err(fault) = markdown.and_then(|markdown| require_as_committed(layout, name, &markdown)) {
            println!("{name}: {}", indented(&format!("{fault:#}"), 4));
            faults += 1;
        }
    }
    if faults > 0 {
        let remedy = match is_bundle(&layout.root) {
            true => "Unpack the bundle again",
            false => "Mend what is named; where the change is meant, `INSTA_UPDATE=always cargo test --test drift`",
        };
        bail!("{faults} of {} answers are not as committed. {remedy}", REGISTRY.len());
    }
    let document = document(layout, RecordSource::Accepted)?;
    let html = report::html::page(&document, &report::render(&document)?.complete()?)?;
    let found = report::html::gate::check(&html).context("the HTML edition")?;
    device.context("device")?;
    println!("{} answers render from snapshots/ as committed", REGISTRY.len());
    println!("{} numbers of the HTML edition link to {} cases", found.numbers, found.cases);
    Ok(Ended::Well)
}

/// Errors: the first line of a problem's answer that differs from its snapshot.
fn require_as_committed(layout: &Layout, name: &str, markdown: &str) -> Result<()> {
    let path = format!("snapshots/rendered/{name}.snap");
    let stored = read_text(&layout.root.join(&path)).with_context(|| format!("failed to read {path}"))?;
    // insta writes a header between two lines of dashes.
    let body = stored.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---\n"));
    let (_, body) = body.with_context(|| format!("{path} is no snapshot"))?;
    if let Some((number, (old, new))) = first_difference(body, markdown) {
        bail!("drifted from {path} at line {number}\n- {old}\n+ {new}");
    }
    Ok(())
}

/// The number and the texts of the first line that differs.
fn first_difference<'a>(old: &'a str, new: &'a str) -> Option<(usize, (&'a str, &'a str))> {
    let lines = |text: &'a str| text.trim().lines().chain(["(end)"]);
    (1..).zip(lines(old).zip(lines(new))).find(|(_, (old, new))| old != new)
}
