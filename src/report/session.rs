//! One rendering of a template: what it states, prints and answers, and whether that is all that its answer has.

use std::fmt::Write as _;

use anyhow::{Result, bail, ensure};
use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};

use super::figures::{PlacedFigure, from_template};
use super::{AnsweredPart, Claim, PartInput, ProblemInput, escape, points};
use crate::harness::answer::{Answer, Drawing};

/// What one rendering collects; the template's functions share it.
pub(super) struct Session {
    problem: String,
    parts: Vec<PartInput>,
    answers: Vec<String>,
    pub answer: Answer,
    pub claims: Vec<Claim>,
    tables: Vec<String>,
    pub figures: Vec<PlacedFigure>,
    pub answered: Vec<AnsweredPart>,
}

impl Session {
    pub fn new(problem: &ProblemInput) -> Self {
        Self {
            problem: problem.name.clone(),
            parts: problem.parts.clone(),
            answers: problem.answers.clone(),
            answer: problem.answer.clone(),
            claims: Vec::new(),
            tables: Vec::new(),
            figures: Vec::new(),
            answered: Vec::new(),
        }
    }

    /// The part's heading (where parts have letters) and its question, set apart as a quotation.
    pub fn part(&mut self, id: &str) -> Result<String, Error> {
        let ids = || self.answers.iter().map(|a| format!("{a:?}")).collect::<Vec<_>>().join(", ");
        let part = self.parts.iter().find(|p| p.id == id && self.answers.iter().any(|a| a == id));
        let part = part.ok_or_else(|| {
            invalid(format!("{} has no part {id:?} to answer; its answers are {}", self.problem, ids()))
        })?;
        if self.answered.iter().any(|a| a.part == id) {
            return Err(invalid(format!("part {id:?} is answered twice")));
        }
        let mut out = String::from("\n\n");
        if !id.is_empty() {
            let plural = if part.points == 1.0 { "" } else { "s" };
            let _ = writeln!(out, "### Part ({id}) · {} point{plural}\n", points(part.points));
        }
        for line in part.question.trim().lines() {
            let _ = writeln!(out, "> {}", line.trim_end());
        }
        if !part.kinds.is_empty() {
            let _ = writeln!(out, ">\n> *To hand in: {}.*", escape::markdown(&part.kinds.join(", ")));
        }
        self.answered.push(AnsweredPart { problem: self.problem.clone(), part: id.into(), points: part.points });
        Ok(out + "\n")
    }

    pub fn claim(
        &mut self,
        id: &str,
        condition: &Value,
        then: Option<String>,
        otherwise: Option<String>,
    ) -> Result<String, Error> {
        if self.claims.iter().any(|c| c.id == id) {
            return Err(invalid(format!("claim {id:?} is made twice; give each its own id")));
        }
        let held = bool::try_from(condition.clone())
            .map_err(|_| invalid(format!("claim {id:?} wants a condition that is true or false, got {condition}")))?;
        self.claims.push(Claim { problem: self.problem.clone(), id: id.into(), held, operands: Vec::new() });
        match (held, otherwise) {
            (true, _) => Ok(then.unwrap_or_default()),
            (false, Some(text)) => Ok(text),
            (false, None) => Err(invalid(format!(
                "claim {id:?} does not hold on these records; correct the prose, or give it an else=\"..\" text"
            ))),
        }
    }

    /// Whether a claim of the answer holds; it is listed from then on.
    pub fn stated(&mut self, id: &str) -> Result<bool, Error> {
        let known = || self.answer.claims().keys().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
        let claim = self.answer.claims().get(id);
        let claim = claim.ok_or_else(|| invalid(format!("the answer makes no claim {id:?}; it makes {}", known())))?;
        let (held, operands) = (claim.held, claim.operands.clone());
        if !self.claims.iter().any(|c| c.id == id) {
            self.claims.push(Claim { problem: self.problem.clone(), id: id.into(), held, operands });
        }
        Ok(held)
    }

    pub fn table(&mut self, id: &str) -> Result<String, Error> {
        let known = || self.answer.tables().keys().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
        let table = self.answer.tables().get(id);
        let table = table.ok_or_else(|| invalid(format!("the answer has no table {id:?}; it has {}", known())))?;
        let markdown = table.markdown();
        if self.tables.iter().any(|t| t == id) {
            return Err(invalid(format!("table {id:?} is printed twice")));
        }
        self.tables.push(id.into());
        Ok(format!("\n\n{markdown}\n"))
    }

    /// A figure of the answer, with its caption; where it has none, the template's next paragraph is it and begins with
    /// "Figure: ".
    pub fn declared_figure(&mut self, id: &str) -> Result<String, Error> {
        let known = || self.answer.figures().keys().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
        let figure = self.answer.figures().get(id);
        let figure = figure.ok_or_else(|| invalid(format!("the answer has no figure {id:?}; it has {}", known())))?;
        let figure = figure.clone();
        let caption = figure.caption.map_or_else(String::new, |caption| format!("Figure: {caption}\n\n"));
        Ok(self.place(id, &figure.alt, figure.drawing)? + &caption)
    }

    /// A figure that the template itself declares.
    pub fn figure(&mut self, id: &str, args: &Kwargs) -> Result<String, Error> {
        let naming = |e: Error| invalid(format!("figure {id:?}")).with_source(e);
        let (alt, caption) = (text(args, id, "alt")?, text(args, id, "caption")?);
        let drawing = from_template::drawing(args).map_err(naming)?;
        args.assert_all_used().map_err(naming)?;
        Ok(format!("{}Figure: {caption}\n\n", self.place(id, &alt, drawing)?))
    }

    fn place(&mut self, id: &str, alt: &str, drawing: Drawing) -> Result<String, Error> {
        if !id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') || id.is_empty() {
            return Err(invalid(format!("figure id {id:?} is no file name: use letters, digits, - and _")));
        }
        let path = format!("figures/{}-{id}.svg", self.problem);
        if self.figures.iter().any(|f| f.path == path) {
            return Err(invalid(format!("figure {id:?} is drawn twice; give each its own id")));
        }
        self.figures.push(PlacedFigure { path: path.clone(), drawing });
        Ok(format!("\n\n![{}]({path})\n\n", escape::markdown(alt)))
    }

    /// What an answer concludes is in the report: no claim, table or figure of it is left out by its template.
    pub fn all_used(&self) -> Result<()> {
        for id in self.answer.claims().keys() {
            ensure!(self.claims.iter().any(|c| c.id == *id), "the answer's claim {id:?} is stated nowhere");
        }
        for id in self.answer.tables().keys() {
            ensure!(self.tables.contains(id), "the answer's table {id:?} is printed nowhere");
        }
        for id in self.answer.figures().keys() {
            let path = format!("figures/{}-{id}.svg", self.problem);
            ensure!(self.figures.iter().any(|f| f.path == path), "the answer's figure {id:?} is printed nowhere");
        }
        Ok(())
    }

    pub fn all_answered(&self, answers: &[String]) -> Result<()> {
        for id in answers {
            if !self.answered.iter().any(|a| a.part == *id) {
                bail!("part {id:?} is registered as answered, and no {{{{ part({id:?}) }}}} is in the template");
            }
        }
        Ok(())
    }
}

/// The text under `key` in one line; a figure needs it.
fn text(args: &Kwargs, id: &str, key: &str) -> Result<String, Error> {
    let text = args.get::<Option<String>>(key)?.unwrap_or_default();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.is_empty() {
        true => Err(invalid(format!("figure {id:?} lacks {key}=\"..\""))),
        false => Ok(text),
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
