//! Renders one problem's template to Markdown, and collects its claims, figures and answered parts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, anyhow, ensure};
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, escape_formatter};
use serde_json::json;

use super::figures::PlacedFigure;
use super::session::{SUMMARY_FIGURE, Session, invalid};
use super::{Document, ProblemInput, filters, jinja, lint};
use crate::harness::answer::format::NOTHING;
use crate::harness::answer::{Answer, Claim};

/// Renders `problem.template` to Markdown, with what it has used; `None` for a problem without one.
///
/// Errors name `templates/<name>.md` and the line.
pub(super) fn fill(problem: &ProblemInput) -> Result<Option<(String, Session)>> {
    let Some(text) = &problem.template else { return Ok(None) };
    let origin = origin(problem);
    let session: Shared = Arc::new(Mutex::new(Session::new(problem)));
    let mut env = environment();
    register(&mut env, &session);
    add(&mut env, &origin, text)?;
    // A shared text that may be damaged fails only the texts that name it.
    let mut unread: Vec<_> = problem.shared.iter().collect();
    let mut including = vec![text];
    while let Some(text) = including.pop() {
        let (named, others): (Vec<_>, _) = unread.into_iter().partition(|(name, _)| text.contains(name.as_str()));
        unread = others;
        for (name, shared) in named {
            let shared = shared.as_ref().map_err(|why| anyhow!("{why}"))?;
            add(&mut env, name, shared)?;
            including.push(shared);
        }
    }
    let scope = Value::from(Serde(json!({"answer": problem.answer.quoted()})));
    let mut printed = Printed { session: session.clone(), text: Text::default(), refuted: Vec::new() };
    let template = env.get_template(&origin).map_err(|e| located(&e))?;
    let rendered = template.render_captured_to(scope, &mut printed).map(drop);
    printed.text.whole(&origin, rendered)?;
    let markdown = printed.markdown()?;
    let session = lock(&session).clone();
    session.all_used().context(origin)?;
    Ok(Some((tidy(&markdown), session)))
}

/// A template that prints more is a mistake; ours print at most 50,000 bytes.
const MOST_BYTES: usize = 4 << 20;

/// What a template prints, up to [`MOST_BYTES`].
#[derive(Default)]
struct Text {
    bytes: Vec<u8>,
    is_too_long: bool,
}

impl Write for Text {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        self.is_too_long |= self.bytes.len() + piece.len() > MOST_BYTES;
        if self.is_too_long { Err(std::io::ErrorKind::FileTooLarge.into()) } else { self.bytes.write(piece) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Text {
    /// Errors: `rendered`'s, or that the text of `origin` is too long.
    fn whole(&self, origin: &str, rendered: Result<(), Error>) -> Result<()> {
        ensure!(!self.is_too_long, "{origin} prints more than {MOST_BYTES} bytes; print less");
        rendered.map_err(|e| located(&e))
    }
}

/// What a template prints, with the claims that did not hold where it asked for them.
struct Printed {
    session: Shared,
    text: Text,
    /// Length of the text at that time, and the claim.
    refuted: Vec<(usize, Claim)>,
}

impl Write for Printed {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        self.place_refuted();
        self.text.write(piece)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Printed {
    fn place_refuted(&mut self) {
        let refuted = std::mem::take(&mut lock(&self.session).refuted);
        self.refuted.extend(refuted.into_iter().map(|claim| (self.text.bytes.len(), claim)));
    }

    /// The text, with each refuted claim behind the paragraph that asked for it.
    fn markdown(mut self) -> Result<String> {
        self.place_refuted();
        let mut text = String::from_utf8(self.text.bytes)?;
        for (at, claim) in self.refuted.iter().rev() {
            let end = text[*at..].find("\n\n").map_or(text.len(), |length| at + length);
            let end = text[..end].trim_end().len();
            let last_line = text[..end].lines().last().unwrap_or_default();
            // Behind a heading, a table, a picture or code stands a paragraph of its own.
            let gap = if last_line.starts_with(['#', '|', '!', '`']) { "\n\n" } else { " " };
            text.insert_str(end, &format!("{gap}*(Does not hold: {}.)*", claim.words()));
        }
        Ok(text)
    }
}

/// The summary's template in messages.
pub const SUMMARY: &str = "templates/summary.md";

/// Renders the summary to Markdown, with the figures that it prints; `None` for a document without one.
///
/// It sees every answer's quoted values as `answers.<problem>`, and whether a GPU was measured as `gpu`; `figure("<problem>")`
/// prints the figure that a problem's answer has for it. A value or a figure that an answer lacks is a dash.
pub(super) fn fill_summary(document: &Document) -> Result<Option<(String, Vec<PlacedFigure>)>> {
    let Some(text) = &document.summary else { return Ok(None) };
    let text = text.as_ref().map_err(|why| anyhow!("{why}"))?;
    let sessions = document.problems.iter().map(|p| (p.handout.name.to_string(), Session::new(p)));
    let sessions: Arc<Mutex<BTreeMap<String, Session>>> = Arc::new(Mutex::new(sessions.collect()));
    let mut env = environment();
    env.set_undefined_behavior(UndefinedBehavior::Chainable);
    env.set_formatter(|out, state, value| match value.is_undefined() || value.is_none() {
        true => out.write_str(NOTHING).map_err(Error::from),
        false => escape_formatter(out, state, value),
    });
    let shared = sessions.clone();
    env.add_function("figure", move |problem: String| {
        let mut sessions = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let session = sessions.get_mut(&problem).ok_or_else(|| invalid(format!("there is no problem {problem:?}")))?;
        let is_drawn = session.answer.figures().contains_key(SUMMARY_FIGURE);
        Ok(if is_drawn { Value::from_safe_string(session.figure(SUMMARY_FIGURE)?) } else { NOTHING.into() })
    });
    let gpu = document.problems.iter().any(|p| p.records.gpu().is_some());
    // The results of GPUs have none of a CPU among them.
    let is_shown = |answer: &Answer| !gpu || answer.quoted()["gpu"] != false;
    let answers: BTreeMap<&str, _> = document
        .problems
        .iter()
        .filter(|p| p.template.is_some() && p.fault.is_none() && is_shown(&p.answer))
        .map(|p| (p.handout.name, p.answer.quoted()))
        .collect();
    let scope = Value::from(Serde(json!({"answers": answers, "gpu": gpu})));
    add(&mut env, SUMMARY, text)?;
    let mut printed = Text::default();
    let template = env.get_template(SUMMARY).map_err(|e| located(&e))?;
    let rendered = template.render_captured_to(scope, &mut printed).map(drop);
    printed.whole(SUMMARY, rendered)?;
    let markdown = String::from_utf8(printed.bytes)?;
    let sessions = sessions.lock().unwrap_or_else(PoisonError::into_inner);
    let figures = sessions.values().flat_map(|session| session.figures.iter().cloned()).collect();
    Ok(Some((tidy(&markdown), figures)))
}

/// A template that takes more of minijinja's steps includes itself; ours take at most some thousands.
const MOST_STEPS: u64 = 1_000_000;
/// A template larger than this is not read; ours have at most 9,000 bytes.
const MOST_SOURCE_BYTES: usize = 1 << 17;

/// What all templates share: strict look-ups and our filters alone, since minijinja's own may allocate without a limit.
fn environment() -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_debug(true);
    env.set_fuel(Some(MOST_STEPS));
    filters::register(&mut env);
    env
}

/// Errors: placeholder text, a syntax error, or Jinja that templates cannot use.
fn add<'source>(env: &mut Environment<'source>, name: &'source str, text: &'source str) -> Result<()> {
    let bytes = text.len();
    ensure!(bytes <= MOST_SOURCE_BYTES, "{name} is {bytes} bytes long; a template has at most {MOST_SOURCE_BYTES}");
    lint::check(name, text)?;
    jinja::require_part(name, text)?;
    env.add_template(name, text).map_err(|e| located(&e))
}

/// The name of a problem's template in messages.
pub fn origin(problem: &ProblemInput) -> String {
    format!("templates/{}{}.md", problem.subfolder, problem.handout.name)
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
    // Each text that includes another one would be a link of the chain.
    if std::iter::successors(Some(error), |&outer| std::error::Error::source(outer)?.downcast_ref::<Error>())
        .any(|inner| inner.kind() == ErrorKind::OutOfFuel)
    {
        return anyhow!("{place}more than {MOST_STEPS} steps; include each text once, and none in itself");
    }
    let mut message = match (error.kind(), error.detail()) {
        (_, Some(detail)) => format!("{place}{detail}"),
        (kind, None) => format!("{place}{kind}"),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let _ = write!(message, ": {inner}");
        cause = inner.source();
    }
    anyhow!(message)
}
