//! One rendering of a template: the claims, tables, figures and parts that it uses, checked against the answer.

use std::fmt::Write as _;

use anyhow::{Result, bail, ensure};
use minijinja::{Error, ErrorKind};

use super::figures::PlacedFigure;
use super::{AnsweredPart, Claim, PartInput, ProblemInput, escape, points};
use crate::harness::answer::Answer;

/// The state of one rendering, shared by the template's functions.
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

    /// Whether a claim of the answer holds. Adds the claim to the list.
    pub fn claim(&mut self, id: &str) -> Result<bool, Error> {
        let known = || self.answer.claims().keys().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
        let claim = self.answer.claims().get(id);
        let claim = claim.ok_or_else(|| invalid(format!("the answer has no claim {id:?}; it has {}", known())))?;
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

    /// A figure of the answer with its caption. Without a caption, the template's next paragraph must be the caption and begin
    /// with "Figure: ".
    pub fn figure(&mut self, id: &str) -> Result<String, Error> {
        let known = || self.answer.figures().keys().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
        let figure = self.answer.figures().get(id);
        let figure = figure.ok_or_else(|| invalid(format!("the answer has no figure {id:?}; it has {}", known())))?;
        let figure = figure.clone();
        let path = format!("figures/{}-{id}.svg", self.problem);
        if self.figures.iter().any(|f| f.path == path) {
            return Err(invalid(format!("figure {id:?} is printed twice")));
        }
        self.figures.push(PlacedFigure { path: path.clone(), drawing: figure.drawing });
        let caption = figure.caption.map_or_else(String::new, |caption| format!("Figure: {caption}\n\n"));
        Ok(format!("\n\n![{}]({path})\n\n{caption}", escape::markdown(&figure.alt)))
    }

    /// Errors: a claim, table or figure of the answer that the template does not use.
    pub fn all_used(&self) -> Result<()> {
        for id in self.answer.claims().keys() {
            ensure!(self.claims.iter().any(|c| c.id == *id), "the template does not use the answer's claim {id:?}");
        }
        for id in self.answer.tables().keys() {
            ensure!(self.tables.contains(id), "the template does not print the answer's table {id:?}");
        }
        for id in self.answer.figures().keys() {
            let path = format!("figures/{}-{id}.svg", self.problem);
            ensure!(
                self.figures.iter().any(|f| f.path == path),
                "the template does not print the answer's figure {id:?}"
            );
        }
        Ok(())
    }

    pub fn all_answered(&self, answers: &[String]) -> Result<()> {
        for id in answers {
            if !self.answered.iter().any(|a| a.part == *id) {
                bail!("part {id:?} is registered as answered, but the template has no {{{{ part({id:?}) }}}}");
            }
        }
        Ok(())
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
