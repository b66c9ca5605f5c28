//! `cs336 grade --cases`: every case file of a folder, one verdict each; a malformed file is one failed case.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Ended, interrupted, watch_for_interrupt};
use crate::checks::golden::{CaseFile, run as run_case};
use crate::harness::store::Layout;
use crate::harness::worker::{Ending, Job, Reply, Worker};

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

/// How one file ended.
#[derive(Debug, Serialize)]
struct CaseResult {
    file: String,
    #[serde(flatten)]
    compared: Compared,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub fn run(layout: &Layout, folder: &Path, as_json: bool) -> Result<Ended> {
    watch_for_interrupt();
    let mut worker = Worker::new(layout);
    let mut results = Vec::new();
    for path in files(folder)? {
        let Some(result) = grade(&mut worker, &path)? else { return Ok(Ended::Interrupted) };
        if !as_json {
            print(&result);
        }
        results.push(result);
    }
    let passed = results.iter().filter(|r| r.compared.passed).count();
    if as_json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    } else {
        println!("{passed} of {} cases passed", results.len());
    }
    Ok(if passed == results.len() { Ended::Well } else { Ended::WithFindings })
}

/// The worker's side: runs one file in its process.
pub fn run_one(path: &Path) -> Result<Value> {
    let comparisons = run_case(&CaseFile::read(path)?)?;
    Ok(serde_json::to_value(Compared {
        passed: comparisons.iter().all(|c| c.passed),
        lines: comparisons.iter().map(ToString::to_string).collect(),
        comparisons: serde_json::to_value(&comparisons)?,
    })?)
}

/// The folder's case files, sorted by name. An empty folder is an error, since nothing would be graded.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| {
        format!("the cases folder {} cannot be opened; name a folder of *.safetensors files", folder.display())
    })?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            files.push(path);
        }
    }
    ensure!(
        !files.is_empty(),
        "{} holds no *.safetensors file, so nothing was graded; suites/cases/README.md describes the format",
        folder.display()
    );
    files.sort();
    Ok(files)
}

/// Grades one file in a worker, so that a crash or a hang fails only this file; `None` when interrupted.
fn grade(worker: &mut Worker, path: &Path) -> Result<Option<CaseResult>> {
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let path = path.canonicalize().with_context(|| format!("failed to find {}", path.display()))?;
    let failed = |error: String| CaseResult { file: file.clone(), compared: Compared::default(), error: Some(error) };
    Ok(Some(match worker.run(&Job::Case { path }, LIMIT, &interrupted)? {
        Ending::Interrupted => return Ok(None),
        Ending::TimedOut { limit } => failed(format!("exceeded the limit of {} s", limit.as_secs())),
        Ending::Died { how, .. } => failed(how),
        Ending::Reply(Reply::Failed(error)) => failed(error),
        Ending::Reply(Reply::Compared(result)) => {
            let compared = Compared::deserialize(result).context("a worker's comparisons")?;
            CaseResult { file, compared, error: None }
        }
        Ending::Reply(other) => failed(format!("a worker answered a case with {other:?}")),
    }))
}

fn print(result: &CaseResult) {
    println!("{} {}", if result.compared.passed { "passed" } else { "FAILED" }, result.file);
    if let Some(error) = &result.error {
        println!("    {error}");
    }
    for comparison in &result.compared.lines {
        println!("    {comparison}");
    }
}
