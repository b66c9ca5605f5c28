//! NVIDIA's compute-sanitizer around a process of ours, and what it reports.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::checks::attestation::Findings;
use crate::error::Fault;
use crate::printable::shown_path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    Memcheck,
    Racecheck,
}

const PROGRAM: &str = "compute-sanitizer";

/// Kinds of errors that are kept.
const MOST_KINDS: usize = 8;

impl Tool {
    fn name(self) -> &'static str {
        match self {
            Self::Memcheck => "memcheck",
            Self::Racecheck => "racecheck",
        }
    }

    /// Runs `program` and everything that it starts under the tool, which looks at the kernels in whose names `kernels`
    /// stands: what it printed, and what was found.
    ///
    /// # Errors
    /// [`Fault::NotAvailable`] without compute-sanitizer; the program's failure, or a report without a summary.
    pub fn watch(self, program: &Command, kernels: &str) -> Result<(String, Findings)> {
        self.watch_by(Path::new(PROGRAM), program, kernels)
    }

    fn watch_by(self, sanitizer: &Path, program: &Command, kernels: &str) -> Result<(String, Findings)> {
        let mut command = Command::new(sanitizer);
        // The callers handle refused driver calls. They are not memory errors.
        command.args(["--tool", self.name(), "--target-processes", "all", "--report-api-errors", "no"]);
        command.args(["--kernel-name", &format!("kernel_substring={kernels}")]);
        command.arg(program.get_program()).args(program.get_args());
        let output = match command.output() {
            Ok(output) => output,
            Err(error) => {
                let needs = format!("{}, of the CUDA toolkit", shown_path(sanitizer));
                return Err(Fault::NotAvailable { needs, has: format!("none: {error}") }.into());
            }
        };
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {printed}\n{stderr}", output.status);
        let report: String = [printed.as_str(), &stderr].concat();
        let findings = self.read(&report).with_context(|| format!("{PROGRAM} gave no summary: {report}"))?;
        Ok((printed.lines().filter(|line| !line.starts_with("=========")).collect::<Vec<_>>().join("\n"), findings))
    }

    /// Adds up the summaries, one a process, of a report; nothing without any.
    fn read(self, report: &str) -> Option<Findings> {
        let summary = match self {
            Self::Memcheck => "ERROR SUMMARY: ",
            Self::Racecheck => "RACECHECK SUMMARY: ",
        };
        let counts =
            report.lines().filter_map(|line| line.split_once(summary)?.1.split(' ').next()?.parse::<u64>().ok());
        let errors = counts.reduce(|a, b| a + b)?;
        let mut kinds: Vec<String> = Vec::new();
        for line in report.lines().filter_map(|line| line.strip_prefix("========= ")) {
            let is_first = ["Error: ", "Invalid ", "Warning: "].iter().any(|start| line.starts_with(start));
            let kind = without_addresses(line);
            if is_first && kinds.len() < MOST_KINDS && !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        Some(Findings { errors, kinds })
    }
}

/// Two reports of one line of source differ by the instruction's place: "+0x75b0" goes.
fn without_addresses(line: &str) -> String {
    line.split(' ').map(|word| word.split_once("+0x").map_or(word, |(name, _)| name)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use super::*;

    const RACES: &str = "\
========= COMPUTE-SANITIZER
{ \"cases\": 1 }
========= Error: Race reported between Write access at copy_in_row<(unsigned int)256>()+0x75b0 in hopper.cuh:73
=========     and Read access at load_pair(unsigned int)+0x1fe0 in base.cuh:18 [64 hazards]
=========
========= Error: Race reported between Write access at copy_in_row<(unsigned int)256>()+0x7820 in hopper.cuh:73
=========     and Read access at load_pair(unsigned int)+0x25a0 in base.cuh:18 [64 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
";

    #[test]
    fn summaries_are_added_and_kinds_listed_once() {
        let findings = Tool::Racecheck.read(RACES).unwrap();
        let kind = "Error: Race reported between Write access at copy_in_row<(unsigned int)256>() in hopper.cuh:73";
        assert_eq!(findings, Findings { errors: 2, kinds: vec![kind.into()] });
        let clean = "========= ERROR SUMMARY: 0 errors\nwords\n========= ERROR SUMMARY: 3 errors\n";
        assert_eq!(Tool::Memcheck.read(clean).unwrap(), Findings { errors: 3, kinds: Vec::new() });
        assert_eq!(Tool::Memcheck.read(RACES), None, "another tool's summary says nothing");
    }

    /// A sanitizer that runs nothing and reports `summary`.
    fn reporter(folder: &Path, summary: &str, status: u8) -> PathBuf {
        let path = folder.join("sanitizer");
        std::fs::write(&path, format!("#!/bin/sh\necho '{{\"cases\": 1}}'\necho '{summary}' >&2\nexit {status}\n"))
            .unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn the_programs_output_and_the_tools_findings_are_separated() {
        let folder = tempfile::tempdir().unwrap();
        let watch = |summary, status| {
            Tool::Memcheck.watch_by(&reporter(folder.path(), summary, status), &Command::new("true"), "")
        };
        let (printed, findings) = watch("========= ERROR SUMMARY: 0 errors", 0).unwrap();
        assert_eq!((printed.as_str(), findings.errors), ("{\"cases\": 1}", 0));
        assert!(format!("{:#}", watch("nothing", 0).unwrap_err()).contains("no summary"));
        assert!(format!("{:#}", watch("========= ERROR SUMMARY: 0 errors", 3).unwrap_err()).contains("exit status: 3"));
        let missing = Tool::Memcheck.watch_by(&folder.path().join("none"), &Command::new("true"), "").unwrap_err();
        assert!(matches!(missing.downcast_ref::<Fault>(), Some(Fault::NotAvailable { .. })), "{missing:#}");
    }
}
