//! The order in which tables are measured, and which cases still fit into a time budget.
//!
//! A table is one grid of one problem. One complete table is more useful in a report than two halves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::plan::{Pending, Plan};

/// The pending cases of one grid of one plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PendingTable {
    /// The index of the plan.
    pub plan: usize,
    pub problem: &'static str,
    pub grid: String,
    pub pending: Vec<Pending>,
}

impl PendingTable {
    /// Expected seconds for the table; `None` if no case has a known time.
    ///
    /// A case that was never measured counts like the slowest known case.
    pub fn estimate_s(&self) -> Option<f64> {
        let known = || self.pending.iter().filter_map(|case| case.last_elapsed_s);
        let slowest = known().reduce(f64::max)?;
        Some(known().sum::<f64>() + slowest * (self.pending.len() - known().count()) as f64)
    }
}

/// The tables of `plans` in the order of the report; with a budget, the quick ones first.
///
/// With a budget the order is: tables that fit into it, the shortest first, so that whole tables are complete when it
/// ends; tables of unknown time; tables that are too long, which `--resume` can continue.
pub fn tables(plans: &[Plan], budget: Option<Duration>) -> Vec<PendingTable> {
    let mut tables: Vec<PendingTable> = Vec::new();
    for (plan, planned) in plans.iter().enumerate() {
        for case in &planned.pending {
            match tables.iter_mut().find(|t| t.plan == plan && t.grid == case.grid) {
                Some(table) => table.pending.push(case.clone()),
                None => {
                    let (problem, grid) = (planned.problem.name, case.grid.clone());
                    tables.push(PendingTable { plan, problem, grid, pending: vec![case.clone()] });
                }
            }
        }
    }
    if let Some(budget) = budget {
        tables.sort_by(|a, b| rank(a, budget).partial_cmp(&rank(b, budget)).unwrap_or(std::cmp::Ordering::Equal));
    }
    tables
}

fn rank(table: &PendingTable, budget: Duration) -> (u8, f64) {
    match table.estimate_s() {
        Some(seconds) if seconds <= budget.as_secs_f64() => (0, seconds),
        None => (1, 0.0),
        Some(seconds) => (2, seconds),
    }
}

/// The remaining budget, and the slowest case of each table so far.
pub struct Clock {
    deadline: Option<Instant>,
    /// Seconds of the slowest case that was measured so far, by plan and grid.
    slowest: BTreeMap<(usize, String), f64>,
}

impl Clock {
    /// Starts now; without a budget everything fits.
    pub fn start(budget: Option<Duration>) -> Self {
        Self { deadline: budget.map(|budget| Instant::now() + budget), slowest: BTreeMap::new() }
    }

    /// The remaining time; `None` without a budget.
    pub fn left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    pub fn is_over(&self) -> bool {
        self.left() == Some(Duration::ZERO)
    }

    /// Whether the remaining time suffices for `case`. The estimate is its last time, else that of the slowest case of its
    /// table. A case without an estimate is tried while any time remains.
    pub fn fits(&self, table: &PendingTable, case: &Pending) -> bool {
        let seen = || self.slowest.get(&(table.plan, table.grid.clone())).copied();
        let estimate_s = case.last_elapsed_s.or_else(seen).unwrap_or(0.0);
        self.left().is_none_or(|left| !left.is_zero() && left.as_secs_f64() >= estimate_s)
    }

    /// Records the time of one case of `table`.
    pub fn took(&mut self, table: &PendingTable, elapsed: Duration) {
        let slowest = self.slowest.entry((table.plan, table.grid.clone())).or_default();
        *slowest = slowest.max(elapsed.as_secs_f64());
    }
}

/// Reads `90s`, `8m` or `1h`: at most a year, so that no clock overflows.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let read = |(unit, seconds): (char, u64)| text.strip_suffix(unit)?.parse::<u64>().ok()?.checked_mul(seconds);
    let seconds = [('s', 1), ('m', 60), ('h', 3600)].into_iter().find_map(read);
    let seconds = seconds.filter(|seconds| (1..=365 * 24 * 3600).contains(seconds));
    let explained =
        || format!("{text:?} is not a time up to a year: write a whole number and a unit, as in 90s, 8m or 1h");
    seconds.map(Duration::from_secs).with_context(explained)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table(grid: &str, seconds: &[Option<f64>]) -> PendingTable {
        let case = |(i, last_elapsed_s): (usize, &Option<f64>)| Pending {
            grid: grid.into(),
            params: json!({ "n": i }),
            last_elapsed_s: *last_elapsed_s,
        };
        PendingTable {
            plan: 0,
            problem: "toy",
            grid: grid.into(),
            pending: seconds.iter().enumerate().map(case).collect(),
        }
    }

    #[test]
    fn a_table_with_an_unknown_case_counts_it_as_the_slowest_known() {
        assert_eq!(table("a", &[Some(1.0), None, Some(4.0)]).estimate_s(), Some(9.0));
        assert_eq!(table("a", &[None, None]).estimate_s(), None);
    }

    #[test]
    fn short_tables_come_first_then_unknown_ones_then_those_that_are_too_long() {
        let budget = Duration::from_secs(10);
        let mut ranks: Vec<_> = [
            table("long", &[Some(11.0)]),
            table("unknown", &[None]),
            table("middle", &[Some(9.0)]),
            table("short", &[Some(1.0), Some(2.0)]),
        ]
        .iter()
        .map(|t| (rank(t, budget), t.grid.clone()))
        .collect();
        ranks.sort_by(|a, b| a.partial_cmp(b).unwrap());
        let grids: Vec<_> = ranks.iter().map(|(_, grid)| grid.as_str()).collect();
        assert_eq!(grids, ["short", "middle", "unknown", "long"]);
    }

    #[test]
    fn a_case_is_estimated_by_its_last_time_or_by_the_slowest_of_its_table() {
        let known = table("known", &[Some(1.0), Some(3600.0)]);
        let new = table("new", &[None]);
        let mut clock = Clock::start(Some(Duration::from_secs(60)));
        assert!(clock.fits(&known, &known.pending[0]) && !clock.fits(&known, &known.pending[1]));
        assert!(clock.fits(&new, &new.pending[0]));
        clock.took(&new, Duration::from_secs(90));
        clock.took(&new, Duration::from_secs(2));
        assert!(!clock.fits(&new, &new.pending[0]), "the slowest of its table does not fit");
        assert!(clock.fits(&known, &known.pending[0]), "another table's time was used for this one");
        let over = Clock::start(Some(Duration::ZERO));
        assert!(over.is_over() && !over.fits(&new, &new.pending[0]));
        let without = Clock::start(None);
        assert!(without.fits(&known, &known.pending[1]) && !without.is_over());
    }

    #[test]
    fn budgets_are_read_with_their_unit_and_others_refused_with_an_example() {
        for (text, seconds) in [("90s", 90), ("8m", 480), ("1h", 3600)] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_secs(seconds));
        }
        for text in ["", "8", "m", "8 m", "-1m", "1.5h", "8min", "0s", "99999999999999999h", "8M"] {
            assert!(parse_duration(text).is_err(), "{text:?}");
        }
        assert!(format!("{:#}", parse_duration("8").unwrap_err()).contains("8m"));
    }
}
