//! How measuring shows itself: a bar on a terminal, a line a problem elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::harness::problem::Problem;
use crate::harness::record::Outcome;
use crate::harness::run::{Pending, Progress};
use crate::units::human_seconds;

/// Progress of one problem's cases on standard error.
pub struct Bar {
    name: &'static str,
    bar: ProgressBar,
    terminal: bool,
}

impl Bar {
    pub fn new(name: &'static str, cases: usize, estimate_s: f64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(cases as u64) } else { ProgressBar::hidden() };
        if let Ok(style) =
            ProgressStyle::with_template("{prefix:<32} [{bar:24}] {pos}/{len} {elapsed_precise} {wide_msg}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(name);
        if !terminal {
            let about = if estimate_s > 0.0 { format!(", about {}", human_seconds(estimate_s)) } else { String::new() };
            eprintln!("{name}: measuring {cases} cases{about}");
        }
        Self { name, bar, terminal }
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Bar {
    fn checks_started(&mut self, problem: &Problem) {
        self.bar.set_message(format!("running {} checks", problem.checks.len()));
    }

    fn case_started(&mut self, case: &Pending) {
        self.bar.set_message(short(&case.params));
    }

    fn case_ended(&mut self, case: &Pending, outcome: &Outcome, elapsed: Duration) {
        self.bar.inc(1);
        if let Outcome::Failed { error } = outcome {
            let line =
                format!("{} {}: failed after {:.1} s: {error}", self.name, short(&case.params), elapsed.as_secs_f64());
            if self.terminal { self.bar.println(line) } else { eprintln!("{line}") }
        }
    }
}

/// A case in one line: `size=small context_length=128`.
pub fn short(params: &Value) -> String {
    let Some(fields) = params.as_object() else { return params.to_string() };
    let words = fields.iter().map(|(key, value)| match value {
        Value::String(text) => format!("{key}={text}"),
        other => format!("{key}={other}"),
    });
    words.collect::<Vec<_>>().join(" ")
}
