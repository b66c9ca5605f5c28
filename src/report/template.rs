//! One problem's template becomes Markdown, with its claims, figures and answered parts.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, anyhow};
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::json;

use super::figures::PlacedFigure;
use super::session::Session;
use super::{AnsweredPart, Claim, ProblemInput, context, filters};
use crate::harness::answer::Records;

/// What a template gave.
pub struct Filled {
    pub markdown: String,
    pub claims: Vec<Claim>,
    pub figures: Vec<PlacedFigure>,
    pub answered: Vec<AnsweredPart>,
}

/// Renders `problem.template`; `None` for a problem without one.
///
/// Errors name `templates/<name>.md` and the line.
pub fn fill(problem: &ProblemInput) -> Result<Option<Filled>> {
    let Some(text) = &problem.template else { return Ok(None) };
    let origin = origin(problem);
    let session: Shared = Arc::new(Mutex::new(Session::new(problem)));
    let mut env = Environment::new();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_debug(true);
    filters::register(&mut env);
    register(&mut env, &session);
    register_records(&mut env, problem);
    for (name, text) in &problem.shared {
        env.add_template(name, text).map_err(|e| located(&e))?;
    }
    env.add_template(&origin, text).map_err(|e| located(&e))?;
    let cpu = context::record_set(problem.records.cpu.as_ref())?;
    let gpu = context::record_set(problem.records.gpu.as_ref())?;
    let main = gpu.clone().or_else(|| cpu.clone());
    let parts: Vec<_> = problem.parts.iter().map(|p| json!({"id": p.id, "points": p.points})).collect();
    let scope = json!({
        "problem": {"name": problem.name, "title": problem.title, "section": problem.section,
            "points": problem.points, "parts": parts},
        "answer": problem.answer.quoted(), "facts": problem.facts, "planned": context::planned(problem.records.suite.as_ref()),
        "cpu": cpu, "gpu": gpu, "main": main,
    });
    let rendered = env.get_template(&origin).map_err(|e| located(&e))?.render(Value::from(Serde(scope)));
    let rendered = rendered.map_err(|e| located(&e));
    let markdown = match main {
        Some(_) => rendered?,
        None => rendered.with_context(|| format!("{} has no records; `cs336 measure {0}` makes them", problem.name))?,
    };
    drop(env);
    let session = lock(&session);
    session.all_answered(&problem.answers).with_context(|| origin.clone())?;
    session.all_used().with_context(|| origin.clone())?;
    Ok(Some(Filled {
        markdown: tidy(&markdown),
        claims: session.claims.clone(),
        figures: session.figures.clone(),
        answered: session.answered.clone(),
    }))
}

/// What messages call a problem's template.
pub fn origin(problem: &ProblemInput) -> String {
    format!("templates/{}.md", problem.name)
}

type Shared = Arc<Mutex<Session>>;

fn lock(session: &Shared) -> MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

fn register(env: &mut Environment<'_>, session: &Shared) {
    let shared = session.clone();
    env.add_function("part", move |id: String| lock(&shared).part(&id).map(Value::from_safe_string));
    let shared = session.clone();
    env.add_function("claim", move |id: String, condition: Option<Value>, texts: Kwargs| {
        let Some(condition) = condition else {
            texts.assert_all_used()?;
            return lock(&shared).stated(&id).map(Value::from);
        };
        let (then, otherwise) = (texts.get::<Option<String>>("then")?, texts.get::<Option<String>>("else")?);
        texts.assert_all_used()?;
        lock(&shared).claim(&id, &condition, then, otherwise).map(Value::from_safe_string)
    });
    let shared = session.clone();
    env.add_function("must", move |id: String| match lock(&shared).stated(&id)? {
        true => Ok(""),
        false => Err(invalid(format!(
            "claim {id:?} does not hold on these records; correct the prose, or write {{% if claim({id:?}) %}} with an else"
        ))),
    });
    let shared = session.clone();
    env.add_function("table", move |id: String| lock(&shared).table(&id).map(Value::from_safe_string));
    let shared = session.clone();
    env.add_function("tables", move |prefix: String| {
        let mut session = lock(&shared);
        let ids = session.answer.tables_of(&prefix);
        ids.iter().map(|id| session.table(id)).collect::<Result<String, Error>>().map(Value::from_safe_string)
    });
    let shared = session.clone();
    env.add_function("figure", move |id: String, args: Kwargs| {
        let mut session = lock(&shared);
        let drawn = if args.has("kind") { session.figure(&id, &args) } else { session.declared_figure(&id) };
        drawn.map(Value::from_safe_string)
    });
    let shared = session.clone();
    env.add_function("figures", move |prefix: String| {
        let mut session = lock(&shared);
        let ids = session.answer.figures_of(&prefix);
        ids.iter().map(|id| session.declared_figure(id)).collect::<Result<String, Error>>().map(Value::from_safe_string)
    });
    env.add_function("select", |cases: Value, filter: Kwargs| select(&cases, &filter));
    env.add_function("one", |cases: Value, filter: Kwargs| {
        let mut found = select(&cases, &filter)?;
        match found.len() {
            1 => Ok(found.remove(0)),
            n => Err(invalid(format!("{n} cases match {}; one() wants exactly one", words(&filter)))),
        }
    });
    env.add_function("source", |set: Value| {
        let missing = || invalid("source() wants cpu, gpu or main, and this one has no records");
        if set.is_none() { Err(missing()) } else { Ok(set.get_attr("source")?) }
    });
}

/// `records("<name>")`: another problem's plan and sets, each of these none where there is no record.
fn register_records(env: &mut Environment<'_>, problem: &ProblemInput) {
    let read = problem.other_records.clone();
    let sets = move |name: &str| -> Result<Value> {
        let Records { suite, cpu, gpu, .. } = read(name)?;
        let (cpu, gpu) = (context::record_set(cpu.as_ref())?, context::record_set(gpu.as_ref())?);
        Ok(Value::from(Serde(json!({"planned": context::planned(suite.as_ref()), "cpu": cpu, "gpu": gpu}))))
    };
    env.add_function("records", move |name: String| {
        sets(&name).map_err(|error| invalid(format!("reading the records of {name:?}: {error:#}")))
    });
}

/// The cases whose grid, kind or parameters equal every given one; a name that no case has is an error.
fn select(cases: &Value, filter: &Kwargs) -> Result<Vec<Value>, Error> {
    let wanted = filter.args().map(|key| Ok((key, filter.peek::<Value>(key)?))).collect::<Result<Vec<_>, Error>>()?;
    let cases: Vec<Value> = cases.try_iter()?.collect();
    let field = |case: &Value, key: &str| -> Result<Value, Error> {
        match key {
            "grid" | "kind" | "run" => case.get_attr(key),
            _ => case.get_attr("params")?.get_attr(key),
        }
    };
    for (key, _) in &wanted {
        let known = cases.iter().map(|case| field(case, key)).collect::<Result<Vec<_>, Error>>()?;
        if !cases.is_empty() && known.iter().all(Value::is_undefined) {
            return Err(invalid(format!("no case has a parameter {key:?}")));
        }
    }
    let mut found = Vec::new();
    for case in cases {
        let mut all = true;
        for (key, value) in &wanted {
            all &= field(&case, key)? == *value;
        }
        if all {
            found.push(case);
        }
    }
    Ok(found)
}

fn words(filter: &Kwargs) -> String {
    let pairs = filter.args().map(|key| match filter.peek::<Value>(key) {
        Ok(value) => format!("{key}={value:?}"),
        Err(_) => key.to_string(),
    });
    pairs.collect::<Vec<_>>().join(", ")
}

/// Blank lines inside a table go, and of several in a row one stays: loops leave them behind.
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

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
