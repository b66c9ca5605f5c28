//! Where numbers come from, for the last appendix: machines, runs, how cases ended, and what decided each claim.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{Document, escape};
use crate::harness::answer::format::{NOTHING, grouped};
use crate::harness::answer::machines::{machine_name, memory_bytes};
use crate::harness::answer::records::runs_by_age;
use crate::harness::answer::{Claim, RecordSet};
use crate::harness::conditions::{Throttle, in_words};
use crate::harness::record::{CaseRecord, Outcome, Peaks, Profile, Run};
use crate::harness::stats::Summary;
use crate::units::human_bytes;

const INTRODUCTION: &str = "A measured number comes from a *case*: one setting of a problem's suite, measured in one *run* on \
    one machine. A case is *stale* when its setting has left the suite, the code of a kernel that it ran has changed, or the \
    meaning of its measurement has; a mere change of Rust code leaves it fresh. The samples of every case are in";

/// The appendix in Markdown.
pub fn markdown(document: &Document, claims: &[(&'static str, Claim)]) -> String {
    let (place, also) = match document.subject {
        Some(_) => ("`records/` beside this report", " A case is stale also when a file of their code has changed."),
        None => ("`snapshots/`, or in `report/records/` where an answer is from this machine's own", ""),
    };
    let mut out = format!("{INTRODUCTION} {place}, one case a line.{also}\n\n");
    let lines = lines(document);
    if !lines.is_empty() {
        out += &format!("### Machines\n\n{}\n### Runs\n\n{}\n", machines(document), runs_table(&lines));
    }
    out + &cases_table(document) + &claims_table(claims)
}

/// Every run of every problem once, with the profile it ran under, oldest first.
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

/// The sensor's readings over several cases.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// The median over the cases of each one's median.
    pub sm_clock_hz: f64,
    pub power_w: f64,
    pub max_temperature_c: f64,
    /// All throttle reasons of these cases.
    pub throttle: BTreeSet<Throttle>,
    /// The number of cases measured again because of a slowdown.
    pub remeasured: usize,
    /// The number of cases slowed down the second time as well.
    pub spoiled: usize,
}

impl Seen {
    /// `None` if no case has a reading.
    pub fn of<'a>(cases: impl Iterator<Item = &'a CaseRecord>) -> Option<Self> {
        let all: Vec<_> = cases.filter_map(|case| case.conditions.as_ref()).collect();
        let during: Vec<_> = all.iter().filter_map(|conditions| conditions.during.as_ref()).collect();
        let clock = Summary::of(&during.iter().map(|d| d.sm_clock_hz.median).collect::<Vec<_>>())?;
        let power = Summary::of(&during.iter().map(|d| d.power_w.median).collect::<Vec<_>>())?;
        Some(Self {
            sm_clock_hz: clock.median,
            power_w: power.median,
            max_temperature_c: during.iter().map(|d| d.max_temperature_c).fold(0.0, f64::max),
            throttle: during.iter().flat_map(|d| &d.throttle).copied().collect(),
            remeasured: all.iter().filter(|conditions| !conditions.remeasured_after.is_empty()).count(),
            spoiled: all.iter().filter(|conditions| !conditions.spoiled_by().is_empty()).count(),
        })
    }

    fn reasons(&self) -> impl Iterator<Item = &Throttle> {
        self.throttle.iter().filter(|reason| **reason != Throttle::GpuIdle)
    }
}

/// The runs of every problem, the GPU's first.
fn lines(document: &Document) -> Vec<Line<'_>> {
    let sets = document.problems.iter().flat_map(|p| p.records.sets().map(move |r| (p, r)));
    let mut lines: Vec<Line> = Vec::new();
    for (problem, set) in sets {
        for run in set.runs() {
            lines.push(Line::new(problem.handout.name, set, run));
        }
    }
    lines.sort_by_key(|line| (line.profile == Profile::Cpu, line.id));
    lines
}

fn runs_table(lines: &[Line]) -> String {
    let watched = lines.iter().any(|line| line.seen.is_some());
    let loaded = lines.iter().any(|line| line.busy.is_some());
    let changed = lines.iter().any(|line| line.commit.ends_with('+'));
    let columns = [(true, RUN), (changed, CHANGED), (loaded, LOAD), (watched, SENSOR)];
    let shown = || columns.iter().filter(|(is_shown, _)| *is_shown);
    let [titles, rules, captions] = [0, 1, 2].map(|part| shown().map(|(_, text)| text[part]).collect::<String>());
    let mut out = format!("{titles}|\n{rules}|\n");
    for line in lines {
        let _ = writeln!(out, "| {} |", line.cells(loaded, watched).join(" | "));
    }
    let _ = writeln!(out, "\nTable: {captions}");
    out
}

/// Columns of the table of runs: their titles, their alignments, and what the caption says of them.
const RUN: [&str; 3] =
    ["| Run | Problem | Commit | Cases ", "|:---|:---|:---|---:", "Each run behind the figures of this report."];
/// Of the table without another column.
const CHANGED: [&str; 3] = ["", "", " A commit with + had uncommitted or edited files."];
const LOAD: [&str; 3] =
    ["| Busy CPUs ", "|---:", " Busy CPUs are those of the whole host, the median over the run's cases."];
const SENSOR: [&str; 3] = [
    "| SM clock (MHz) | Power (W) | Up to (°C) | Held down by ",
    "|---:|---:|---:|:---",
    " Clock and power are medians over the run's cases of what was read every 100 ms while a case ran; a case measured again \
     had been slowed down by heat or a fault the first time.",
];

/// One run of one problem.
struct Line<'a> {
    problem: &'a str,
    profile: Profile,
    id: &'a str,
    commit: String,
    cases: usize,
    busy: Option<f64>,
    seen: Option<Seen>,
}

impl<'a> Line<'a> {
    fn new(problem: &'a str, set: &'a RecordSet, run: &'a Run) -> Self {
        let cases = || set.file.cases.iter().filter(|case| case.run == run.id);
        let dirty = if run.dirty { " +" } else { "" };
        let commit = format!("`{}`{dirty}", run.commit.get(..10).unwrap_or(&run.commit));
        Self {
            problem,
            profile: set.file.profile,
            id: &run.id,
            commit,
            cases: cases().count(),
            busy: Summary::of(&cases().filter_map(|case| case.busy_processors).collect::<Vec<_>>())
                .map(|busy| busy.median),
            seen: Seen::of(cases()),
        }
    }

    fn cells(&self, loaded: bool, watched: bool) -> Vec<String> {
        let problem = format!("`{}` ({})", self.problem, self.profile);
        let mut cells = vec![self.id.to_string(), problem, self.commit.clone(), self.cases.to_string()];
        if loaded {
            cells.push(self.busy.map_or(NOTHING.into(), |busy| grouped(busy, 1)));
        }
        match (&self.seen, watched) {
            (_, false) => {}
            (None, true) => cells.extend([NOTHING; 4].map(String::from)),
            (Some(seen), true) => {
                let again = match (seen.remeasured, seen.spoiled) {
                    (0, _) => String::new(),
                    (n, 0) => format!("; {n} measured again"),
                    (n, slow) => format!("; {n} measured again, {slow} slow both times"),
                };
                let reasons = in_words(seen.reasons());
                let reasons = if reasons.is_empty() { NOTHING.to_string() } else { reasons };
                cells.extend([
                    grouped(seen.sm_clock_hz / 1e6, 0),
                    grouped(seen.power_w, 0),
                    grouped(seen.max_temperature_c, 0),
                    reasons + &again,
                ]);
            }
        }
        cells
    }
}

/// Each machine once, by its newest run: memory, software, settings and peak speeds.
fn machines(document: &Document) -> String {
    let mut out = String::new();
    let mut known = BTreeSet::new();
    for (profile, run) in runs(document).into_iter().rev() {
        let name = machine_name(&run.machine, profile);
        if known.insert((profile, name.clone())) {
            let memory = human_bytes(memory_bytes(&run.machine, profile));
            let software = run.software.iter().map(|(k, v)| format!("{k} {v}")).collect::<Vec<_>>().join(", ");
            let (os, settings, roofs) = (&run.machine.os, settings(run), roofs(&run.peaks));
            let line = format!(
                "{name} ({profile}): {memory} of memory; {os}; {software}; {settings}. No timing may be faster than {roofs} allow."
            );
            let _ = writeln!(out, "- {}", escape::markdown(&line));
        }
    }
    out
}

/// The settings of a run that affect its numbers, in one line.
fn settings(run: &Run) -> String {
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

/// "66.9 TFLOP/s in float32, 4.80 TB/s of memory (NVIDIA's data sheet, dense)".
fn roofs(peaks: &Peaks) -> String {
    let flops = peaks.flops_per_s.iter().map(|(name, flops)| format!("{:.1} TFLOP/s in {name}", flops / 1e12));
    let memory = format!("{:.2} TB/s of memory", peaks.bytes_per_s / 1e12);
    format!("{} ({})", flops.chain([memory]).collect::<Vec<_>>().join(", "), peaks.source)
}

/// How the cases of every problem ended; empty if nothing was measured.
fn cases_table(document: &Document) -> String {
    let mut rows = String::new();
    for problem in &document.problems {
        for set in problem.records.sets() {
            let count = |matches: fn(&Outcome) -> bool| set.file.cases.iter().filter(|c| matches(&c.outcome)).count();
            let counts = [
                set.file.cases.len(),
                count(|o| matches!(o, Outcome::Measured { .. }) && o.failure().is_none()),
                count(|o| matches!(o, Outcome::OutOfMemory { .. })),
                count(Outcome::is_not_run),
                count(|o| o.failure().is_some()),
                set.stale.len(),
            ];
            let counts = counts.map(|n| if n == 0 { NOTHING.to_string() } else { n.to_string() }).join(" | ");
            let _ = writeln!(rows, "| `{}` | {} | {counts} |", problem.handout.name, set.file.profile);
        }
    }
    if rows.is_empty() {
        return rows;
    }
    let head = "| Problem | Profile | Cases | Measured | Out of memory | Not run | Failed | Stale |\n\
                |:---|:---|---:|---:|---:|---:|---:|---:|";
    format!(
        "### Cases\n\n{head}\n{rows}\nTable: How the cases of each problem ended. Problems that are not listed hand in code or \
         computed numbers and measure nothing.\n\n"
    )
}

fn claims_table(claims: &[(&'static str, Claim)]) -> String {
    if claims.is_empty() {
        return String::new();
    }
    let mut table = "### Claims\n\nA claim is a comparison in the text, decided by the records when this report is built. Where one does not hold, the \
                     text says so or leaves it out.\n\n| Problem | Claim | Holds | Decided by |\n|:---|:---|:---|:---|\n"
        .to_string();
    for (problem, claim) in claims {
        let held = if claim.held { "yes" } else { "no" };
        let (words, decided_by) = (claim.words(), claim.decided_by());
        let _ = writeln!(table, "| `{problem}` | {words} | {held} | {decided_by} |");
    }
    let _ = writeln!(table, "\nTable: The {} claims of this report and whether they hold.", claims.len());
    table
}

#[cfg(test)]
mod tests;
