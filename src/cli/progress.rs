//! Progress of measuring: a bar for each table on a terminal, a line elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::harness::plan::Pending;
use crate::harness::problem::Problem;
use crate::harness::record::Outcome;
use crate::harness::run::Progress;
use crate::harness::schedule::PendingTable;
use crate::units::human_seconds;

/// Progress of one table after another on standard error.
#[derive(Default)]
pub struct Bars(Option<Bar>);

/// The progress of one table.
struct Bar {
    name: String,
    bar: ProgressBar,
}

impl Bar {
    fn new(problem: &Problem, table: &PendingTable) -> Self {
        let name = format!("{}.{}", problem.name, table.grid);
        let cases = table.pending.len();
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(cases as u64) } else { ProgressBar::hidden() };
        if let Ok(style) =
            ProgressStyle::with_template("{prefix:<40} [{bar:24}] {pos}/{len} {elapsed_precise} {wide_msg}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(name.clone());
        if !terminal {
            let about = table.estimate_s().map_or(String::new(), |s| format!(", about {}", human_seconds(s)));
            eprintln!("{name}: measuring {cases} cases{about}");
        }
        Self { name, bar }
    }
}

impl Progress for Bars {
    fn table_started(&mut self, problem: &Problem, table: &PendingTable) {
        self.0 = Some(Bar::new(problem, table));
    }

    fn checks_started(&mut self, problem: &Problem) {
        self.0.iter().for_each(|Bar { bar, .. }| bar.set_message(format!("running {} checks", problem.checks.len())));
    }

    fn case_started(&mut self, case: &Pending) {
        self.0.iter().for_each(|Bar { bar, .. }| bar.set_message(short(&case.params)));
    }

    fn case_ended(&mut self, case: &Pending, outcome: &Outcome, elapsed: Duration) {
        let Some(Bar { name, bar }) = &self.0 else { return };
        bar.inc(1);
        if let Outcome::Failed { error } = outcome {
            let line = format!("{name} {}: failed after {:.1} s: {error}", short(&case.params), elapsed.as_secs_f64());
            if bar.is_hidden() { eprintln!("{line}") } else { bar.println(line) }
        }
    }

    fn table_ended(&mut self) {
        if let Some(Bar { bar, .. }) = self.0.take() {
            bar.finish_and_clear();
        }
    }

    fn refused(&mut self, _: &Problem, error: &anyhow::Error) {
        eprintln!("cs336: {error:#}");
    }
}

/// A case in one line: `size=small context_length=128`.
pub fn short(params: &Value) -> String {
    let Some(fields) = params.as_object() else { return params.to_string() };
    let parts = fields.iter().map(|(key, value)| match value {
        Value::String(text) => format!("{key}={text}"),
        other => format!("{key}={other}"),
    });
    parts.collect::<Vec<_>>().join(" ")
}
