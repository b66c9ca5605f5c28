//! `cs336 diff`: this machine's records against the accepted ones.

use anyhow::Result;

use super::progress::short;
use super::{Chosen, Ended, selected};
use crate::harness::drift::{Drift, Finding, drift};
use crate::harness::problem::Problem;
use crate::harness::record::Profile;
use crate::harness::stats::Change;
use crate::harness::store::Layout;
use crate::printable::indented;

pub fn run(layout: &Layout, chosen: &Chosen, as_json: bool) -> Result<Ended> {
    let (mut found, mut unusable) = (Vec::new(), false);
    for problem in selected(&chosen.problems)? {
        for profile in chosen.profiles() {
            match compare(layout, problem, profile) {
                Ok(drift) => found.extend(drift),
                Err(error) => {
                    eprintln!("{}: {}", problem.name, indented(&format!("{error:#}"), 4));
                    unusable = true;
                }
            }
        }
    }
    if as_json {
        println!("{}", serde_json::to_string_pretty(&found)?);
    } else if found.is_empty() && !unusable {
        println!(
            "nothing to compare: no problem has both local and accepted records (see `cs336 measure`, `cs336 accept`)"
        );
    } else {
        found.iter().for_each(print);
    }
    let contradicted = found.iter().flat_map(|d| &d.cases).flat_map(|c| &c.changes).any(Finding::is_contradiction);
    Ok(if contradicted || unusable { Ended::WithFindings } else { Ended::Well })
}

/// The differences of one problem's records; `None` if there are none here or none accepted.
fn compare(layout: &Layout, problem: &Problem, profile: Profile) -> Result<Option<Drift>> {
    match (layout.read_local(profile, problem)?, layout.read_accepted(profile, problem)?) {
        (Some(local), Some(accepted)) => drift(&local, &accepted).map(Some),
        _ => Ok(None),
    }
}

/// Prints the differences, and the number of unchanged timings.
pub fn print(drift: &Drift) {
    let findings = || drift.cases.iter().flat_map(|c| &c.changes);
    let timings = findings().filter(|f| matches!(f, Finding::Timing { .. })).count();
    let quiet = findings().filter(|f| matches!(f, Finding::Timing { .. }) && !f.is_difference()).count();
    println!(
        "{}: {} cases, {timings} timings compared, {quiet} of them without a shown change",
        drift.problem,
        drift.cases.len()
    );
    if let Some(reason) = &drift.other_machine {
        println!("  timings not compared: {reason}");
    }
    for case in &drift.cases {
        for finding in case.changes.iter().filter(|f| f.is_difference()) {
            println!("  {}: {}", short(&case.params), indented(&describe(finding), 4));
        }
    }
}

/// A value shortened to one line: a list may hold a thousand spans.
fn summary(value: &impl std::fmt::Display) -> String {
    const MOST: usize = 120;
    let text = value.to_string();
    let mut kept: String = text.chars().take(MOST).collect();
    if kept.len() < text.len() {
        kept += " ...";
    }
    kept
}

fn describe(finding: &Finding) -> String {
    match finding {
        Finding::OnlyLocal => "new, not accepted yet".into(),
        Finding::OnlyAccepted => "accepted, not measured here".into(),
        Finding::Outcome { accepted, local } => format!("was {accepted}, is {local}"),
        Finding::Value { path, accepted, local } => {
            format!("{path} was {}, is {}, and must repeat exactly", summary(accepted), summary(local))
        }
        Finding::Timing { path, comparison } => {
            let word = match comparison.change {
                Change::Faster => "faster",
                Change::Slower => "slower",
                Change::Same | Change::Indistinct => "unchanged",
            };
            let interval = comparison.interval.map_or(String::new(), |(low, high)| format!(" [{low:.3}, {high:.3}]"));
            format!("{path} {word}: {:.3} times the accepted{interval}, p = {:.2e}", comparison.ratio, comparison.p)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_shortened() {
        assert_eq!(summary(&serde_json::json!([1, 2])), "[1,2]");
        let long = summary(&serde_json::json!(vec![0; 1000]));
        assert!(long.len() == 124 && long.starts_with("[0,0,") && long.ends_with(" ..."), "{long}");
    }
}
