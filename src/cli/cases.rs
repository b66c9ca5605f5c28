//! `cs336 grade --cases`: every case file of a folder, one verdict each; a malformed file is one failed case.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;

use super::Ended;
use crate::cases::{CaseFile, Comparison, run as run_case};
use crate::harness::worker::panic_message;

/// How one file ended.
#[derive(Debug, Serialize)]
struct CaseResult {
    file: String,
    passed: bool,
    comparisons: Vec<Comparison>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub fn run(folder: &Path, as_json: bool) -> Result<Ended> {
    let results: Vec<CaseResult> = files(folder)?.iter().map(|path| grade(path, as_json)).collect();
    let passed = results.iter().filter(|r| r.passed).count();
    if as_json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    } else {
        println!("{passed} of {} cases passed", results.len());
    }
    Ok(if passed == results.len() { Ended::Well } else { Ended::WithFindings })
}

/// The folder's case files by name; none at all is an error, since nothing would have been graded.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("failed to open the cases folder {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            files.push(path);
        }
    }
    ensure!(!files.is_empty(), "{} holds no *.safetensors file, so nothing was graded", folder.display());
    files.sort();
    Ok(files)
}

fn grade(path: &Path, quiet: bool) -> CaseResult {
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let attempt = catch_unwind(AssertUnwindSafe(|| run_case(&CaseFile::read(path)?)));
    let attempt = attempt.unwrap_or_else(|panic| Err(anyhow::anyhow!("panicked: {}", panic_message(panic.as_ref()))));
    let result = match attempt.and_then(nothing_skipped) {
        Ok(comparisons) => CaseResult { file, passed: comparisons.iter().all(|c| c.passed), comparisons, error: None },
        Err(error) => CaseResult { file, passed: false, comparisons: Vec::new(), error: Some(format!("{error:#}")) },
    };
    if !quiet {
        print(&result);
    }
    result
}

fn nothing_skipped(comparisons: Vec<Comparison>) -> Result<Vec<Comparison>> {
    if comparisons.is_empty() {
        bail!("nothing was compared");
    }
    Ok(comparisons)
}

fn print(result: &CaseResult) {
    println!("{} {}", if result.passed { "passed" } else { "FAILED" }, result.file);
    if let Some(error) = &result.error {
        println!("    {error}");
    }
    for comparison in &result.comparisons {
        println!("    {comparison}");
    }
}
