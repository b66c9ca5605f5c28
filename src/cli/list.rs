//! `cs336 list`: the handout's problems, and which parts this program has answers to, whatever is measured.

use anyhow::Result;
use serde_json::json;

use super::{Ended, entry};
use crate::harness::grade::{points, status};
use crate::harness::handout::{HANDOUT, HandoutProblem, Part, total_points};

pub fn run(as_json: bool) -> Result<Ended> {
    print!("{}", if as_json { json_text()? } else { text() });
    Ok(Ended::Well)
}

fn has_answer(problem: &HandoutProblem, part: &Part) -> bool {
    entry(problem).is_some_and(|entry| entry.answers.contains(&part.id))
}

fn text() -> String {
    let mut out =
        format!("{:<8} {:<46} {:>6}  {:<7}  parts (* has an answer)\n", "section", "problem", "points", "answers");
    let mut answered = 0.0;
    for problem in HANDOUT.iter() {
        let mut parts = Vec::new();
        for part in problem.parts {
            let id = if part.id.is_empty() { "whole" } else { part.id };
            let has_answer = has_answer(problem, part);
            parts.push(format!("{id}{}", if has_answer { "*" } else { "" }));
            answered += if has_answer { part.points } else { 0.0 };
        }
        out += &format!(
            "{:<8} {:<46} {:>6}  {:<7}  {}\n",
            problem.section,
            problem.name,
            points(problem.points),
            status(problem, entry(problem)).name(),
            parts.join(" ")
        );
    }
    let (total, answered) = (points(total_points()), points(answered));
    out + &format!(
        "{} problems, {total} points; this program has answers to parts of {answered} points, and `cs336 writeup` \
         counts those with records\n",
        HANDOUT.len()
    )
}

fn json_text() -> Result<String> {
    let part = |problem: &HandoutProblem, part: &Part| {
        let has_answer = has_answer(problem, part);
        json!({"id": part.id, "points": part.points, "kinds": part.kinds, "has_answer": has_answer})
    };
    let problem = |problem: &HandoutProblem| {
        json!({
            "name": problem.name,
            "title": problem.title,
            "section": problem.section,
            "points": problem.points,
            "parts": problem.parts.iter().map(|p| part(problem, p)).collect::<Vec<_>>(),
            "answers": status(problem, entry(problem)),
        })
    };
    let problems: Vec<_> = HANDOUT.iter().map(problem).collect();
    Ok(serde_json::to_string_pretty(&problems)? + "\n")
}
