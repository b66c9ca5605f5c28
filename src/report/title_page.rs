//! The title page and the contents, as data for `writeup.typ` and as the head of `writeup.md`.

use std::fmt::Write as _;

use serde::Serialize;

use super::{AnsweredPart, Document, escape, points};
use crate::harness::answer::RecordSet;
use crate::harness::answer::records::{machine_name, memory_bytes, runs_by_age};
use crate::harness::handout::HandoutProblem;
use crate::harness::record::{Profile, Run};
use crate::units::human_bytes;

/// The contents of the title page. They depend on the records only, not on the clock.
#[derive(Serialize)]
pub struct Front {
    title: String,
    assignment: String,
    points: String,
    total: String,
    /// The day of the newest run; none without records.
    date: Option<String>,
    machines: Vec<MachineLine>,
    problems: Vec<ContentsLine>,
}

#[derive(Serialize)]
struct MachineLine {
    profile: Profile,
    name: String,
    detail: String,
    software: String,
    /// The conditions of the newest run, such as threads.
    settings: String,
    /// The commits of all records, newest first.
    commits: Vec<CommitRuns>,
}

#[derive(Serialize)]
struct CommitRuns {
    id: String,
    dirty: bool,
    runs: usize,
}

#[derive(Serialize)]
struct ContentsLine {
    name: &'static str,
    title: &'static str,
    section: &'static str,
    points: String,
    earned: String,
    open: bool,
}

impl Front {
    pub fn new(document: &Document, answered: &[AnsweredPart]) -> Self {
        // an empty sum of floats is -0
        let earned =
            |p: &HandoutProblem| answered.iter().filter(|a| a.problem == p.name).map(|a| a.points).sum::<f64>() + 0.0;
        let handout = || document.problems.iter().map(|p| &p.handout);
        let problems = handout().map(|p| ContentsLine {
            name: p.name,
            title: p.title,
            section: p.section,
            points: points(p.points),
            earned: points(earned(p)),
            open: earned(p) == 0.0,
        });
        let runs = runs(document);
        Self {
            title: document.title.clone(),
            assignment: document.assignment.clone(),
            points: points(handout().map(earned).sum()),
            total: points(handout().map(|p| p.points).sum()),
            date: runs.iter().map(|(_, r)| &r.started).max().map(|day| day.get(..10).unwrap_or(day).to_string()),
            machines: machines(&runs),
            problems: problems.collect(),
        }
    }

    /// The head of `writeup.md`.
    pub fn markdown(&self) -> String {
        let mut out = format!("# {}\n\n{}\n\n", self.title, self.assignment);
        let _ = writeln!(out, "**{} of {} points answered.**", self.points, self.total);
        if let Some(date) = &self.date {
            let _ = writeln!(out, "Newest record: {date}.");
        }
        if !self.machines.is_empty() {
            out += "\n| Profile | Machine | Software | Settings | Commits |\n|:---|:---|:---|:---|:---|\n";
        }
        for m in &self.machines {
            let [name, software, settings] = [&m.name, &m.software, &m.settings].map(|text| escape::markdown(text));
            let commits = m.commits.iter().map(|c| {
                let dirty = if c.dirty { " with uncommitted changes" } else { "" };
                format!("`{}`{dirty} ({} run{})", c.id, c.runs, if c.runs == 1 { "" } else { "s" })
            });
            let commits = commits.collect::<Vec<_>>().join(", ");
            let _ = writeln!(out, "| {} | {name}; {} | {software} | {settings} | {commits} |", m.profile, m.detail);
        }
        out += "\n## Contents\n\n";
        for p in &self.problems {
            let status = if p.open { "not answered".into() } else { format!("{} of {}", p.earned, p.points) };
            let _ = writeln!(out, "- {} [{}](#{}): {status} points", p.section, p.title, anchor(p.title));
        }
        out.replace("not answered points", "not answered")
    }
}

/// Every run of every problem once, with the profile it ran under.
pub fn runs(document: &Document) -> Vec<(Profile, &Run)> {
    let sets = document.problems.iter().flat_map(|p| p.records.sets());
    let mut runs: Vec<(Profile, &Run)> = Vec::new();
    for RecordSet { file, .. } in sets {
        for run in runs_by_age(&file.runs) {
            if !runs.iter().any(|(_, r)| r.id == run.id) {
                runs.push((file.profile, run));
            }
        }
    }
    runs.sort_by(|a, b| (&a.1.started, &a.1.id).cmp(&(&b.1.started, &b.1.id)));
    runs
}

/// One line for each machine, from its newest run, with the commits of all; GPUs first.
fn machines(runs: &[(Profile, &Run)]) -> Vec<MachineLine> {
    let mut lines: Vec<MachineLine> = Vec::new();
    for (profile, run) in runs.iter().rev() {
        let name = machine_name(&run.machine, *profile);
        let known = lines.iter().position(|l| l.name == name && l.profile == *profile);
        let line = known.unwrap_or(lines.len());
        if known.is_none() {
            lines.push(machine(*profile, name, run));
        }
        lines[line].count(run);
    }
    lines.sort_by_key(|l| l.profile == Profile::Cpu);
    lines
}

fn machine(profile: Profile, name: String, run: &Run) -> MachineLine {
    let memory = human_bytes(memory_bytes(&run.machine, profile));
    MachineLine {
        profile,
        name,
        detail: format!("{memory} of memory, {}", run.machine.os),
        software: run.software.iter().map(|(k, v)| format!("{k} {v}")).collect::<Vec<_>>().join(", "),
        settings: settings(run),
        commits: Vec::new(),
    }
}

/// The settings of a run that affect its numbers, in one line.
pub fn settings(run: &Run) -> String {
    run.settings.iter().rev().map(|(k, v)| setting(k, v)).collect::<Vec<_>>().join(", ")
}

/// A setting as text: "2 threads", "TF32 off", "AVX512 kernels".
fn setting(key: &str, value: &str) -> String {
    match key {
        "threads" => format!("{value} thread{}", if value == "1" { "" } else { "s" }),
        "tf32" => format!("TF32 {value}"),
        "cpu_capability" => format!("{value} kernels"),
        "max_sm_clock" => format!("SM clock up to {value}"),
        "max_memory_clock" => format!("memory clock {value}"),
        _ => format!("{} {value}", key.replace('_', " ")),
    }
}

impl MachineLine {
    fn count(&mut self, run: &Run) {
        let id = run.commit.get(..10).unwrap_or(&run.commit);
        match self.commits.iter_mut().find(|c| c.id == id && c.dirty == run.dirty) {
            Some(commit) => commit.runs += 1,
            None => self.commits.push(CommitRuns { id: id.into(), dirty: run.dirty, runs: 1 }),
        }
    }
}

/// The anchor that Markdown viewers give a heading.
fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}
