//! `cs336 list`: the handout's problems, and which parts are answered.

use anyhow::Result;
use serde_json::json;

use super::{Ended, entry};
use crate::harness::grade::{points, status};
use crate::harness::handout::{HANDOUT, HandoutProblem, Part, total_points};

pub fn run(as_json: bool) -> Result<Ended> {
    print!("{}", if as_json { json_text()? } else { text() });
    Ok(Ended::Well)
}

fn is_answered(problem: &HandoutProblem, part: &Part) -> bool {
    entry(problem).is_some_and(|entry| entry.answers.contains(&part.id))
}

fn text() -> String {
    let mut out = format!("{:<8} {:<46} {:>6}  {:<10}  parts (* answered)\n", "section", "problem", "points", "status");
    let mut answered = 0.0;
    for problem in HANDOUT.iter() {
        let mut parts = Vec::new();
        for part in problem.parts {
            let id = if part.id.is_empty() { "whole" } else { part.id };
            let is_answered = is_answered(problem, part);
            parts.push(format!("{id}{}", if is_answered { "*" } else { "" }));
            answered += if is_answered { part.points } else { 0.0 };
        }
        out += &format!(
            "{:<8} {:<46} {:>6}  {:<10}  {}\n",
            problem.section,
            problem.name,
            points(problem.points),
            status(problem, entry(problem)).name(),
            parts.join(" ")
        );
    }
    let (total, answered) = (points(total_points()), points(answered));
    out + &format!("{} problems, {total} points; {answered} points answered\n", HANDOUT.len())
}

fn json_text() -> Result<String> {
    let part = |problem: &HandoutProblem, part: &Part| {
        let answered = is_answered(problem, part);
        json!({"id": part.id, "points": part.points, "kinds": part.kinds, "answered": answered})
    };
    let problem = |problem: &HandoutProblem| {
        json!({
            "name": problem.name,
            "title": problem.title,
            "section": problem.section,
            "points": problem.points,
            "parts": problem.parts.iter().map(|p| part(problem, p)).collect::<Vec<_>>(),
            "status": status(problem, entry(problem)),
        })
    };
    let problems: Vec<_> = HANDOUT.iter().map(problem).collect();
    Ok(serde_json::to_string_pretty(&problems)? + "\n")
}
