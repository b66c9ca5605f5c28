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
use crate::printable::{indented, one_line, printable};
use crate::units::human_seconds;

/// Progress of one table after another on standard error.
pub struct Bars {
    table: String,
    bar: ProgressBar,
}

impl Default for Bars {
    fn default() -> Self {
        Self { table: String::new(), bar: ProgressBar::hidden() }
    }
}

impl Progress for Bars {
    fn table_started(&mut self, table: &PendingTable) {
        let (name, cases) = (format!("{}.{}", table.problem, table.grid), table.pending.len());
        let terminal = std::io::stderr().is_terminal();
        self.bar = if terminal { ProgressBar::new(cases as u64) } else { ProgressBar::hidden() };
        let template = "{prefix:<40} [{bar:24}] {pos}/{len} {elapsed_precise} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.progress_chars("=> "));
        }
        self.bar.set_prefix(name.clone());
        if !terminal {
            let about = table.estimate_s().map_or(String::new(), |s| format!(", about {}", human_seconds(s)));
            eprintln!("{name}: measuring {cases} cases{about}");
        }
        self.table = name;
    }

    fn checks_started(&mut self, problem: &Problem) {
        self.bar.set_message(format!("running {} checks", problem.checks.len()));
    }

    fn case_started(&mut self, case: &Pending) {
        self.bar.set_message(short(&case.params));
    }

    fn case_ended(&mut self, case: &Pending, outcome: &Outcome, elapsed: Duration) {
        self.bar.inc(1);
        if let Some(error) = outcome.failure() {
            let (table, case) = (&self.table, short(&case.params));
            let error = indented(error, 4);
            self.noticed(&format!("{table} {case}: failed after {:.1} s: {error}", elapsed.as_secs_f64()));
        }
    }

    fn table_ended(&mut self) {
        self.bar.finish_and_clear();
    }

    fn noticed(&mut self, message: &str) {
        let message = printable(message);
        if self.bar.is_hidden() { eprintln!("{message}") } else { self.bar.println(message) }
    }

    fn refused(&mut self, error: &anyhow::Error) {
        eprintln!("cs336: {}", indented(&format!("{error:#}"), 4));
    }
}

/// A case in one line: `size=small context_length=128`.
pub fn short(params: &Value) -> String {
    let Some(fields) = params.as_object() else { return params.to_string() };
    let parts = fields.iter().map(|(key, value)| match value {
        Value::String(text) => one_line(&format!("{key}={text}")),
        other => format!("{key}={other}"),
    });
    parts.collect::<Vec<_>>().join(" ")
}
