//! `cs336 list`: the handout's problems, and which parts are answered.

use anyhow::Result;
use serde_json::json;

use super::Ended;
use crate::harness::grade::{Status, points, status};
use crate::harness::handout::{HANDOUT, HandoutProblem, total_points};
use crate::harness::problem::Problem;
use crate::problems::REGISTRY;

pub fn run(as_json: bool) -> Result<Ended> {
    print!("{}", if as_json { json_text()? } else { text() });
    Ok(Ended::Well)
}

fn entry(problem: &HandoutProblem) -> Option<&'static Problem> {
    REGISTRY.iter().find(|entry| entry.name == problem.name)
}

/// Points of the parts that are answered.
pub fn answered_points() -> f64 {
    let parts = |p: &'static HandoutProblem| p.parts.iter().filter(move |part| is_answered(p, part.id));
    HANDOUT.iter().flat_map(parts).map(|part| part.points).sum()
}

pub fn is_answered(problem: &HandoutProblem, part: &str) -> bool {
    entry(problem).is_some_and(|entry| entry.answers.contains(&part))
}

fn text() -> String {
    let mut out = format!("{:<8} {:<46} {:>6}  {:<10}  parts (* answered)\n", "section", "problem", "points", "status");
    for problem in HANDOUT.iter() {
        let mark = |id: &str| if is_answered(problem, id) { "*" } else { "" };
        let part = |id: &str| if id.is_empty() { format!("whole{}", mark(id)) } else { format!("{id}{}", mark(id)) };
        let parts: Vec<String> = problem.parts.iter().map(|p| part(p.id)).collect();
        let state: Status = status(problem, entry(problem));
        out += &format!(
            "{:<8} {:<46} {:>6}  {:<10}  {}\n",
            problem.section,
            problem.name,
            points(problem.points),
            state.name(),
            parts.join(" ")
        );
    }
    let answered = points(answered_points());
    out + &format!("{} problems, {} points; {answered} points answered\n", HANDOUT.len(), points(total_points()))
}

fn json_text() -> Result<String> {
    let problems: Vec<_> = HANDOUT
        .iter()
        .map(|problem| {
            let parts: Vec<_> = problem
                .parts
                .iter()
                .map(|part| {
                    let kinds: Vec<_> = part.kinds.iter().map(|k| k.name()).collect();
                    json!({"id": part.id, "points": part.points, "kinds": kinds, "answered": is_answered(problem, part.id)})
                })
                .collect();
            json!({
                "name": problem.name,
                "title": problem.title,
                "section": problem.section,
                "points": problem.points,
                "parts": parts,
                "status": status(problem, entry(problem)).name(),
            })
        })
        .collect();
    Ok(serde_json::to_string_pretty(&problems)? + "\n")
}
