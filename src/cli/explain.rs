//! `cs336 explain`: one problem's questions, checks, grids, records and files.

use anyhow::Result;

use super::{Ended, entry, handout_problem};
use crate::harness::grade::points;
use crate::harness::plan::{Scope, plan};
use crate::harness::problem::Problem;
use crate::harness::record::Profile;
use crate::harness::store::Layout;
use crate::harness::suite;
use crate::printable::indented;
use crate::units::human_seconds;

pub fn run(layout: &Layout, name: &str) -> Result<Ended> {
    let problem = handout_problem(name)?;
    let entry = entry(problem);
    println!("{} - {} (section {}, {} points)", problem.name, problem.title, problem.section, points(problem.points));
    for part in problem.parts {
        let has_answer = entry.is_some_and(|e| e.answers.contains(&part.id));
        let kinds: Vec<_> = part.kinds.iter().map(|k| k.name()).collect();
        let label = if part.id.is_empty() { "whole".to_string() } else { format!("({})", part.id) };
        let state = if has_answer { "has an answer" } else { "has no answer yet" };
        println!("\n{label} {} points, {}: {state}\n    {}", points(part.points), kinds.join(" + "), part.question);
    }
    match entry {
        Some(entry) => explain_entry(layout, entry),
        None => {
            println!("\nIts code does not exist yet.");
            Ok(Ended::Well)
        }
    }
}

fn explain_entry(layout: &Layout, entry: &Problem) -> Result<Ended> {
    let name = entry.name;
    let folder = layout.root.join("src").join("problems").join(name);
    println!(
        "\nfiles: src/problems/{name}{}, templates/{name}.md{}",
        if folder.is_dir() { "/" } else { ".rs" },
        if entry.measured.is_some() { format!(", suites/{}.toml", entry.name) } else { String::new() }
    );
    println!("checks:");
    for check in entry.checks {
        let part = if check.part.is_empty() { String::new() } else { format!(" (part {})", check.part) };
        println!("    {}::{}{part}", entry.name, check.name);
    }
    let Some(suite) = suite::load(&layout.root, entry)? else {
        println!("it measures nothing");
        return Ok(Ended::Well);
    };
    for grid in &suite.grids {
        println!("grid {}.{}: {} cases", grid.profile, grid.name, grid.cases.len());
        if let Some(first) = grid.cases.first() {
            println!("    the first: {first}");
        }
    }
    for profile in Profile::ALL {
        if let Some(plan) = plan(layout, entry, profile, Scope::Outdated)? {
            plan.unreadable.iter().for_each(|why| println!("{}", indented(why, 4)));
            let (seconds, unknown) = plan.estimate();
            let failed = plan.record.cases.iter().filter(|case| case.outcome.failure().is_some()).count();
            println!(
                "{profile}: {} cases recorded here, {failed} of them failed; {} missing or stale ({} for those measured before, \
                 {unknown} never measured)",
                plan.record.cases.len(),
                plan.pending.len(),
                human_seconds(seconds)
            );
        }
    }
    Ok(Ended::Well)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::handout::HANDOUT;

    #[test]
    fn every_problem_of_the_handout_can_be_explained() {
        let layout = Layout::at(env!("CARGO_MANIFEST_DIR").into());
        for problem in HANDOUT.iter() {
            assert_eq!(run(&layout, problem.name).unwrap(), Ended::Well, "{}", problem.name);
        }
    }
}
