//! The head of the report: title, contents and the date of the newest record, for `writeup.typ` and for `writeup.md`.

use std::fmt::Write as _;

use serde::Serialize;

use super::{AnsweredPart, Document, escape, points, provenance};
use crate::harness::answer::machines::machine_name;
use crate::harness::handout::HandoutProblem;

/// The head of the report. It depends on the records only, not on the clock.
#[derive(Serialize)]
pub struct Front {
    title: String,
    assignment: String,
    /// Whose implementation it is, where that is not ours.
    subject: Option<String>,
    points: String,
    total: String,
    /// The day of the newest run; none without records.
    date: Option<String>,
    /// The names of the machines, the GPUs' first.
    machines: Vec<String>,
    problems: Vec<ContentsLine>,
}

#[derive(Serialize)]
struct ContentsLine {
    name: &'static str,
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
            section: p.section,
            points: points(p.points),
            earned: points(earned(p)),
            open: earned(p) == 0.0,
        });
        let runs = provenance::runs(document);
        let mut machines: Vec<_> =
            runs.iter().map(|(profile, r)| (profile, machine_name(&r.machine, *profile))).collect();
        machines.sort();
        machines.dedup();
        Self {
            title: document.title.clone(),
            assignment: document.assignment.clone(),
            subject: document.subject.clone(),
            points: points(handout().map(earned).sum()),
            total: points(handout().map(|p| p.points).sum()),
            date: runs.iter().map(|(_, r)| &r.started).max().map(|day| day.get(..10).unwrap_or(day).to_string()),
            machines: machines.into_iter().rev().map(|(_, name)| name).collect(),
            problems: problems.collect(),
        }
    }

    /// The head of `writeup.md`: title, `summary` and contents.
    pub fn markdown(&self, summary: &str) -> String {
        let mut out = format!("# {}\n\n{}\n\n", self.title, self.assignment);
        let _ = match &self.subject {
            Some(subject) => write!(out, "The implementation of **{}**, measured by cs336.", escape::markdown(subject)),
            None => write!(out, "{} of {} points answered.", self.points, self.total),
        };
        if let Some(date) = &self.date {
            let _ = write!(out, " Newest record: {date}. Machines: {}.", escape::markdown(&self.machines.join("; ")));
        }
        let _ = write!(out, "\n\n{summary}\n## Contents\n\n");
        for p in &self.problems {
            let status = if p.open { "not answered".into() } else { format!("{}/{}", p.earned, p.points) };
            let _ = writeln!(out, "- {} [`{}`](#{}): {status}", p.section, p.name, p.anchor());
        }
        out
    }
}

impl ContentsLine {
    /// The anchor that Markdown viewers give the problem's heading, "1.1.3 benchmarking_script (4 points)".
    fn anchor(&self) -> String {
        let plural = if self.points == "1" { "" } else { "s" };
        let heading = format!("{} {} {} point{plural}", self.section, self.name, self.points);
        heading.replace('.', "").replace(' ', "-")
    }
}
