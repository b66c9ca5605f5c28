//! `cs336 grade --cases`: every case file of a folder, one result each; what cannot be read or run is one failed case.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::grade::{Arguments, leave_why};
use super::printer::Printer;
use super::{Ended, interrupted, watch_for_interrupt};
use crate::checks::golden::{CaseFile, run_on};
use crate::error::NotGraded;
use crate::harness::grade::CheckStatus;
use crate::harness::grade_files::junit;
use crate::harness::named_files::require_distinct;
use crate::harness::store::{Layout, write_atomically};
use crate::harness::subject::{MORE_MEMORY, Subject};
use crate::harness::worker::{Ending, Job, Reply, Worker};
use crate::printable::{distinct_name, indented, printable, shown_path};
use crate::subject::words_of;

/// A case that takes longer is ended and counts as failed.
const LIMIT: Duration = Duration::from_secs(300);

/// A worker's result for one file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Compared {
    passed: bool,
    /// The comparisons as text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lines: Vec<String>,
    /// The comparisons as data. An error that is not a number (different shapes) is null.
    comparisons: Value,
}

/// How one file ended. Names and messages are printable.
#[derive(Debug, Serialize)]
struct CaseResult {
    file: String,
    #[serde(flatten)]
    compared: Compared,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Why the subject could not be graded, for which it is not to blame.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_graded: Option<String>,
    elapsed_s: f64,
}

/// Runs every case on our implementations, or on the subject's.
pub fn run(layout: &Layout, folder: &Path, subject: Option<&Subject>, arguments: &Arguments) -> Result<Ended> {
    watch_for_interrupt();
    let files = files(folder).map_err(|error| leave_why(arguments, error))?;
    let printer = arguments.printer();
    let mut worker = Worker::new(layout);
    let mut results = Vec::new();
    let count = files.len();
    for path in files {
        // What is finished is printed and written all the same.
        let Some(result) = grade(&mut worker, &path, subject) else { break };
        if !arguments.json {
            print(&result, printer);
        }
        results.push(result);
    }
    let passed = results.iter().filter(|r| r.compared.passed).count();
    if arguments.json {
        printer.line(serde_json::to_string_pretty(&results)?);
    } else {
        printer.line(format!("{passed} of {count} cases passed"));
    }
    let left = count - results.len();
    if let Some(path) = &arguments.junit {
        let words = CheckStatus::Failed { error: format!("interrupted: {left} of {count} cases were not run") };
        let rest = (left > 0).then_some(("grading", words, 0.0));
        let tests = results.iter().map(|r| (r.file.as_str(), r.status(), r.elapsed_s)).chain(rest);
        write_atomically(path, junit([("cases", tests)])?.as_bytes())?;
    }
    if left > 0 {
        return Ok(Ended::Interrupted);
    }
    let not_graded = results.iter().filter(|r| r.not_graded.is_some()).count();
    ensure!(
        not_graded == 0,
        "not graded: {not_graded} of {} cases, for which the subject is not to blame",
        results.len()
    );
    Ok(if passed == results.len() { Ended::Well } else { Ended::WithFindings })
}

/// Errors: the file of results would take the place of a case.
pub fn require_no_case(folder: &Path, results: Option<&Path>) -> Result<()> {
    let paths = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    for case in paths.filter(|path| is_case(path)) {
        require_distinct(&[("--cases", Some(&case)), ("--junit", results)])?;
    }
    Ok(())
}

fn is_case(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().to_lowercase().ends_with(".safetensors"))
}

/// The worker's side: runs one file in its process.
pub fn run_one(path: &Path, subject: Option<&Subject>) -> Result<Value> {
    let comparisons = run_on(&CaseFile::read(path)?, subject);
    let comparisons = comparisons.map_err(|error| match (NotGraded::of(&error), subject) {
        (None, Some(_)) => anyhow!(words_of(&error)),
        _ => error,
    });
    let has_passed = comparisons.as_ref().is_ok_and(|all| all.iter().all(|c| c.passed));
    if !has_passed {
        subject.map_or(Ok(()), Subject::require_readable)?;
    }
    let comparisons = comparisons?;
    Ok(serde_json::to_value(Compared {
        passed: has_passed,
        lines: comparisons.iter().map(ToString::to_string).collect(),
        comparisons: serde_json::to_value(&comparisons)?,
    })?)
}

impl CaseResult {
    fn status(&self) -> CheckStatus {
        let not_graded = self.not_graded.as_ref().map(|reason| format!("not graded: {reason}"));
        let text: Vec<_> =
            self.error.iter().chain(&not_graded).chain(&self.compared.lines).map(String::as_str).collect();
        match self.compared.passed {
            true => CheckStatus::Passed { note: text.join("\n") },
            false => CheckStatus::Failed { error: text.join("\n") },
        }
    }
}

/// The folder's case files, sorted by name. An empty folder is an error, since nothing would be graded.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| {
        format!("the cases folder {} cannot be opened; name a folder of *.safetensors files", shown_path(folder))
    })?;
    let paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let (mut files, others): (Vec<_>, Vec<_>) = paths.into_iter().partition(|path| is_case(path));
    ensure!(
        !files.is_empty(),
        "{} holds no *.safetensors file, so nothing was graded; suites/cases/README.md describes the format",
        shown_path(folder)
    );
    if !others.is_empty() {
        let all = files.len() + others.len();
        eprintln!("not graded, since their names do not end in .safetensors: {} of {all} files", others.len());
    }
    files.sort();
    Ok(files)
}

/// Grades one file in a worker, so that a crash or a hang fails only this file; `None` when interrupted.
fn grade(worker: &mut Worker, path: &Path, subject: Option<&Subject>) -> Option<CaseResult> {
    let started = Instant::now();
    let job = Job::Case { path: path.into(), subject: subject.cloned() };
    let limit = subject.map_or(LIMIT, |subject| subject.patience(LIMIT));
    let (mut compared, mut error, mut not_graded) = (Compared::default(), None, None);
    match worker.run(&job, limit, &interrupted) {
        Ok(Ending::Interrupted) => return None,
        Ok(Ending::TimedOut { limit }) => error = Some(format!("exceeded the limit of {} s", limit.as_secs())),
        Ok(Ending::Died { how, out_of_memory: true }) if subject.is_some() => {
            not_graded = Some(format!("{how}; {MORE_MEMORY}"));
        }
        Ok(Ending::Died { how, .. }) => error = Some(how),
        Ok(Ending::Reply(Reply::Failed(why))) => error = Some(why),
        Ok(Ending::Reply(Reply::Compared(result))) => match Compared::deserialize(result) {
            Ok(result) => compared = result,
            Err(why) => error = Some(format!("the worker's comparisons cannot be read: {why}")),
        },
        Ok(Ending::Reply(Reply::NotGraded(reason))) => not_graded = Some(reason),
        Ok(Ending::Reply(other)) => error = Some(format!("a worker answered a case with {other:?}")),
        Err(why) if subject.is_some() => not_graded = Some(format!("{why:#}")),
        Err(why) => error = Some(format!("{why:#}")),
    }
    let [error, not_graded] = [error, not_graded].map(|text| text.map(|text| printable(&text)));
    let file = distinct_name(path.file_name().unwrap_or_default());
    Some(CaseResult { file, compared, error, not_graded, elapsed_s: started.elapsed().as_secs_f64() })
}

fn print(result: &CaseResult, printer: Printer) {
    let ending = match (&result.not_graded, result.compared.passed) {
        (Some(_), _) => "not graded",
        (None, true) => "passed",
        (None, false) => "FAILED",
    };
    printer.line(format!("{ending} {}", result.file));
    for text in result.error.iter().chain(&result.not_graded).chain(&result.compared.lines) {
        printer.line(format!("    {}", indented(text, 4)));
    }
}
