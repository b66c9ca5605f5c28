//! `cs336 grade`: points per problem and part with the reason for each one lost; hidden cases; JUnit and Gradescope
//! files.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, anyhow};

use super::printer::Printer;
use super::subject::{SubjectArguments, conditions};
use super::writeup::{self, Lacking};
use super::{Ended, entry, handout_problem, interrupted, watch_for_interrupt};
use crate::harness::case::Runner;
use crate::harness::grade::{CheckResult, CheckStatus, ProblemGrade, grade, points};
use crate::harness::grade_files::{gradescope, junit};
use crate::harness::handout::{HANDOUT, HandoutProblem};
use crate::harness::named_files::{require_distinct, require_no_folders, require_outside, require_writable};
use crate::harness::problem::Problem;
use crate::harness::schedule::Clock;
use crate::harness::store::{Layout, write_atomically};
use crate::harness::subject::Subject;
use crate::harness::worker::Worker;
use crate::printable::{indented, printable};

#[derive(clap::Args)]
pub struct Arguments {
    /// Problems to grade, the whole handout by default; with --device, checks to run
    problems: Vec<String>,
    /// Instead, run the checks that need a GPU and record how they end; without a GPU each is skipped
    #[arg(long, conflicts_with_all = ["cases", "junit", "gradescope", "subject"])]
    device: bool,
    /// Instead, run every *.safetensors case in this folder (the format is in suites/cases/README.md)
    #[arg(long, value_name = "DIR", conflicts_with_all = ["problems", "gradescope"])]
    cases: Option<PathBuf>,
    /// Also write the results as JUnit XML, with --cases too
    #[arg(long, value_name = "FILE")]
    pub(super) junit: Option<PathBuf>,
    /// Also write the results as a Gradescope results.json
    #[arg(long, value_name = "FILE")]
    gradescope: Option<PathBuf>,
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    subject: SubjectArguments,
    /// Grade every folder in this folder but hidden ones as a subject; writes grades.csv and a results.json each into --output
    #[arg(long, value_name = "DIR", conflicts_with_all = ["subject", "device", "cases", "junit", "gradescope", "json"])]
    subjects: Option<PathBuf>,
    /// Of a subject: run only the checks of this name (repeatable); the others earn nothing
    #[arg(long = "check", value_name = "NAME")]
    checks: Vec<String>,
    /// Where --subjects writes [default: grades]
    #[arg(long, value_name = "DIR", requires = "subjects")]
    output: Option<PathBuf>,
}

impl Arguments {
    pub(super) fn printer(&self) -> Printer {
        Printer { outlives: self.junit.is_some() || self.gradescope.is_some() }
    }
}

pub fn run(arguments: &Arguments) -> Result<Ended> {
    let files = [("--junit", arguments.junit.as_deref()), ("--gradescope", arguments.gradescope.as_deref())];
    require_distinct(&files)?;
    require_no_folders(&files)?;
    arguments.subject.subject.as_deref().map_or(Ok(()), |folder| require_outside(&files, folder))?;
    require_writable(files.iter().filter_map(|(_, path)| *path))?;
    let cases = arguments.cases.as_deref();
    cases.map_or(Ok(()), |folder| super::cases::require_no_case(folder, arguments.junit.as_deref()))?;
    let leave_why = |error| leave_why(arguments, error);
    let layout = &Layout::find().map_err(leave_why)?;
    if let Some(folder) = &arguments.subjects {
        return super::subjects::run(
            layout,
            folder,
            &arguments.subject,
            &arguments.problems,
            &arguments.checks,
            arguments.output.as_deref().unwrap_or(Path::new("grades")),
        );
    }
    arguments.subject.require_named().map_err(leave_why)?;
    let subject = arguments.subject.subject.as_deref();
    if !arguments.checks.is_empty() && (subject.is_none() || cases.is_some()) {
        let misplaced = "--check chooses among the checks of a subject: use it with --subject or --subjects";
        return Err(leave_why(anyhow!(misplaced)));
    }
    let subject = subject.map(|folder| subject_of(folder, arguments)).transpose().map_err(leave_why)?;
    if let Some(folder) = cases {
        return super::cases::run(layout, folder, subject.as_ref(), arguments);
    }
    if arguments.device {
        return super::device::run(layout, &arguments.problems, arguments.json);
    }
    watch_for_interrupt();
    let printer = arguments.printer();
    let conditions = subject.as_ref().map(conditions);
    if let Some(conditions) = conditions.as_ref().filter(|_| !arguments.json) {
        printer.line(conditions);
    }
    let grades = match &subject {
        Some(subject) => of_subject(layout, subject, arguments).map_err(leave_why)?.map(|grades| (grades, false)),
        None => of_ours(layout, arguments).map_err(leave_why)?,
    };
    let Some((grades, cannot_be_built)) = grades else { return Ok(Ended::Interrupted) };
    if arguments.json {
        printer.line(serde_json::to_string_pretty(&grades)?);
    } else {
        let sum = |f: fn(&ProblemGrade) -> f64| points(grades.iter().map(f).sum());
        printer.line(format!("earned {} of {} points", sum(|g| g.earned), sum(|g| g.points)));
    }
    let junit = junit(grades.iter().map(|grade| (grade.name, grade.tests())))?;
    let files = [(&arguments.junit, junit), (&arguments.gradescope, gradescope(&grades, conditions.as_deref())?)];
    // Both are tried before the first error is returned.
    let written =
        files.map(|(path, text)| path.as_ref().map_or(Ok(()), |path| write_atomically(path, text.as_bytes())));
    written.into_iter().collect::<Result<()>>()?;
    let mut checks = grades.iter().flat_map(|g| &g.parts).flat_map(|p| &p.checks);
    let failed = cannot_be_built || checks.any(|c| matches!(c.ending, CheckStatus::Failed { .. }));
    Ok(if failed { Ended::WithFindings } else { Ended::Well })
}

/// Leaves in the files for graders why there are no grades, in the place of those of an earlier grading; gives the error.
pub(super) fn leave_why(arguments: &Arguments, error: anyhow::Error) -> anyhow::Error {
    if interrupted() {
        return error;
    }
    let words = indented(&printable(&format!("{error:#}")), 4);
    let test = ("grading", CheckStatus::Failed { error: words.clone() }, 0.0);
    let files =
        [(&arguments.junit, junit([("cs336", [test])])), (&arguments.gradescope, gradescope(&[], Some(&words)))];
    for (path, text) in files {
        if let (Some(path), Ok(text)) = (path, text) {
            // Where it cannot be written, the first error is the one to mend.
            let _ = write_atomically(path, text.as_bytes());
        }
    }
    error
}

/// The grades of this program's own code, and whether an answer cannot be built; `None` when interrupted.
fn of_ours(layout: &Layout, arguments: &Arguments) -> Result<Option<(Vec<ProblemGrade>, bool)>> {
    let chosen: Vec<&HandoutProblem> = match arguments.problems.as_slice() {
        [] => HANDOUT.iter().collect(),
        names => super::once_each(names).map(handout_problem).collect::<Result<_>>()?,
    };
    let (mut grades, mut cannot_be_built, printer) = (Vec::new(), false, arguments.printer());
    for problem in chosen {
        let entry = entry(problem);
        let Some((checks, lacking)) = results(layout, entry) else { return Ok(None) };
        cannot_be_built |= lacking.is_error;
        let graded = grade(problem, entry, &checks, &lacking.reasons);
        if !arguments.json {
            print(&graded, printer);
            let unattested = entry.map(|entry| writeup::unattested(layout, entry)).transpose();
            if let Some(message) = unattested.map(Option::flatten).unwrap_or_else(|error| Some(format!("{error:#}"))) {
                printer.line(format!("             {}", indented(&message, 17)));
            }
        }
        grades.push(graded);
    }
    Ok(Some((grades, cannot_be_built)))
}

/// The subject in `folder`. A name that is wrong is told before an hour of installing.
fn subject_of(folder: &Path, arguments: &Arguments) -> Result<Subject> {
    let problems = super::subject::problems(&arguments.problems)?;
    super::subject::require_checks(&arguments.checks, &problems)?;
    arguments.subject.find(folder, arguments.cases.as_deref(), None)
}

/// The grades of a subject; `None` when interrupted.
fn of_subject(layout: &Layout, subject: &Subject, arguments: &Arguments) -> Result<Option<Vec<ProblemGrade>>> {
    let problems = super::subject::problems(&arguments.problems)?;
    let shown = |graded: &ProblemGrade| {
        if !arguments.json {
            print(graded, arguments.printer());
        }
    };
    super::subject::grades(layout, subject, &problems, &arguments.checks, shown)
}

/// Runs a problem's checks and looks for what its records and its template lack; `None` when interrupted.
///
/// An error fails its check, or is what the problem lacks: the other problems are graded all the same.
fn results(layout: &Layout, entry: Option<&'static Problem>) -> Option<(Vec<CheckResult>, Lacking)> {
    let Some(entry) = entry else { return Some(Default::default()) };
    let (runner, mut worker) = (Runner::new(layout, &interrupted), Worker::new(layout));
    let mut checks = Vec::new();
    for check in entry.checks {
        let started = Instant::now();
        let ending = match runner.check(&mut worker, entry, check, &Clock::start(None)) {
            Ok(ending) => ending?,
            Err(error) => CheckStatus::Failed { error: printable(&format!("{error:#}")) },
        };
        let elapsed_s = started.elapsed().as_secs_f64();
        checks.push(CheckResult { name: check.name, part: check.part, ending, elapsed_s });
    }
    let mut lacking = writeup::lacking(layout, entry)
        .unwrap_or_else(|error| Lacking { reasons: vec![format!("{error:#}")], is_error: true });
    lacking.reasons.iter_mut().for_each(|reason| *reason = printable(reason));
    Some((checks, lacking))
}

fn print(graded: &ProblemGrade, printer: Printer) {
    printer.line(format!(
        "{:>5} / {:<4} {} (section {})",
        points(graded.earned),
        points(graded.points),
        graded.name,
        graded.section
    ));
    for part in &graded.parts {
        let label = if part.id.is_empty() { "   ".to_string() } else { format!("({})", part.id) };
        let passed = part.checks.iter().filter(|c| matches!(c.ending, CheckStatus::Passed { .. })).count();
        let checks = if part.checks.is_empty() {
            String::new()
        } else {
            format!("  {passed} of {} checks pass", part.checks.len())
        };
        printer.line(format!("      {:>5} / {:<4} {label}{checks}", points(part.earned), points(part.points)));
        for reason in &part.lost {
            printer.line(format!("                       {}", indented(reason, 23)));
        }
    }
}
