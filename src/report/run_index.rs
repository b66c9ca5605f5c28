//! The index of runs at the end of the report: their cases, conditions and peak speeds.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{Document, escape, title_page};
use crate::harness::answer::RecordSet;
use crate::harness::answer::format::{NOTHING, grouped};
use crate::harness::answer::records::machine_name;
use crate::harness::conditions::{Throttle, in_words};
use crate::harness::record::{CaseRecord, Peaks, Profile, Run};
use crate::harness::stats::Summary;

/// The sensor's readings over several cases.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// The number of cases that ran long enough for a reading.
    pub cases: usize,
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
            cases: during.len(),
            sm_clock_hz: clock.median,
            power_w: power.median,
            max_temperature_c: during.iter().map(|d| d.max_temperature_c).fold(0.0, f64::max),
            throttle: during.iter().flat_map(|d| &d.throttle).copied().collect(),
            remeasured: all.iter().filter(|conditions| !conditions.remeasured_after.is_empty()).count(),
            spoiled: all.iter().filter(|conditions| !conditions.spoiled_by().is_empty()).count(),
        })
    }

    /// "SM clock 1,980 MHz, 450 W, at most 61 °C".
    pub fn describe(&self) -> String {
        let spoiled = match self.spoiled {
            0 => String::new(),
            n => format!(", {n} of {} cases slowed down by {}", self.cases, in_words(self.reasons())),
        };
        let clock = grouped(self.sm_clock_hz / 1e6, 0);
        format!("SM clock {clock} MHz, {:.0} W, at most {:.0} °C{spoiled}", self.power_w, self.max_temperature_c)
    }

    /// The throttle reasons while cases ran.
    fn reasons(&self) -> impl Iterator<Item = &Throttle> {
        self.throttle.iter().filter(|reason| **reason != Throttle::GpuIdle)
    }
}

/// The appendix as Markdown; `None` for a document without records.
pub fn index(document: &Document) -> Option<String> {
    let sets = document.problems.iter().flat_map(|p| p.records.sets().map(move |r| (p, r)));
    let mut lines: Vec<Line> = Vec::new();
    for (problem, set) in sets {
        for run in set.runs() {
            lines.push(Line::new(problem.handout.name, set, run));
        }
    }
    if lines.is_empty() {
        return None;
    }
    lines.sort_by_key(|line| (line.profile == Profile::Cpu, line.id));
    let machines = machines(document);
    let watched = lines.iter().any(|line| line.seen.is_some());
    let mut out = format!("{machines}\n{}\n", if watched { WATCHED } else { UNWATCHED });
    for line in &lines {
        let _ = writeln!(out, "| {} |", line.cells(watched).join(" | "));
    }
    let _ = writeln!(out, "\nTable: {}", if watched { WATCHED_CAPTION } else { UNWATCHED_CAPTION });
    Some(out)
}

const WATCHED: &str = "| Run | Problem | Commit | Cases | SM clock (MHz) | Power (W) | Up to (°C) | Held down by |\n\
                       |:---|:---|:---|---:|---:|---:|---:|:---|";
const WATCHED_CAPTION: &str = "Each run behind the figures of this report. Clock and power are medians over the run's \
                               cases of what was read every 100 ms while a case ran; a case measured again had been \
                               slowed down by heat or a fault the first time.";
const UNWATCHED: &str = "| Run | Problem | Commit | Cases |\n|:---|:---|:---|---:|";
const UNWATCHED_CAPTION: &str = "Each run behind the figures of this report.";

/// One run of one problem.
struct Line<'a> {
    problem: &'a str,
    profile: Profile,
    id: &'a str,
    commit: String,
    cases: usize,
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
            seen: Seen::of(cases()),
        }
    }

    fn cells(&self, watched: bool) -> Vec<String> {
        let problem = format!("`{}` ({})", self.problem, self.profile);
        let mut cells = vec![self.id.to_string(), problem, self.commit.clone(), self.cases.to_string()];
        match (&self.seen, watched) {
            (_, false) => {}
            (None, true) => cells.extend([NOTHING; 4].map(String::from)),
            (Some(seen), true) => {
                let again = match seen.remeasured {
                    0 => String::new(),
                    n => format!("; {n} measured again"),
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

/// Each machine once, by its newest run: settings and peak speeds.
fn machines(document: &Document) -> String {
    let mut out = String::new();
    let mut known = BTreeSet::new();
    for (profile, run) in title_page::runs(document).into_iter().rev() {
        let name = machine_name(&run.machine, profile);
        if known.insert((profile, name.clone())) {
            let settings = title_page::settings(run);
            let line = format!("{name} ({profile}): {settings}. Timings are held against {}.", roofs(&run.peaks));
            let _ = writeln!(out, "- {}", escape::markdown(&line));
        }
    }
    out
}

/// "66.9 TFLOP/s in float32, 4.80 TB/s of memory (NVIDIA's data sheet, dense)".
fn roofs(peaks: &Peaks) -> String {
    let flops = peaks.flops_per_s.iter().map(|(name, flops)| format!("{:.1} TFLOP/s in {name}", flops / 1e12));
    let memory = format!("{:.2} TB/s of memory", peaks.bytes_per_s / 1e12);
    format!("{} ({})", flops.chain([memory]).collect::<Vec<_>>().join(", "), peaks.source)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::harness::conditions::{Conditions, During, Reading, ReadingRange};
    use crate::harness::record::Outcome;

    fn case(clock: f64, power: f64, throttle: &[Throttle], again: bool) -> CaseRecord {
        let range = |median: f64| ReadingRange { min: median, median, max: median };
        let reading = Reading {
            sm_clock_hz: clock,
            memory_clock_hz: 3e9,
            power_w: power,
            temperature_c: 50.0,
            throttle: BTreeSet::new(),
        };
        let during = During {
            readings: 3,
            sm_clock_hz: range(clock),
            power_w: range(power),
            max_temperature_c: power / 10.0,
            throttle: throttle.iter().copied().collect(),
        };
        let remeasured_after = if again { [Throttle::HwSlowdown].into() } else { BTreeSet::new() };
        CaseRecord {
            grid: "g".into(),
            params: json!({}),
            run: "r".into(),
            revision: 1,
            kernels: BTreeMap::new(),
            elapsed_s: 1.0,
            conditions: Some(Conditions {
                before: reading.clone(),
                during: Some(during),
                after: reading,
                remeasured_after,
            }),
            outcome: Outcome::Measured { row: json!({}) },
        }
    }

    #[test]
    fn cases_are_summarised_and_a_slowdown_is_named() {
        let idle = [Throttle::GpuIdle];
        let cases = [case(1.98e9, 400.0, &idle, false), case(1.5e9, 690.0, &[Throttle::SwPowerCap], true)];
        let seen = Seen::of(cases.iter()).unwrap();
        assert_eq!((seen.cases, seen.remeasured, seen.spoiled), (2, 1, 0));
        assert_eq!(seen.describe(), "SM clock 1,740 MHz, 545 W, at most 69 °C");
        assert_eq!(in_words(seen.reasons()), "power cap");
        let slow = [case(1.0e9, 200.0, &[Throttle::HwSlowdown], true)];
        let words = Seen::of(slow.iter()).unwrap().describe();
        assert!(words.ends_with("1 of 1 cases slowed down by hardware slowdown"), "{words}");
        assert_eq!(Seen::of([].iter()), None);
    }

    #[test]
    fn peaks_are_printed_with_their_units() {
        let peaks = Peaks {
            flops_per_s: [("float32".to_string(), 66.9e12)].into(),
            bytes_per_s: 4.8e12,
            cache_bytes: 0.0,
            source: "a data sheet".into(),
        };
        assert_eq!(roofs(&peaks), "66.9 TFLOP/s in float32, 4.80 TB/s of memory (a data sheet)");
    }
}
