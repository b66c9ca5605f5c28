//! Renders one problem's template to Markdown, and collects its claims, figures and answered parts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, anyhow};
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, Error, UndefinedBehavior};
use serde_json::json;

use super::figures::PlacedFigure;
use super::session::{SUMMARY_FIGURE, Session, invalid};
use super::{Document, ProblemInput, filters};

/// Renders `problem.template` to Markdown, with what it has used; `None` for a problem without one.
///
/// Errors name `templates/<name>.md` and the line.
pub(super) fn fill(problem: &ProblemInput) -> Result<Option<(String, Session)>> {
    let Some(text) = &problem.template else { return Ok(None) };
    let origin = origin(problem);
    let session: Shared = Arc::new(Mutex::new(Session::new(problem)));
    let mut env = environment();
    register(&mut env, &session);
    for (name, text) in &problem.shared {
        env.add_template(name, text).map_err(|e| located(&e))?;
    }
    env.add_template(&origin, text).map_err(|e| located(&e))?;
    let scope = json!({"answer": problem.answer.quoted()});
    let rendered = env.get_template(&origin).map_err(|e| located(&e))?.render(Value::from(Serde(scope)));
    let markdown = rendered.map_err(|e| located(&e))?;
    let session = lock(&session).clone();
    session.all_used().context(origin)?;
    Ok(Some((tidy(&markdown), session)))
}

/// The summary's template in messages.
pub const SUMMARY: &str = "templates/summary.md";

/// Renders the summary to Markdown, with the figures that it prints; `None` for a document without one.
///
/// It sees every answer's quoted values as `answers.<problem>`, and `figure("<problem>")` prints the figure that a problem's
/// answer has for it.
pub(super) fn fill_summary(document: &Document) -> Result<Option<(String, Vec<PlacedFigure>)>> {
    let Some(text) = &document.summary else { return Ok(None) };
    let sessions = document.problems.iter().map(|p| (p.handout.name.to_string(), Session::new(p)));
    let sessions: Arc<Mutex<BTreeMap<String, Session>>> = Arc::new(Mutex::new(sessions.collect()));
    let mut env = environment();
    let shared = sessions.clone();
    env.add_function("figure", move |problem: String| {
        let mut sessions = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let session = sessions.get_mut(&problem).ok_or_else(|| invalid(format!("there is no problem {problem:?}")))?;
        session.figure(SUMMARY_FIGURE).map(Value::from_safe_string)
    });
    let answers: BTreeMap<&str, _> = document
        .problems
        .iter()
        .filter(|p| p.template.is_some())
        .map(|p| (p.handout.name, p.answer.quoted()))
        .collect();
    env.add_template(SUMMARY, text).map_err(|e| located(&e))?;
    let rendered =
        env.get_template(SUMMARY).map_err(|e| located(&e))?.render(Value::from(Serde(json!({"answers": answers}))));
    let markdown = rendered.map_err(|e| located(&e))?;
    let sessions = sessions.lock().unwrap_or_else(PoisonError::into_inner);
    let figures = sessions.values().flat_map(|session| session.figures.iter().cloned()).collect();
    Ok(Some((tidy(&markdown), figures)))
}

/// What all templates share: strict look-ups and the filters.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_debug(true);
    filters::register(&mut env);
    env
}

/// The name of a problem's template in messages.
pub fn origin(problem: &ProblemInput) -> String {
    format!("templates/{}.md", problem.handout.name)
}

type Shared = Arc<Mutex<Session>>;

fn lock(session: &Shared) -> MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

fn register(env: &mut Environment<'_>, session: &Shared) {
    let shared = session.clone();
    env.add_function("claim", move |id: String| lock(&shared).claim(&id));
    let shared = session.clone();
    env.add_function("must", move |id: String| match lock(&shared).claim(&id)? {
        true => Ok(""),
        false => Err(invalid(format!(
            "claim {id:?} does not hold on these records; correct the prose, or write {{% if claim({id:?}) %}} with an else"
        ))),
    });
    let mut add = |name: &'static str, text: fn(&mut Session, &str) -> Result<String, Error>| {
        let shared = session.clone();
        env.add_function(name, move |id: String| text(&mut lock(&shared), &id).map(Value::from_safe_string));
    };
    add("part", Session::part);
    add("table", Session::table);
    add("tables", |session, prefix| session.answer.tables_of(prefix).iter().map(|id| session.table(id)).collect());
    add("figure", Session::figure);
    add("figures", |session, prefix| session.answer.figures_of(prefix).iter().map(|id| session.figure(id)).collect());
}

/// Removes blank lines inside tables, and repeated blank lines, which loops leave behind.
fn tidy(markdown: &str) -> String {
    let mut out: Vec<&str> = Vec::new();
    for line in markdown.lines() {
        let line = if line.trim().is_empty() { "" } else { line };
        if line.trim_start().starts_with('|') {
            let last = out.iter().rposition(|l| !l.is_empty());
            if let Some(last) = last.filter(|&i| out[i].trim_start().starts_with('|')) {
                out.truncate(last + 1);
            }
        } else if line.is_empty() && out.last().is_none_or(|l| l.is_empty()) {
            continue;
        }
        out.push(line);
    }
    out.join("\n").trim().to_string() + "\n"
}

/// The whole chain of a minijinja error in one line that begins with file and line.
fn located(error: &Error) -> anyhow::Error {
    let place = match (error.name(), error.line()) {
        (Some(name), Some(line)) => format!("{name}:{line}: "),
        (Some(name), None) => format!("{name}: "),
        _ => String::new(),
    };
    let mut message = format!("{place}{}", error.detail().map_or_else(|| error.kind().to_string(), str::to_string));
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let _ = write!(message, ": {inner}");
        cause = inner.source();
    }
    anyhow!(message)
}
