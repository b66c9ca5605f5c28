//! The title page and the contents, as data for `writeup.typ` and as the head of `writeup.md`.

use std::fmt::Write as _;

use serde::Serialize;

use super::{AnsweredPart, Document, ProblemInput, Records, context, escape, points};
use crate::harness::record::{Profile, Run};
use crate::units::human_bytes;

/// What the title page says; everything comes from the records, nothing from the clock.
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
    commit: String,
    dirty: bool,
    runs: usize,
}

#[derive(Serialize)]
struct ContentsLine {
    name: String,
    title: String,
    section: String,
    points: String,
    earned: String,
    open: bool,
}

impl Front {
    pub fn new(document: &Document, answered: &[AnsweredPart]) -> Self {
        // an empty sum of floats is -0
        let earned =
            |p: &ProblemInput| answered.iter().filter(|a| a.problem == p.name).map(|a| a.points).sum::<f64>() + 0.0;
        let problems = document.problems.iter().map(|p| ContentsLine {
            name: p.name.clone(),
            title: p.title.clone(),
            section: p.section.clone(),
            points: points(p.points),
            earned: points(earned(p)),
            open: earned(p) == 0.0,
        });
        let runs = runs(document);
        Self {
            title: document.title.clone(),
            assignment: document.assignment.clone(),
            points: points(document.problems.iter().map(earned).sum()),
            total: points(document.problems.iter().map(|p| p.points).sum()),
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
            out += "\n| Profile | Machine | Software | Commit |\n|:---|:---|:---|:---|\n";
        }
        for m in &self.machines {
            let dirty = if m.dirty { " (uncommitted changes)" } else { "" };
            let (name, software) = (escape::markdown(&m.name), escape::markdown(&m.software));
            let _ = writeln!(out, "| {} | {name}; {} | {software} | `{}`{dirty} |", m.profile, m.detail, m.commit);
        }
        out += "\n## Contents\n\n";
        for p in &self.problems {
            let status = if p.open { "not answered".into() } else { format!("{} of {}", p.earned, p.points) };
            let _ = writeln!(out, "- {} [{}](#{}): {status} points", p.section, p.title, anchor(&p.title));
        }
        out.replace("not answered points", "not answered")
    }
}

/// Every run of every problem once, with the profile it ran under.
fn runs(document: &Document) -> Vec<(Profile, &Run)> {
    let sets = document.problems.iter().flat_map(|p| [&p.gpu, &p.cpu]).flatten();
    let mut runs: Vec<(Profile, &Run)> = Vec::new();
    for Records { file, .. } in sets {
        for run in context::runs_by_age(&file.runs) {
            if !runs.iter().any(|(_, r)| r.id == run.id) {
                runs.push((file.profile, run));
            }
        }
    }
    runs.sort_by(|a, b| (&a.1.started, &a.1.id).cmp(&(&b.1.started, &b.1.id)));
    runs
}

/// One line for each machine, from its newest run; GPUs first.
fn machines(runs: &[(Profile, &Run)]) -> Vec<MachineLine> {
    let mut lines: Vec<MachineLine> = Vec::new();
    for (profile, run) in runs.iter().rev() {
        let name = context::machine_name(&run.machine, *profile);
        if let Some(line) = lines.iter_mut().find(|l| l.name == name && l.profile == *profile) {
            line.runs += 1;
            continue;
        }
        let memory = match (profile, run.machine.gpus.first()) {
            (Profile::Gpu, Some(gpu)) => human_bytes(gpu.memory_bytes),
            _ => human_bytes(run.machine.memory_bytes),
        };
        lines.push(MachineLine {
            profile: *profile,
            name,
            detail: format!("{memory}, {}", run.machine.os),
            software: run.software.iter().map(|(k, v)| format!("{k} {v}")).collect::<Vec<_>>().join(", "),
            commit: run.commit.get(..10).unwrap_or(&run.commit).to_string(),
            dirty: run.dirty,
            runs: 1,
        });
    }
    lines.sort_by_key(|l| l.profile == Profile::Cpu);
    lines
}

/// The anchor that Markdown viewers give a heading.
fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}
